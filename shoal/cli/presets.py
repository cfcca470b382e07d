"""The command `presets`."""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console

from shoal.cli.console import console, say
from shoal.cli.parsing import parse
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.runs.presets.listing import ListedPreset


@dataclass(frozen=True)
class PresetsArgs:
    """List the presets: tuned settings that `shoal train` uses for an environment by default.

    Presets of your own are tables in presets/ALGORITHM.toml, or in any file for --preset FILE.toml:NAME.
    """

    algo: tyro.conf.Positional[str | None] = None
    """Show the settings of this algorithm's presets, or of those in a TOML file (default: list all presets by name)."""
    name: tyro.conf.Positional[str | None] = None
    """Show only this preset (default: all)."""


def show_presets(words: list[str]) -> int:
    """List presets, or print their settings."""
    wanted = parse(PresetsArgs, words, "presets")
    from shoal.runs.presets.files import split_reference

    out = console()
    problems: list[str] = []
    file, name = split_reference(wanted.algo or "")
    if wanted.algo is None:
        _list_names(out, problems)
    elif file is not None:
        _show_file(out, file, name or wanted.name, problems)
    else:
        _show_algorithm(out, wanted.algo, wanted.name, problems)
    if problems:
        raise UsageError(problems)
    return 0


def _list_names(out: Console, problems: list[str]) -> None:
    from shoal import algos
    from shoal.runs.presets import listing

    places: dict[tuple[str, Path | None], list[str]] = {(algo, None): [] for algo in algos.ALGORITHMS}
    for item in listing.by_name(problems):
        note = " (instead of the built-in one)" if item.preset.replaces else ""
        places.setdefault((str(item.algo), item.preset.file), []).append(item.preset.name + note)
    for (algo, file), names in sorted(places.items(), key=lambda place: place[0][0]):
        say(out, f"{algo}{'' if file is None else f' ({file})'}: {', '.join(names) or 'none'}")


def _show_file(out: Console, file: Path, name: str | None, problems: list[str]) -> None:
    from shoal.runs.presets import listing

    for item in listing.in_file(file, problems, name):
        _show(out, item, item.algo or "ALGORITHM", ["--preset", f"{file}:{item.preset.name}"])


def _show_algorithm(out: Console, algo: str, name: str | None, problems: list[str]) -> None:
    from shoal import algos
    from shoal.runs.presets import listing

    short = algos.short_name(algo)
    found = listing.by_name(problems, short, name)
    if not found and not problems:
        raise UsageError(_nothing_found(algo, name, [item.preset.name for item in listing.by_name([], short)]))
    for item in found:
        _show(out, item, algo, [item.preset.name])


def _show(out: Console, item: ListedPreset, algo: str, short: list[str]) -> None:
    """Print a preset as the arguments of `shoal train` that it is short for."""
    place = "" if item.preset.file is None else f"\n  from: {item.preset.file}"
    env = item.preset.env if item.algo is not None or "env" in item.preset.settings else "ENV"
    line = shlex.join([env, *item.flags(), "--no-preset"])
    say(out, f"shoal train {shlex.join([algo, *short])}\n  is short for: {line}{place}")


def _nothing_found(algo: str, name: str | None, known: list[str]) -> str:
    from shoal import algos
    from shoal.runs.presets.files import FOLDER, SUFFIX

    if known:
        return f"there is no preset {name!r} of {algo}, only {', '.join(known)}"
    names = [*algos.ALGORITHMS, *algos.installed()]
    near = difflib.get_close_matches(algo, names, n=1)
    hint = f"Did you mean {near[0]}?" if near and algo not in names else f"Algorithms: {', '.join(names)}."
    return f"{algo} has no presets. {hint} Your own belong in {FOLDER / algos.short_name(algo)}{SUFFIX}"
