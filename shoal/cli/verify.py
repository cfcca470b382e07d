"""The command `verify`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shoal.cli.console import console, say
from shoal.cli.parsing import parse_spec_and


@dataclass(frozen=True)
class VerifyArgs:
    """What to compare."""

    engines: str = "serial,processes:1,processes:3"
    """Engines to compare, each with its number of workers."""
    kill_workers: bool = False
    """Also run with a worker killed (SIGKILL) in each iteration; on redis, with every other fault too."""
    kill_head: bool = False
    """Also run with the head killed (SIGKILL) half-way and the run resumed on the next engine of the list."""


def verify(words: list[str]) -> int:
    """Check that results are equal; the exit code is 1 if they differ."""
    spec, wanted = parse_spec_and(VerifyArgs, "verify", words)
    from shoal.algos import short_name
    from shoal.commands import verify as verification

    out = console()
    chosen = verification.parse_engines(wanted.engines)
    variants = verification.run_variants(chosen, wanted.kill_workers, wanted.kill_head)
    settings = spec.settings
    if settings.iterations is None:
        settings = dataclasses.replace(settings, iterations=5, steps=10**12)

    def report(result: verification.VariantResult) -> None:
        last = result.rows[-1]
        lost = f", {result.lost_workers} workers lost" if result.lost_workers else ""
        say(
            out,
            f"{last['digest']}  {len(result.rows)} iterations, {last['time/total_timesteps']:,} steps, "
            f"{result.seconds:.1f} s{lost}: {result.variant}",
        )

    iterations = f"{settings.iterations} iterations in {len(variants)} ways"
    say(out, f"{short_name(spec.algo)} {settings.env}, seed {settings.seed}, {iterations}")
    difference = verification.first_difference(dataclasses.replace(spec, settings=settings), variants, report)
    if difference:
        say(out, f"DIFFERENT: {difference}")
        return 1
    say(out, f"Equal: all {len(variants)} ways gave the same digest in every iteration")
    return 0
