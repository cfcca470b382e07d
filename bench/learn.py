"""Scores of the presets over seeds, beside published ones.

Each preset trains with each seed; the final policy plays greedy episodes; the training return is kept too. With a file
of results a campaign can be stopped and gone on with, and its table written again without running anything.
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
from typing import Any, ClassVar

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
"""A curve keeps about so many."""


@dataclass(frozen=True)
class LearnOptions(BenchOptions):
    """Scores of the presets over seeds, beside published ones."""

    algo: tuple[str, ...] = ()
    """Only these algorithms."""
    env: tuple[str, ...] = ()
    """Only the presets of these names."""
    seeds: int = 5
    """Each preset trains once with each of so many seeds."""
    episodes: int = 100
    """Greedy episodes that the final policy plays."""
    steps: int | None = None
    """Train for so many steps instead of the preset's own number."""
    results: str | None = None
    """File that keeps each result as it comes; what is in it is not run again."""
    train: bool = True
    """Train what is not in that file; else the table has what is."""
    svg: str | None = None
    """Draw the learning curves of one preset into this file."""

    QUICK: ClassVar[dict[str, Any]] = {"algo": ("trpo",), "env": ("CartPole-v1",), "seeds": 2}

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
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
            found.append(f"no preset of {', '.join(self.algo)} is called {' or '.join(self.env)}")
        if not self.train and self.results is None:
            found.append("without training the table has what is in a file of results: give one with --results FILE")
        if self.svg is not None and len(chosen) != 1:
            found.append(f"svg draws one preset, and {len(chosen)} are chosen; choose with --algo and --env")
        return found

    def environments(self) -> list[str]:
        """Those of the presets."""
        return [presets.presets(algo)[name].get("env", name) for algo, name in self.chosen()]

    def chosen(self) -> list[tuple[str, str]]:
        """Algorithm and name of each preset to run."""
        return [
            (algo, name)
            for algo in algos.ALGORITHMS
            if not self.algo or algo in self.algo
            for name in presets.presets(algo)
            if not self.env or name in self.env
        ]


OPTIONS = LearnOptions


def run(options: LearnOptions, say: Say) -> Report:
    """Train what is not there yet, and report."""
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
        f"Scores are means of {options.episodes} episodes with the likeliest actions, after training; training is the "
        f"mean return of its last 100 episodes; seconds are the median. Published: source, mean return (± deviation), "
        f"steps, and the environment's version where it is another. {' And: '.join(dict.fromkeys(facts))}"
    )
    if failures:
        notes += f" Failed: {'; '.join(failures)}."
    return Report("learn", markdown_table(header, rows), notes)


def settings_of(algo: str, name: str) -> dict[str, Any]:
    """All settings of an algorithm with a preset, and what the preset has beside them, as JSON has them."""
    preset = presets.find_preset(algo, name) or {}
    kind = algos.load(algo).Config
    settings: dict[str, Any] = json.loads(json.dumps(preset | asdict(kind(**presets.own(kind, preset)))))
    return settings


def train(algo: str, env: str, seed: int, settings: dict[str, Any], episodes: int) -> Result:
    """Train a preset and evaluate it, by the ordinary command line."""
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
    return lines[-1] if lines else "it said nothing"


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


def references() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Published scores, by algorithm and environment."""
    return tomllib.loads((resources.files("bench") / "references.toml").read_text())


def _reference(entry: dict[str, Any]) -> str:
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
