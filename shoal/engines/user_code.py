"""Modules of the user: algorithms, environments and wrappers, by import path or by file.

A file `dir/a2c.py` is imported as the module `a2c`, with `dir` at the end of `sys.path`, so that workers, which receive
the path, find its functions too. A file of a package is imported under its dotted name. The file of the script that is
running is not imported again: its module is `__main__`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from shoal.errors import ShoalError, UsageError

MAIN = "__main__"
_importing = threading.RLock()  # a module may import another one by file
_running = threading.local()


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
        module = module_name(name)
        try:
            with being_imported():
                return importlib.import_module(module)
        except ShoalError:
            raise
        except Exception as error:
            raise UsageError(f"the module {name} cannot be imported: {type(error).__name__}: {error}") from error


def module_name(name: str) -> str:
    """Return the name to import a module by, given by name or file; makes the module of a file importable."""
    if not is_file(name):
        return name
    path = absolute(name)
    return MAIN if path == main_file() else _module_of_file(path)


def main_file() -> Path | None:
    """Return the file of the running script; None in a notebook, and under `python -m`, where it is a module."""
    main = sys.modules.get(MAIN)
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None or not file.endswith(".py"):
        return None
    return absolute(file)


def locate(thing: object, what: str) -> str:
    """Return the name `module:name` by which any process finds a class or function; a file for that of a script."""
    module: str | None = getattr(thing, "__module__", None)
    name: str | None = getattr(thing, "__qualname__", None)
    if isinstance(thing, functools.partial):
        raise UsageError(
            f"{what} is a partial call, which has no name. Pass {thing.func!r} and its arguments separately"
        )
    if module is None or name is None or not callable(thing):
        raise UsageError(f"{what} must be a name, a class or a function, not {thing!r}")
    if "<" in name or "." in name:
        kind = "a lambda" if "<lambda>" in name else "defined inside another function or class"
        raise UsageError(f"{what} {name} is {kind}, so workers cannot find it: define it at the top level of a module")
    if module == MAIN and (file := main_file()) is not None:
        module = str(file)
    elif module == MAIN and (spec := getattr(sys.modules[MAIN], "__spec__", None)) is not None:
        module = spec.name
    return f"{module}:{name}"


@contextlib.contextmanager
def being_imported() -> Iterator[None]:
    """Note that this thread imports code of the user, which then must not start to train."""
    outer, _running.importing = getattr(_running, "importing", False), True
    try:
        yield
    finally:
        _running.importing = outer


def refuse_while_imported() -> None:
    """Raise if an engine is started by a script or module that is only imported, to find what it defines."""
    if getattr(_running, "importing", False):
        raise UsageError(
            "this script starts an engine when it is imported, and workers import it to find what it defines. "
            'Put the part that starts the engine under `if __name__ == "__main__":`'
        )


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
    if origin is None or not origin.endswith(".py"):
        return []
    file = Path(origin)
    return sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]


def folder_of(module: ModuleType) -> str:
    """Return the folder that has to be on `sys.path` for a module to be found; empty if it has no source file."""
    origin = getattr(module, "__file__", None)
    if origin is None:
        return ""
    file = Path(origin).absolute()
    return str(file.parents[module.__name__.count(".") + (file.name == "__init__.py")])


def content_digest(module: ModuleType) -> str:
    """Digest the source of a module, and of the package that contains it; empty if it has no source file.

    Computed once per process, so that it stands for the code that was imported even if files change afterwards.
    """
    return _digest(module.__name__)


@functools.cache
def _digest(name: str) -> str:
    files = code_files(sys.modules[name])
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()[:12] if files else ""


def require(name: str, digest: str) -> None:
    """Raise if a module, by name or file, is not the one with this digest: results would silently differ."""
    module = load(name)
    found = content_digest(module)
    if found != digest:
        raise UsageError(
            f"the code of {name} differs between the head ({digest}) and a worker ({found}, "
            f"{getattr(module, '__file__', None)}), so results would differ. Copy the same files to every machine and "
            f"restart its workers; in a notebook, restart the kernel after a change"
        )
