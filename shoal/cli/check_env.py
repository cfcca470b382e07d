"""The command `check-env`."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from shoal.base import validation
from shoal.cli.parsing import console, parse, say
from shoal.errors import UsageError


@dataclass(frozen=True)
class CheckEnvArgs:
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
    say(out, f"{failed} of Shoal's promises do not hold for it" if failed else "It keeps every rule")
    return 1 if failed else 0
