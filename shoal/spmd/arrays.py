"""Convert values of any framework to NumPy arrays and back, without importing a framework that is not loaded yet.

Values are typed `Any` where their type depends on such a framework: a PyTorch tensor, a JAX array, a Keras model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

UNUSABLE = (TypeError, ValueError, RuntimeError)  # raised by frameworks for a value that is not a plain array


def to_array(value: Any) -> np.ndarray:
    """Convert a value to a C-ordered NumPy array, sharing memory where possible."""
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    array = np.asarray(value, order="C")
    if array.dtype.hasobject:
        raise TypeError(f"its type is {type(value).__name__}, not numbers")
    return array


def like(value: Any, array: np.ndarray) -> Any:
    """Convert `array` to the type of `value`: a tensor on the same device, a JAX array, a number, else NumPy."""
    if is_tensor(value):
        return sys.modules["torch"].from_numpy(array).to(value.device)
    if "jax" in sys.modules and isinstance(value, sys.modules["jax"].Array):
        return sys.modules["jax"].numpy.asarray(array)
    if isinstance(value, bool | int | float | complex):
        return array.item()
    return array


def is_tensor(value: object) -> bool:
    """Whether a value is a PyTorch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: object) -> bool:
    """Whether a value is a PyTorch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


@functools.cache  # str() takes 5 us
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name of a dtype as `np.dtype` accepts it, such as float32."""
    return str(dtype)


def bytes_of(array: np.ndarray) -> np.ndarray:
    """View the memory of a C-ordered array as bytes (n,)."""
    return array.reshape(-1).view(np.uint8)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of nested dicts, lists, tuples and, if JAX is loaded, its pytrees. None is not a leaf."""
    inner = _children(tree)
    if inner is None:
        yield path or "value", tree
    else:
        for key, child in inner:
            yield from leaves(child, f"{path}[{key!r}]")


def rebuild(tree: Any, new: Iterator[Any], in_place: bool) -> Any:
    """Replace the leaves of a tree, in the order of `leaves`. With `in_place`, dicts and lists are modified."""
    inner = _children(tree)
    if inner is None:
        return next(new)
    children = [(key, rebuild(child, new, in_place)) for key, child in inner]
    if isinstance(tree, dict):
        if in_place:
            tree.update(children)
            return tree
        return {key: dict(children)[key] for key in tree}
    values = [child for _, child in children]
    if isinstance(tree, list):
        if in_place:
            tree[:] = values
            return tree
        return values
    if isinstance(tree, tuple):
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return None if tree is None else sys.modules["jax"].tree.structure(tree).unflatten(values)


def _children(tree: Any) -> list[tuple[object, Any]] | None:
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [(key, tree[key]) for key in sorted(tree, key=str)]
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    jax = sys.modules.get("jax")
    if jax is not None and not jax.tree_util.all_leaves([tree]):
        return list(enumerate(jax.tree.leaves(tree)))
    return None
