"""The command `shoal check-env`."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from shoal.base import validation
from shoal.cli.console import console, say
from shoal.cli.parsing import parse
from shoal.errors import UsageError


@dataclass(frozen=True)
class CheckEnvArgs:
    """Check whether an environment allows reproducible results, how fast it is and whether it leaks memory."""

    env: tyro.conf.Positional[str]
    """Gymnasium id of the environment, or module:Env-v0 to import the module first."""
    env_kwargs: str = "{}"
    """Keyword arguments for the environment, as JSON."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps (default: the environment's own limit)."""
    seconds: float = 3.0
    """Seconds to measure speed for; the memory check takes 1.5 times as long."""


def check_env(words: list[str]) -> int:
    """Run `shoal check-env`; the exit code is 1 if a check fails."""
    wanted = parse(CheckEnvArgs, words, "check-env")
    from shoal.commands.check_env import env_verdicts
    from shoal.runs.settings import Settings

    settings = Settings(wanted.env, env_kwargs=wanted.env_kwargs, max_episode_steps=wanted.max_episode_steps)
    problems = settings.problems() + validation.field_problems(wanted, above_zero=("seconds",))
    if problems:
        raise UsageError(problems)
    out = console()
    failed = 0
    for verdict in env_verdicts(settings.env_spec, wanted.seconds):
        failed += verdict.works is False
        sign = {True: "ok  ", False: "FAIL", None: "    "}[verdict.works]
        say(out, f"{sign} {verdict.what:30} {verdict.detail}")
    say(out, f"{failed} of the checks failed; the consequences are above" if failed else "All checks passed")
    return 1 if failed else 0
