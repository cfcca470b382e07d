"""Presets: tuned settings as data, in TOML files with one table per environment or task.

The built-in files are in this folder, one per algorithm, and note which presets have no complete learning curve yet.
`files` reads the user's own. Of two presets with the same name, the user's is used.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from shoal import algos
from shoal.envs.names import env_problems
from shoal.errors import UsageError
from shoal.runs.presets import files
from shoal.runs.presets.files import PresetTable

log = logging.getLogger("shoal.presets")


@dataclass(frozen=True)
class Preset:
    """A preset for an algorithm, with checked settings."""

    name: str
    file: Path | None
    """The user's file that contains it; None if it is built in."""
    settings: dict[str, Any]
    """Includes `env` only where the preset itself does."""
    replaces: bool = False
    """Whether it is used instead of a built-in one of the same name."""

    @property
    def env(self) -> str:
        """The environment: a preset that does not set one has its name."""
        return str(self.settings.get("env", self.name))

    def on(self, env: str | None) -> dict[str, Any]:
        """Return the settings for an environment, by default the preset's; refuse if it has none."""
        if env is None and self.file and "env" not in self.settings and env_problems(self.name):
            raise UsageError(
                f"the preset {self.name} of {self.file} has no environment: name one on the command line or in Python, "
                f'or add a key such as env = "CartPole-v1"'
            )
        return self.settings | {"env": self.env if env is None else env}


def presets(algo: str) -> dict[str, dict[str, Any]]:
    """Read the built-in presets of an algorithm: name -> settings; empty if it has none."""
    file = resources.files(__name__) / f"{algo}.toml"
    if not algos.is_builtin(algo):
        return {}
    return tomllib.loads(file.read_text()) if file.is_file() else {}


def find_preset(algo: str, name: str) -> dict[str, Any] | None:
    """Return the settings of one preset, with `env` filled in; None if the algorithm has no such preset."""
    found = find(algo, name)
    return None if found is None else found.on(None)


def find(algo: str, name: str) -> Preset | None:
    """Find a preset by name: in the user's folder, or built in."""
    problems: list[str] = []
    tables = [table for table in _of_folder(algo, problems) if table.name == name]
    if len(tables) > 1:
        problems.append(two_homes(tables))
    if problems:
        raise UsageError(problems)
    values = presets(algo).get(name)
    if tables:
        if values is not None:
            log.info("the preset %s of %s is used instead of the built-in one", name, tables[0].file)
        return _preset(algo, tables[0], replaces=values is not None)
    return None if values is None else builtin(name, values)


def named(algo: str, reference: str) -> Preset:
    """Return the preset that `my.toml:fast` or `fast` stands for, or refuse it."""
    file, name = files.split_reference(reference)
    if file is not None:
        table = files.choose(file, name)
        if not table.fits_any and table.algo != algos.short_name(algo):
            why = f"its key {files.ALGO}" if table.declared else "the name of the file"
            raise UsageError(f"the preset {name} of {file} is for {table.algo} ({why}), not for {algo}")
        return _preset(algo, table)
    found = find(algo, name)
    if found is None:
        known = f"To list the presets, run: shoal presets {algo}"
        raise UsageError(f"{algos.short_name(algo)} has no preset {name!r}. {hint(algo, name) or known}")
    return found


def hint(algo: str, name: str) -> str:
    """Suggest what may be meant by the name of a preset that an algorithm does not have; empty if nothing is near."""
    short = algos.short_name(algo)
    of_folder = [table for table in files.read_folder([]) if isinstance(table.content, dict)]
    same = [table for table in of_folder if table.name == name]
    if general := [table.file for table in same if table.fits_any]:
        return (
            f"{general[0]} has a preset {name!r}: to use it, add --preset {general[0]}:{name}, or give its table the "
            f'key {files.ALGO} = "{short}"'
        )
    others = {table.algo: table.content for table in same}
    others |= {other: found[name] for other in algos.ALGORITHMS if name in (found := presets(other))}
    if others:
        env = next(iter(others.values())).get("env", name)
        return f"{name!r} is a preset of {' and '.join(others)}, on {env}; {short} has none of that name"
    known = [*(table.name for table in of_folder if table.algo == short), *presets(algo)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"{short} has a preset {near[0]!r}; did you mean that?" if near else ""


def two_homes(tables: Sequence[PresetTable]) -> str:
    """Describe presets of one name and algorithm in several files."""
    places = " and ".join(str(table.file) for table in tables)
    return f"{places} have presets of the same name, {tables[0].name}: rename all but one"


def own(kind: type[Any], preset: dict[str, Any]) -> dict[str, Any]:
    """Select those settings of a preset that are fields of a dataclass."""
    return {field.name: preset[field.name] for field in dataclasses.fields(kind) if field.name in preset}


def _of_folder(algo: str, problems: list[str]) -> list[PresetTable]:
    return [table for table in files.read_folder(problems) if table.algo == algos.short_name(algo)]


def _preset(algo: str, table: PresetTable, replaces: bool = False) -> Preset:
    return Preset(table.name, table.file, table.checked(algos.load(algo).Config), replaces)


def builtin(name: str, values: Mapping[str, Any]) -> Preset:
    """Make a preset of the settings in a built-in file."""
    return Preset(
        name, None, {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    )
