"""The `shoal` command: subcommands only. What they do lives in the modules that they call."""

from __future__ import annotations

import os

# One BLAS thread also in this process, before anything loads NumPy: the serial engine runs lanes here.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import dataclasses
import difflib
import io
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import tyro
from rich.console import Console

from shoal import __version__, presets
from shoal.errors import CheckpointFault, ShoalError, Stopped, UsageError, problem_list

if TYPE_CHECKING:
    from shoal.run import Result
    from shoal.rundir import RunDir

T = TypeVar("T")

USAGE = """\
shoal: reinforcement learning on any number of workers, with the same result

  shoal train trpo CartPole-v1                     learn, on all cores
  shoal train trpo --help                          every setting of an algorithm
  shoal resume trpo-CartPole-v1-0001               go on with a run
  shoal evaluate trpo-CartPole-v1-0001             play episodes with its policy
  shoal runs                                       list runs
  shoal presets                                    settings that are known to learn
  shoal check-env CartPole-v1                      does an environment keep the rules?
  shoal verify trpo CartPole-v1 --engines serial,processes:1,processes:3
                                                   check that results are equal, bit for bit
  shoal doctor                                     what works on this machine

Each command has --help. Exit codes: 0 done, 1 failed or different, 2 your settings or environment, 130/143 stopped.
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # also into a file or a pipe: long commands are watched there
    # Where the command is typed is where `module:Env-v0` is looked for; last, so that it shadows nothing.
    sys.path.append(str(Path.cwd()))
    try:
        sys.exit(_dispatch(words))
    except Stopped as stop:
        sys.exit(128 + stop.number)
    except ShoalError as error:
        for problem in problem_list(error):
            print(f"error: {problem}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            print(note, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"there is no command {words[0]!r}.{hint} To see them all, type: shoal --help")
    return command(words[1:])


def _parse(
    kind: type[T], words: list[str], command: str, description: str | None = None, default: T | None = None
) -> T:
    return tyro.cli(
        kind,
        args=words,
        prog=f"shoal {command}",
        description=description,
        default=tyro.MISSING_NONPROP if default is None else default,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _console() -> Console:
    """The console, with Shoal's log lines going through it so that they do not tear a live line."""
    console = Console()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _say(console, f"{record.levelname.lower()}: {record.getMessage()}")

    logger = logging.getLogger("shoal")
    logger.handlers = [Handler()]
    logger.propagate = False
    return console


def _say(console: Console, text: str) -> None:
    """Print as it is: no markup, no colours of rich's choosing, no wrapping that would break a command to copy."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


# train, resume, verify ------------------------------------------------------------------------------------------


def _algorithm(command: str, words: list[str], extra: type[Any] | None = None) -> tuple[str, Any]:
    """The algorithm's name, and its settings parsed into an object with `settings`, `config` and maybe `extra`."""
    from shoal import algos
    from shoal.run import Settings

    if not words or words[0] in ("-h", "--help"):
        print(f"usage: shoal {command} ALGORITHM ENVIRONMENT [--setting value ...]\n")
        print(f"Algorithms: {', '.join(algos.ALGOS)}")
        print(f"Example:    shoal {command} trpo CartPole-v1 --seed 1")
        print(f"Settings:   shoal {command} trpo --help")
        sys.exit(0 if words else 2)
    name = words[0]
    module = algos.load(name)
    fields: list[tuple[str, Any]] = [("settings", Settings), ("config", module.Config)]
    if extra is not None:
        fields.append(("extra", extra))
    both = dataclasses.make_dataclass("Both", fields, frozen=True)
    description = f"{(module.__doc__ or '').strip()}\n\nExample: shoal {command} {name} CartPole-v1 --seed 1"
    rest = _env_first(words[1:])
    default = None
    if NO_PRESET in rest:
        rest.remove(NO_PRESET)
    elif rest and (preset := presets.find(name, rest[0])):
        print(f"Using the preset {rest[0]} of {name} (to see it: shoal presets {name}; without it: {NO_PRESET})")
        rest[0] = preset["env"]
        default = both(*[_fill(kind, preset) for _, kind in fields])
    return name, _parse(both, rest, f"{command} {name}", description, default)


NO_PRESET = "--no-preset"


def _fill(kind: type[Any], preset: dict[str, Any]) -> Any:
    """A dataclass with those values of a preset that are its fields."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in preset.items() if key in names})


def _env_first(words: list[str]) -> list[str]:
    """`--env NAME` and `--env-id NAME`, as other libraries spell it, mean the positional argument."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--env", "--env-id"):
            after = words[at + 1 :]
            return [value, *words[:at], *after] if equals else [*after[:1], *words[:at], *after[1:]]
    return words


def train(words: list[str]) -> int:
    """Learn."""
    name, parsed = _algorithm("train", words)
    from shoal import run

    console = _console()
    return _watch(console, lambda: run.train(name, parsed.settings, parsed.config, console=console))


@dataclass(frozen=True)
class Resume:
    """Go on with a run, exactly where its newest checkpoint is, on any engine and number of workers."""

    run: tyro.conf.Positional[str]
    """Name of the run, or path of its folder."""
    steps: int | None = None
    """New goal in environment steps, to go on with a run that has finished."""
    iterations: int | None = None
    """New goal in iterations."""
    engine: str | None = None
    """Another engine."""
    workers: int | None = None
    """Another number of workers."""
    runs: str = "runs"
    """Folder of all runs."""


def resume(words: list[str]) -> int:
    """Go on with a run."""
    wanted = _parse(Resume, words, "resume")
    from shoal import run

    changes = {key: getattr(wanted, key) for key in ("steps", "iterations", "engine", "workers")}
    changes = {key: value for key, value in changes.items() if value is not None}
    if wanted.engine is not None:
        changes.setdefault("workers", None)
    if wanted.steps is not None:
        changes.setdefault("iterations", None)
    console = _console()
    return _watch(console, lambda: run.resume(wanted.run, Path(wanted.runs), changes, console=console))


def _watch(console: Console, go: Callable[[], Result]) -> int:
    """Run to the end, or to a signal; then say what there is now and what to type next."""
    from shoal.run import on_runs, program, resume_command

    try:
        result = go()
    except Stopped as stop:
        for note in getattr(stop, "__notes__", ["nothing was learned yet, so nothing was saved"]):
            _say(console, f"{stop}: {note}")
        return 128 + stop.number
    metrics, run = result.metrics, result.run
    if result.seconds == 0:
        again = f"{resume_command(run)} --steps {2 * metrics['time/total_timesteps']}"
        _say(console, f"{run.name} has reached its goal already. To go on, type: {again}")
        return 0
    score = metrics.get("rollout/ep_rew_mean")
    steps, speed, idle = metrics["time/total_timesteps"], metrics["time/fps"], metrics["time/idle_share"]
    _say(
        console,
        f"Done:   {steps:,} steps in {result.seconds:.1f} s ({speed:,.0f} steps/s, workers idle {idle:.0%})\n"
        f"Return: {'no episode has ended yet' if score is None else f'{score:.1f}, mean of the last 100 episodes'}\n"
        f"Limit:  {result.advice}\n"
        f"Digest: {metrics['digest']}, equal for this seed on every engine and number of workers\n"
        f"Saved:  {run.path}\n"
        f"Next:   {program()} evaluate {run.name}{on_runs(run)}\n"
        f"        {resume_command(run)} --steps {2 * steps}",
    )
    if shutil.which("tensorboard"):
        _say(console, f"        tensorboard --logdir {run.path.parent}")
    return 0


@dataclass(frozen=True)
class Verify:
    """How to verify."""

    engines: str = "serial,processes:1,processes:3"
    """What to compare: engines, with numbers of workers."""
    kill_workers: bool = False
    """Also with a worker killed (SIGKILL) in each iteration."""
    kill_head: bool = False
    """Also with the head killed (SIGKILL) half-way and the run resumed on the next engine of the list."""


def verify(words: list[str]) -> int:
    """Check that results are equal."""
    name, parsed = _algorithm("verify", words, Verify)
    from shoal import verify as verification

    console = _console()
    chosen = verification.parse_engines(parsed.extra.engines)
    todo = verification.ways(chosen, parsed.extra.kill_workers, parsed.extra.kill_head)
    settings = parsed.settings
    if settings.iterations is None:
        settings = dataclasses.replace(settings, iterations=5, steps=10**12)

    def report(outcome: verification.Outcome) -> None:
        last = outcome.lines[-1]
        lost = f", {outcome.lost_workers} workers lost" if outcome.lost_workers else ""
        _say(
            console,
            f"{last['digest']}  {len(outcome.lines)} iterations, {last['time/total_timesteps']:,} steps, "
            f"{outcome.seconds:.1f} s{lost}: {outcome.way}",
        )

    _say(
        console,
        f"{name} {settings.env}, seed {settings.seed}, {settings.iterations} iterations in {len(todo)} ways",
    )
    difference = verification.verify(name, settings, parsed.config, todo, report)
    if difference:
        _say(console, f"DIFFERENT: {difference}")
        return 1
    _say(console, f"Equal: all {len(todo)} ways gave the same digest in every iteration")
    return 0


# evaluate, runs, doctor -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluate:
    """Play whole episodes with the newest policy of a run, or with a policy file."""

    run: tyro.conf.Positional[str]
    """Name of the run, path of its folder, or a .safetensors file."""
    episodes: int = 100
    """How many episodes."""
    seed: int = 0
    """Which episodes."""
    sample: bool = False
    """Draw actions as in training, instead of taking the likeliest."""
    engine: str = "processes"
    """Who runs the environments."""
    workers: int | None = None
    """How many workers."""
    runs: str = "runs"
    """Folder of all runs."""
    json: bool = False
    """Print one line of JSON."""


def evaluate(words: list[str]) -> int:
    """Play episodes."""
    wanted = _parse(Evaluate, words, "evaluate")
    from shoal.evaluate import evaluate as play

    console = _console()
    begun = time.monotonic()
    scores = play(
        wanted.run, Path(wanted.runs), count=wanted.episodes, seed=wanted.seed, sample=wanted.sample,
        engine=wanted.engine, workers=wanted.workers,
    )  # fmt: skip
    summary = {
        "episodes": len(scores.returns),
        "mean": float(scores.returns.mean()),
        "std": float(scores.returns.std()),
        "min": float(scores.returns.min()),
        "max": float(scores.returns.max()),
        "mean_length": float(scores.lengths.mean()),
    }
    if wanted.json:
        print(json.dumps(summary))
        return 0
    _say(
        console,
        f"{summary['episodes']} episodes in {time.monotonic() - begun:.1f} s: return {summary['mean']:.1f} ± "
        f"{summary['std']:.1f} (from {summary['min']:.1f} to {summary['max']:.1f}), "
        f"length {summary['mean_length']:.0f}",
    )
    return 0


@dataclass(frozen=True)
class Runs:
    """List the runs in a folder, newest last."""

    runs: str = "runs"
    """Folder of all runs."""


def runs(words: list[str]) -> int:
    """List runs."""
    wanted = _parse(Runs, words, "runs")
    from shoal.rundir import RunDir

    console = _console()
    found = RunDir.all(Path(wanted.runs))
    if not found:
        _say(console, f"There are no runs in {wanted.runs}. To make one, type: shoal train trpo CartPole-v1")
        return 0
    rows = [
        ["run", "algorithm", "environment", "seed", "iteration", "steps", "return", "state"],
        *map(_row, found),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        _say(console, "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(run: RunDir) -> list[str]:
    from shoal.run import Settings

    try:
        record, lines = run.config(), run.metrics()
    except (CheckpointFault, OSError) as error:
        return [run.name, *[""] * 6, f"unreadable: {error}"]
    settings = Settings(**record["settings"])
    last = lines[-1] if lines else {"iteration": 0, "time/total_timesteps": 0}
    finished = settings.goal.reached(last["iteration"], last) >= 1
    score = last.get("rollout/ep_rew_mean")
    return [
        run.name,
        record["algo"],
        settings.env,
        str(settings.seed),
        str(last["iteration"]),
        f"{last['time/total_timesteps']:,}",
        "" if score is None else f"{score:.1f}",
        "running" if run.busy() else "finished" if finished else "stopped",
    ]


@dataclass(frozen=True)
class CheckEnv:
    """Try whether an environment keeps the rules that equal results rest on, how fast it is and whether it leaks."""

    env: tyro.conf.Positional[str]
    """Environment: a Gymnasium id, or module:Env-v0 to import the module first."""
    env_kwargs: str = "{}"
    """Keyword arguments for the environment, as JSON."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps."""
    seconds: float = 3.0
    """How long to measure speed and memory."""


def check_env(words: list[str]) -> int:
    """Check an environment."""
    wanted = _parse(CheckEnv, words, "check-env")
    from shoal.envs.check import check
    from shoal.run import Settings

    settings = Settings(wanted.env, env_kwargs=wanted.env_kwargs, max_episode_steps=wanted.max_episode_steps)
    problems = settings.problems()
    if problems:
        raise UsageError(problems)
    console = _console()
    failed = 0
    for verdict in check(settings.env_spec, wanted.seconds):
        failed += verdict.works is False
        sign = {True: "ok  ", False: "FAIL", None: "    "}[verdict.works]
        _say(console, f"{sign} {verdict.what:30} {verdict.detail}")
    _say(console, f"{failed} of Shoal's promises do not hold for it" if failed else "It keeps every rule")
    return 1 if failed else 0


@dataclass(frozen=True)
class Presets:
    """List the presets: settings that `shoal train` uses for an environment unless told otherwise."""

    algo: tyro.conf.Positional[str | None] = None
    """Show the settings of this algorithm's presets."""


def show_presets(words: list[str]) -> int:
    """List or show presets."""
    wanted = _parse(Presets, words, "presets")
    from shoal import algos

    console = _console()
    if wanted.algo is None:
        for algo in algos.ALGOS:
            _say(console, f"{algo}: {', '.join(presets.presets(algo)) or 'none'}")
        return 0
    algos.load(wanted.algo)
    for name, settings in presets.presets(wanted.algo).items():
        values = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in settings.items())
        _say(console, f"shoal train {wanted.algo} {name}\n  {values}")
    return 0


@dataclass(frozen=True)
class Doctor:
    """Try every engine and optional package on this machine, and say what to install for those that do not work."""


def doctor(words: list[str]) -> int:
    """Say what works here."""
    _parse(Doctor, words, "doctor")
    from shoal.doctor import examine

    console = _console()
    checks = examine()
    width = max(len(check.what) for check in checks)
    for check in checks:
        _say(console, f"{'ok' if check.works else '--'}  {check.what:{width}}  {check.detail}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "evaluate": evaluate,
    "runs": runs,
    "check-env": check_env,
    "presets": show_presets,
    "verify": verify,
    "doctor": doctor,
}

if __name__ == "__main__":
    main()
