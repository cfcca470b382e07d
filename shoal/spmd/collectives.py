"""Gather batches and sum numbers over all ranks. Every rank must call every function here."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from shoal.errors import RanksDiffer
from shoal.spmd.arrays import UNUSABLE, bytes_of, dtype_name, leaves, like, rebuild, to_array
from shoal.spmd.world import World, world

_BLOCK = 1 << 20  # numbers per rank that a sum in rank order holds at a time
_SUMMABLE = "bhilqBHILQfdFD"  # types that MPI can add


def gather(batch: Any) -> Any:
    """Concatenate the rows of all ranks, in rank order, on rank 0. Returns None on the other ranks.

    `batch` is a dict of arrays, tensors, lists (n, ...) or single numbers, or one of these alone. The number of rows
    may differ between ranks; the dtype and the rest of the shape may not (an empty list matches any). Tensors come
    back as tensors, everything else as NumPy arrays.
    """
    return gathered("gather", batch, everywhere=False)


def allgather(batch: Any) -> Any:
    """Like `gather`, with the result on every rank."""
    return gathered("allgather", batch, everywhere=True)


def sum(values: Any, in_order: bool = False) -> Any:  # noqa: A001  users write spmd.sum
    """Sum a number, an array or a tree of these over all ranks, element by element. Every rank gets the result.

    With `in_order` the sum is in rank order, so its last bits do not depend on the MPI library. That moves `size()`
    times the data.
    """
    return _combined("sum", values, in_order)


def mean(values: Any, in_order: bool = False) -> Any:
    """Like `sum`, divided by the number of ranks. Integers become float64."""
    return _combined("mean", values, in_order)


def gathered(verb: str, batch: Any, everywhere: bool, problem: str = "") -> Any:
    """Implement `gather` and `allgather`. A `problem` on this rank raises on every rank."""
    values = batch if isinstance(batch, dict) else {"batch": batch}
    names = sorted(values, key=str)
    rows: dict[Any, np.ndarray] = {}
    offer: list[tuple[str, str, tuple[int, ...]]] = []
    for name in names:
        try:
            array = rows[name] = np.atleast_1d(to_array(values[name]))
        except UNUSABLE as error:
            problem = problem or f"{name!r} cannot be gathered: {error}"
            continue
        # An empty list has no dtype: a rank that finished no episode has no returns.
        typeless = isinstance(values[name], list | tuple) and not values[name]
        offer.append((str(name), "" if typeless else dtype_name(array.dtype), array.shape[1:]))
    ranks = world()
    offers = ranks.agree(verb, repr(offer), problem)
    if len(offers) > 1:
        agreed = _agreed(verb, [ast.literal_eval(other) for other in offers])
        for name, (_, dtype, _) in zip(names, offer, strict=True):
            if not dtype:
                rows[name] = np.empty((0, *agreed[str(name)][1]), agreed[str(name)][0])
    if ranks.mpi is not None:
        rows = _concatenated(ranks, [rows[n] for n in names], names, everywhere)
        if not (everywhere or ranks.rank == 0):
            return None
    result = {name: like(value, rows[name]) if not _number(value) else rows[name] for name, value in values.items()}
    return result if isinstance(batch, dict) else result["batch"]


def _number(value: object) -> bool:
    return isinstance(value, bool | int | float | complex)


def _agreed(verb: str, offers: Sequence[list[tuple[str, str, tuple[int, ...]]]]) -> dict[str, tuple[str, Any]]:
    """Map each name to its dtype and row shape. If the ranks disagree, raise the same error on every rank."""
    first = [name for name, _, _ in offers[0]]
    problems = [
        f"{verb}: rank {r} passes {[name for name, _, _ in offer]}, rank 0 passes {first}"
        for r, offer in enumerate(offers)
        if [name for name, _, _ in offer] != first
    ]
    if problems:
        raise RanksDiffer(problems)
    result: dict[str, tuple[str, Any]] = {}
    owner: dict[str, int] = {}
    for r, offer in enumerate(offers):
        for name, dtype, trailing in offer:
            if not dtype:
                result.setdefault(name, ("", ()))
            elif not result.get(name, ("", ()))[0]:
                result[name], owner[name] = (dtype, trailing), r
            elif result[name] != (dtype, trailing):
                theirs = f"{result[name][0]} with rows of shape {result[name][1]} on rank {owner[name]}"
                problems.append(
                    f"{verb}: {name!r} is {dtype} with rows of shape {trailing} on rank {r}, but {theirs}. "
                    "Convert it to one dtype and shape on all ranks first"
                )
    if problems:
        raise RanksDiffer(problems)
    return {name: (dtype or "float64", trailing) for name, (dtype, trailing) in result.items()}


def _concatenated(ranks: World, rows: list[np.ndarray], names: list[Any], everywhere: bool) -> dict[Any, np.ndarray]:
    mine = np.array([len(array) for array in rows], np.int64)
    table = np.empty((ranks.size, len(rows)), np.int64)
    receives = everywhere or ranks.rank == 0
    if everywhere:
        ranks.comm.Allgather(mine, table)
    else:
        ranks.comm.Gather(mine, table if receives else None)
    result: dict[Any, np.ndarray] = {}
    for i, (name, array) in enumerate(zip(names, rows, strict=True)):
        # Count in rows, not bytes: MPI's counts are limited to 2^31.
        row = ranks.mpi.BYTE.Create_contiguous(array.dtype.itemsize * math.prod(array.shape[1:])).Commit()
        whole: list[Any] | None = None
        if receives:
            counts = table[:, i].tolist()
            *begins, end = accumulate(counts, initial=0)
            result[name] = np.empty((end, *array.shape[1:]), array.dtype)
            whole = [bytes_of(result[name]), counts, begins, row]
        move = ranks.comm.Allgatherv if everywhere else ranks.comm.Gatherv
        move([bytes_of(array), len(array), row], whole)
        row.Free()
    return result


def _combined(verb: str, values: Any, in_order: bool) -> Any:
    found = list(leaves(values))
    arrays: list[np.ndarray] = []
    problem = ""
    for path, leaf in found:
        try:
            array = to_array(leaf)
            if verb == "mean" and array.dtype.kind in "iub":
                array = array.astype(np.float64)
            arrays.append(array.astype(np.int64) if array.dtype.kind == "b" else array)
            if arrays[-1].dtype.char not in _SUMMABLE or not arrays[-1].dtype.isnative:
                problem = (
                    problem
                    or f"{path} is {array.dtype}, which MPI cannot add. Convert it first, for example to float32"
                )
        except UNUSABLE as error:
            problem = problem or f"{path} cannot be added: {error}"
    totals = summed(verb, [path for path, _ in found], arrays, in_order, problem)
    if verb == "mean":
        totals = [total / total.dtype.type(world().size) for total in totals]
    return rebuild(values, (like(leaf, total) for (_, leaf), total in zip(found, totals, strict=True)), in_place=False)


def summed(verb: str, names: list[str], arrays: list[np.ndarray], in_order: bool, problem: str) -> list[np.ndarray]:
    """Sum each array over the ranks, with one message per dtype."""
    ranks = world()
    what = "\n".join(
        f"{name} {dtype_name(array.dtype)} {array.shape}" for name, array in zip(names, arrays, strict=False)
    )
    same_on_all(verb, ranks.agree(f"{verb}(in_order)" if in_order else verb, what, problem))
    if ranks.mpi is None:
        return arrays
    result = list(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        members = [i for i, array in enumerate(arrays) if array.dtype == dtype]
        flat = np.concatenate([arrays[i].reshape(-1) for i in members])
        total = _sum_in_order(ranks, flat) if in_order else np.empty_like(flat)
        if not in_order:
            ranks.comm.Allreduce(flat, total)
        begins = accumulate((arrays[i].size for i in members), initial=0)
        for i, begin in zip(members, begins, strict=False):
            result[i] = total[begin : begin + arrays[i].size].reshape(arrays[i].shape)
    return result


def _sum_in_order(ranks: World, flat: np.ndarray) -> np.ndarray:
    total = np.empty_like(flat)
    for begin in range(0, len(flat), _BLOCK):
        block = flat[begin : begin + _BLOCK]
        every = np.empty((ranks.size, len(block)), flat.dtype)
        ranks.comm.Allgather(block, every)
        total[begin : begin + _BLOCK] = every[0]
        for other in every[1:]:
            total[begin : begin + _BLOCK] += other
    return total


def same_on_all(verb: str, offers: list[str]) -> None:
    """Raise the same error on every rank if their arrays differ; `offers` has lines of name, dtype and shape."""
    for r, offer in enumerate(offers[1:], 1):
        theirs, ours = offer.splitlines(), offers[0].splitlines()
        if theirs == ours:
            continue
        if len(theirs) != len(ours):
            raise RanksDiffer(f"{verb}: rank {r} passes {len(theirs)} arrays, rank 0 passes {len(ours)}")
        differing = [f"{b} on rank {r}, but {a} on rank 0" for a, b in zip(ours, theirs, strict=True) if a != b]
        raise RanksDiffer([f"{verb}: {line}" for line in differing[:5]])
