"""The command `presets`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import tyro

from shoal.cli.console import console, say
from shoal.cli.parsing import parse
from shoal.errors import UsageError
from shoal.runs import presets


@dataclass(frozen=True)
class PresetsArgs:
    """List the presets: tuned settings that `shoal train` uses for an environment by default."""

    algo: tyro.conf.Positional[str | None] = None
    """Show the settings of this algorithm's presets (default: list the presets of all algorithms)."""
    name: tyro.conf.Positional[str | None] = None
    """Show only this preset (default: all)."""


def show_presets(words: list[str]) -> int:
    """List presets, or print their settings."""
    wanted = parse(PresetsArgs, words, "presets")
    from shoal import algos

    out = console()
    if wanted.algo is None:
        for algo in algos.ALGORITHMS:
            say(out, f"{algo}: {', '.join(presets.presets(algo)) or 'none'}")
        return 0
    algos.load(wanted.algo)
    known = presets.presets(wanted.algo)
    if wanted.name not in {None, *known}:
        raise UsageError(f"there is no preset {wanted.name!r} of {wanted.algo}, only {', '.join(known)}")
    for name in known if wanted.name is None else [wanted.name]:
        env, flags = presets.command_line(wanted.algo, name)
        say(out, f"shoal train {wanted.algo} {name}\n  is short for: {shlex.join([env, *flags])}")
    return 0
