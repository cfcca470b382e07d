"""Commands about environments, presets and this machine: check-env, presets, doctor."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import tyro

from shoal import bounds, presets
from shoal.cli.parsing import console, parse, say
from shoal.errors import UsageError


@dataclass(frozen=True)
class CheckEnv:
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
    wanted = parse(CheckEnv, words, "check-env")
    from shoal.envs.check import check
    from shoal.settings import Settings

    settings = Settings(wanted.env, env_kwargs=wanted.env_kwargs, max_episode_steps=wanted.max_episode_steps)
    problems = settings.problems() + bounds.problems(wanted, above_zero=("seconds",))
    if problems:
        raise UsageError(problems)
    out = console()
    failed = 0
    for verdict in check(settings.env_spec, wanted.seconds):
        failed += verdict.works is False
        sign = {True: "ok  ", False: "FAIL", None: "    "}[verdict.works]
        say(out, f"{sign} {verdict.what:30} {verdict.detail}")
    say(out, f"{failed} of Shoal's promises do not hold for it" if failed else "It keeps every rule")
    return 1 if failed else 0


@dataclass(frozen=True)
class Presets:
    """List the presets: settings that `shoal train` uses for an environment unless told otherwise."""

    algo: tyro.conf.Positional[str | None] = None
    """Show the settings of this algorithm's presets."""
    name: tyro.conf.Positional[str | None] = None
    """Show only this one."""


def show_presets(words: list[str]) -> int:
    """List or show presets."""
    wanted = parse(Presets, words, "presets")
    from shoal import algos

    out = console()
    if wanted.algo is None:
        for algo in algos.ALGOS:
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


@dataclass(frozen=True)
class Optimizers:
    """List Nevergrad's optimizers by family, for `shoal train nevergrad --optimizer NAME`."""

    family: tyro.conf.Positional[str | None] = None
    """Name every optimizer of this family."""


def list_optimizers(words: list[str]) -> int:
    """List optimizers."""
    wanted = parse(Optimizers, words, "optimizers")
    from shoal.algos.nevergrad import FAMILIES, family, registry

    out = console()
    by_family: dict[str, list[str]] = {known.name: [] for known in FAMILIES}
    for name in registry():
        by_family[family(name).name].append(name)
    if wanted.family is not None:
        if wanted.family not in by_family:
            raise UsageError(f"there is no family {wanted.family!r}, only {', '.join(by_family)}")
        for name in sorted(by_family[wanted.family]):
            say(out, name)
        return 0
    for known in FAMILIES:
        names = sorted(by_family[known.name], key=lambda name: (len(name), name))
        most = "" if known.limit is None else f" Up to about {known.limit:,} weights."
        say(out, f"{known.name} ({len(names)}): {known.words}.{most}\n  {' '.join(names[:12])}")
    say(out, "All of a family: shoal optimizers FAMILY. To use one: shoal train nevergrad CartPole-v1 --optimizer DE")
    return 0


@dataclass(frozen=True)
class Doctor:
    """Try every engine and optional package on this machine, and say what to install for those that do not work."""


def doctor(words: list[str]) -> int:
    """Say what works here."""
    parse(Doctor, words, "doctor")
    from shoal.doctor import examine

    out = console()
    checks = examine()
    width = max(len(check.what) for check in checks)
    for check in checks:
        say(out, f"{'ok' if check.works else '--'}  {check.what:{width}}  {check.detail}")
    return 0
