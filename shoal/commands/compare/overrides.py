"""The settings that `--set` gives, such as `ppo.lr=0.001`: which side they are for, and their values."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from shoal import algos

_SETTING = re.compile(r"(?P<of>.+?)\.(?P<name>[\w-]+)=(?P<value>.*)")


def split_overrides(texts: Sequence[str], known: Collection[str], problems: list[str]) -> dict[str, dict[str, str]]:
    """Sort settings by the algorithm or label that they are for, one of `known`; adds to `problems`."""
    given: dict[str, dict[str, str]] = {}
    for text in texts:
        match = _SETTING.fullmatch(text)
        if match is None:
            problems.append(f"{text!r} is not a setting such as ppo.lr=0.001")
        elif match["of"] not in known:
            problems.append(f"{text!r} is for {match['of']}, which is not compared, only {', '.join(known)}")
        else:
            name, of_side = _field(match["name"]), given.setdefault(match["of"], {})
            if name in of_side:
                problems.append(f"{match['of']}.{name} is set more than once, again by {text!r}: give only one value")
            of_side[name] = match["value"]
    return given


def _field(name: str) -> str:
    """Return the field of a setting, which may be spelled as a flag."""
    return "start" if name == "from" else name.replace("-", "_")  # the flag --from sets the field `start`


def override_values(algo: str, texts: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    """Convert the texts of an algorithm's settings to values; adds to `problems`."""
    hints = typing.get_type_hints(algos.load(algo).Config)
    values: dict[str, Any] = {}
    for flag, text in texts.items():
        name = _field(flag)
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"To see its settings, run: shoal train {algo} --help"
            problems.append(f"{algo} has no setting {name!r}. {hint}")
            continue
        try:
            values[name] = setting_from_text(text, hints[name])
        except (msgspec.ValidationError, ValueError) as error:
            problems.append(f"{name} cannot be {text!r}: {error}")
    return values


def setting_from_text(text: str, kind: Any) -> Any:
    """Convert a text to the type of a setting. Commas separate the numbers of a tuple, and none is None."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if text.lower() == "none" and type(None) in options:
        return None
    if any(typing.get_origin(option) is tuple for option in options):
        return msgspec.convert([part for part in text.split(",") if part], kind, strict=False)
    return msgspec.convert(text, kind, strict=False)
