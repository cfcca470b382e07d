"""What the name of an environment stands for, without making one.

`CartPole-v1`            an id that is registered with Gymnasium
`my_pkg:Grid-v0`         an id that is registered once the module is imported
`my_pkg:GridWorld`       a class or function in a module, called to make the environment; no registration
`./grid.py:GridWorld`    the same in a file
"""

from __future__ import annotations

import copy
import difflib
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registered

from shoal.engines import user_code
from shoal.engines.functions import refuse_module
from shoal.errors import UsageError

# Namespaces that need no module: prefix, and the module that registers their environments
_REGISTERED_BY = {"ALE": "ale_py", "shoal": "shoal.envs.builtin"}


@dataclass(frozen=True)
class Place:
    """A module, by name or file ("" for none), and something in it: a Gymnasium id, a class or a function."""

    module: str
    name: str

    @property
    def is_users(self) -> bool:
        """Whether the module is neither part of Shoal nor one that it knows."""
        return bool(self.module) and self.module not in _REGISTERED_BY.values()

    def load(self) -> ModuleType:
        """Import the module, if this process may."""
        if not self.is_users:
            return importlib.import_module(self.module)
        refuse_module(user_code.module_name(self.module))
        return user_code.load(self.module)


def place_of(name: str) -> Place:
    """Split the name of an environment."""
    module, _, plain = name.rpartition(":")
    return Place(module or _REGISTERED_BY.get(plain.partition("/")[0], ""), plain)


def full_name(name: str) -> str:
    """Return the name under which an environment or wrapper is found from any folder: files by their whole path."""
    file, colon, rest = name.partition(":")
    return f"{user_code.absolute(file)}{colon}{rest}" if file.endswith(".py") else name


def factory_of(name: str) -> Callable[..., Any] | None:
    """Return the class or function that an environment's name stands for; None if it is a Gymnasium id."""
    place = place_of(name)
    if not place.is_users or not place.name.isidentifier():
        return None
    found = getattr(place.load(), place.name, None)
    return found if callable(found) else None


def registered(name: str) -> Registered:
    """Return a copy of Gymnasium's spec of an environment, after importing the module that registers it."""
    place = place_of(name)
    if place.module:
        place.load()
    return copy.deepcopy(gymnasium.spec(place.name))


def env_problems(name: str) -> list[str]:
    """Describe what is wrong with an environment's name, without making the environment."""
    place = place_of(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if factory_of(name) is None:
                registered(name)
    except gymnasium.error.Error as error:
        return [_unknown(place, error)]
    except UsageError as error:
        return error.problems
    except ModuleNotFoundError as error:
        if error.name == "ale_py":
            return [f"{place.name} needs the Atari emulator. Install it: pip install 'shoal[atari]'"]
        raise
    return []


def _unknown(place: Place, error: gymnasium.error.Error) -> str:
    if place.is_users and place.name.isidentifier():
        public = [name for name, value in vars(place.load()).items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(place.name, public, n=1)
        hint = f" Did you mean {place.module}:{near[0]}?" if near else ""
        return f"{place.module} has no class or function {place.name!r} and registers no such environment.{hint}"
    near = difflib.get_close_matches(place.name, gymnasium.registry, n=2, cutoff=0.7)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    hint += "" if place.module else " If your own module registers it, use module:Env-v0; its class is module:Class"
    return f"there is no environment {place.name!r}. {error}{hint}"
