"""Preset files of the user: TOML with one table per preset, in the folder `presets` or anywhere else.

They are read defensively, because any tool may have written them, and without importing code of the user.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import algos
from shoal.algos.base import AlgorithmConfig
from shoal.errors import UsageError
from shoal.runs.settings import Settings
from shoal.runs.values import converted_fields, field_names, unknown_setting

FOLDER = Path("presets")
"""The user's presets that are found by name, in the working directory."""

SUFFIX = ".toml"
ALGO = "algo"
"""Key of a table that names its algorithm, in a file that is not named after one."""

MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class PresetTable:
    """One entry of a preset file, not checked yet."""

    file: Path
    name: str
    content: Any
    """Its settings; anything but a table is refused when it is used or listed."""
    general: bool
    """Whether the file is not named after an algorithm that Shoal knows by name."""

    @property
    def declared(self) -> str | None:
        """Short name of the algorithm that the table is for; None if it does not name one."""
        algo = self.content.get(ALGO) if isinstance(self.content, dict) else None
        return algos.short_name(algo) if isinstance(algo, str) else None

    @property
    def algo(self) -> str:
        """Short name of the algorithm that the table is for, by its key or the name of the file."""
        return self.declared or self.file.stem

    @property
    def fits_any(self) -> bool:
        """Whether neither the table nor the name of its file says which algorithm it is for."""
        return self.general and self.declared is None

    def checked(self, kind: type[AlgorithmConfig] | None) -> dict[str, Any]:
        """Convert the settings, or refuse all mistakes at once.

        `kind` holds the settings of the algorithm; if it is None, because it takes the user's code to know them, only
        the settings of the run are checked.
        """
        if not isinstance(self.content, dict):
            raise UsageError(
                f"{self.file}: {self.name} is not a table of settings: begin each preset with its name, as in [fast]"
            )
        given = {key: value for key, value in self.content.items() if key != ALGO}
        problems: list[str] = []
        if ALGO in self.content and self.declared is None:
            problems.append(f"{ALGO} must be the name of an algorithm, not {self.content[ALGO]!r}")
        known = field_names(Settings) | (set(given) if kind is None else field_names(kind))
        problems += [_unknown(key, given[key], known, self.name) for key in given if key not in known]
        values = given | converted_fields(Settings, given, problems)
        if kind is not None:
            values |= converted_fields(kind, given, problems)
        if problems:
            raise UsageError([f"{self.file}: [{self.name}]: {problem}" for problem in problems])
        return values


def _unknown(key: str, value: object, known: set[str], table: str) -> str:
    if isinstance(value, dict):
        return f'{key!r} is a table inside a table. A name that contains a dot needs quotes: ["{table}.{key}"]'
    return unknown_setting(key, known)


def read_file(file: Path) -> list[PresetTable]:
    """Read a preset file, or refuse it."""
    try:
        path = file.expanduser()
        if path.exists() and not path.is_file():
            raise UsageError(f"{file} is not a file")  # reading a pipe would wait
        with path.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"there is no file {file}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise UsageError(f"{file} cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{file} has more than {MAX_BYTES:,} bytes, which is too much for a preset file")
    try:
        tables = tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text, as TOML has to be") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}") from None
    general = file.stem not in (*algos.ALGORITHMS, *algos.installed())
    return [PresetTable(file, name, content, general) for name, content in tables.items()]


def read_folder(problems: list[str]) -> list[PresetTable]:
    """Read all files of the folder `presets`; adds those that cannot be read to `problems`."""
    found: list[PresetTable] = []
    for file in sorted(FOLDER.glob(f"*{SUFFIX}")) if FOLDER.is_dir() else []:
        try:
            found += read_file(file)
        except UsageError as error:
            problems += error.problems
    return found


def split_reference(text: str) -> tuple[Path | None, str]:
    """Split `my.toml:fast` into file and name; the file is None for `fast`, and the name empty for `my.toml`."""
    stem, dot, name = text.partition(f"{SUFFIX}:")
    if dot:
        return Path(stem + SUFFIX), name
    return (Path(text), "") if text.endswith(SUFFIX) else (None, text)


def choose(file: Path, name: str) -> PresetTable:
    """Return the table of a name in a file."""
    tables = {table.name: table for table in read_file(file)}
    if name not in tables:
        what = f"has no preset {name!r}" if name else "may hold several presets, so name one of them"
        raise UsageError(f"{file} {what}. {_hint(name, list(tables), f'{file}:')}")
    return tables[name]


def _hint(name: str, known: Sequence[str], prefix: str) -> str:
    """Suggest a preset of a file; `prefix` is its path and a colon."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"Did you mean {prefix}{near[0]}?"
    return f"Presets in it: {', '.join(f'{prefix}{other}' for other in known) or 'none'}"
