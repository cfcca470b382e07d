"""Modules of the user: algorithms, environments and wrappers, by import path or by file.

A file `dir/a2c.py` is imported as the module `a2c`, with `dir` at the end of `sys.path`, so that workers, which receive
the path, find its functions too. A file of a package is imported under its dotted name.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

from shoal.errors import ShoalError, UsageError

_importing = threading.Lock()


def is_file(name: str) -> bool:
    """Test whether a name is spelled as a file, not as a module."""
    return name.endswith(".py") or os.sep in name


def absolute(name: str) -> Path:
    """Return the absolute path of a file."""
    return Path(name).expanduser().absolute()


def is_importable(module: str) -> bool:
    """Test whether a module of this name can be found. Imports its parent packages, as Python's own search does."""
    if not all(part.isidentifier() for part in module.split(".")):
        return False
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except Exception:  # a parent package that raises exists; importing it reports why
        return True


def load(name: str) -> ModuleType:
    """Import a module by name or file. Whatever its code raises becomes a `UsageError` that says so."""
    with _importing:
        module = _module_of_file(absolute(name)) if is_file(name) else name
        try:
            return importlib.import_module(module)
        except ShoalError:
            raise
        except Exception as error:
            raise UsageError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _module_of_file(path: Path) -> str:
    """Make the module of a file importable, and return its name."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    if path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file: its name must end in .py")
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    name = ".".join(parts)
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"{path} cannot be imported as the module {name!r}: rename it to letters, digits and _")
    if str(root) not in sys.path:
        sys.path.append(str(root))
        importlib.invalidate_caches()
    found = sys.modules.get(name)
    origin = (
        found.__spec__.origin if found and found.__spec__ else getattr(importlib.util.find_spec(name), "origin", None)
    )
    if origin is None or Path(origin).resolve() != path.resolve():
        raise UsageError(f"{path} is hidden by another module {name!r} ({origin or 'built in'}): rename the file")
    return name


def code_files(module: ModuleType) -> list[Path]:
    """List the source files that count as a module's code: itself, or all of the package that contains it."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    origin = getattr(top, "__file__", None) or getattr(module, "__file__", None)
    if origin is None:
        return []
    file = Path(origin)
    return sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]


def content_digest(module: ModuleType) -> str:
    """Digest the source of a module, and of the package that contains it; empty if it has no source file."""
    files = code_files(module)
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()[:12] if files else ""
