"""Broadcast weights from rank 0 and average gradients over all ranks. Every rank must call every function here."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from shoal.errors import UsageError
from shoal.spmd.arrays import UNUSABLE, bytes_of, dtype_name, is_module, is_tensor, leaves, like, rebuild, to_array
from shoal.spmd.collectives import same_on_all, summed
from shoal.spmd.world import World, world

_SMALL = 1 << 16  # bytes: smaller arrays are sent together, larger ones without a copy
_LARGEST = 1 << 30  # bytes in one message: MPI's counts are limited to 2^31


def broadcast(weights: Any) -> Any:
    """Copy rank 0's weights to every rank and return them. Modules, models, NumPy arrays and tensors change in place.

    `weights` is a PyTorch module (parameters and buffers), a Keras model, or a tree (dicts, lists, tuples, JAX pytrees)
    of arrays, tensors and numbers. JAX arrays are immutable: use the returned ones.
    """
    if is_module(weights):
        _send([*weights.named_parameters(), *weights.named_buffers()])
        return weights
    if hasattr(weights, "get_weights") and hasattr(weights, "set_weights"):
        held = weights.get_weights()
        received = _send(list(leaves(held)))
        if world().rank > 0:
            weights.set_weights(received)
        return weights
    return rebuild(weights, iter(_send(list(leaves(weights)))), in_place=True)


def average_gradients(module: Any, in_order: bool = False) -> None:
    """Replace the gradients of a PyTorch module by their mean over all ranks. Call it before `optimizer.step()`.

    Weights that start equal (`broadcast` them once) stay equal. `in_order` is the same as in `sum`.
    """
    if not is_module(module):
        raise UsageError(
            f"average_gradients takes a PyTorch module, not a {type(module).__name__}. "
            "For a tree of arrays use: gradients = spmd.mean(gradients)"
        )
    found = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    arrays: list[np.ndarray] = []
    problem = "" if found else "no parameter has a gradient. Call loss.backward() first"
    for name, gradient in found:
        try:
            arrays.append(to_array(gradient))
        except UNUSABLE as error:
            problem = problem or f"the gradient of {name} cannot be averaged: {error}"
    ranks = world()
    totals = summed("average_gradients", [name for name, _ in found], arrays, in_order, problem)
    if ranks.size > 1:
        for (_, gradient), total in zip(found, totals, strict=True):
            gradient.copy_(like(gradient, total / total.dtype.type(ranks.size)))


def _send(values: list[tuple[str, Any]]) -> list[Any]:
    """Return rank 0's values; values of other ranks that are writable are overwritten in place."""
    ranks = world()
    if ranks.mpi is None:
        return [value for _, value in values]
    buffers: list[np.ndarray] = []
    described: list[str] = []
    problem = ""
    for path, value in values:
        try:
            buffer = _buffer(value)
        except UNUSABLE as error:
            problem = problem or f"{path} cannot be broadcast: {error}"
            continue
        described.append(f"{path} {_kind(value, buffer)}")
        # Rank 0 only reads. The other ranks need a copy if their own memory is read-only.
        buffers.append(buffer if ranks.rank == 0 or buffer.flags.writeable else buffer.copy())
    same_on_all("broadcast", ranks.agree("broadcast", "\n".join(described), problem))
    _send_bytes(ranks, [bytes_of(buffer) for buffer in buffers])
    if ranks.rank == 0:
        return [value for _, value in values]
    return [_put(value, buffer) for (_, value), buffer in zip(values, buffers, strict=True)]


def _buffer(value: Any) -> np.ndarray:
    if is_tensor(value):
        # As bytes: NumPy lacks some of PyTorch's dtypes.
        return value.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()  # type: ignore[no-any-return]
    return to_array(value)


def _kind(value: Any, buffer: np.ndarray) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if is_tensor(value) else f"{dtype_name(buffer.dtype)} {buffer.shape}"


def _put(value: Any, buffer: np.ndarray) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and is_tensor(value):
        with torch.no_grad():
            received = torch.from_numpy(buffer).view(value.dtype).reshape(value.shape)
            if received.data_ptr() != value.data_ptr():  # on another device, or not in C order
                value.copy_(received)
        torch.autograd.graph.increment_version(value)  # autograd must reject a graph built with the old weights
        return value
    if isinstance(value, np.ndarray) and value.flags.writeable:
        if not np.shares_memory(value, buffer):
            value[...] = buffer
        return value
    return like(value, buffer)


def _send_bytes(ranks: World, buffers: list[np.ndarray]) -> None:
    small = [buffer for buffer in buffers if buffer.nbytes < _SMALL]
    if small:
        together = np.concatenate(small)
        ranks.comm.Bcast([together, ranks.mpi.BYTE])
        if ranks.rank > 0:
            ends = np.cumsum([buffer.nbytes for buffer in small])
            for buffer, part in zip(small, np.split(together, ends[:-1]), strict=True):
                buffer[:] = part
    for buffer in buffers:
        if buffer.nbytes >= _SMALL:
            for begin in range(0, buffer.nbytes, _LARGEST):
                ranks.comm.Bcast([buffer[begin : begin + _LARGEST], ranks.mpi.BYTE])
