"""Test whether an environment is deterministic enough for reproducible results, how fast it is and whether it leaks.

An episode must depend only on its seed and its actions: when it is repeated, in a new environment, after other
episodes, after one that was abandoned, and in another process. Then lanes can move between workers and runs can resume.
Each failed check reports its consequence.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.base.host import available_cores
from shoal.engines import make as make_engine
from shoal.envs.make import EnvRecord, EnvSpec, make_env, time_limit
from shoal.errors import TaskFailed
from shoal.sampling.tasks import describe

STEPS = 300  # of each episode that are compared
LEAK_MEGABYTES = 4.0  # less could be the memory allocator settling
ACT_MICROSECONDS = 60.0  # for a forward pass of a 64x64 network, with the environment competing for caches


@dataclass(frozen=True)
class Verdict:
    """The result of one check. `works` is None for a measurement."""

    what: str
    works: bool | None
    detail: str


class Unusable(Exception):
    """An environment raised an error or returned something other than Gymnasium's API requires."""


class Watched:
    """An environment that raises `Unusable` for errors and for results that violate Gymnasium's API.

    `calls` and `spent` count the calls and their seconds, separately for "reset" and "step".
    """

    def __init__(self, spec: EnvSpec) -> None:
        self._env, self.limit = make_env(spec), time_limit(spec)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.calls, self.spent = {"reset": 0, "step": 0}, {"reset": 0.0, "step": 0.0}
        self.odd: set[str] = set()
        """Deviations from Gymnasium's API that Shoal can cope with."""
        self._steps, self._seed = 0, 0

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._env.close()

    def actions(self, seed: int) -> Iterator[Any]:
        """Yield an endless sequence of random actions that depends only on the seed."""
        space = copy.deepcopy(self.action_space)  # seeding the original could hide an environment that samples from it
        space.seed(seed)
        while True:
            yield space.sample()

    def reset(self, seed: int) -> Any:
        """Start an episode and return its first observation."""
        self._steps, self._seed = 0, seed
        return self._call("reset", 2, seed=seed)[0]

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Take a step. Returns observation, reward, terminated and truncated, which includes the time limit."""
        self._steps += 1
        observation, reward, terminated, truncated, _ = self._call("step", 5, action)
        try:
            return observation, float(reward), bool(terminated), bool(truncated) or self._steps == self.limit
        except (TypeError, ValueError) as error:
            raise Unusable(f"{self._where} returned the reward {reward!r}: {error}") from None

    def episode(self, seed: int) -> Iterator[tuple[Any, float, bool, bool]]:
        """Play an episode with random actions, and yield the result of the reset and of each step."""
        yield self.reset(seed), 0.0, False, False
        for action in itertools.islice(self.actions(seed), STEPS):
            answer = self.step(action)
            yield answer
            if answer[2] or answer[3]:
                return

    def _call(self, name: str, count: int, *args: Any, **kwargs: int) -> tuple[Any, ...]:
        function, begun = getattr(self._env, name), time.perf_counter()
        try:
            returned = function(*args, **kwargs)
        except Exception as error:
            raise Unusable(f"{self._where} raised {type(error).__name__}: {error}") from error
        self.spent[name] += time.perf_counter() - begun
        self.calls[name] += 1
        if not isinstance(returned, tuple) or len(returned) != count:
            form = f"{len(returned)} values" if isinstance(returned, tuple) else f"one {type(returned).__name__}"
            raise Unusable(f"{self._where} returned {form}, not {count}")
        if not isinstance(returned[-1], dict):
            self.odd.add(f"{name} returns info of type {type(returned[-1]).__name__}, not a dict")
        return returned

    @property
    def _where(self) -> str:
        return f"step {self._steps} after reset(seed={self._seed})" if self._steps else f"reset(seed={self._seed})"


def marks(env: Watched, seed: int) -> list[str]:
    """Digest everything up to each step of an episode; the first digest is of the reset."""
    total, found = hashlib.sha256(), []
    for values in env.episode(seed):
        for value in values:
            total.update(np.asarray(value).tobytes())
        found.append(total.hexdigest()[:12])
    return found


def marks_in_new_env(spec: EnvRecord, seeds: list[int]) -> list[str]:
    """Task: play several episodes in a new environment and return the marks of the last."""
    with Watched(EnvSpec.from_record(spec)) as env:
        *_, last = (marks(env, seed) for seed in seeds)
    return last


def env_verdicts(spec: EnvSpec, seconds: float = 3.0) -> Iterator[Verdict]:
    """Run all checks and yield their verdicts one by one. Raises if the environment cannot be made (`make_env`)."""
    spaces = describe(spec.to_record())
    with Watched(spec) as env:
        yield Verdict(
            "spaces", True, f"observations {tuple(spaces['shape'])} {spaces['dtype']}, actions {env.action_space}"
        )
        try:
            yield _interface(env)
            yield from _determinism(spec, env)
            yield _ending(env)
            yield from _speed(env, seconds)
            yield _leak(env, seconds)
        except Unusable as problem:
            yield Verdict("works at all", False, f"{problem}. Training would stop there; other checks were skipped")


def _interface(env: Watched) -> Verdict:
    """Check that observations and rewards match the spaces and are finite."""
    space, problems = env.observation_space, set()
    for seed in range(5):
        for step, (observation, reward, _, _) in enumerate(env.episode(seed)):
            source = "step" if step else "reset"
            if not np.isfinite(reward):
                problems.add(f"a reward is {reward}")
            array = np.asarray(observation)
            if array.shape != space.shape:
                problems.add(f"{source} returns an observation of shape {array.shape}, but the space has {space.shape}")
            elif array.dtype.kind == "f" and not np.isfinite(array).all():
                problems.add(f"{source} returns an observation that is not finite")
            elif not space.contains(observation):
                problems.add(f"{source} returns an observation outside its space (dtype {array.dtype})")
    problems |= env.odd
    cost = "learning may use wrong numbers" if problems else "observations and rewards match the spaces"
    return Verdict("interface", not problems, "; ".join([*sorted(problems), cost]))


def _determinism(spec: EnvSpec, used: Watched) -> Iterator[Verdict]:
    """Play the episode with seed 7 in several ways, which must all give the same."""
    tree = spec.to_record()
    first = marks_in_new_env(tree, [7])
    cost = "Results are not reproducible at all; seed the environment's random numbers with the seed of `reset`"
    yield _same("same seed, same episode", first, marks_in_new_env(tree, [7]), cost)

    other = marks_in_new_env(tree, [8])
    yield Verdict(
        "another seed, another episode",
        other != first or None,
        "they differ" if other != first else "they are equal: the environment is not random, or ignores its seed",
    )

    cost = "Some state survives `reset`, so results change when a lane moves; try --recreate-after 1"
    yield _same("alone and after other episodes", first, marks_in_new_env(tree, [20, 21, 22, 23, 24, 7]), cost)

    list(itertools.islice(used.episode(3), 6))  # abandoned after a few steps
    cost = "A lane cannot be rebuilt, so losing a worker or resuming changes the result"
    yield _same("replay of its actions", first, marks(used, 7), cost)

    cost = "Workers disagree: results depend on where an episode runs"
    with make_engine("processes", workers=1) as engine:
        try:
            elsewhere = engine.submit(marks_in_new_env, tree, [7]).result()
        except TaskFailed as error:
            raise Unusable(f"in another process, {str(error).splitlines()[0]}") from error
    yield _same("in another process", first, elsewhere, cost)


def _same(what: str, one: list[str], other: list[str], cost: str) -> Verdict:
    if one == other:
        return Verdict(what, True, f"equal in all {len(one) - 1} steps")
    at = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    return Verdict(what, False, f"differs from {'the reset' if at == 0 else f'step {at}'} on. {cost}")


def _ending(env: Watched) -> Verdict:
    if env.limit is not None:
        return Verdict("episodes end", True, f"at {env.limit:,} steps at the latest")
    env.reset(0)
    for step, action in enumerate(itertools.islice(env.actions(0), 10_000), start=1):
        if any(env.step(action)[2:]):
            return Verdict("episodes end", True, f"after {step} steps in a test; there is no time limit")
    detail = "not within 10,000 random steps, and there is no time limit. Set one with --max-episode-steps N"
    return Verdict("episodes end", False, detail)


def _speed(env: Watched, seconds: float) -> Iterator[Verdict]:
    begun = time.perf_counter()
    for seed in itertools.count():
        for _ in env.episode(seed):
            pass
        if time.perf_counter() - begun >= seconds:
            break
    per_step, per_reset = (env.spent[name] / env.calls[name] * 1e6 for name in ("step", "reset"))
    yield Verdict("speed", None, f"{per_step:.0f} µs a step, {per_reset:.0f} µs a reset")
    # Wide enough for the forward pass to take at most a tenth of a lane's time, up to 32.
    width = next((w for w in (4, 8, 16, 32) if ACT_MICROSECONDS / w <= 0.1 * per_step), 32)
    cores = available_cores()
    yield Verdict(
        "suits", None, f"--width {width}, and up to {cores} workers here (one per core, at most one per lane)"
    )


def _leak(env: Watched, seconds: float) -> Verdict:
    """Compare memory after many resets with memory after a few, when caches are full."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return Verdict("memory", None, "not measured: this system has no /proc")
    action = next(env.actions(0))

    def megabytes() -> float:
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20

    def reset_while(more: Callable[[int], bool]) -> int:
        count = 0
        while more(count):
            env.reset(count)
            env.step(action)
            count += 1
        return count

    def until(end: float) -> Callable[[int], bool]:
        return lambda _: time.perf_counter() < end

    reset_while(until(time.perf_counter() + seconds / 2))  # to fill caches
    before = megabytes()
    count = reset_while(until(time.perf_counter() + seconds / 2))
    half = megabytes()
    # Equally many, not equally long: other load would make the second half look like the end of the growth.
    first = count
    count += reset_while(lambda done: done < first)
    grown = megabytes() - before
    if grown >= LEAK_MEGABYTES and (grown - (half - before)) >= grown / 4:  # a leak continues, the allocator settles
        keep = max(1, int(50 * count / grown))  # episodes that cost 50 MB
        rate = f"grows by {grown / count * 1000:.1f} MB per 1,000 episodes"
        return Verdict("memory", False, f"{rate}. Limit it to 50 MB with --recreate-after {keep}")
    if count < 200:  # a leak of 20 MB per 1,000 episodes could go unnoticed
        longer = math.ceil(seconds * 200 / max(count, 1))
        return Verdict("memory", None, f"not measured: {count} resets are too few. Try --seconds {longer}")
    unseen = LEAK_MEGABYTES / count * 1000
    return Verdict("memory", True, f"no growth over {count:,} resets (less than {unseen:.2g} MB per 1,000)")
