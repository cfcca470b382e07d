"""What was asked for, as runs: ordinary ones, in a folder of their own, with names that another try finds again."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import tyro

from shoal import algos, engines
from shoal.base import validation
from shoal.envs.make import EnvSpec, env_problems, registered
from shoal.errors import ShoalError, UsageError
from shoal.runs import presets
from shoal.runs.folder import RunDir, name_problems
from shoal.runs.settings import Settings
from shoal.runs.spec import located
from shoal.sampling.tasks import KEEP_RUNS

_TASK = ("env", "env_kwargs", "max_episode_steps", "vector")
"""Settings that must be equal for all, or it would not be one task."""
_RESULT = (*_TASK, "steps", "iterations", "seed", "step_limit", "recreate_after")
"""Settings that a run's result depends on."""
_SETTING = re.compile(r"(?P<of>.+?)\.(?P<name>[\w-]+)=(?P<value>.*)")


@dataclass(frozen=True)
class Comparison:
    """Compare algorithms on one task, each with several seeds: a table, and a picture of the learning curves.

    All runs share the workers: while one learns, they serve another. They are ordinary runs in runs/NAME; the same
    command again goes on where they are.

    Example: shoal compare CartPole-v1 --algos ppo trpo dqn --seeds 5 --set ppo.lr=0.001 dqn.hidden=32,32
    """

    env: tyro.conf.Positional[str]
    """Environment, or the name of a preset."""
    algos: tuple[str, ...]
    """What to compare; ALGORITHM:NAME sets an algorithm's optimizer, as in nevergrad:CMA."""
    seeds: int = 5
    """Each is run with so many seeds, from 0."""
    steps: int | None = None
    """Environment steps of each run; the most that one of the presets has unless told."""
    set: tuple[str, ...] = ()
    """Settings of an algorithm, as ppo.lr=0.001 or dqn.hidden=32,32."""
    preset: bool = True
    """Use the algorithms' presets for the environment."""
    env_kwargs: str | None = None
    """Keyword arguments for the environment, as JSON."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps; the environment's own limit unless told."""
    episodes: int = 100
    """Greedy episodes that each final policy plays: their mean return is its score."""
    threshold: float | None = None
    """Say after how many steps this return was reached; where the environment counts as solved unless told."""
    engine: str = "processes"
    """Who runs the environments. Does not change the results."""
    workers: int | None = None
    """How many workers; one per core unless told. Does not change the results."""
    at_once: int | None = None
    """How many runs learn at the same time, each in a process of its own; one more than workers unless told."""
    runs: str = "runs"
    """Folder of all runs."""
    name: str | None = None
    """Name of the comparison's own folder in it; compare- and the environment unless told."""

    @property
    def folder(self) -> Path:
        """Where its runs, its table and its picture are."""
        return Path(self.runs) / (self.name or f"compare-{re.sub(r'[^A-Za-z0-9._-]+', '-', self.env)}")

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
        found = engines.engine_problems(self.engine, self.workers) + (
            [] if self.name is None else name_problems(self.name)
        )
        found += validation.field_problems(
            self,
            at_least_one=("seeds", "steps", "max_episode_steps", "episodes", "at_once"),
            finite=() if self.threshold is None else ("threshold",),
        )
        if self.at_once is not None and self.at_once > KEEP_RUNS:
            found.append(f"at_once must be at most {KEEP_RUNS}, not {self.at_once}: workers hold no more runs")
        if self.engine == "serial" and self.at_once not in (None, 1):
            found.append(f"the serial engine has one worker; it cannot serve {self.at_once} runs at once")
        return found

    def lines(self, workers: int, runs: int) -> int:
        """How many runs learn at once."""
        if self.engine == "serial":
            return 1
        return min(self.at_once or workers + 1, runs, KEEP_RUNS)


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    label: str
    algo: str
    settings: Settings
    config: Any
    preset: bool
    """Whether its settings began as a preset."""

    @property
    def run(self) -> RunDir:
        """Its folder, which may not be there yet."""
        return RunDir(Path(self.settings.runs) / str(self.settings.name))

    def __str__(self) -> str:
        return f"{self.label} seed {self.settings.seed}"

    @property
    def finished(self) -> bool:
        """Whether it has reached its goal already, and saved that."""
        if not self.run.config_file.is_file():
            return False
        lines, saved = self.run.metrics(), self.run.saved()
        last = next((line for line in lines if saved and line["iteration"] == saved[0]), None)
        return last is not None and self.settings.goal.reached(last)


@dataclass(frozen=True)
class _Entrant:
    """One side of the comparison."""

    label: str
    algo: str
    preset: dict[str, Any]
    config: Any


def plan_runs(wanted: Comparison) -> list[ComparedRun]:
    """The runs, in the order in which they begin: the first seed of all, then the second. All mistakes at once."""
    problems = wanted.problems()
    names = _names(wanted, problems)
    given = _given(wanted, names, problems)
    found, task = _presets(wanted, [algo for _, algo, _ in names], problems)
    entrants = []
    for label, algo, optimizer in names:
        preset = found.get(algo, {})
        config = _config(label, algo, optimizer, preset, given.get(algo, {}) | given.get(label, {}), problems)
        try:
            config = located(config, Path(wanted.runs))
        except UsageError as error:
            problems += [f"{label}: {problem}" for problem in error.problems]
        entrants.append(_Entrant(label, algo, preset, config))
    most = max(
        (entrant.preset["steps"] for entrant in entrants if "steps" in entrant.preset), default=Settings("").steps
    )
    jobs = []
    for seed in range(max(wanted.seeds, 1)):
        for entrant in entrants:
            own = {key: entrant.preset[key] for key in ("step_limit", "recreate_after") if key in entrant.preset}
            settings = Settings(
                **task, **own, steps=wanted.steps or most, seed=seed, engine=wanted.engine, workers=wanted.workers,
                runs=str(wanted.folder), name=f"{entrant.label.replace(':', '-')}-seed{seed}",
            )  # fmt: skip
            jobs.append(ComparedRun(entrant.label, entrant.algo, settings, entrant.config, bool(entrant.preset)))
    for job in jobs:
        problems += [problem for problem in job.settings.problems() if problem not in problems]
    if not problems:
        problems += _other_settings(jobs)
    if problems:
        raise UsageError(problems)
    return jobs


def tuning_warning(jobs: Sequence[ComparedRun]) -> str:
    """A warning where some have a preset for the task and others do not."""
    without = dict.fromkeys(job.label for job in jobs if not job.preset)
    if not without or len(without) == len({job.label for job in jobs}):
        return ""
    return (
        f"Not equally tuned: there is no preset for this task for {', '.join(without)}, only for the others. "
        f"To give settings, use --set, as in --set {next(iter(without))}.hidden=32,32"
    )


def threshold(wanted: Comparison, env: EnvSpec) -> float | None:
    """The return that counts as solved, if anybody says one."""
    if wanted.threshold is not None:
        return wanted.threshold
    try:
        return registered(env).reward_threshold
    except gymnasium.error.Error:
        return None


def _names(wanted: Comparison, problems: list[str]) -> list[tuple[str, str, str]]:
    """Label, algorithm and optimizer of each side."""
    names: list[tuple[str, str, str]] = []
    for label in wanted.algos:
        algo, _, optimizer = label.partition(":")
        try:
            fields = {field.name for field in dataclasses.fields(algos.load(algo).Config)}
        except ShoalError as error:
            problems += [problem for problem in str(error).splitlines() if problem not in problems]
            continue
        if optimizer and "optimizer" not in fields:
            problems.append(f"{label}: {algo} has no optimizer to choose. Compare {algo} itself")
        elif label in [known for known, *_ in names]:
            problems.append(f"{label} is given twice")
        else:
            names.append((label, algo, optimizer))
    if not wanted.algos:
        problems.append("there is nothing to compare: name algorithms with --algos")
    return names


def _given(wanted: Comparison, names: Sequence[tuple[str, str, str]], problems: list[str]) -> dict[str, dict[str, str]]:
    """Settings from --set, by what they are for."""
    known = {word for label, algo, _ in names for word in (label, algo)}
    given: dict[str, dict[str, str]] = {}
    for text in wanted.set:
        match = _SETTING.fullmatch(text)
        if match is None:
            problems.append(f"{text!r} is not a setting such as ppo.lr=0.001")
        elif match["of"] not in known:
            problems.append(f"{text!r} is for {match['of']}, which is not compared, only {', '.join(wanted.algos)}")
        else:
            given.setdefault(match["of"], {})[match["name"].replace("-", "_")] = match["value"]
    return given


def _presets(
    wanted: Comparison, names: Sequence[str], problems: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Presets by algorithm, and the settings that make the task."""
    own: dict[str, Any] = {"env_kwargs": wanted.env_kwargs, "max_episode_steps": wanted.max_episode_steps}
    own = {key: value for key, value in own.items() if value is not None}
    found = {algo: preset for algo in names if wanted.preset and (preset := presets.find_preset(algo, wanted.env))}
    tasks = {algo: {key: preset[key] for key in _TASK if key in preset} | own for algo, preset in found.items()}
    task: dict[str, Any] = next(iter(tasks.values()), {"env": wanted.env} | own)
    if any(other != task for other in tasks.values()):
        problems.append(f"{wanted.env} is not one task: {', '.join(f'{a}: {t}' for a, t in tasks.items())}")
    for algo in names:  # one algorithm's own name for a task may be known to another by its environment alone
        preset = presets.find_preset(algo, task["env"]) if wanted.preset and algo not in found else None
        if preset and {key: preset[key] for key in _TASK if key in preset} | own == task:
            found[algo] = preset
    if not tasks and wanted.preset:
        problems += [problem for problem in env_problems(wanted.env) if problem not in problems]
    return found, task


def _config(
    label: str, algo: str, optimizer: str, preset: dict[str, Any], given: dict[str, str], problems: list[str]
) -> Any:
    """An algorithm's settings: its own, the preset's, then what was given."""
    kind = algos.load(algo).Config
    hints = typing.get_type_hints(kind)
    values = presets.own(kind, preset)
    found = []
    for flag, text in given.items():
        name = "start" if flag == "from" else flag  # what the command line calls it
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"To see its settings, type: shoal train {algo} --help"
            found.append(f"{algo} has no setting {name!r}. {hint}")
            continue
        try:
            values[name] = _value(text, hints[name])
        except (msgspec.ValidationError, ValueError) as error:
            found.append(f"{name} cannot be {text!r}: {error}")
    if optimizer:
        values["optimizer"] = optimizer
    config = kind(**values)
    problems += [f"{label}: {problem}" for problem in [*found, *config.problems()]]
    return config


def _value(text: str, kind: Any) -> Any:
    """What a word means as a setting of some type; commas are between the numbers of a tuple."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if text.lower() == "none" and type(None) in options:
        return None
    if any(typing.get_origin(option) is tuple for option in options):
        return msgspec.convert([part for part in text.split(",") if part], kind, strict=False)
    return msgspec.convert(text, kind, strict=False)


def _other_settings(jobs: Sequence[ComparedRun]) -> list[str]:
    """Which runs are there already, and were made with settings that give another result."""
    found: dict[str, list[str]] = {}
    for job in jobs:
        if job.run.config_file.is_file() and (differs := _difference(job)):
            found.setdefault(differs, []).append(job.run.name)
    return [
        f"{', '.join(names)} in {jobs[0].settings.runs}: made with other settings ({differs}). "
        f"Give the same ones to go on, or another --name to begin anew"
        for differs, names in found.items()
    ]


def _difference(job: ComparedRun) -> str:
    record = job.run.record()
    then = {"algorithm": record["algo"]} | {key: record["settings"].get(key) for key in _RESULT} | record["config"]
    now = {"algorithm": job.algo} | {key: getattr(job.settings, key) for key in _RESULT}
    now |= json.loads(json.dumps(asdict(job.config)))
    differs = [key for key in sorted(then | now) if then.get(key) != now.get(key)]
    return "; ".join(f"{key} {then.get(key)} then, {now.get(key)} now" for key in differs)
