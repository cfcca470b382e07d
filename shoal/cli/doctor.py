"""The command `doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cli.console import console, say
from shoal.cli.parsing import parse


@dataclass(frozen=True)
class DoctorArgs:
    """Try every engine and optional package on this machine, and print what to install for those that do not work."""


def doctor(words: list[str]) -> int:
    """Print what works on this machine."""
    parse(DoctorArgs, words, "doctor")
    from shoal.commands.doctor import run_checks

    out = console()
    checks = run_checks()
    width = max(len(check.what) for check in checks)
    for check in checks:
        say(out, f"{'ok' if check.works else '--'}  {check.what:{width}}  {check.detail}")
    return 0
