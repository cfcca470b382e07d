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

_ALSO_KNOWN = ALIASES | {
    "from": "start", "from_": "start", "n_envs": "width", "n_steps": "batch_steps", "batch_size": "minibatch",
    "n_epochs": "epochs", "ent_coef": "entropy", "gae_lambda": "lam", "clip_range": "clip", "target_kl": "max_kl",
    "net_arch": "hidden", "exploration_final_eps": "epsilon", "target_update_interval": "target_every",
}  # fmt: skip
"""Names that other libraries have for settings, to suggest ours."""
_JSON = ("env_kwargs", "engine_options")  # settings that are JSON in a run's record and dicts in Python
_LONGEST = 100  # characters of a value in a message


def field_names(kind: type[Any]) -> set[str]:
    """Return the names of the settings that a dataclass has."""
    return {field.name for field in dataclasses.fields(kind)}


def unknown_setting(key: str, known: Collection[str]) -> str:
    """Describe a name that is no setting, with the nearest one that is."""
    names = {other: name for other, name in _ALSO_KNOWN.items() if name in known} | {name: name for name in known}
    near = [key] if key in names else difflib.get_close_matches(key, names, n=1)
    hint = f"Did you mean {names[near[0]]}?" if near else "To list all settings, run: shoal train ALGORITHM --help"
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
    if key == "start" and hasattr(value, "path"):  # a run
        value = value.path
    if hasattr(value, "__fspath__"):
        value = str(value)
    elif hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        value = value.item()
    options = (hint, *typing.get_args(hint))
    if isinstance(value, float) and value.is_integer() and int in options and float not in options:  # steps=1e5
        value = int(value)
    try:
        if key == "wrap" and isinstance(value, str):
            value = (value,)
        if key == "wrap" and isinstance(value, list | tuple):
            value = [text if isinstance(text, str) else user_code.locate(text, "the wrapper") for text in value]
        return msgspec.convert(value, hint)
    except UsageError as error:
        problems += error.problems
    except msgspec.ValidationError as error:
        text, why = repr(value), str(error).replace("`array`", "a list").replace("null", "None")
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        problems.append(f"{key}={text} does not fit: {why[:1].lower()}{why[1:]}")
    return value
