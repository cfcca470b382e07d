"""Wrappers by flag: `--wrap FrameStackObservation:4 --wrap my_pkg:Scale:factor=0.5`, the innermost first."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from shoal.envs.names import Place, place_of
from shoal.errors import UsageError


@dataclass(frozen=True)
class Wrapper:
    """A wrapper and its arguments."""

    place: Place
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def parse(text: str) -> Wrapper:
        """Parse NAME, NAME:ARGUMENTS, MODULE:NAME or MODULE:NAME:ARGUMENTS. Arguments are JSON, others text."""
        first, _, rest = text.partition(":")
        module, name, arguments = ("", first, rest) if _is_gymnasiums(first) else (first, *_cut(rest))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for part in _arguments(arguments):
            key, equals, value = part.partition("=")
            if equals and key.strip().isidentifier():
                kwargs[key.strip()] = _value(value)
            else:
                args.append(_value(part))
        return Wrapper(Place(module, name), tuple(args), kwargs)

    def wrap(self, env: Any) -> Any:
        """Wrap an environment."""
        kind = getattr(self.place.load() if self.place.module else gymnasium.wrappers, self.place.name)
        return kind(env, *self.args, **self.kwargs)


def wrapper_problems(text: str) -> list[str]:
    """Describe what is wrong with a `--wrap`, without wrapping anything."""
    place = Wrapper.parse(text).place
    if not place.module:
        return []
    if not place.name.isidentifier():
        near = difflib.get_close_matches(place.module, dir(gymnasium.wrappers), n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        return [
            f"Gymnasium has no wrapper {place.module!r}. {hint}For one of your own, use module:Class or ./file.py:Class"
        ]
    try:
        module = place.load()
    except UsageError as error:
        return error.problems
    found = callable(getattr(module, place.name, None))
    return [] if found else [f"{place.module} has no wrapper {place.name!r}"]


def users_modules(env: str, wrap: Iterable[str]) -> list[str]:
    """List the modules, by name or file, that an environment and its wrappers come from, but for Shoal's and ALE's."""
    places = [place_of(env), *(Wrapper.parse(text).place for text in wrap)]
    return list(dict.fromkeys(place.module for place in places if place.is_users))


def _is_gymnasiums(name: str) -> bool:
    return name.isidentifier() and hasattr(gymnasium.wrappers, name)


def _cut(text: str) -> tuple[str, str]:
    name, _, arguments = text.partition(":")
    return name, arguments


def _arguments(text: str) -> list[str]:
    """Split at commas, but not inside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text.strip())
