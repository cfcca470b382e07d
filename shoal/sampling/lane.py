"""A lane, as a worker sees it: `width` environments stepped in lockstep behind one batched forward pass.

The width is part of the task, because a row of a batch has other bits than the same row alone; only where each row has
weights of its own may a lane get narrower. Two tasks use lanes:

- `fragment` goes on for a fixed number of steps from where the lane's last fragment ended. A worker that holds the
  lane live just goes on; one that does not is told the ledger and rebuilds it: reset with the episode's seed, step
  the actions since. Episodes follow each other in a slot.
- `episodes` runs whole episodes from fresh resets and keeps nothing but the environments themselves.

`population` has a third, which evaluates many policies in a lane. `alone` plays one episode again without a lane. No
other module steps single environments; `vectors` has lanes of native vector environments.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np

from shoal.base import seeding
from shoal.base.trees import Tree
from shoal.envs.make import EnvSpec, make_env, observation_dtype, time_limit
from shoal.errors import EnvironmentFault
from shoal.policies.actions import Head
from shoal.policies.policy import Actor, Policy
from shoal.sampling.record import NOISE_STEPS, Record, Slots
from shoal.sampling.vector_lane import VectorLane


def fragment(place: Tree, policy: Tree, weights: Tree, steps: int, ledger: Tree | None = None) -> Tree | None:
    """Task: the next `steps` steps of a lane, as a `Record`'s tree.

    `place` says which lane of which run this is and how many fragments came before. Returns None when this worker
    does not hold the lane there and no ledger came along: then it has to be asked again, with the ledger.
    """
    parsed = Policy.from_tree(policy)
    if parsed.remembered:
        raise AssertionError("a ledger holds no memory, so policies that remember play whole episodes only")
    held = _live.setdefault(place["token"], {})
    _live.move_to_end(place["token"])
    position, lane = held.pop(place["lane"], (None, None))
    if lane is None or position != place["fragment"] or ledger is not None:
        if lane is not None:
            lane.close()
        if ledger is None:
            return None
        lane = VectorLane(place) if place["env"]["vector"] else Lane(place)
        lane.rebuild(ledger, parsed)
    rng = seeding.rng(place["seed"], place["purpose"] + "-act", place["lane"], place["fragment"])
    record = lane.run(parsed, weights, rng, lambda slot: lane.episodes[slot] + 1, steps)
    held[place["lane"]] = (place["fragment"] + 1, lane)
    _drop_old_runs()
    return record


def episodes(place: Tree, policy: Tree, weights: Tree, budget: Tree, greedy: bool = False) -> Tree:
    """Task: whole episodes, as a `Record`'s tree.

    `budget` is {"episodes": n} for exactly n, or {"steps": n} to start episodes until n steps were taken and then
    finish them. Either way which episodes are run never depends on how long one takes compared with another lane's.
    """
    lane = Lane(place)
    count = budget.get("episodes")
    first = lane.width if count is None else min(lane.width, count)
    for slot in range(first):
        lane.begin(slot, 0)
    started = first

    def following(slot: int) -> int | None:
        nonlocal started
        if lane.taken >= budget["steps"] if count is None else started >= count:
            return None
        started += 1
        return lane.episodes[slot] + 1

    rng = None if greedy else seeding.rng(place["seed"], place["purpose"] + "-act", place["lane"], 0)
    record = lane.run(Policy.from_tree(policy), weights, rng, following)
    lane.close()
    return record


class Answer(NamedTuple):
    """What an environment gave for a reset or a step, as lanes keep it."""

    observation: np.ndarray
    reward: float
    terminated: bool
    truncated: bool


def alone(
    env: gymnasium.Env[Any, Any], spec: EnvSpec, seed: int, actions: Sequence[Any], pause: Callable[[int], None]
) -> Iterator[Answer]:
    """One episode with given actions and no lane: the answer to its reset, then to each step, up to its end.

    `pause(step)` is called before each step, from a frame that has `env`, `action` and `observation`: for a debugger.
    """
    limit, space = time_limit(spec), env.observation_space
    dtype, shape = observation_dtype(space), space.shape or ()
    observation, _ = env.reset(seed=seed)
    yield Answer(np.array(observation, dtype).reshape(shape), 0.0, False, False)
    for step, action in enumerate(actions):
        pause(step)
        observation, reward, terminated, truncated, _info = env.step(action)
        truncated = bool(truncated) or step + 1 == limit
        yield Answer(np.array(observation, dtype).reshape(shape), float(reward), bool(terminated), truncated)
        if terminated or truncated:
            return


class Keeper(Protocol):
    """What is kept of a lane's steps: everything (`Record`), or less."""

    def step(self, observations: np.ndarray, actions: np.ndarray, rewards: list[float]) -> None:
        """The slots took a step: what they acted on, what they did, and what it paid."""

    def end(self, time: int, slot: int, terminated: bool) -> None:
        """An episode ended in a slot, with the step at this time."""


class Lane(Slots):
    """A lane of single environments, one for each slot."""

    def __init__(self, place: Tree) -> None:
        super().__init__(place)
        self.limit = time_limit(self.spec)
        self._pool_key = json.dumps(self.spec.to_tree(), sort_keys=True)
        self.envs = _borrow(self.spec, self._pool_key, self.width)
        self.see(self.envs[0].observation_space)

    def begin(self, slot: int, episode: int) -> None:
        """Start an episode in a slot, from its own seed."""
        age = self._age(slot, episode)
        if self.spec.recreate_after and age and age % self.spec.recreate_after == 0:
            self.envs[slot].close()
            self.envs[slot] = make_env(self.spec)
        self.episodes[slot], self.begun[slot], self.returns[slot] = episode, self.clock, 0.0
        self.memory[slot] = 0.0
        try:
            self.observations[slot] = self.envs[slot].reset(seed=self.seed(slot, episode))[0]
        except Exception as error:
            raise self.raised(slot, error) from error

    def _age(self, slot: int, episode: int) -> int:
        """Episodes of a slot before this one."""
        return episode

    def rebuild(self, ledger: Tree, policy: Policy) -> None:
        """Bring every slot to where the ledger says it is."""
        for slot in range(self.width):
            entry = ledger[str(slot)]
            self.begin(slot, entry["episode"])
            env = self.envs[slot]
            for step, action in enumerate(policy.head.to_env(entry["actions"])):
                self.begun[slot] = self.clock - step - 1
                try:
                    observation, reward, terminated, truncated, _ = env.step(action)
                except Exception as error:
                    raise self.raised(slot, error) from error
                if terminated or truncated:
                    raise EnvironmentFault(self._not_deterministic(slot, step, len(entry["actions"])))
                self.observations[slot] = observation
                self.returns[slot] += float(reward)

    def run(
        self,
        policy: Policy,
        weights: Tree,
        rng: np.random.Generator | None,
        following: Callable[[int], int | None],
        steps: int | None = None,
    ) -> Tree:
        """Step the slots together, and record everything. See `play`."""
        record = Record(self)
        self.memory = np.zeros((self.width, policy.remembered), np.float32)
        time = self.play(policy.actor(weights, self.place["lane"]), policy.head, rng, following, record, steps)
        return record.tree(policy, time)

    def play(
        self,
        act: Actor,
        head: Head,
        rng: np.random.Generator | None,
        following: Callable[[int], int | None],
        record: Keeper,
        steps: int | None = None,
        narrowing: bool = False,
    ) -> int:
        """Step the slots together, for `steps` steps or until none is left in an episode; how many steps it took.

        `following(slot)` is the episode to start where one has ended, or None to leave the slot, which stays where it
        is. With `narrowing` this returns when half of the slots were left, for the caller to `narrow` the lane. Without
        `rng` the likeliest actions are taken.
        """
        ways = [self._way(slot) for slot in range(self.width)]
        chunk = NOISE_STEPS if steps is None else min(steps, NOISE_STEPS)
        time, playing = 0, self.width - self.episodes.count(-1)
        while playing and time != steps:
            if rng is not None and time % chunk == 0:
                noise = head.noise(rng, chunk, self.width)
            acted_on = self.observations
            actions = act(acted_on, None if rng is None else noise[time % chunk], self.memory)
            env_actions = head.to_env(actions)
            self.clock = clock = self.clock + 1
            rows: list[Any] = []
            rewards: list[float] = []
            ended: list[tuple[int, bool]] = []
            try:
                for (step, due), action in zip(ways, env_actions, strict=True):
                    observation, reward, terminated, truncated, _ = step(action)
                    rewards.append(float(reward))
                    if terminated or truncated or clock == due:
                        ended.append((len(rows), bool(terminated)))
                    rows.append(observation)
                self.observations = self._stacked(rows)
            except Exception as error:
                raise self.raised(self._culprit(rows), error) from error
            record.step(acted_on, actions, rewards)
            time += 1
            self.taken += playing
            for slot, terminated in ended:
                record.end(time - 1, slot, terminated)
                episode = following(slot)
                if episode is None:
                    playing -= 1
                    self.episodes[slot] = -1
                else:
                    self.begin(slot, episode)
                ways[slot] = self._way(slot)
            if time % NOISE_STEPS == 0 or time == steps:
                self._check_ending()
            if narrowing and 2 * playing <= self.width:
                break
        return time

    def narrow(self) -> list[int]:
        """Go on without the slots that were left: which slots are still there, in order."""
        kept = [slot for slot in range(self.width) if self.episodes[slot] >= 0]
        self._give_back([env for slot, env in enumerate(self.envs) if self.episodes[slot] < 0])
        self.width = len(kept)
        self.envs = [self.envs[slot] for slot in kept]
        self.observations, self.memory = self.observations[kept], self.memory[kept]
        self.episodes, self.begun = [self.episodes[slot] for slot in kept], [self.begun[slot] for slot in kept]
        self.returns = [self.returns[slot] for slot in kept]
        return kept

    def _way(self, slot: int) -> tuple[Callable[[Any], tuple[Any, ...]], int]:
        """How a slot takes a step, and when it is cut off by the clock. One that was left stays where it is."""
        if self.episodes[slot] >= 0:
            return self.envs[slot].step, self._due(slot)
        answer: tuple[Any, ...] = (self.observations[slot].copy(), 0.0, False, False, {})
        return lambda action: answer, -1

    def _stacked(self, rows: list[Any]) -> np.ndarray:
        """Observations as one array. One call for all of them costs a third of one assignment for each."""
        shape, dtype = self.observations.shape, self.observations.dtype
        if len(shape) == 1:
            return np.array(rows, dtype)
        return np.concatenate(rows, dtype=dtype, casting="unsafe").reshape(shape)

    def _culprit(self, rows: list[Any]) -> int:
        """The slot at fault: where the next row would have come from, or whose row is not like the others."""
        if len(rows) < self.width:
            return len(rows)
        shape = self.observations.shape[1:]
        return next((slot for slot, row in enumerate(rows) if np.shape(row) != shape), self.width - 1)

    def _due(self, slot: int) -> int:
        """When, by the clock, the time limit cuts a slot's episode off."""
        return self.begun[slot] + self.limit if self.limit else -1

    def close(self) -> None:
        """Give the environments back for the next lane."""
        self._give_back(self.envs)

    def _give_back(self, envs: list[gymnasium.Env[Any, Any]]) -> None:
        idle = None if self.spec.recreate_after else _pool.get(self._pool_key)
        for env in envs:
            if idle is None:
                env.close()
            else:
                idle.append(env)

    def _not_deterministic(self, slot: int, step: int, length: int) -> str:
        return (
            f"the environment is not deterministic under its seed: an episode of {length} steps so far ended at step "
            f"{step} when its actions were replayed, in {self.where(slot, self.episodes[slot], step)}. "
            f"To see more, type: shoal check-env {self.spec.id}"
        )

    def _check_ending(self) -> None:
        playing = [slot for slot in range(self.width) if self.episodes[slot] >= 0]
        slot = min(playing, key=self.begun.__getitem__, default=0)
        length = self.clock - self.begun[slot]
        if not playing or length < self.spec.step_limit:
            return
        where = self.where(slot, self.episodes[slot], length)
        raise EnvironmentFault(
            f"an episode does not end: {where}. Truncate episodes with --max-episode-steps N, "
            f"or allow longer ones with --step-limit N (now {self.spec.step_limit:,})"
        )


# What a worker keeps between tasks -------------------------------------------------------------------------------

KEEP_RUNS = 16  # a worker may serve several heads at once
_KEEP_SPECS = 4

_live: OrderedDict[str, dict[int, tuple[int, Lane | VectorLane]]] = (
    OrderedDict()
)  # run -> lane -> (fragments done, lane)
_pool: OrderedDict[str, list[gymnasium.Env[Any, Any]]] = OrderedDict()


def _drop_old_runs() -> None:
    while len(_live) > KEEP_RUNS:
        _, lanes = _live.popitem(last=False)
        for _, lane in lanes.values():
            lane.close()


def _borrow(spec: EnvSpec, key: str, count: int) -> list[gymnasium.Env[Any, Any]]:
    """Environments that were used before, or new ones: making one costs far more than resetting it."""
    idle = _pool.setdefault(key, [])
    _pool.move_to_end(key)
    while len(_pool) > _KEEP_SPECS:
        for env in _pool.popitem(last=False)[1]:
            env.close()
    return [idle.pop() if idle else make_env(spec) for _ in range(count)]
