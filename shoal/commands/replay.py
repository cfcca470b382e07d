"""Replay one episode of a run alone: learn its iteration again in this process, then play the episode.

A run keeps settings, metrics and some checkpoints, and that is enough: learning again reproduces the records of its
lanes bit for bit, and the digests in its metrics prove it. The run is only read, so another process may be training it.
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import logging
import pdb
import shlex
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal import algos
from shoal.algos.base import Step
from shoal.base import disk, trees
from shoal.engines.serial import SerialEngine
from shoal.envs.make import EnvSpec, make_env
from shoal.errors import CheckpointFault, DiskFault, UsageError
from shoal.learning import xla
from shoal.policies.policy import Policy
from shoal.runs import run
from shoal.runs.checkpoints import Checkpoint
from shoal.runs.folder import RunDir, RunRecord
from shoal.runs.metrics import MetricsRow
from shoal.runs.spec import RunSpec, make_config
from shoal.sampling import tasks
from shoal.sampling.lane import Answer, play_alone
from shoal.sampling.lane_address import LaneAddress, Ledger, episode_seed
from shoal.sampling.record import LaneRecord

log = logging.getLogger("shoal.replay")


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode of n steps, of which its lane recorded the last m.

    m < n if the episode began before the checkpoint that learning started from.
    """

    lane: int
    slot: int
    number: int
    """Number of the episode in its slot."""
    seed: int
    """Seed of the reset."""
    actions: list[Any]
    """(n): in the form that the environment takes."""
    observations: np.ndarray
    """(m + 1, ...): those acted on, and the final one."""
    rewards: np.ndarray
    """(m,) float32."""
    terminated: bool
    """False if it was truncated."""
    total: float
    """Sum of all n rewards."""

    @property
    def length(self) -> int:
        """Number of steps, n."""
        return len(self.actions)

    @property
    def unseen(self) -> int:
        """Number of steps at the beginning, n - m, of which only the actions are known."""
        return len(self.actions) - len(self.rewards)

    @property
    def end(self) -> str:
        """Whether the episode terminated or was truncated."""
        return "terminated" if self.terminated else "truncated"


@dataclass
class _Pieces:
    """The recorded parts of a running episode."""

    actions: list[np.ndarray] = field(default_factory=list)
    observations: list[np.ndarray] = field(default_factory=list)
    rewards: list[np.ndarray] = field(default_factory=list)

    def add(self, record: LaneRecord, slot: int, times: slice) -> None:
        # Copies, because views would keep the records of all iterations that a long episode spans in memory.
        self.actions.append(record["actions"][times, slot].copy())
        self.observations.append(record["observations"][:-1][times, slot].copy())
        self.rewards.append(record["rewards"][times, slot].copy())


class _LaneFuture(Future[LaneRecord | None]):
    """The future of a lane task: calls `on_taken` with the record when its result is taken for the first time.

    An episode belongs to the iteration that learns from it. That is known only when the algorithm takes the result,
    because an algorithm may submit tasks of the next iteration before it has finished this one.
    """

    def __init__(self, done: Future[LaneRecord | None], on_taken: Callable[[LaneRecord | None], None]) -> None:
        super().__init__()
        self._on_taken = on_taken
        self._taken = False
        error = done.exception()
        if error is None:
            self.set_result(done.result())
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> LaneRecord | None:
        record = super().result(timeout)
        if not self._taken:
            self._taken = True
            self._on_taken(record)
        return record


class RecordingEngine(SerialEngine):
    """The serial engine, which also collects the episodes that end in lane tasks.

    `ended` is in the order in which results are taken, then in order of end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[RecordedEpisode] = []
        self._running: dict[tuple[str, int], list[_Pieces]] = {}  # purpose and lane -> slots

    def submit(self, function: Callable[..., object], /, *args: object, key: Hashable = None) -> Future[Any]:
        """Run a task now, and collect the episodes of its record when that is taken."""
        future = super().submit(function, *args, key=key)
        if function not in (tasks.fragment, tasks.episodes):
            return future
        call = inspect.signature(function).bind(*args).arguments
        return _LaneFuture(future, lambda record: self._collect(call, record))

    def _collect(self, call: dict[str, Any], record: LaneRecord | None) -> None:
        if record is None:  # the lane is not held here; the head submits the task again, with the ledger
            return
        address: LaneAddress = call["address"]
        distribution = Policy.from_record(call["policy"]).distribution
        begun = [0] * address["width"]
        slots = [_Pieces() for _ in begun]
        if "fragment" in address:
            where = address["purpose"], address["lane"]
            if where not in self._running:
                ledger: Ledger = call["ledger"]  # the first task of a lane has it
                self._running[where] = [_Pieces([ledger[str(slot)]["actions"]]) for slot in range(address["width"])]
            slots = self._running[where]
        for index, (time, slot) in enumerate(record["ends"].tolist()):
            pieces, slots[slot] = slots[slot], _Pieces()
            pieces.add(record, slot, slice(begun[slot], time + 1))
            begun[slot] = time + 1
            number = int(record["episodes"][index])
            self.ended.append(
                RecordedEpisode(
                    lane=address["lane"],
                    slot=slot,
                    number=number,
                    seed=episode_seed(address, slot, number),
                    actions=distribution.to_env(np.concatenate(pieces.actions)),
                    observations=np.concatenate([*pieces.observations, record["finals"][index][None]]),
                    rewards=np.concatenate(pieces.rewards),
                    terminated=bool(record["terminated"][index]),
                    total=float(record["returns"][index]),
                )
            )
        for slot, pieces in enumerate(slots):
            pieces.add(record, slot, slice(begun[slot], None))


# Learning again --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RelearnedIteration:
    """An iteration of a run that was learned again."""

    env: EnvSpec
    episodes: list[RecordedEpisode]
    """Episodes that ended in the iteration, in lane order, then in order of end."""
    difference: str
    """Empty if every digest matched the run's; otherwise describes the first mismatch."""


def replay_problems(folder: RunDir, iteration: int, number: int | None) -> list[str]:
    """Describe why an episode cannot be replayed, as far as the run's metrics show it before anything is learned."""
    record = folder.record()
    if make_config(record["algo"], record["config"]).samples == "scores":
        return [
            f"workers of {record['algo']} send only scores, so there is no record to compare an episode with. "
            f"To evaluate its policy, run: shoal evaluate {folder.name}"
        ]
    if vector := record["settings"].get("vector"):
        return [f"episodes of --vector {vector} are not seeded one by one, so none can be replayed alone"]
    totals = {row["iteration"]: row.get("rollout/episodes") for row in folder.metrics()}
    if iteration not in totals:
        there = f"it has {min(totals)} to {max(totals)}" if totals else "it has none yet"
        return [f"the run {folder.name} has no iteration {iteration}: {there}"]
    before: dict[int, int | None] = {0: 0, **totals}
    counts = {
        at: total - previous
        for at, total in totals.items()
        if total is not None and (previous := before.get(at - 1)) is not None
    }
    return _no_episode(iteration, number, counts[iteration], counts) if iteration in counts else []


def _no_episode(iteration: int, number: int | None, count: int, counts: dict[int, int]) -> list[str]:
    """Describe why there is no such episode, if there is none. `counts` has the ended episodes of each iteration."""
    if count == 0:
        others = sorted((at for at, found in counts.items() if found), key=lambda at: abs(at - iteration))[:2]
        hint = f". The nearest iterations with one: {', '.join(map(str, sorted(others)))}" if others else ""
        return [f"no episode ended in iteration {iteration}{hint}"]
    if number is not None and not 0 <= number < count:
        return [f"iteration {iteration} has no episode {number}: {count} ended in it, 0 to {count - 1}"]
    return []


def relearn(
    folder: RunDir,
    iteration: int,
    number: int | None,
    announce: Callable[[str], None],
    allow: Collection[str] = (),
) -> RelearnedIteration:
    """Learn an iteration again from the newest checkpoint before it, for one of its episodes or for all of them."""
    rows = {row["iteration"]: row for row in folder.metrics()}
    record, spec = run.recorded(folder, {}, allow)
    settings = spec.settings
    checkpoint = _checkpoint(folder, iteration)
    first = checkpoint.iteration
    xla.start(settings.learner_threads or 1, settings.device)
    which = f"iterations {first + 1} to {iteration}" if first + 1 < iteration else f"iteration {iteration}"
    announce(f"Learning {which} again, from {f'the checkpoint of {first}' if first else 'the start'}")
    with RecordingEngine() as engine:
        for reached, step in _steps(record, spec, engine, checkpoint):
            difference = _difference(rows.get(reached), step)
            if difference:
                return RelearnedIteration(settings.env_spec, [], f"iteration {reached} {difference}")
            if reached == iteration:
                if missing := _no_episode(iteration, number, len(engine.ended), {}):  # metrics may not count them
                    raise UsageError(missing)
                return RelearnedIteration(settings.env_spec, engine.ended, "")
            engine.ended.clear()
    raise AssertionError("the steps of an algorithm never end")


def _checkpoint(folder: RunDir, iteration: int) -> Checkpoint:
    try:
        return folder.load(before=iteration)
    except CheckpointFault as error:  # damaged, or removed by the process that trains the run: learn from the start
        log.warning("%s", error)
        return Checkpoint(0, None)


def _steps(
    record: RunRecord, spec: RunSpec, engine: RecordingEngine, checkpoint: Checkpoint
) -> Iterator[tuple[int, Step]]:
    """Learn every iteration after a checkpoint, resuming wherever the run was resumed with a new goal."""
    ends, first, settings = spec.schedule_ends(record), checkpoint.iteration, spec.settings
    end = ends[max(after for after in ends if after <= first)]
    train = algos.load(spec.algo).train
    steps = train(spec.config, settings.env_spec, engine, settings.seed, end, checkpoint.state)
    for iteration, step in enumerate(steps, start=first + 1):
        yield iteration, step
        if iteration in ends:
            yield from _steps(record, spec, engine, Checkpoint(iteration, step.state()))


def _difference(row: MetricsRow | None, step: Step) -> str:
    parts = trees.digests(step.learned)
    digest = trees.digest(parts)
    if row is None or row["digest"] == digest:  # a damaged line is missing; the next line covers it
        return ""
    differs = [part for part in sorted(parts | row["digests"]) if parts.get(part) != row["digests"].get(part)]
    return f"has the digest {digest} now and {row['digest']} in the run; what differs: {', '.join(differs)}"


# Playing one episode ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayedEpisode:
    """An episode played alone, and where it differs from the lane's record."""

    actions: list[Any]
    answers: list[Answer]
    """Results of the reset and of each step."""
    step: int
    """The first step that differs from the lane's; -1 for the reset."""
    difference: str
    """Describes what differs there; empty if nothing does."""


def replay_episode(episode: RecordedEpisode, env: EnvSpec, break_at: int | None = None) -> ReplayedEpisode:
    """Play an episode alone in a new environment, and compare it with its lane's record, bit for bit.

    With `break_at`, Python's debugger stops before that step, and where the environment raises.
    """
    fresh = make_env(env)
    answers: list[Answer] = []
    step, difference, total = -1, "", 0.0

    def pause(at: int) -> None:
        if at == break_at:
            pdb.Pdb().set_trace(sys._getframe(1))  # in `play_alone`: its next line; from Python 3.13 on, this one

    try:
        for answer in play_alone(fresh, env, episode.seed, episode.actions, pause):
            total += answer.reward
            if not difference:
                step, difference = len(answers) - 1, _unlike(episode, len(answers), answer, total)
            answers.append(answer)
    except BdbQuit:
        raise
    except Exception as error:
        if break_at is not None:
            pdb.post_mortem(error.__traceback__)
        if difference:
            difference += f"; at step {len(answers) - 1} it raised {type(error).__name__}: {error}"
        else:
            below = error.__traceback__.tb_next if error.__traceback__ is not None else None
            trace = "".join(traceback.format_exception(type(error), error, below))
            step = len(answers) - 1
            difference = f"it raised {type(error).__name__} alone and not in the lane\n\n{trace}"
    finally:
        fresh.close()
    return ReplayedEpisode(episode.actions, answers, step, difference)


def _unlike(episode: RecordedEpisode, count: int, answer: Answer, total: float) -> str:
    """Describe how an answer after `count` steps differs from the lane's; empty if it does not."""
    recorded = count - episode.unseen
    ended, should_end = answer.terminated or answer.truncated, count == episode.length
    if ended or should_end:
        alone = _ending(ended, answer.terminated)
        lane = _ending(should_end, episode.terminated)
        if alone != lane:
            return f"it {alone} alone and {lane} in the lane"
    if recorded > 0:
        reward = episode.rewards[recorded - 1]
        if np.float32(answer.reward).tobytes() != reward.tobytes():
            return f"the reward is {np.float32(answer.reward)} alone and {reward} in the lane"
    if recorded >= 0 and answer.observation.tobytes() != episode.observations[recorded].tobytes():
        return _unlike_observations(answer.observation, episode.observations[recorded])
    if should_end and np.float64(total).tobytes() != np.float64(episode.total).tobytes():
        return f"the return is {total} alone and {episode.total} in the lane"
    return ""


def _ending(ended: bool, terminated: bool) -> str:
    return ("terminated" if terminated else "was truncated") if ended else "went on"


def _unlike_observations(alone: np.ndarray, lane: np.ndarray) -> str:
    bits = f"u{alone.dtype.itemsize}"  # compared by bits: -0.0 differs from 0.0, and NaN equals itself
    places = np.argwhere(alone.view(bits) != lane.view(bits))
    at = tuple(places[0].tolist())
    name = f"observation{list(at) if at else ''}"
    return f"{name} is {alone[at]} alone and {lane[at]} in the lane ({len(places)} of {alone.size} numbers differ)"


def check_command(env: EnvSpec) -> str:
    """Return the command that checks whether an environment is deterministic."""
    return shlex.join(
        [
            *("shoal", "check-env", env.id),
            *(["--env-kwargs", json.dumps(env.kwargs)] if env.kwargs else []),
            *(["--max-episode-steps", str(env.max_episode_steps)] if env.max_episode_steps else []),
        ]
    )


# The episode as a table ------------------------------------------------------------------------------------------


def save_problems(path: Path) -> list[str]:
    """Describe why an episode cannot be saved there. An existing file is never replaced."""
    problems = []
    if path.suffix != ".csv":
        problems.append(f"an episode is saved as a .csv file, not as {path}")
    if path.exists():
        problems.append(f"{path} exists already. Remove it, or choose another name")
    elif not path.parent.is_dir():
        problems.append(f"{path} cannot be written: there is no folder {path.parent}")
    return problems


def save_episode(played: ReplayedEpisode, path: Path) -> None:
    """Write one row per step: the observation acted on, the action, and the results of the step."""
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    observation, action = played.answers[0].observation, np.asarray(played.actions[0])
    names = ["step", *_columns("observation", observation), *_columns("action", action)]
    table.writerow([*names, "reward", "terminated", "truncated"])
    rows = zip(played.answers, played.actions, played.answers[1:], strict=False)
    for step, (before, action, after) in enumerate(rows):
        numbers = [*before.observation.ravel(), *np.ravel(action)]
        table.writerow([step, *numbers, after.reward, after.terminated, after.truncated])
    try:
        disk.write_file(path, text.getvalue().encode())
    except OSError as error:
        raise DiskFault(f"{path} could not be written: {error.strerror}") from None


def _columns(name: str, values: np.ndarray) -> list[str]:
    return ["_".join([name, *map(str, index)]) for index in np.ndindex(values.shape)]
