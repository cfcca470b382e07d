"""Does an environment keep the rules that equal results rest on? Tried, not believed; each verdict says what it costs.

An episode must follow from its seed and its actions alone: on the same environment again, on a new one, after other
episodes, cut off in the middle and replayed, and in another process. Then lanes can move and runs can resume.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from shoal.engines import make as make_engine
from shoal.engines.processes import available_cores
from shoal.envs.make import EnvSpec, describe, make, time_limit
from shoal.trees import Tree

STEPS = 300  # of an episode that is compared
ACT_MICROSECONDS = 60.0  # of one forward pass of a 64x64 network, while an environment fills the caches


@dataclass(frozen=True)
class Verdict:
    """One finding. `works` is None for a measurement."""

    what: str
    works: bool | None
    detail: str


def actions_for(space: gymnasium.Space[Any], seed: int) -> list[Any]:
    """The same random actions for everybody who asks with the same seed."""
    space.seed(seed)
    return [space.sample() for _ in range(STEPS)]


def episode(env: gymnasium.Env[Any, Any], seed: int, limit: int | None) -> list[str]:
    """A digest of everything up to each step of an episode; the first is of the reset."""
    total = hashlib.sha256()

    def mark(*values: Any) -> str:
        for value in values:
            total.update(np.asarray(value).tobytes())
        return total.copy().hexdigest()[:12]

    observation, _ = env.reset(seed=seed)
    marks = [mark(observation)]
    for step, action in enumerate(actions_for(env.action_space, seed), start=1):
        observation, reward, terminated, truncated, _ = env.step(action)
        marks.append(mark(observation, float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated or step == limit:
            break
    return marks


def episode_elsewhere(spec: Tree, seed: int) -> list[str]:
    """Task: the same on a new environment in a worker's process."""
    parsed = EnvSpec(**spec)
    env = make(parsed)
    try:
        return episode(env, seed, time_limit(parsed))
    finally:
        env.close()


def check(spec: EnvSpec, seconds: float = 3.0) -> Iterator[Verdict]:
    """All verdicts, as they are found. Raises what `make` raises if there is no such environment."""
    spaces = describe(spec.to_tree())
    env, limit = make(spec), time_limit(spec)
    try:
        yield Verdict(
            "spaces", True, f"observations {tuple(spaces['shape'])} {spaces['dtype']}, actions {env.action_space}"
        )
        yield _interface(env)
        yield from _determinism(spec, env, limit)
        yield _ending(env, spec, limit)
        yield from _speed(env, limit, seconds)
        yield _leak(env, seconds)
    finally:
        env.close()


def _interface(env: gymnasium.Env[Any, Any]) -> Verdict:
    """Whether what it returns is what its spaces promise."""
    problems = []
    space = env.observation_space
    start: tuple[Any, Any] = env.reset(seed=0)
    observation, info = start
    returned = [("reset", observation)]
    if not isinstance(info, dict):
        problems.append(f"reset returns info of type {type(info).__name__}, not a dict")
    for action in actions_for(env.action_space, 0)[:50]:
        result: tuple[Any, ...] = env.step(action)
        if len(result) != 5:
            problems.append(f"step returns {len(result)} values, not 5")
            break
        observation, reward, terminated, truncated, _ = result
        returned.append(("step", observation))
        if not np.isfinite(float(reward)):
            problems.append(f"a reward is {reward}")
        if terminated or truncated:
            break
    for source, observation in returned:
        array = np.asarray(observation)
        if array.shape != space.shape:
            problems.append(f"{source} returns an observation of shape {array.shape}, the space says {space.shape}")
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            problems.append(f"{source} returns an observation that is not finite")
        elif not space.contains(observation):
            problems.append(f"{source} returns an observation outside of its space (dtype {array.dtype})")
    unique = sorted(set(problems))
    cost = "learning may see wrong numbers" if unique else "what it returns is what its spaces promise"
    return Verdict("interface", not unique, "; ".join([*unique, cost]))


def _determinism(spec: EnvSpec, env: gymnasium.Env[Any, Any], limit: int | None) -> Iterator[Verdict]:
    first = episode(env, 7, limit)
    again = episode(env, 7, limit)
    cost = "results are not reproducible at all; give the environment's random numbers the seed of `reset`"
    yield _same("same seed, same episode", first, again, cost)

    fresh = make(spec)
    other = episode(fresh, 8, limit)
    yield Verdict(
        "another seed, another episode",
        other != first or None,
        "they differ" if other != first else "they are equal: the environment has no randomness, or ignores its seed",
    )
    alone = episode(fresh, 7, limit)
    for seed in range(20, 25):
        episode(fresh, seed, limit)
    cost = "something survives `reset`: results change when a lane moves; try --recreate-after 1"
    yield _same("alone and after other episodes", alone, episode(fresh, 7, limit), cost)
    fresh.close()

    half = max(1, len(first) // 2)
    replayed = make(spec)
    replayed.reset(seed=3)
    for action in actions_for(replayed.action_space, 3)[:5]:
        if any(replayed.step(action)[2:4]):
            break
    cost = "a lane cannot be rebuilt: a lost worker or a resume changes the result"
    yield _same("replay of its actions", first[:half], episode(replayed, 7, limit)[:half], cost)
    replayed.close()

    with make_engine("processes", workers=1) as engine:
        elsewhere = engine.submit(episode_elsewhere, spec.to_tree(), 7).result()
    cost = "workers disagree: results depend on where an episode runs"
    yield _same("in another process", first, elsewhere, cost)


def _same(what: str, one: list[str], other: list[str], cost: str) -> Verdict:
    if one == other:
        return Verdict(what, True, f"equal, all {len(one) - 1} steps")
    at = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    return Verdict(what, False, f"differs from {'the reset' if at == 0 else f'step {at}'} on. {cost}")


def _ending(env: gymnasium.Env[Any, Any], spec: EnvSpec, limit: int | None) -> Verdict:
    if limit is not None:
        return Verdict("episodes end", True, f"at {limit:,} steps at the latest")
    env.reset(seed=0)
    for step in range(10_000):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            return Verdict("episodes end", True, f"one did after {step + 1} steps; there is no limit")
    detail = "not within 10,000 random steps, and there is no limit. Give it one with --max-episode-steps N"
    return Verdict("episodes end", False, detail)


def _speed(env: gymnasium.Env[Any, Any], limit: int | None, seconds: float) -> Iterator[Verdict]:
    actions = actions_for(env.action_space, 0)
    stepping = resetting = 0.0
    steps = resets = length = 0
    env.reset(seed=0)
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            steps, length = steps + 1, length + 1
            if terminated or truncated or length == limit:
                break
        middle = time.perf_counter()
        stepping += middle - start
        if terminated or truncated or length == limit:
            env.reset(seed=resets)
            resets, length = resets + 1, 0
            resetting += time.perf_counter() - middle
    per_step = stepping / steps * 1e6
    words = f"{per_step:.0f} µs a step"
    words += f", {resetting / resets * 1e6:.0f} µs a reset" if resets else ", no episode ended"
    yield Verdict("speed", None, words)
    # Wide enough that the forward pass takes a tenth of a lane's time, within reason.
    width = next((w for w in (4, 8, 16, 32) if ACT_MICROSECONDS / w <= 0.1 * per_step), 32)
    cores = available_cores()
    yield Verdict(
        "suits", None, f"--width {width}, and up to {cores} workers here (one per core, never more than lanes)"
    )


def _leak(env: gymnasium.Env[Any, Any], seconds: float) -> Verdict:
    """Memory after many resets, beside memory after some: caches fill first."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return Verdict("memory", None, "not measured: this system has no /proc")

    def megabytes() -> float:
        return int(statm.read_text().split()[1]) * 4096 / 2**20

    def reset_for(duration: float) -> int:
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < duration:
            env.reset(seed=count)
            env.step(env.action_space.sample())
            count += 1
        return count

    reset_for(seconds / 2)  # caches fill
    before = megabytes()
    count = reset_for(seconds / 2)
    half = megabytes()
    count += reset_for(seconds / 2)
    grown = megabytes() - before
    if grown < 4.0 or (grown - (half - before)) < grown / 4:  # a leak goes on; the allocator settles
        return Verdict("memory", True, f"no growth over {count:,} resets")
    keep = max(1, int(50 * count / grown))  # episodes that cost 50 MB
    detail = (
        f"{grown / count * 1000:.1f} MB more for every 1,000 episodes. Keep it at 50 MB with --recreate-after {keep}"
    )
    return Verdict("memory", False, detail)
