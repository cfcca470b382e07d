"""Train, iterate and open runs from Python."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from shoal import engines
from shoal.commands import mpirun
from shoal.commands.evaluate import evaluate_run, evaluate_saved, evaluation_problems
from shoal.engines.base import Engine
from shoal.errors import EngineError, Stopped, UsageError
from shoal.policies.loaded import LoadedPolicy
from shoal.policies.policy import SavedPolicy
from shoal.runs import run as runs
from shoal.runs.evaluator import Evaluator
from shoal.runs.folder import RunDir
from shoal.runs.keywords import EnvSource, make_spec
from shoal.runs.meter import Meter
from shoal.runs.metrics import MetricsRow
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec
from shoal.runs.track import Tracker
from shoal.runs.trust import trust_policy
from shoal.runs.usage import Usage
from shoal.sampling.evaluation import Evaluation


class Run:
    """A run and its folder, trained by this process or any other."""

    def __init__(self, folder: RunDir, allow: Sequence[str] = ()) -> None:
        self._folder, self._allow = folder, allow

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self._folder.path

    @property
    def name(self) -> str:
        """Name of the run: the last part of its path."""
        return self._folder.name

    @property
    def metrics(self) -> list[MetricsRow]:
        """One row per iteration, under Stable-Baselines3's names: `run.metrics[-1]["rollout/ep_rew_mean"]`."""
        return self._folder.metrics()

    @property
    def digest(self) -> str:
        """Digest of everything learned: equal for equal seeds and settings, on any engine and number of workers."""
        rows = self.metrics
        return rows[-1]["digest"] if rows else ""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the run was started with: its own and those of the algorithm, by name."""
        record = self._folder.record()
        return {"algo": record["algo"]} | record["settings"] | record["config"]

    @property
    def policy(self) -> LoadedPolicy:
        """The newest saved policy."""
        return LoadedPolicy.load(self._folder.policy_file)

    @property
    def best(self) -> LoadedPolicy:
        """The policy with the highest mean return in an evaluation during training, with `eval_every`."""
        if not self._folder.best_file.exists():
            raise UsageError(f"{self.path} has no best policy: it was not evaluated while it trained (eval_every)")
        return LoadedPolicy.load(self._folder.best_file)

    def evaluate(
        self,
        episodes: int = 100,
        *,
        seed: int = 0,
        sample: bool = False,
        engine: str | Engine = "processes",
        workers: int | None = None,
    ) -> Evaluation:
        """Play whole episodes with the newest policy: greedily, or with actions sampled as in training."""
        return evaluate_run(
            str(self.path), self.path.parent, count=episodes, seed=seed, sample=sample, engine=engine, workers=workers,
            allow=self._allow,
        )  # fmt: skip

    def resume(
        self,
        *,
        steps: int | None = None,
        iterations: int | None = None,
        engine: str | Engine | None = None,
        workers: int | None = None,
        progress: bool = False,
        trackers: Sequence[Tracker] = (),
    ) -> Run:
        """Continue from the newest checkpoint, to a new goal if one is given, on any engine and number of workers."""
        with _closing(trackers), python_signals():
            name, made = split_engine(engine)
            changes = runs.resume_changes(steps, iterations, name, workers)
            settings = Settings(**self._folder.record()["settings"] | changes)
            if made is None and mpirun.is_needed(settings.engine):
                _refuse_trackers(trackers)
                goal = [f"--{key}={changes[key]}" for key in ("steps", "iterations") if changes.get(key)]
                goal += [f"--allow={module}" for module in self._allow]
                code = mpirun.resume_under_mpirun(self._folder, settings.workers, settings.restarts, goal)
                _refuse_failure(code, self._folder)
                return self
            where = (str(self.path), self.path.parent)
            result = runs.resume(
                *where, changes, engine=made, trackers=trackers, console=_console(progress), allow=self._allow
            )
            if result.seconds == 0 and (steps or iterations):
                taken = result.metrics["time/total_timesteps"]
                raise UsageError(
                    f"{self.path} has taken {taken:,} steps in {result.metrics['iteration']} iterations already, and "
                    f"a new goal counts from its start. For as many again: resume(steps={2 * taken})"
                )
        return self

    def __repr__(self) -> str:
        rows = self.metrics
        steps = f"{rows[-1]['time/total_timesteps']:,} steps" if rows else "nothing learned yet"
        return f"Run({str(self.path)!r}, {steps})"


@dataclass(frozen=True)
class Iteration:
    """One iteration of `shoal.iterate`."""

    metrics: MetricsRow
    """Numbers and digest of this iteration."""
    saved: SavedPolicy
    """The policy after this iteration, as a policy file holds it."""

    @property
    def policy(self) -> LoadedPolicy:
        """The policy after this iteration, ready to act."""
        return LoadedPolicy(self.saved)


def train(
    algo: str | ModuleType,
    env: EnvSource | None = None,
    *,
    engine: str | Engine | None = None,
    preset: bool | str = True,
    progress: bool = False,
    trackers: Sequence[Tracker] = (),
    **settings: Any,
) -> Run:
    """Train a new run to its goal, and return it.

    `algo` is a built-in algorithm, or the module or file of your own; `env` a Gymnasium id, the name of a preset, or a
    class or function that makes the environment. `preset` is a preset to start from, by name or as "my.toml:fast",
    whose environment is used where `env` is left out; false turns off the preset that is named like `env`. Settings are
    those of the command line, with underscores: `steps=100_000, seed=1, lr=1e-3, hidden=(64, 64), workers=4`; `shoal
    train ALGO --help` lists them. Nothing is printed unless `progress` is true. Each tracker's `write(metrics)` is
    called after every iteration, and its `close()` at the end, even after an error.
    """
    with _closing(trackers), python_signals():
        name, made = split_engine(engine)
        spec = make_spec(algo, env, settings | ({} if name is None else {"engine": name}), preset)
        if made is None and mpirun.is_needed(spec.settings.engine):
            _refuse_trackers(trackers)
            return _train_under_mpirun(spec)
        return Run(runs.train(spec, engine=made, trackers=trackers, console=_console(progress)).run)


def iterate(
    algo: str | ModuleType,
    env: EnvSource | None = None,
    *,
    engine: str | Engine | None = None,
    preset: bool | str = True,
    **settings: Any,
) -> Iterator[Iteration]:
    """Train without a run folder, one iteration at a time, until the goal is reached or the loop is left.

    Takes the settings of `train`, and gives the same digests.
    """
    if refused := [key for key in ("name", "trackers", "progress") if key in settings]:
        raise UsageError(
            f"iterate does not take {', '.join(refused)}: it writes and prints nothing, and your loop gets the "
            f"metrics of each iteration. Use shoal.train for a run with a folder"
        )
    name, made = split_engine(engine)
    spec = make_spec(algo, env, settings | ({} if name is None else {"engine": name}), preset)
    problems = spec.problems()
    if spec.config.start is not None:
        spec.start_content()  # refuses a policy that cannot be read
    if made is None and mpirun.is_needed(spec.settings.engine):
        problems.append("iterate on the mpi engine needs a script that runs under mpirun: mpirun -n 4 python script.py")
    if problems:
        raise UsageError(problems)
    return _iterations(spec.completed(), made)


def _iterations(spec: RunSpec, engine: Engine | None) -> Iterator[Iteration]:
    with contextlib.ExitStack() as stack:
        if engine is None:
            engine = stack.enter_context(runs.make_engine(spec.settings))
        config = spec.located_config()
        steps = stack.enter_context(runs.learning(spec, config, engine))
        meter = Meter(engine, Usage(engine.workers, config.lanes, engine.shared_cores))
        evaluator = Evaluator(engine, spec.settings)
        for number, step in enumerate(steps, start=1):
            with meter.excluded():
                evaluation = evaluator.metrics(step) if evaluator.due(step) else {}
            row = meter.row(number, step, evaluation)
            yield Iteration(row, step.policy)
            if spec.settings.goal.reached(row):
                return


def evaluate(
    policy: LoadedPolicy,
    episodes: int = 100,
    *,
    seed: int = 0,
    sample: bool = False,
    engine: str | Engine = "processes",
    workers: int | None = None,
    allow: Sequence[str] = (),
) -> Evaluation:
    """Play whole episodes with any policy, such as `run.best`, or the `policy` of an iteration.

    If the policy comes from a file that is not in the folder of a run of yours, `allow` lists the modules of its
    environment that may be imported.
    """
    if problems := evaluation_problems(episodes, seed, engine, workers):
        raise UsageError(problems)
    if policy.source is not None:
        trust_policy(str(policy.source), policy.source.parent, policy.env, allow)
    return evaluate_saved(policy.saved, episodes, seed, sample, engine, workers)


def open_run(name: str | Path, *, runs: str | Path = "runs", allow: Sequence[str] = ()) -> Run:
    """Open an existing run by name or folder: to read its metrics, evaluate or resume it.

    For a run of another user, `allow` lists the modules of its own that may be imported.
    """
    return Run(RunDir.find(Path(runs), str(name)), allow)


def split_engine(engine: str | Engine | None) -> tuple[str | None, Engine | None]:
    """Split what the caller passed into an engine's name and an engine that is made already."""
    if engine is None or isinstance(engine, str):
        return engine, None
    if not isinstance(engine, Engine):
        raise UsageError(f"engine must be a name such as 'processes', or a shoal.engine(...), not {engine!r}")
    place = f"{type(engine).__module__}:{type(engine).__name__}"
    names = [name for name, home in engines.ENGINES.items() if home == place]
    return (names[0] if names else None), engine


def _console(progress: bool) -> Console:
    return Console() if progress else Console(quiet=True)


@contextlib.contextmanager
def _closing(trackers: Sequence[Tracker]) -> Iterator[None]:
    wrong = [
        tracker
        for tracker in trackers
        if isinstance(tracker, type) or not all(callable(getattr(tracker, name, None)) for name in ("write", "close"))
    ]
    if wrong:
        raise UsageError(f"a tracker is an object with the methods write(metrics) and close(), unlike {wrong[0]!r}")
    with contextlib.ExitStack() as stack:
        for tracker in trackers:
            stack.callback(runs.close_tracker, tracker)
        yield


@contextlib.contextmanager
def python_signals() -> Iterator[None]:
    """Let a stop signal end a run as Python programs expect: Ctrl-C as KeyboardInterrupt, others as an exit."""
    try:
        yield
    except Stopped as stop:
        end = KeyboardInterrupt() if stop.number == signal.SIGINT else SystemExit(128 + stop.number)
        for note in getattr(stop, "__notes__", []):
            end.add_note(note)
        raise end from None


def _refuse_trackers(trackers: Sequence[Tracker]) -> None:
    if trackers:
        raise UsageError("trackers need the run's metrics in this process: start your script with mpirun instead")


def _train_under_mpirun(spec: RunSpec) -> Run:
    folder, _ = runs.create(spec)
    _refuse_failure(mpirun.train_created(folder, spec), folder)
    return Run(folder)


def _refuse_failure(code: int, folder: RunDir) -> None:
    if code:
        raise EngineError(f"the run {folder.path} ended with exit code {code} under mpirun; see its output above")
