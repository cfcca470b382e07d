"""Trees: nested dicts with string keys whose leaves are arrays, numbers, strings or None.

The state of a run is one tree. Flattened, it is a table from path to leaf, which is what checkpoints store and what
digests are computed from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeGuard

import numpy as np

Leaf: TypeAlias = np.ndarray | bool | int | float | str | None
Tree = dict[str, Any]
"""Each value is a `Leaf` or another tree. Where the keys are fixed, a TypedDict describes them."""
_LEAVES = (np.ndarray, bool, int, float, str, type(None))  # exactly these: a NumPy scalar would be read back as another


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, Leaf]:
    """Return a table from path ("policy/mean") to leaf, in sorted order. Keys must not contain "/"."""
    table: dict[str, Leaf] = {}
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, Mapping):
            table |= flatten(value, f"{prefix}{key}/")
        elif _is_leaf(value):
            table[prefix + key] = value
        else:
            raise TypeError(
                f"{prefix}{key} is a {type(value).__name__}; a tree holds arrays, numbers, strings and None"
            )
    return table


def _is_leaf(value: object) -> TypeGuard[Leaf]:
    return type(value) in _LEAVES


def unflatten(table: Mapping[str, Leaf]) -> Tree:
    """Invert `flatten`, except that empty sub-trees are lost."""
    tree: Tree = {}
    for path, leaf in table.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def digest(tree: Mapping[str, object]) -> str:
    """Hash every path, type, shape and bit of a tree. Two results are "the same" in Shoal if their digests are."""
    total = hashlib.sha256()
    for path, leaf in flatten(tree).items():
        if isinstance(leaf, np.ndarray):
            total.update(f"{path} {leaf.dtype.str} {leaf.shape}\n".encode())
            total.update(np.asarray(leaf, order="C").data)
        else:
            # repr is exact for floats and distinguishes 1, 1.0 and True.
            total.update(f"{path} {leaf!r}\n".encode())
    return total.hexdigest()[:16]


def digests(tree: Mapping[str, object]) -> dict[str, str]:
    """Compute a digest for each top-level part, to tell which parts differ."""
    return {key: digest({key: tree[key]}) for key in sorted(tree)}
