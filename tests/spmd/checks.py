"""What every rank checks, run under mpirun by test_spmd.py: `python -m tests.spmd.checks PROCESSES [CHECK ...]`.

Each function is one check; a line is printed for each that passed.
"""

import random
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from shoal import spmd
from shoal.base.moments import Moments
from shoal.errors import RanksDiffer
from shoal.spmd import collectives, weights

if __name__ == "__main__":
    spmd.launch(int(sys.argv[1]))
RANK, SIZE = spmd.rank(), spmd.size()


class Pair(NamedTuple):
    left: Any
    right: Any


def rows_of(rank: int, columns: int = 2) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=((4, 0, 7)[rank], columns)).astype(np.float32)


def differ(call: Any, *words: str) -> None:
    """The call raises on this rank (and as every rank runs this, on all), and the message has these words."""
    if SIZE == 1:
        return  # no other rank to differ from
    with pytest.raises(RanksDiffer) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    spmd.sum(1)  # and the ranks are still together


def check_world() -> None:
    assert spmd.is_root() == (RANK == 0)
    assert spmd.allgather(RANK).tolist() == list(range(SIZE))


def check_gather_concatenates_in_rank_order() -> None:
    batch = spmd.gather(
        {
            "rows": rows_of(RANK),
            "list": [RANK] * RANK,
            "number": RANK + 0.5,
            "flags": np.array([RANK == 1]),
            "transposed": np.arange(6.0).reshape(2, 3).T + RANK,
            "pictures": np.full((2, 3, 4), RANK, np.uint8),
            "nothing": np.zeros((0, 3), np.int16),
        }
    )
    if RANK > 0:
        assert batch is None
        return
    ranks = range(SIZE)
    assert list(batch) == ["rows", "list", "number", "flags", "transposed", "pictures", "nothing"]
    assert batch["rows"].tobytes() == np.concatenate([rows_of(r) for r in ranks]).tobytes()
    assert batch["rows"].dtype == np.float32
    assert batch["list"].tolist() == [r for r in ranks for _ in range(r)]
    assert batch["number"].tolist() == [r + 0.5 for r in ranks]
    assert batch["flags"].tolist() == [r == 1 for r in ranks]
    assert batch["transposed"].tolist() == np.concatenate([np.arange(6.0).reshape(2, 3).T + r for r in ranks]).tolist()
    assert batch["pictures"].shape == (2 * SIZE, 3, 4)
    assert batch["pictures"][:, 0, 0].tolist() == [r for r in ranks for _ in range(2)]
    assert batch["nothing"].shape == (0, 3)
    assert batch["nothing"].dtype == np.int16


def check_empty_list_fits_anything() -> None:
    nested = spmd.allgather([] if RANK == 0 else [[1, 2], [3, 4]])
    assert nested.tolist() == [[1, 2], [3, 4]] * (SIZE - 1)
    assert nested.dtype == (np.int64 if SIZE > 1 else np.float64)
    assert spmd.allgather({"returns": []})["returns"].shape == (0,)


def check_allgather_is_the_same_everywhere() -> None:
    assert spmd.allgather({"rows": rows_of(RANK)})["rows"].tobytes() == b"".join(
        rows_of(r).tobytes() for r in range(SIZE)
    )


def check_gather_refuses_on_all_ranks() -> None:
    last = SIZE - 1
    wide = np.zeros((2, 3), np.float64 if last == RANK else np.float32)
    differ(lambda: spmd.gather({"wide": wide}), "'wide'", f"float64 with rows of shape (3,) on rank {last}", "float32")
    differ(lambda: spmd.gather({"tall": np.zeros((1, 2 + (RANK == 1)))}), "shape (3,) on rank 1", "shape (2,)")
    differ(lambda: spmd.gather({"a": 1} if RANK else {"b": 1}), "rank 1 passes ['a'], rank 0 passes ['b']")
    differ(lambda: spmd.gather({"bad": [[1], [1, 2]] if RANK == 1 else [[1]]}), "rank 1", "'bad' cannot be gathered")
    differ(lambda: spmd.gather({"object": object()}), f"rank {last}: 'object' cannot be gathered: its type is object")


def check_sum_and_mean() -> None:
    total = SIZE * (SIZE + 1) // 2
    assert spmd.sum(RANK + 1) == total
    assert isinstance(spmd.sum(RANK + 1), int)
    assert spmd.mean(RANK + 1) == total / SIZE
    assert spmd.sum(RANK == 0) == 1
    mine = {"a": np.full((2, 3), RANK + 1, np.float32), "b": [RANK + 1, (np.array(RANK + 1),)], "c": None}
    for in_order in (False, True):
        tree = spmd.sum(mine, in_order=in_order)
        assert tree["a"].tolist() == [[total] * 3] * 2
        assert tree["a"].dtype == np.float32
        assert tree["b"][0] == total
        assert tree["b"][1][0] == total
        assert tree["c"] is None
        assert mine["a"][0, 0] == RANK + 1
    assert isinstance(spmd.mean(Pair(RANK, 2.0)), Pair)
    assert spmd.mean(np.array([RANK])).dtype == np.float64


def check_sum_in_order_adds_in_rank_order() -> None:
    def numbers(rank: int) -> np.ndarray:
        return np.random.default_rng(rank).normal(size=10_000).astype(np.float32) * np.float32(10.0**rank)

    expected = numbers(0)
    for r in range(1, SIZE):
        expected = expected + numbers(r)
    previous, collectives._BLOCK = collectives._BLOCK, 999  # several blocks
    assert spmd.sum(numbers(RANK), in_order=True).tobytes() == expected.tobytes()
    collectives._BLOCK = previous


def check_sum_refuses_on_all_ranks() -> None:
    differ(lambda: spmd.sum(np.zeros(2 + (RANK == 1))), "(3,) on rank 1", "(2,) on rank 0")
    differ(lambda: spmd.mean({"a": np.zeros(2, np.float32 if RANK else np.float64)}), "['a']", "on rank 1")
    differ(lambda: spmd.sum(np.zeros(2, np.float16)), "float16, which MPI cannot add")
    differ(lambda: spmd.sum([1, 2] if RANK == 1 else [1]), "rank 1 passes 2 arrays, rank 0 passes 1")
    differ(lambda: spmd.sum("text" if RANK == 1 else 1), "rank 1")


def check_broadcast_in_place() -> None:
    previous, weights._LARGEST = weights._LARGEST, 70_000  # several messages
    small, large = np.full((2, 3), RANK, np.float32), np.full(100_000, RANK, np.int16)
    turned = np.full((4, 5), RANK, np.float64).T
    fixed = np.full(3, RANK)
    fixed.flags.writeable = False
    tree = {"small": small, "inner": [large, (turned, RANK)], "fixed": fixed, "none": None, "empty": np.zeros((0, 2))}
    assert spmd.broadcast(tree) is tree
    for array in (small, large, turned, tree["fixed"]):
        assert not array.any()
    assert tree["inner"][1][1] == 0
    assert fixed[0] == RANK  # was not to be changed, so it was replaced
    alone = spmd.broadcast(Pair(RANK, np.full(2, RANK)))
    assert alone.left == 0
    assert not alone.right.any()
    assert spmd.broadcast(RANK + 0.5) == 0.5
    weights._LARGEST = previous


def check_broadcast_refuses_on_all_ranks() -> None:
    differ(lambda: spmd.broadcast({"w": np.zeros((2, 2 + RANK))}), "['w']", "(2, 3) on rank 1", "(2, 2) on rank 0")
    differ(lambda: spmd.broadcast({"w": "text" if RANK == 1 else np.zeros(2)}), "on rank 1")
    differ(lambda: spmd.broadcast({"w": object()}), "['w'] cannot be broadcast")


def check_broadcast_keras_protocol() -> None:
    """Keras itself is heavy; what is used of it are these two methods."""
    held = [np.full((2, 2), RANK, np.float32), np.full(2, RANK, np.float32)]

    def set_weights(new: list[np.ndarray]) -> None:
        held[:] = new

    model = SimpleNamespace(get_weights=lambda: [w.copy() for w in held], set_weights=set_weights)
    assert spmd.broadcast(model) is model
    assert not any(w.any() for w in held)


def check_running_moments() -> None:
    running, expected, seen = spmd.Running((2,)), Moments.empty(2), []
    for step in range(3):
        parts = [rows_of(r) + np.float32(10 * step) for r in range(SIZE)]
        running.update(parts[RANK])
        for part in parts:
            if len(part):
                expected = expected.merge(Moments.of(part))
        seen += parts
    everything = np.concatenate(seen).astype(np.float64)
    assert running.count == len(everything)
    assert running.mean.tobytes() == expected.mean.tobytes()
    assert np.allclose(running.mean, everything.mean(axis=0), atol=1e-12)
    assert np.allclose(running.std, everything.std(axis=0), atol=1e-6)
    differ(lambda: running.update(np.zeros((1, 3))), "rows have shape (1, 3), not (n, 2)")
    alone = spmd.Running()
    assert alone.std == 1.0
    alone.update(np.array([float(RANK)]))
    assert alone.mean == (SIZE - 1) / 2


def check_seeds_differ_between_ranks() -> None:
    spmd.seed_everything(7)
    first = [random.random(), float(np.random.random())]
    drawn = spmd.allgather(np.array([first]))
    assert len(np.unique(drawn)) == 2 * SIZE
    spmd.seed_everything(7)
    assert [random.random(), float(np.random.random())] == first
    seeds = spmd.allgather(spmd.own_seed(7)).tolist()
    assert seeds[0] == 7
    assert len(set(seeds)) == SIZE
    assert all(0 <= seed < 2**31 for seed in seeds)


def check_jax() -> None:
    import jax

    key = spmd.seed_everything(7)
    assert len(np.unique(spmd.allgather(np.asarray(jax.random.key_data(key))[None]), axis=0)) == SIZE
    params = {"w": jax.numpy.full((2, 2), RANK, jax.numpy.bfloat16), "b": jax.numpy.full(2, RANK + 1.0)}
    new = spmd.broadcast(params)
    assert isinstance(new["w"], jax.Array)
    assert new["w"].dtype == jax.numpy.bfloat16
    assert not new["w"].any()
    assert new["b"].tolist() == [1.0, 1.0]
    grads = spmd.mean(jax.tree_util.Partial(print, jax.numpy.full(2, RANK + 1.0)))  # a node that only JAX knows
    assert grads.args[0].tolist() == [(SIZE + 1) / 2] * 2


def check_torch() -> None:
    import torch

    torch.manual_seed(RANK)
    model = torch.nn.Sequential(torch.nn.Linear(3, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 200))
    model.register_buffer("small", torch.full((3,), RANK, dtype=torch.bfloat16))
    model[2].weight = torch.nn.Parameter(torch.randn(200, 200).T)  # not in C order
    torch.manual_seed(0)
    same = [torch.nn.Linear(3, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 200)]
    weight, last = same[0].weight, torch.randn(200, 200).T
    before = [id(p) for p in model.parameters()]
    model(torch.ones(4, 3))  # counts a batch
    assert spmd.broadcast(model) is model
    assert [id(p) for p in model.parameters()] == before
    assert torch.equal(model[0].weight, weight)
    assert torch.equal(model[2].weight, last)
    assert not model.small.any()
    assert model[1].num_batches_tracked == 1
    two = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    loss = two(torch.ones(1, 2)).sum()
    spmd.broadcast(two)
    if RANK > 0:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    batch = spmd.gather({"x": torch.full((RANK, 2), RANK, dtype=torch.float32), "n": torch.tensor(RANK)})
    if RANK == 0:
        assert isinstance(batch["x"], torch.Tensor)
        assert batch["x"][:, 0].tolist() == [r for r in range(SIZE) for _ in range(r)]
        assert batch["n"].tolist() == list(range(SIZE))

    for in_order in (False, True):
        model.zero_grad()
        model(torch.full((4, 3), RANK + 1.0) * torch.arange(4)[:, None]).square().sum().backward()
        gradients = spmd.allgather({"g": model[2].weight.grad[None]})["g"]
        spmd.average_gradients(model, in_order=in_order)
        assert torch.allclose(model[2].weight.grad, gradients.mean(dim=0), rtol=1e-5)
    model.zero_grad()
    differ(lambda: spmd.average_gradients(model), "no parameter has a gradient")
    if RANK == 1:
        model(torch.ones(4, 3)).sum().backward()
    else:
        model[0](torch.ones(4, 3)).sum().backward()
    differ(lambda: spmd.average_gradients(model), "rank 1 passes 6 arrays, rank 0 passes 2")


def check_many_calls() -> None:
    for i in range(500):
        assert spmd.sum(i) == SIZE * i


LIGHT = [name for name in dir() if name.startswith("check_") and name not in ("check_jax", "check_torch")]


def main(names: list[str]) -> None:
    for name in names or LIGHT:
        globals()[name]()
        spmd.print0(f"passed: {name}")


if __name__ == "__main__":
    assert int(sys.argv[1]) == SIZE
    main(sys.argv[2:])
