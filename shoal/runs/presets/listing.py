"""Lists presets, built in and the user's, and spells them as command lines. Never imports code of the user."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal import algos
from shoal.algos.base import AlgorithmConfig
from shoal.errors import UsageError
from shoal.runs.flags import spelled
from shoal.runs.presets import Preset, builtin, files, presets, two_homes
from shoal.runs.presets.files import PresetTable
from shoal.runs.settings import Settings


@dataclass(frozen=True)
class ListedPreset:
    """A preset and the algorithm that it is for."""

    algo: str | None
    """Short name; None if the preset may be for any algorithm."""
    preset: Preset

    def flags(self) -> list[str]:
        """Spell the settings as flags, except the environment."""
        kind = _config(self.algo)
        return spelled(self.preset.settings, Settings, *([] if kind is None else [kind]))


def by_name(problems: list[str], algo: str | None = None, name: str | None = None) -> list[ListedPreset]:
    """List the presets that are found by name, of all algorithms or one; adds mistakes in files to `problems`."""
    tables = _chosen(files.read_folder(problems), algo, name)
    homes = defaultdict(list)
    for table in tables:
        homes[table.algo, table.name].append(table)
    problems += [two_homes(same) for same in homes.values() if len(same) > 1]
    found = [
        ListedPreset(known, builtin(preset, values))
        for known in algos.ALGORITHMS
        for preset, values in presets(known).items()
        if algo in (None, known) and name in (None, preset) and (known, preset) not in homes
    ]
    return found + [item for table in tables if (item := _checked(table, table.algo, problems))]


def in_file(file: Path, problems: list[str], name: str | None = None) -> list[ListedPreset]:
    """List the presets of a file; adds mistakes in it to `problems`."""
    tables = files.read_file(file) if name is None else [files.choose(file, name)]
    listed = [_checked(table, None if table.fits_any else table.algo, problems) for table in tables]
    return [item for item in listed if item]


def _chosen(tables: Iterable[PresetTable], algo: str | None, name: str | None) -> list[PresetTable]:
    return [table for table in tables if algo in (None, table.algo) and name in (None, table.name)]


def _checked(table: PresetTable, algo: str | None, problems: list[str]) -> ListedPreset | None:
    try:
        settings = table.checked(_config(algo))
    except UsageError as error:
        problems += error.problems
        return None
    return ListedPreset(algo, Preset(table.name, table.file, settings, replaces=table.name in presets(algo or "")))


def _config(algo: str | None) -> type[AlgorithmConfig] | None:
    """Return the settings of a built-in algorithm: those of any other are code to import."""
    return algos.load(algo).Config if algo in algos.ALGORITHMS else None
