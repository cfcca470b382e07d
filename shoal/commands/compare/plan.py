"""Plan the runs of a comparison: ordinary runs in one folder, with names that the same command finds again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import tyro

from shoal import algos, engines
from shoal.algos.base import AlgorithmConfig
from shoal.base import validation
from shoal.commands.campaign.runs import TASK, PlannedRun, at_once_problems, other_settings
from shoal.commands.compare.overrides import override_values, split_overrides
from shoal.envs.make import EnvSpec
from shoal.envs.names import env_problems, factory_of, registered
from shoal.errors import ShoalError, UsageError
from shoal.runs import presets
from shoal.runs.folder import name_problems
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec, located


@dataclass(frozen=True)
class Comparison:
    """Compare algorithms on one task, each with several seeds: a table, and a plot of the learning curves.

    All runs share the workers: while one run learns, the workers serve another. They are ordinary runs in runs/NAME;
    running the same command again continues them.

    Example: shoal compare CartPole-v1 --algos ppo trpo dqn --seeds 5 --set ppo.lr=0.001 dqn.hidden=32,32
    """

    env: tyro.conf.Positional[str]
    """Environment, or the name of a preset."""
    algos: tuple[str, ...]
    """Algorithms to compare; ALGORITHM:NAME sets an algorithm's optimizer, as in nevergrad:CMA."""
    seeds: int = 5
    """Number of seeds for each algorithm, from 0."""
    steps: int | None = None
    """Environment steps of each run (default: the most of all presets)."""
    set: tuple[str, ...] = ()
    """Settings of an algorithm, as ppo.lr=0.001 or dqn.hidden=32,32 (default: those of its preset)."""
    preset: bool = True
    """Use the algorithms' presets for the environment."""
    env_kwargs: str | None = None
    """Keyword arguments for the environment, as JSON (default: the preset's)."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps (default: the environment's limit)."""
    episodes: int = 100
    """Greedy episodes with each final policy; their mean return is its score."""
    threshold: float | None = None
    """Report after how many steps this return was reached (default: the environment's reward threshold)."""
    engine: str = "processes"
    """What runs the environments: serial, processes, mpi, ray or redis. Does not change the results."""
    workers: int | None = None
    """Number of workers (default: one per core). Does not change the results."""
    at_once: int | None = None
    """Number of runs that train at the same time, each in its own process (default: workers + 1)."""
    runs: str = "runs"
    """Folder of all runs."""
    name: str | None = None
    """Name of the comparison's folder in it (default: compare- and the environment)."""

    @property
    def folder(self) -> Path:
        """Folder of the runs, the table and the plot."""
        return Path(self.runs) / (self.name or f"compare-{re.sub(r'[^A-Za-z0-9._-]+', '-', self.env)}")

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        found = engines.engine_problems(self.engine, self.workers)
        found += [] if self.name is None else name_problems(self.name)
        found += validation.field_problems(
            self,
            at_least_one=("seeds", "steps", "max_episode_steps", "episodes"),
            finite=() if self.threshold is None else ("threshold",),
        )
        found += at_once_problems(self.at_once, self.engine)
        return found

    def threshold_on(self, env: EnvSpec) -> float | None:
        """Return the return to report on: the given one, or where the environment counts as solved, if it says so."""
        if self.threshold is not None:
            return self.threshold
        try:
            return None if factory_of(env.id) else registered(env.id).reward_threshold
        except gymnasium.error.Error:
            return None


@dataclass(frozen=True)
class _Side:
    """What is compared: an algorithm, perhaps with an optimizer."""

    label: str
    algo: str
    optimizer: str = ""


@dataclass(frozen=True)
class _Task:
    """The settings that make the task, and the presets for it by algorithm."""

    settings: dict[str, Any]
    presets: dict[str, dict[str, Any]]

    def steps(self) -> int:
        """Return the largest number of steps that a preset has."""
        return max((found["steps"] for found in self.presets.values() if "steps" in found), default=Settings("").steps)


def plan_runs(wanted: Comparison) -> list[PlannedRun]:
    """List the runs in the order in which they start: the first seed of all sides, then the second.

    Refuses all mistakes at once.
    """
    problems = wanted.problems()
    sides = _sides(wanted, problems)
    task = _task(wanted, sides, problems)
    configs = _configs(wanted, sides, task, problems)
    planned = [
        _planned_run(wanted, side, task, seed, configs[side.label])
        for seed in range(max(wanted.seeds, 1))
        for side in sides
    ]
    for run in planned:
        problems += [problem for problem in run.spec.settings.problems() if problem not in problems]
    problems = problems or other_settings(planned)
    if problems:
        raise UsageError(problems)
    return planned


def _planned_run(wanted: Comparison, side: _Side, task: _Task, seed: int, config: AlgorithmConfig) -> PlannedRun:
    preset = task.presets.get(side.algo, {})
    own = {key: preset[key] for key in ("step_limit", "recreate_after") if key in preset}
    settings = Settings(
        **task.settings, **own, steps=wanted.steps or task.steps(), seed=seed, engine=wanted.engine,
        workers=wanted.workers, runs=str(wanted.folder), name=f"{side.label.replace(':', '-')}-seed{seed}",
    )  # fmt: skip
    return PlannedRun(side.label, RunSpec(side.algo, settings, config), bool(preset))


def tuning_warning(planned: Sequence[PlannedRun]) -> str:
    """Warn if some sides have a preset for the task and others do not; otherwise return an empty string."""
    without = dict.fromkeys(run.label for run in planned if not run.preset)
    if not without or len(without) == len({run.label for run in planned}):
        return ""
    return (
        f"Not equally tuned: there is no preset for this task for {', '.join(without)}, only for the others. "
        f"To give settings, use --set, as in --set {next(iter(without))}.hidden=32,32"
    )


# Sides, task and settings. Each function adds what is wrong to `problems`, so that all mistakes are refused at once. --


def _sides(wanted: Comparison, problems: list[str]) -> list[_Side]:
    sides: list[_Side] = []
    for given in wanted.algos:
        algo, _, optimizer = given.partition(":")
        algo = algos.full_name(algo)
        label = algos.short_name(algo) + (f":{optimizer}" if optimizer else "")
        try:
            fields = {field.name for field in dataclasses.fields(algos.load(algo).Config)}
        except ShoalError as error:
            problems += [problem for problem in str(error).splitlines() if problem not in problems]
            continue
        if optimizer and "optimizer" not in fields:
            problems.append(f"{given}: {algo} has no optimizer to choose. Compare {algo} itself")
        elif label in [side.label for side in sides]:
            problems.append(f"{label} is given twice")
        else:
            sides.append(_Side(label, algo, optimizer))
    if not wanted.algos:
        problems.append("there is nothing to compare: name algorithms with --algos")
    return sides


def _task(wanted: Comparison, sides: Sequence[_Side], problems: list[str]) -> _Task:
    """Find the presets and the task that they agree on."""
    given: dict[str, Any] = {"env_kwargs": wanted.env_kwargs, "max_episode_steps": wanted.max_episode_steps}
    given = {key: value for key, value in given.items() if value is not None}

    def task_of(preset: dict[str, Any]) -> dict[str, Any]:
        return {key: preset[key] for key in TASK if key in preset} | given

    if not wanted.preset:
        return _Task({"env": wanted.env} | given, {})
    algorithms = [side.algo for side in sides]
    found = {algo: preset for algo in algorithms if (preset := _preset(algo, wanted.env, problems))}
    if not found:
        problems += [problem for problem in env_problems(wanted.env) if problem not in problems]
    tasks = {algo: task_of(preset) for algo, preset in found.items()}
    task = next(iter(tasks.values()), {"env": wanted.env} | given)
    if any(other != task for other in tasks.values()):
        problems.append(f"{wanted.env} is not one task: {', '.join(f'{a}: {t}' for a, t in tasks.items())}")
    for algo in algorithms:  # the name of one algorithm's preset may be known to another by the environment's id
        preset = _preset(algo, task["env"], problems) if algo not in found else None
        if preset and task_of(preset) == task:
            found[algo] = preset
    return _Task(task, found)


def _preset(algo: str, name: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        return presets.find_preset(algo, name)
    except UsageError as error:
        problems += [problem for problem in error.problems if problem not in problems]
        return None


def _configs(
    wanted: Comparison, sides: Sequence[_Side], task: _Task, problems: list[str]
) -> dict[str, AlgorithmConfig]:
    """Build the algorithm's settings of each side, by label: defaults, then the preset's, then those of --set."""
    known = dict.fromkeys(name for side in sides for name in (side.label, side.algo))
    given = split_overrides(wanted.set, known, problems)
    configs = {}
    for side in sides:
        kind = algos.load(side.algo).Config
        found: list[str] = []
        texts = given.get(side.algo, {}) | given.get(side.label, {})
        values = presets.own(kind, task.presets.get(side.algo, {})) | override_values(side.algo, texts, found)
        if side.optimizer:
            values["optimizer"] = side.optimizer
        config = kind(**values)
        found += config.problems()
        try:
            config = located(config, Path(wanted.runs))
        except UsageError as error:
            found += error.problems
        problems += [f"{side.label}: {problem}" for problem in found]
        configs[side.label] = config
    return configs
