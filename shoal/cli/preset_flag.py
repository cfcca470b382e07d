"""The flags `--preset NAME` and `--no-preset` of commands that take the settings of a run."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import typing
from collections.abc import Callable
from typing import Annotated, TypeVar

import tyro

from shoal.envs.names import env_problems
from shoal.errors import UsageError
from shoal.runs import presets
from shoal.runs.flags import flags_of, given_flag
from shoal.runs.presets import Preset
from shoal.runs.presets.files import split_reference

T = TypeVar("T")

PRESET, NO_PRESET = "--preset", "--no-preset"

_HELP = (
    "Preset to start from: FILE.toml:NAME, or one that `shoal presets` lists; --no-preset starts from none (default: "
    "the preset named like the environment, if there is one)."
)
_ARG = tyro.conf.arg(help=_HELP, metavar="PRESET", help_behavior_hint="")
FIELD = ("preset", Annotated[str | None, _ARG], dataclasses.field(default=None))
"""Field of a command's arguments, for its help. `take` reads the value earlier, because it sets defaults."""


def take(words: list[str]) -> tuple[str | bool, list[str]]:
    """Return the preset that the words name, true for the one named like the environment and false for none.

    Also returns the words without `--no-preset`, which is no field.
    """
    rest = [word for word in words if given_flag(word) != NO_PRESET]
    at = next((at for at, word in enumerate(rest) if given_flag(word) == PRESET), None)
    if at is None:
        return len(rest) == len(words), rest
    if len(rest) < len(words):
        raise UsageError(f"{PRESET} and {NO_PRESET} contradict each other: give only one")
    _, equals, value = rest[at].partition("=")
    return value if equals else next(iter(rest[at + 1 :]), True), rest


def find(algo: str, wanted: str | bool, env: Callable[[], str]) -> Preset | None:
    """Find the preset to start from, and print which it is; `env` finds the environment, if that decides."""
    if wanted is False:
        return None
    if wanted is True:
        name = env()
        found = presets.find(algo, name)
        if found is None:
            _hint_at_preset(algo, name)
            return None
    else:
        found = presets.named(algo, wanted)
    place = algo if found.file is None else f"{found.file}{', instead of the built-in one' * found.replaces}"
    by_file = wanted is not True and split_reference(wanted)[0] is not None
    see = shlex.join(["shoal", "presets", str(found.file) if by_file else algo, found.name])
    without = f"; without it: {NO_PRESET}" if wanted is True else ""
    print(f"Using the preset {found.name} of {place} (to see it: {see}{without})")
    return found


def defaults(kind: type[T], preset: Preset, words: list[str]) -> T:
    """Return the arguments of a run that a preset gives where the words give none."""
    given = set(map(given_flag, words))
    # Tyro adds the values of a repeated flag to its default. Here they replace the preset's, as with any other flag.
    added = {name for name, flag in flags_of(kind).items() if flag.repeats and given & set(flag.names)}
    values = {key: value for key, value in (preset.settings | {"env": preset.env}).items() if key not in added}
    parts = {
        name: part(**presets.own(part, values))
        for name, part in typing.get_type_hints(kind).items()
        if isinstance(part, type) and dataclasses.is_dataclass(part)
    }
    return kind(**parts)


def _hint_at_preset(algo: str, name: str) -> None:
    """Print which preset may be meant, if there is no environment of this name (which is refused later)."""
    if env_problems(name) and (hint := presets.hint(algo, name)):
        print(hint, file=sys.stderr)
