"""Presets: settings that are known to learn, as data. One TOML file per algorithm, one table per environment."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any


def presets(algo: str) -> dict[str, dict[str, Any]]:
    """Table from preset name to settings, as they stand in the algorithm's file; empty if it has none."""
    file = resources.files(__name__) / f"{algo}.toml"
    return tomllib.loads(file.read_text()) if file.is_file() else {}


def find(algo: str, name: str) -> dict[str, Any] | None:
    """The settings of one preset, with `env` filled in; None if there is none of that name."""
    found = presets(algo).get(name)
    if found is None:
        return None
    settings = {"env": name} | found
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
