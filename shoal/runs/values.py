"""Values of settings as Python code and preset files have them, converted to the types of the settings."""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shoal.engines import user_code
from shoal.errors import UsageError

ALIASES = {"learning_rate": "lr", "total_timesteps": "steps"}
"""Names of other libraries -> settings. `n_envs` sets the width: n_envs = lanes x width."""

_ALSO_KNOWN = ALIASES | {"from": "start", "n_envs": "width"}
_JSON = ("env_kwargs", "engine_options")  # settings that are JSON in a run's record and dicts in Python
_LONGEST = 100  # characters of a value in a message


def field_names(kind: type[Any]) -> set[str]:
    """Return the names of the settings that a dataclass has."""
    return {field.name for field in dataclasses.fields(kind)}


def unknown_setting(key: str, known: Collection[str]) -> str:
    """Describe a name that is no setting, with the nearest one that is."""
    near = [name for name in (_ALSO_KNOWN.get(key),) if name in known] or difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Settings: {', '.join(sorted(known))}"
    return f"there is no setting {key!r}. {hint}"


def converted_fields(kind: type[Any], values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Convert those values that are settings of a dataclass; adds to `problems`."""
    hints, names = typing.get_type_hints(kind), field_names(kind)
    return {key: converted(key, value, hints[key], problems) for key, value in values.items() if key in names}


def converted(key: str, value: Any, hint: Any, problems: list[str]) -> Any:
    """Convert a value to the type of its setting, as JSON would be; adds to `problems` where it does not fit."""
    if key in _JSON and isinstance(value, Mapping):
        try:
            return json.dumps(dict(value))
        except (TypeError, ValueError) as error:
            problems.append(f"{key} must hold plain values (numbers, strings, lists): {error}")
            return "{}"
    if hasattr(value, "__fspath__"):
        value = str(value)
    elif hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        value = value.item()
    try:
        if key == "wrap" and isinstance(value, list | tuple):
            value = [text if isinstance(text, str) else user_code.locate(text, "the wrapper") for text in value]
        return msgspec.convert(value, hint)
    except UsageError as error:
        problems += error.problems
    except msgspec.ValidationError as error:
        text, why = repr(value), str(error)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        problems.append(f"{key}={text} does not fit: {why[:1].lower()}{why[1:]}")
    return value
