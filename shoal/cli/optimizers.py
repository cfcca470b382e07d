"""The command `optimizers`."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from shoal.cli.console import console, say
from shoal.cli.parsing import parse
from shoal.errors import UsageError


@dataclass(frozen=True)
class OptimizersArgs:
    """List Nevergrad's optimizers by family, for `shoal train nevergrad --optimizer NAME`."""

    family: tyro.conf.Positional[str | None] = None
    """List every optimizer of this family (default: some of each)."""


def list_optimizers(words: list[str]) -> int:
    """List the optimizers of a family, or of all families in brief."""
    wanted = parse(OptimizersArgs, words, "optimizers")
    from shoal.algos.nevergrad import families, family, registry

    out = console()
    by_family: dict[str, list[str]] = {known.name: [] for known in families()}
    for name in registry():
        by_family[family(name).name].append(name)
    if wanted.family is not None:
        if wanted.family not in by_family:
            raise UsageError(f"there is no family {wanted.family!r}, only {', '.join(by_family)}")
        for name in sorted(by_family[wanted.family]):
            say(out, name)
        return 0
    for known in families():
        names = sorted(by_family[known.name], key=lambda name: (len(name), name))
        most = "" if known.limit is None else f" Up to about {known.limit:,} weights."
        say(out, f"{known.name} ({len(names)}): {known.description}.{most}\n  {' '.join(names[:12])}")
    say(out, "All of a family: shoal optimizers FAMILY. To use one: shoal train nevergrad CartPole-v1 --optimizer DE")
    return 0
