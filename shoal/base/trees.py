"""Trees: nested dicts with string keys whose leaves are arrays, numbers, strings or None.

The state of a run is one tree. Flattened, it is a table from path to leaf, which is what checkpoints store and what
digests are made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Tree = dict[str, Any]
_LEAVES = (np.ndarray, bool, int, float, str, type(None))  # these very types: NumPy scalars would come back as others


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Table from path ("policy/mean") to leaf, in sorted order. Keys must not contain "/"."""
    table: dict[str, Any] = {}
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, Mapping):
            table |= flatten(value, f"{prefix}{key}/")
        elif type(value) in _LEAVES:
            table[prefix + key] = value
        else:
            raise TypeError(
                f"{prefix}{key} is a {type(value).__name__}; a tree holds arrays, numbers, strings and None"
            )
    return table


def unflatten(table: Mapping[str, Any]) -> Tree:
    """The inverse of `flatten` (empty sub-trees do not survive)."""
    tree: Tree = {}
    for path, leaf in table.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def digest(tree: Mapping[str, Any]) -> str:
    """A short hash of every path, type, shape and bit of a tree: what "the same" means in Shoal."""
    total = hashlib.sha256()
    for path, leaf in flatten(tree).items():
        if isinstance(leaf, np.ndarray):
            total.update(f"{path} {leaf.dtype.str} {leaf.shape}\n".encode())
            total.update(np.asarray(leaf, order="C").data)
        else:
            # repr of a float is exact, and tells 1 from 1.0 and True.
            total.update(f"{path} {leaf!r}\n".encode())
    return total.hexdigest()[:16]


def digests(tree: Mapping[str, Any]) -> dict[str, str]:
    """One digest for each top-level part, so that a difference can be named."""
    return {key: digest({key: tree[key]}) for key in sorted(tree)}
