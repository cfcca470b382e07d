"""Scores of the presets over seeds, next to published ones.

Each preset trains with each seed, and the final policy plays greedy episodes; the training return is kept too. With a
file of results a campaign can be stopped and continued, and its table written again without any training.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, NotRequired, TypedDict

from bench import machine
from bench.options import BenchOptions, Say, folder_problems
from bench.report import Report
from bench.results import Result, Results
from bench.watch import shoal_environment
from shoal import algos
from shoal.base import validation
from shoal.base.host import shoal_command
from shoal.errors import DiskFault
from shoal.reports import curves
from shoal.reports.tables import interquartile_mean, markdown_table
from shoal.runs import presets
from shoal.runs.folder import RunDir

POINTS = 200
"""Approximate number of points that a curve keeps."""


@dataclass(frozen=True)
class LearnOptions(BenchOptions):
    """Scores of the presets over seeds, next to published ones."""

    algo: tuple[str, ...] = ()
    """Algorithms (default: all)."""
    env: tuple[str, ...] = ()
    """Names of presets (default: all)."""
    seeds: int = 5
    """Number of seeds; every preset trains once per seed."""
    episodes: int = 100
    """Greedy episodes to evaluate the final policy."""
    steps: int | None = None
    """Environment steps to train for (default: the preset's)."""
    results: str | None = None
    """File to keep results in; those already in it are not trained again."""
    train: bool = True
    """Train what is missing from that file; with --no-train the table has only the results in it."""
    svg: str | None = None
    """File to draw the learning curves of one preset to."""

    QUICK: ClassVar[dict[str, Any]] = {"algo": ("trpo",), "env": ("CartPole-v1",), "seeds": 2}

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        known = sorted({name for algo in algos.ALGORITHMS for name in presets.presets(algo)})
        found = [
            f"there is no algorithm {algo!r}, only {', '.join(algos.ALGORITHMS)}"
            for algo in self.algo
            if algo not in algos.ALGORITHMS
        ]
        found += [f"there is no preset {env!r}, only {', '.join(known)}" for env in self.env if env not in known]
        found += validation.field_problems(self, at_least_one=("seeds", "episodes", "steps")) + folder_problems(
            self.out, self.svg
        )
        chosen = self.chosen()
        if not found and not chosen:
            found.append(f"{', '.join(self.algo)} has no preset {' or '.join(self.env)}")
        if not self.train and self.results is None:
            found.append("--no-train needs a file of earlier results: give one with --results FILE")
        if self.svg is not None and len(chosen) != 1:
            found.append(f"svg draws one preset, not {len(chosen)}; choose one with --algo and --env")
        return found

    def environments(self) -> list[str]:
        return [presets.presets(algo)[name].get("env", name) for algo, name in self.chosen()]

    def chosen(self) -> list[tuple[str, str]]:
        """List algorithm and name of each preset to run."""
        return [
            (algo, name)
            for algo in algos.ALGORITHMS
            if not self.algo or algo in self.algo
            for name in presets.presets(algo)
            if not self.env or name in self.env
        ]


OPTIONS = LearnOptions


def run(options: LearnOptions, say: Say) -> Report:
    """Train what is missing, and report."""
    results = Results(None if options.results is None else Path(options.results))
    rows, failures, facts = [], [], []
    for algo, env in options.chosen():
        settings = settings_of(algo, env) | ({} if options.steps is None else {"steps": options.steps})
        found = []
        for seed in range(options.seeds):
            result = results.find(algo, env, seed, settings, options.episodes)
            if result is None:
                if not options.train:
                    continue
                try:
                    result = train(algo, env, seed, settings, options.episodes)
                except subprocess.CalledProcessError as error:
                    failures.append(f"{algo} {env} seed {seed}: {_last(error.stderr)}")
                    say(f"failed: {failures[-1]}")
                    continue
                results.add(result)
            found.append(result)
            say(
                f"{algo} {env} seed {seed}: {result.score:.1f} ± {result.deviation:.1f} over {result.episodes} greedy "
                f"episodes after {result.steps:,} steps in {result.seconds:.1f} s; digest {result.digest}"
            )
        facts += [result.facts for result in found]
        if found:
            rows.append(_row(algo, env, found))
        if options.svg is not None and found:
            _draw(Path(options.svg), f"{algo.upper()} on {env}", found)
    header = [
        "", "environment", "steps", "seeds", "greedy: interquartile mean", "median", "range",
        "training: interquartile mean", "seconds", "published",
    ]  # fmt: skip
    notes = (
        f"Scores are means of {options.episodes} episodes with the most likely actions, after training; training is "
        f"the mean return of its last 100 episodes; seconds are the median. Published: source, mean return (± standard "
        f"deviation), steps, and the environment's version if it differs. {' And: '.join(dict.fromkeys(facts))}"
    )
    if failures:
        notes += f" Failed: {'; '.join(failures)}."
    return Report("learn", markdown_table(header, rows), notes)


def settings_of(algo: str, name: str) -> dict[str, object]:
    """List all settings of an algorithm with a preset, and the preset's other entries, as values of JSON."""
    preset = presets.find_preset(algo, name) or {}
    kind = algos.load(algo).Config
    settings: dict[str, object] = json.loads(json.dumps(preset | asdict(kind(**presets.own(kind, preset)))))
    return settings


def train(algo: str, env: str, seed: int, settings: dict[str, object], episodes: int) -> Result:
    """Train a preset and evaluate it, both from the command line."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        place = [f"--runs={folder}"]
        goal = [f"--steps={settings['steps']}"] if "steps" in settings else []
        _shoal("train", algo, env, f"--seed={seed}", *goal, "--name=bench", *place)
        played = json.loads(_shoal("evaluate", "bench", f"--episodes={episodes}", "--json", *place))
        lines = RunDir(Path(folder) / "bench").metrics()
    last = lines[-1]
    curve = [
        [line["time/total_timesteps"], line["rollout/ep_rew_mean"]] for line in lines if "rollout/ep_rew_mean" in line
    ]
    return Result(
        algo, env, seed, settings, machine.facts({}), played["mean"], played["std"], played["episodes"],
        last.get("rollout/ep_rew_mean"), last["time/total_timesteps"], last["time/time_elapsed"], last["digest"],
        [*curve[: -1 : max(1, len(curve) // POINTS)], *curve[-1:]],
    )  # fmt: skip


def _shoal(*words: str) -> str:
    command = shoal_command(*words)
    return subprocess.run(command, check=True, capture_output=True, text=True, env=shoal_environment()).stdout


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed no error"


def _row(algo: str, env: str, found: Sequence[Result]) -> list[str]:
    scores = [result.score for result in found]
    trained = [result.training for result in found if result.training is not None]
    return [
        algo,
        env,
        f"{found[0].steps:,}",
        str(len(found)),
        f"{interquartile_mean(scores):.0f}",
        f"{statistics.median(scores):.0f}",
        f"{min(scores):.0f} to {max(scores):.0f}",
        f"{interquartile_mean(trained):.0f}" if trained else "",
        f"{statistics.median(result.seconds for result in found):.0f}",
        "; ".join(map(_reference, references().get(algo, {}).get(env, []))),
    ]


class Reference(TypedDict):
    """A published score."""

    source: str
    score: float
    deviation: NotRequired[float]
    steps: int
    of: NotRequired[str]
    """Version of the environment, if it differs."""


def references() -> dict[str, dict[str, list[Reference]]]:
    """Load published scores, by algorithm and environment."""
    return tomllib.loads((resources.files("bench") / "references.toml").read_text())


def _reference(entry: Reference) -> str:
    deviation = f"±{entry['deviation']}" if "deviation" in entry else ""
    steps = entry["steps"]
    after = f"{steps / 1e6:g}M" if steps >= 1_000_000 else f"{steps // 1000}k"
    version = f" ({entry['of']})" if "of" in entry else ""
    return f"{entry['source']} {entry['score']}{deviation} @{after}{version}"


def _draw(path: Path, title: str, found: Sequence[Result]) -> None:
    lines = [curves.Curve(f"seed {result.seed}", result.curve) for result in found]
    picture = curves.draw_curves(title, [curves.Panel("environment steps", lines)])
    try:
        path.write_text(picture)
    except OSError as error:
        raise DiskFault(f"{path} could not be written: {error.strerror}") from None
