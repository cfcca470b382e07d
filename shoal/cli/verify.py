"""The command `verify`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.cli.parsing import algorithm, console, say

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class VerifyArgs:
    """How to verify."""

    engines: str = "serial,processes:1,processes:3"
    """What to compare: engines, with numbers of workers."""
    kill_workers: bool = False
    """Also with a worker killed (SIGKILL) in each iteration; on redis with every other fault too."""
    kill_head: bool = False
    """Also with the head killed (SIGKILL) half-way and the run resumed on the next engine of the list."""


def verify(words: list[str]) -> int:
    """Check that results are equal."""
    name, parsed = algorithm("verify", words, VerifyArgs)
    from shoal.commands import verify as verification
    from shoal.runs.spec import RunSpec

    out = console()
    chosen = verification.parse_engines(parsed.extra.engines)
    todo = verification.run_variants(chosen, parsed.extra.kill_workers, parsed.extra.kill_head)
    settings = parsed.settings
    if settings.iterations is None:
        settings = dataclasses.replace(settings, iterations=5, steps=10**12)

    def report(outcome: verification.VariantResult) -> None:
        last = outcome.lines[-1]
        lost = f", {outcome.lost_workers} workers lost" if outcome.lost_workers else ""
        say(
            out,
            f"{last['digest']}  {len(outcome.lines)} iterations, {last['time/total_timesteps']:,} steps, "
            f"{outcome.seconds:.1f} s{lost}: {outcome.way}",
        )

    say(
        out,
        f"{name} {settings.env}, seed {settings.seed}, {settings.iterations} iterations in {len(todo)} ways",
    )
    difference = verification.first_difference(RunSpec(name, settings, parsed.config), todo, report)
    if difference:
        say(out, f"DIFFERENT: {difference}")
        return 1
    say(out, f"Equal: all {len(todo)} ways gave the same digest in every iteration")
    return 0
