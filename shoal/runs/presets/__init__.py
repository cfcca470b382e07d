"""Presets: tuned settings as data, one TOML file per algorithm and one table per environment.

Each file notes which presets have no complete learning curve yet.
"""

from __future__ import annotations

import dataclasses
import tomllib
from importlib import resources
from typing import Any

from shoal import algos


def presets(algo: str) -> dict[str, dict[str, Any]]:
    """Read the presets of an algorithm: name -> settings; empty if it has none."""
    file = resources.files(__name__) / f"{algo}.toml"
    if not algos.is_builtin(algo):
        return {}
    return tomllib.loads(file.read_text()) if file.is_file() else {}


def find_preset(algo: str, name: str) -> dict[str, Any] | None:
    """Return the settings of one preset, with `env` filled in; None if the algorithm has no such preset."""
    found = presets(algo).get(name)
    if found is None:
        return None
    settings = {"env": name} | found
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def own(kind: type[Any], preset: dict[str, Any]) -> dict[str, Any]:
    """Select those settings of a preset that are fields of a dataclass."""
    return {field.name: preset[field.name] for field in dataclasses.fields(kind) if field.name in preset}


def command_line(algo: str, name: str) -> tuple[str, list[str]]:
    """Spell a preset as command-line arguments: its environment, and flags for all its settings."""
    settings = presets(algo)[name]
    words: list[str] = []
    for key, value in settings.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif key != "env":
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return settings.get("env", name), words
