"""How settings are spelled as flags of the command line."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import tyro


class Flag(NamedTuple):
    """The flag of a setting."""

    names: tuple[str, ...]
    """All spellings; the first is the plain one."""
    several: bool
    """Takes several values."""
    repeats: bool
    """May be repeated, for one more value each time."""


def flags_of(kind: type[Any]) -> dict[str, Flag]:
    """Return the flag of each setting of a dataclass, and of the dataclasses in it."""
    marked = typing.get_type_hints(kind, include_extras=True)
    found: dict[str, Flag] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= flags_of(hint)
            continue
        marks = getattr(marked[name], "__metadata__", ())
        word = next((mark.name for mark in marks if getattr(mark, "name", None)), name).replace("_", "-")
        others = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        names = (f"--{word}", *([f"--no-{word}"] if hint is bool else []), *others)
        found[name] = Flag(names, typing.get_origin(hint) is tuple, tyro.conf.UseAppendAction in marks)
    return found


def given_flag(word: str) -> str:
    """Return the flag that a word of the command line gives, with dashes as tyro spells it; empty for a value."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("-") else ""


def spelled(values: Mapping[str, Any], *kinds: type[Any]) -> list[str]:
    """Spell settings of these dataclasses as flags, except the environment and those that are None."""
    flags = {name: flag for kind in kinds for name, flag in flags_of(kind).items()}
    words = []
    for key, value in values.items():
        plain = key.replace("_", "-")
        names, _, repeats = flags.get(key, Flag((f"--{plain}", f"--no-{plain}"), several=False, repeats=False))
        if value is None or key == "env":
            continue
        if isinstance(value, bool):
            words.append(names[not value])
        elif repeats:
            words += [f"{names[0]}={text}" for text in value]
        elif isinstance(value, list | tuple):
            words += [names[0], *map(str, value)]
        else:
            words.append(f"{names[0]}={json.dumps(value) if isinstance(value, dict) else value}")
    return words
