"""The replay buffer against plain Python: every transition, the draws, and exact states."""

import logging
from typing import Any

import numpy as np
import pytest

from shoal.base.memory import available_memory
from shoal.base.trees import Tree, digest
from shoal.errors import UsageError
from shoal.learning import replay_buffer as buffer_module
from shoal.learning.replay_buffer import Layout, ReplayBuffer, SumTree

GAMMA = 0.9


class Streams:
    """Slots that count up, with episodes that end at random; keeps every transition by itself."""

    def __init__(self, lanes: int, width: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.lanes, self.width = lanes, width
        self.number = 0.0
        self.now = [[self.fresh() for _ in range(width)] for _ in range(lanes)]
        self.seen: list[list[dict[str, Any]]] = [[] for _ in range(lanes * width)]  # per slot, in order of time

    def fresh(self) -> float:
        self.number += 1.0
        return self.number

    def round(self, steps: int) -> list[Tree]:
        return [self.record(lane, steps) for lane in range(self.lanes)]

    def record(self, lane: int, steps: int) -> Tree:
        observations, actions, rewards = [list(self.now[lane])], [], []
        ends, terminated, finals = [], [], []
        for time in range(steps):
            actions.append(self.rng.integers(0, 3, self.width).tolist())
            rewards.append(self.rng.normal(size=self.width).astype(np.float32).tolist())
            for slot in range(self.width):
                chance, before, after = self.rng.random(), self.now[lane][slot], self.fresh()
                end = "terminated" if chance < 0.1 else "cut" if chance < 0.3 else None
                if end:
                    ends.append((time, slot))
                    terminated.append(end == "terminated")
                    finals.append([after])
                self.seen[lane * self.width + slot].append(
                    {"o": before, "a": actions[-1][slot], "r": rewards[-1][slot], "end": end, "next": after}
                )
                self.now[lane][slot] = self.fresh() if end else after
            observations.append(list(self.now[lane]))
        return {
            "observations": np.array(observations, np.float32)[..., None],
            "actions": np.array(actions, np.int32)[..., None],
            "rewards": np.array(rewards, np.float32),
            "ends": np.array(ends, np.int32).reshape(-1, 2),
            "terminated": np.array(terminated, bool),
            "finals": np.array(finals, np.float32).reshape(-1, 1),
        }

    def expected(self, row: int, slot: int, n_step: int) -> tuple[float, int, float, float | None, float]:
        """Observation, action, return, next observation (None: it does not matter) and discount, step by step."""
        first, total = self.seen[slot][row], 0.0
        for step in range(n_step):
            at = self.seen[slot][row + step]
            total += GAMMA**step * at["r"]
            if at["end"] == "terminated":
                return first["o"], first["a"], total, None, 0.0
            if at["end"] == "cut":
                return first["o"], first["a"], total, at["next"], GAMMA ** (step + 1)
        return first["o"], first["a"], total, at["next"], GAMMA**n_step


def layout(size: int = 40, prioritised: bool = False) -> Layout:
    return Layout(size, slots=4, round_rows=3, shape=(1,), dtype="<f4", prioritised=prioritised)


def check_every_transition(buffer: ReplayBuffer, streams: Streams) -> int:
    first, count = buffer.starts
    rows, slots = np.divmod(np.arange(count * 4), 4)
    found = buffer.transitions(rows + first, slots)
    for i, (row, slot) in enumerate(zip((rows + first).tolist(), slots.tolist(), strict=True)):
        observation, action, total, following, discount = streams.expected(row, slot, buffer.n_step)
        assert found.observations[i, 0] == observation
        assert found.actions[i] == action
        np.testing.assert_allclose(found.returns[i], total, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.discounts[i], discount, rtol=1e-6)
        assert following is None or found.following[i, 0] == following
    return count


@pytest.mark.parametrize("n_step", [1, 2, 5])
def test_every_transition_is_what_happened(n_step: int) -> None:
    """Ends inside of the window, borders of rounds, and the ring turning several times."""
    streams = Streams(lanes=2, width=2)
    buffer = ReplayBuffer(layout(), GAMMA, n_step)
    counts = []
    for _ in range(25):
        buffer.add(streams.round(3))
        counts.append(check_every_transition(buffer, streams))
    assert counts[0] == max(0, 3 - n_step + 1)
    assert counts[-1] == 10 - n_step + 1, "the newest 40 steps, but for windows that are not over yet"
    assert buffer.steps == 25 * 3 * 4


def test_targets_by_hand() -> None:
    """Three steps with rewards 1, 2, 4; then terminated, cut off, or going on."""
    for end, following, discount in (("terminated", None, 0.0), ("cut", 9.0, 0.9**3), ("", 4.0, 0.9**3)):
        ends = [(2, 0)] if end else []
        record = {
            "observations": np.array([1, 2, 3, 4], np.float32).reshape(4, 1, 1),  # 4 begins the next episode, if any
            "actions": np.array([0, 1, 2], np.int32).reshape(3, 1, 1),
            "rewards": np.array([1, 2, 4], np.float32).reshape(3, 1),
            "ends": np.array(ends, np.int32).reshape(-1, 2),
            "terminated": np.array([end == "terminated"] * len(ends), bool),
            "finals": np.array([[9.0]] * len(ends), np.float32).reshape(-1, 1),
        }
        buffer = ReplayBuffer(Layout(8, 1, 3, (1,), "<f4"), GAMMA, n_step=3)
        buffer.add([record])
        found = buffer.transitions(np.array([0]), np.array([0]))
        np.testing.assert_allclose(found.returns, [1 + 0.9 * 2 + 0.81 * 4], rtol=1e-6)
        np.testing.assert_allclose(found.discounts, [discount], rtol=1e-6)
        assert following is None or found.following[0, 0] == following
        assert found.actions.tolist() == [0]


def test_bytes_stay_bytes() -> None:
    plan = Layout(8, 1, 2, (2, 2), "|u1")
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2)
    record = {
        "observations": pixels,
        "actions": np.zeros((2, 1, 1), np.int32),
        "rewards": np.zeros((2, 1), np.float32),
        "ends": np.zeros((0, 2), np.int32),
        "terminated": np.zeros(0, bool),
        "finals": np.zeros((0, 2, 2), np.uint8),
    }
    buffer = ReplayBuffer(plan, GAMMA)
    buffer.add([record])
    found = buffer.transitions(np.array([0, 1]), np.array([0, 0]))
    assert found.observations.dtype == np.uint8
    np.testing.assert_array_equal(found.following, pixels[1:, 0])


def test_draws_are_uniform_over_what_can_be_drawn() -> None:
    streams = Streams(lanes=2, width=2)
    buffer = ReplayBuffer(layout(), GAMMA, n_step=2)
    for _ in range(9):
        buffer.add(streams.round(3))
    found, _ = buffer.draw(np.random.default_rng(0), 200, 90)
    assert found.observations.shape == (200, 90, 1)
    first, count = buffer.starts
    drawn, times = np.unique(found.observations, return_counts=True)
    possible = [streams.seen[slot][row]["o"] for slot in range(4) for row in range(first, first + count)]
    assert drawn.tolist() == sorted(possible)
    assert abs(times - 500).max() < 5 * np.sqrt(500)
    assert (found.weights == 1).all()


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 7, 11])
def test_state_goes_on_exactly(prioritised: bool, stop: int) -> None:
    streams = Streams(lanes=2, width=2)
    rounds = [streams.round(3) for _ in range(30)]
    settings = {"n_step": 2, "alpha": 0.6 if prioritised else 0.0, "beta": 0.4}

    def learn(buffer: ReplayBuffer, number: int) -> str:
        found, places = buffer.draw(np.random.default_rng(number), 3, 8)
        if prioritised:
            buffer.reweigh(places, found.returns)
        return digest(buffer.state()()) + digest(found._asdict())

    whole = ReplayBuffer(layout(prioritised=prioritised), GAMMA, **settings)
    for number in range(stop):
        whole.add(rounds[number])
        learn(whole, number)
    saved = whole.state()
    before = saved()
    resumed = ReplayBuffer(layout(prioritised=prioritised), GAMMA, **settings, state=before)
    check_every_transition(resumed, streams)
    for number in range(stop, 30):
        whole.add(rounds[number])
        resumed.add(rounds[number])
        assert learn(whole, number) == learn(resumed, number)
        if number == stop:  # a run that is stopped in the middle of a round saves the state before it
            assert digest(saved()) == digest(before)


def test_sum_tree_draws_like_a_plain_draw() -> None:
    rng = np.random.default_rng(0)
    tree, plain = SumTree(13), np.zeros(13)
    for _ in range(50):  # changed again and again, with equal places in one call
        places, priorities = rng.integers(0, 13, 6), rng.random(6) * (rng.random(6) < 0.7)
        tree.set(places, priorities)
        for place, priority in zip(places, priorities, strict=True):
            plain[place] = priority
    np.testing.assert_allclose(tree.total, plain.sum())
    np.testing.assert_array_equal(tree.leaves[:13], plain)
    places, chances = tree.draw(np.random.default_rng(1), 50, 64)
    # The naive draw: the first place whose running sum is above the number.
    numbers = (np.arange(64) + np.random.default_rng(1).random((50, 64))) * (plain.sum() / 64)
    np.testing.assert_array_equal(places, np.searchsorted(np.cumsum(plain), numbers, side="right"))
    np.testing.assert_allclose(chances, (plain / plain.sum())[places])
    assert (plain[places] > 0).all()


def test_sum_tree_never_draws_what_has_no_priority() -> None:
    tree = SumTree(8)
    tree.set(np.array([0, 1, 2]), np.array([0.1, 0.2, 0.3]))

    class Last:
        def random(self, shape: tuple[int, ...]) -> np.ndarray:
            return np.full(shape, np.nextafter(1.0, 2.0))

    places, _ = tree.draw(Last(), 4, 4)  # type: ignore[arg-type]
    assert places.max() == 2


def test_priorities_choose_and_weights_make_up_for_it() -> None:
    streams = Streams(lanes=2, width=2)
    buffer = ReplayBuffer(layout(prioritised=True), GAMMA, 2, alpha=1.0, beta=1.0)
    for _ in range(8):
        buffer.add(streams.round(3))
    first, count = buffer.starts
    rows, slots = np.divmod(np.arange(count * 4), 4)
    everything = buffer.transitions(rows + first, slots)
    buffer.reweigh((rows + first) % buffer.layout.ring * 4 + slots, np.where(everything.actions == 2, 3.0, 1.0))
    found, _ = buffer.draw(np.random.default_rng(0), 50, 64)
    share = (found.actions == 2).mean()
    twos = (everything.actions == 2).mean()
    assert abs(share - 3 * twos / (3 * twos + 1 - twos)) < 0.02
    np.testing.assert_allclose(found.weights[found.actions == 2], 1 / 3, rtol=1e-4)
    np.testing.assert_allclose(found.weights[found.actions != 2], 1.0, rtol=1e-4)


def test_new_steps_get_the_highest_priority_and_old_ones_leave() -> None:
    streams = Streams(lanes=2, width=2)
    buffer = ReplayBuffer(layout(prioritised=True), GAMMA, 2, alpha=1.0, beta=1.0)
    for number in range(20):
        buffer.add(streams.round(3))
        first, count = buffer.starts
        found, places = buffer.draw(np.random.default_rng(number), 20, 64)
        possible = {streams.seen[slot][row]["o"] for slot in range(4) for row in range(first, first + count)}
        assert set(found.observations.ravel().tolist()) <= possible
        assert len(possible) == count * 4
        buffer.reweigh(places, np.full(places.shape, float(number + 1)))
    buffer.add(streams.round(3))
    leaves = buffer.state()()["priorities"]
    assert (leaves[-4:-1] >= 20).all(), "three rows can be drawn now, and their errors are not known yet"
    assert (leaves[-1] == 0).all(), "the window of the newest row is not over yet"


def test_memory_is_known_before_it_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    plan = Layout(100_000, slots=8, round_rows=32, shape=(4,), dtype="<f4")
    buffer = ReplayBuffer(plan, GAMMA)
    arrays = [value for value in vars(buffer).values() if isinstance(value, np.ndarray)]
    assert abs(sum(array.nbytes for array in arrays) - plan.bytes) < 100
    buffer_module._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "shoal"):
        plan.check(None)
    assert "the replay buffer of 100,000 steps takes 2.4 MiB (25 bytes a step)" in caplog.text
    with pytest.raises(UsageError, match=r"9.6 MiB in all.*has 5.0 MiB available.*--buffer-size (\d+)") as error:
        plan.check(5 * 2**20)
    fits = int(str(error.value).rpartition(" ")[2])
    Layout(fits, 8, 32, (4,), "<f4").check(5 * 2**20)
    available = available_memory()
    assert available is not None
    assert available > 2**20
