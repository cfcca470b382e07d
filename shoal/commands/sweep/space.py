"""What a sweep varies: settings with a list of values, or with a range to search.

A list is written `lr=1e-3,3e-4`; a value with commas of its own is put in brackets, as in `hidden=[64,64],[32,32]`.
A range is written `lr=log:1e-5:1e-2`, `clip=float:0.1:0.3`, `epochs=int:3:20` or, by 32, `minibatch=int:32:256:32`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from shoal import algos
from shoal.commands.compare.overrides import setting_from_text
from shoal.errors import UsageError
from shoal.runs.settings import Settings
from shoal.runs.values import ALIASES, converted

SWEPT_SETTINGS = (
    "steps", "iterations", "env_kwargs", "wrap", "max_episode_steps", "step_limit", "recreate_after", "vector",
    "learner_threads", "device",
)  # fmt: skip
"""Settings of a run, besides the algorithm's, that may be swept: they change results and leave them comparable."""
_INSTEAD = {
    "env": "returns in different environments cannot be ranked. Use one sweep for each",
    "seed": "every trial has the same seeds: --seeds N, from --seed on",
    "n_envs": "sweep lanes or width (n_envs = lanes x width)",
}
_RANGE = re.compile(r"(?P<kind>log|int|float):(?P<ends>.*)")


@dataclass(frozen=True)
class Range:
    """An interval to search, both ends included."""

    low: float
    high: float
    log: bool = False
    step: int | None = None
    """Distance between integers; None for real numbers."""

    def __str__(self) -> str:
        if self.step is None or self.log:
            return f"{'log' if self.log else 'float'}:{self.low:g}:{self.high:g}"
        return f"int:{self.low}:{self.high}" + (f":{self.step}" if self.step > 1 else "")


Values: TypeAlias = tuple[Any, ...]
Space: TypeAlias = dict[str, Values | Range]
"""Setting -> its values or, in a search, its range."""


def assignments(texts: Sequence[str], option: str, problems: list[str]) -> dict[str, str]:
    """Split texts such as lr=1e-3,3e-4 into settings and what follows; adds to `problems`."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key and value):
            problems.append(f"{option} {text!r} has no value: write it as lr=1e-3,3e-4")
        elif key in found:
            problems.append(f"{option} has {key} twice: give all its values after one {key}=")
        else:
            found[key] = value
    return found


def setting_name(key: str) -> str:
    """Return the field that a user's spelling of a setting means."""
    name = key.lstrip("-").replace("-", "_")
    return {"from": "start"}.get(name, ALIASES.get(name, name))


def flag_of(name: str) -> str:
    """Return the user's spelling of a setting."""
    return "from" if name == "start" else name


def parse_space(
    algo: str, given: Mapping[str, Any], fixed: Collection[str], ranges: bool, problems: list[str]
) -> Space:  # fmt: skip
    """Check the settings to sweep and convert their values by type; adds to `problems`.

    Each value of `given` is a text or a list of values; `ranges` says whether a text may be a range. `fixed` has the
    settings that the user gave a single value.
    """
    hints = typing.get_type_hints(Settings) | typing.get_type_hints(algos.load(algo).Config)
    space: Space = {}
    for key, values in given.items():
        name = setting_name(key)
        unfit = _unfit(algo, key, name, fixed)
        if name in space:
            problems.append(f"{key} and {flag_of(name)} are the same setting: give only one")
        elif unfit:
            problems.append(unfit)
        else:
            try:
                space[name] = _range_or_values(name, values, hints[name], ranges)
            except UsageError as error:
                problems += error.problems
    return space


def _unfit(algo: str, key: str, name: str, fixed: Collection[str]) -> str:
    """Describe why a setting cannot be swept; empty if it can."""
    of_algorithm = [field.name for field in dataclasses.fields(typing.cast(Any, algos.load(algo).Config))]
    if name in _INSTEAD and name not in of_algorithm:
        return f"{key} cannot be swept: {_INSTEAD[name]}"
    known = [*SWEPT_SETTINGS, *of_algorithm]
    if name not in known:
        if name in {field.name for field in dataclasses.fields(Settings)}:
            return f"{key} cannot be swept: it does not change results"
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {flag_of(near[0])}?" if near else f"To list all settings, run: shoal train {algo} --help"
        return f"{algos.short_name(algo)} has no setting {key!r}. {hint}"
    if name in fixed:
        return f"{key} is swept and also has a single value: give only one of them"
    if "n_envs" in fixed and name in ("lanes", "width"):
        return f"{key} is swept, and n_envs sets the width too (n_envs = lanes x width): give only one of them"
    return ""


def _range_or_values(name: str, given: Any, hint: Any, ranges: bool) -> Values | Range:
    if isinstance(given, str):
        match = _RANGE.fullmatch(given)
        if match and ranges:
            return _range(name, given, match, hint)
        if match:
            raise UsageError(
                f"{flag_of(name)}={given} is a range, which a grid cannot have: use --search, or list values"
            )
        values = tuple(_from_text(name, text, hint) for text in _split(given))
    elif isinstance(given, Sequence) or hasattr(given, "__array__"):
        problems: list[str] = []
        values = tuple(converted(flag_of(name), value, hint, problems) for value in given)
        if problems:
            raise UsageError(problems)
    else:
        raise UsageError(f"{flag_of(name)}: the values to sweep must be a list, not {given!r}")
    if not values:
        raise UsageError(f"{flag_of(name)} has no values")
    again = next((value for place, value in enumerate(values) if value in values[:place]), None)
    if again is not None:
        raise UsageError(f"{flag_of(name)} has the value {text_of(again)} twice")
    return values


def _from_text(name: str, text: str, hint: Any) -> Any:
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return setting_from_text(inner, hint)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{flag_of(name)} cannot be {text!r}: {error}") from None


def _split(text: str) -> list[str]:
    """Split at the commas that are not inside brackets or braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _range(name: str, text: str, match: re.Match[str], hint: Any) -> Range:
    where = f"{flag_of(name)}={text}"
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if not {int, float} & set(options):
        raise UsageError(f"{where}: the setting is not a number, so list its values instead, as in {flag_of(name)}=A,B")
    whole = float not in options
    if match["kind"] == ("float" if whole else "int"):
        fit = "an integer, so use int:" if whole else "a real number, so use float:"
        raise UsageError(f"{where}: the setting is {fit} or log: instead")
    ends = match["ends"].split(":")
    try:
        low, high, *rest = [int(end) if whole else float(end) for end in ends]
    except ValueError:
        low, high, rest = 0, 0, [0, 0]
    finite = math.isfinite(low) and math.isfinite(high)
    if not finite or len(rest) > (match["kind"] == "int") or any(step < 1 for step in rest):
        form = "int:LOW:HIGH or int:LOW:HIGH:STEP" if match["kind"] == "int" else f"{match['kind']}:LOW:HIGH"
        raise UsageError(f"{where}: a range is written {form}, with {'integers' if whole else 'numbers'}")
    if low >= high:
        raise UsageError(f"{where}: the low end must be below the high end")
    if match["kind"] == "log" and low <= 0:
        raise UsageError(f"{where}: a logarithmic range must start above 0")
    if not whole:
        return Range(low, high, match["kind"] == "log")
    step = int(rest[0]) if rest else 1
    return Range(low, low + (high - low) // step * step, match["kind"] == "log", step)


def text_of(value: Any) -> str:
    """Format a value, for labels and tables."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return f"[{','.join(map(text_of, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
