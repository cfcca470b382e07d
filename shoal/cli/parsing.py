"""Words of a command line to settings, and lines to the console."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import sys
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro
from rich.console import Console

from shoal.errors import UsageError
from shoal.runs import presets

T = TypeVar("T")


def parse(kind: type[T], words: list[str], command: str, description: str | None = None, default: T | None = None) -> T:
    """Settings of one command from its words; tyro says what is wrong with them and exits with 2."""
    _refuse_repeated(kind, words)
    return tyro.cli(
        kind,
        args=words,
        prog=f"shoal {command}",
        description=description,
        default=tyro.MISSING_NONPROP if default is None else default,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _refuse_repeated(kind: type[Any], words: list[str]) -> None:
    """The last of two equal flags counts, as everywhere; but where a flag takes several values, both were meant."""
    flags = Counter(word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--"))
    again = [flag for flag in _of_several_values(kind) if flags[flag] > 1]
    if again:
        raise UsageError(
            f"given more than once, of which only the last would count: {', '.join(again)}. All values follow one "
            f"flag: {again[0]} A B"
        )


def _of_several_values(kind: type[Any]) -> Iterator[str]:
    for name, hint in typing.get_type_hints(kind).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _of_several_values(hint)
        elif typing.get_origin(hint) is tuple:
            yield f"--{name.replace('_', '-')}"


def console() -> Console:
    """The console, with Shoal's log lines going through it so that they do not tear a live line."""
    out = Console()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(out, f"{record.levelname.lower()}: {record.getMessage()}")

    logger = logging.getLogger("shoal")
    logger.handlers = [Handler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return out


def say(out: Console, text: str) -> None:
    """Print as it is: no markup, no colours of rich's choosing, no wrapping that would break a command to copy."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(out: Console, rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; the first one is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say(out, "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def algorithm(command: str, words: list[str], extra: type[Any] | None = None) -> tuple[str, Any]:
    """The algorithm's name, and its settings parsed into an object with `settings`, `config` and maybe `extra`."""
    from shoal import algos
    from shoal.runs.settings import Settings

    if not words or words[0] in ("-h", "--help"):
        print(f"usage: shoal {command} ALGORITHM ENVIRONMENT [--setting value ...]\n")
        print(f"Algorithms: {', '.join(algos.ALGORITHMS)}")
        print(f"Example:    shoal {command} trpo CartPole-v1 --seed 1")
        print(f"Settings:   shoal {command} trpo --help")
        sys.exit(0 if words else 2)
    name = words[0]
    module = algos.load(name)
    fields: list[tuple[str, Any]] = [("settings", Settings), ("config", module.Config)]
    if extra is not None:
        fields.append(("extra", extra))
    both = dataclasses.make_dataclass("Both", fields, frozen=True)
    description = f"{(module.__doc__ or '').strip()}\n\nExample: shoal {command} {name} CartPole-v1 --seed 1"
    title = f"{command} {name}"
    rest = _env_first(words[1:])
    if NO_PRESET in rest:
        rest.remove(NO_PRESET)
        return name, parse(both, rest, title, description)
    first = rest[0] if rest and not rest[0].startswith("-") else parse(both, rest, title, description).settings.env
    preset = presets.find_preset(name, first)
    if preset is None:
        _hint_at_preset(name, first)
        return name, parse(both, rest, title, description)
    print(f"Using the preset {first} of {name} (to see it: shoal presets {name} {first}; without it: {NO_PRESET})")
    parsed = parse(both, rest, title, description, both(*[kind(**presets.own(kind, preset)) for _, kind in fields]))
    return name, dataclasses.replace(parsed, settings=dataclasses.replace(parsed.settings, env=preset["env"]))


NO_PRESET = "--no-preset"


def _hint_at_preset(algo: str, name: str) -> None:
    """If there is no environment of this name, which is refused later with all other mistakes, say which preset may be
    meant."""
    from shoal import algos
    from shoal.envs.make import env_problems

    near = difflib.get_close_matches(name, presets.presets(algo), n=1, cutoff=0.7)
    others = [other for other in algos.ALGORITHMS if presets.find_preset(other, name)]
    if not (near or others) or not env_problems(name):
        return
    if near:
        hint = f"{algo} has a preset {near[0]!r}; did you mean that?"
    else:
        env = (presets.find_preset(others[0], name) or {})["env"]
        hint = f"{name!r} is a preset of {' and '.join(others)}, on {env}; {algo} has none of that name"
    print(hint, file=sys.stderr)


def _env_first(words: list[str]) -> list[str]:
    """`--env NAME` and `--env-id NAME`, as other libraries spell it, mean the positional argument."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--env", "--env-id"):
            after = words[at + 1 :]
            return [value, *words[:at], *after] if equals else [*after[:1], *words[:at], *after[1:]]
    return words
