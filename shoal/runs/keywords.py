"""From keyword arguments to a run: the same settings as the command line's, checked in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import gymnasium

from shoal import algos
from shoal.engines import user_code
from shoal.errors import UsageError
from shoal.runs import presets
from shoal.runs.settings import Settings
from shoal.runs.spec import RunSpec
from shoal.runs.values import ALIASES, converted_fields, field_names, unknown_setting

EnvSource: TypeAlias = str | Callable[..., Any]
"""An environment: its name, or a class or function that makes it."""


def make_spec(
    algo: str | ModuleType, env: EnvSource | None, given: Mapping[str, Any], preset: bool | str = True
) -> RunSpec:
    """Build a run from an algorithm, an environment or preset, and settings by name; report every problem at once.

    `preset` is the name of a preset, or true for the one that is named like the environment, if there is one.
    """
    name = algo_name(algo)
    kind = algos.load(name).Config
    problems: list[str] = []
    base = _base(name, None if env is None else _env_name(env), preset, problems)
    values = _resolved(given, kind, problems)
    parts = [presets.own(part, base) | converted_fields(part, values, problems) for part in (Settings, kind)]
    if problems:
        raise UsageError(problems)
    settings, config = Settings(**parts[0]), kind(**parts[1])
    return RunSpec(name, settings, config if "n_envs" not in given else with_n_envs(config, given["n_envs"], "n_envs"))


def _base(algo: str, env: str | None, preset: bool | str, problems: list[str]) -> dict[str, Any]:
    """Return the settings to start from: those of the preset, or only the environment; adds to `problems`."""
    try:
        if isinstance(preset, str):
            return presets.named(algo, preset).on(env)
        if env is None:
            raise UsageError(f"name an environment, as in train({algo!r}, 'CartPole-v1'), or a preset that has one")
        found = presets.find(algo, env) if preset else None
        return {"env": env} if found is None else found.on(None)
    except UsageError as error:
        problems += error.problems
        return {}


def _env_name(env: EnvSource) -> str:
    if isinstance(env, str):
        return env
    made: object = env
    if isinstance(made, gymnasium.Env):
        source = f"its id {made.spec.id!r}" if made.spec is not None else f"the class {type(made).__name__}"
        raise UsageError(
            f"every worker makes its own environments, so pass {source}, or a function that returns a new environment, "
            f"not an environment"
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


def _resolved(given: Mapping[str, Any], kind: type[Any], problems: list[str]) -> dict[str, Any]:
    """Replace aliases, and describe names that are no settings."""
    known = (field_names(Settings) - {"env"}) | field_names(kind)
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = ALIASES.get(key, key)
        if name == "n_envs" and "width" in known:
            if "width" in given:
                problems.append(f"n_envs={value} and width={given['width']} both set the width: give only one")
        elif name not in known:
            problems.append(unknown_setting(key, known))
        elif name in values:
            both = " and ".join(f"{other}={given[other]}" for other in given if ALIASES.get(other, other) == name)
            problems.append(f"{both} are the same setting: give only one")
        else:
            values[name] = value
    return values


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
