"""From keyword arguments to a run: the same settings as the command line's, checked in the same way."""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import gymnasium
import msgspec

from shoal import algos
from shoal.engines import user_code
from shoal.errors import UsageError
from shoal.runs import presets
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec

EnvSource: TypeAlias = str | Callable[..., Any]
"""An environment: its name, or a class or function that makes it."""

ALIASES = {"learning_rate": "lr", "total_timesteps": "steps"}
"""Names of other libraries -> settings. `n_envs` sets the width: n_envs = lanes x width."""

_JSON = ("env_kwargs", "engine_options")  # settings that are JSON in a run's record and dicts in Python


def make_spec(algo: str | ModuleType, env: EnvSource, given: Mapping[str, Any], preset: bool = True) -> RunSpec:
    """Build a run from an algorithm, an environment or preset, and settings by name; report every problem at once."""
    name, env = algo_name(algo), _env_name(env)
    kind = algos.load(name).Config
    found = presets.find_preset(name, env) if preset else None
    base = {"env": env} if found is None else found
    problems: list[str] = []
    values = _resolved(given, kind, problems)
    parts = []
    for part in (Settings, kind):
        hints = typing.get_type_hints(part)
        own = presets.own(part, base)
        for key in [key for key in values if key in _fields(part)]:
            own[key] = converted(key, values[key], hints[key], problems)
        parts.append(own)
    if problems:
        raise UsageError(problems)
    settings, config = Settings(**parts[0]), kind(**parts[1])
    return RunSpec(name, settings, config if "n_envs" not in given else with_n_envs(config, given["n_envs"], "n_envs"))


def _env_name(env: EnvSource) -> str:
    if isinstance(env, str):
        return env
    if isinstance(env, gymnasium.Env):
        raise UsageError(
            f"every worker makes its own environments, so pass the class {type(env).__name__}, or a function that "
            f"returns a new environment, not an environment"
        )
    return user_code.locate(env, "the environment")


def algo_name(algo: str | ModuleType) -> str:
    """Return the name to record for an algorithm: built in, or by module or file."""
    if isinstance(algo, str):
        return algos.full_name(algo)
    names = {module: name for name, module in algos.ALGORITHMS.items()}
    if algo.__name__ == "__main__":
        raise UsageError("an algorithm must be a module or file of its own: pass its path, as in './a2c.py'")
    return names.get(algo.__name__, algo.__name__)


def _fields(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _resolved(given: Mapping[str, Any], kind: type[Any], problems: list[str]) -> dict[str, Any]:
    """Replace aliases, and describe names that are no settings."""
    known = (_fields(Settings) - {"env"}) | _fields(kind)
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = ALIASES.get(key, key)
        if name == "n_envs" and "width" in known:
            if "width" in given:
                problems.append(f"n_envs={value} and width={given['width']} both set the width: give only one")
        elif name not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Settings: {', '.join(sorted(known))}"
            problems.append(f"there is no setting {key!r}. {hint}")
        elif name in values:
            problems.append(f"{key}={value} and {name}={values[name]} are the same setting: give only one")
        else:
            values[name] = value
    return values


def converted(key: str, value: Any, hint: Any, problems: list[str]) -> Any:
    """Convert a value to the type of its setting, as JSON would be; adds to `problems` where it does not fit."""
    if key in _JSON and isinstance(value, Mapping):
        try:
            return json.dumps(dict(value))
        except (TypeError, ValueError) as error:
            problems.append(f"{key} must hold plain values (numbers, strings, lists): {error}")
            return "{}"
    if key == "wrap":
        value = [text if isinstance(text, str) else user_code.locate(text, "the wrapper") for text in value]
    if hasattr(value, "__fspath__"):
        value = str(value)
    elif hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        value = value.item()
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        problems.append(f"{key}={value!r} does not fit: {str(error)[:1].lower()}{str(error)[1:]}")
        return value


def with_n_envs(config: Any, n_envs: int, option: str) -> Any:
    """Set the width so that lanes x width is `n_envs`; `option` is how its user spells it."""
    lanes = config.lanes
    if lanes < 1:
        return config  # refused later, with all other mistakes
    width, left = divmod(n_envs, lanes)
    if left or width < 1:
        nearest = " or ".join(str(lanes * near) for near in (width, width + 1) if near >= 1) or lanes
        raise UsageError(
            f"{option} {n_envs} is not a {'' if n_envs > 0 else 'positive '}multiple of the number of lanes, {lanes} "
            f"(n_envs = lanes x width): use {option} {nearest}, or another number of lanes"
        )
    return dataclasses.replace(config, width=width)
