"""Functions are sent by name (`module:function`) and looked up on the worker. No code is pickled."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Collection
from types import ModuleType

from shoal.engines.user_code import MAIN, being_imported, content_digest, require
from shoal.errors import NotNameable, UsageError

_MAIN_ON_WORKER = "__shoal_main__"

OWN_TASKS = "shoal.sampling.tasks"
"""The module whose functions every worker runs, even one that trusts no other module. The package has functions that
start processes and write files, so being part of it is not enough."""
_trusted: frozenset[str] | None = None  # modules that this process may import because a message names them; None: any


def name_of(function: Callable[..., object]) -> str:
    """Return the name by which a worker finds a function; refuse functions that have none."""
    module: str | None = getattr(function, "__module__", None)
    name: str | None = getattr(function, "__qualname__", None)
    advice = "Define it with `def` at the top level of a module or of your script, and pass what it needs as arguments."
    if module is None or name is None or not callable(function):
        raise NotNameable(f"{function!r} has no importable name, so workers cannot find it. {advice}")
    if "<" in name or "." in name:
        kind = "a lambda" if "<lambda>" in name else "defined inside another function or class"
        raise NotNameable(f"{name} is {kind}, so workers cannot find it. {advice}")
    found = getattr(sys.modules.get(module), name, None)
    if found is not function:
        raise NotNameable(f"{module}:{name} names something else than the function that was passed. {advice}")
    if module in (MAIN, _MAIN_ON_WORKER):
        spec = getattr(sys.modules[module], "__spec__", None)
        # `python -m package.script` has an importable name; a plain script is loaded from its file.
        module = spec.name if module == MAIN and spec is not None else MAIN
    return f"{module}:{name}"


def with_digest(name: str) -> str:
    """Add the digest of the user's code to a function's name, so that a worker with other code refuses the task."""
    module = name.partition(":")[0]
    found = sys.modules.get(module)  # None for a script that runs as a module
    if found is None or module == MAIN or module.partition(".")[0] == "shoal":  # the fingerprint covers Shoal
        return name
    return f"{name}@{content_digest(found)}"


def main_script() -> str | None:
    """Return the file of the running script, from which workers load functions of `__main__`."""
    return getattr(sys.modules.get(MAIN), "__file__", None)


def trust(modules: Collection[str] | None) -> None:
    """From now on, let messages make this process import these modules only; None allows any."""
    global _trusted  # noqa: PLW0603 - a process serves one head
    _trusted = None if modules is None else frozenset(modules)


def refuse_module(name: str) -> None:
    """Raise if a module that a message names is not among those that this process trusts."""
    if _trusted is not None and not covers(_trusted, name):
        raise UsageError(
            f"this worker may not import {name}. If you trust that module, start the worker with --allow {name}"
        )


def covers(modules: Collection[str], name: str) -> bool:
    """Whether a module, or a package that contains it, is among these."""
    parents = name.split(".")
    return any(".".join(parents[: depth + 1]) in modules for depth in range(len(parents)))


class Functions:
    """Finds functions by name on a worker.

    `allow` lists the modules that may be named in addition to Shoal's own tasks; None allows any. `main` is the file of
    the head's script, and `source` its text if the worker may not have that file.
    """

    def __init__(
        self, allow: Collection[str] | None = (), main: str | None = None, source: bytes | None = None
    ) -> None:
        self.allow = None if allow is None else frozenset(allow)
        self.main = main
        self.source = source
        self._found: dict[str, Callable[..., object]] = {}

    def find(self, name: str) -> Callable[..., object]:
        """Return the function with the name `module:function`, with the digest of its code if `@digest` follows."""
        if name not in self._found:
            plain, _, digest = name.partition("@")
            found = self._find(plain)
            if digest:
                require(plain.partition(":")[0], digest)
            self._found[name] = found
        return self._found[name]

    def remember(self, name: str, function: Callable[..., object]) -> None:
        """Register a function of this process: to look it up by name would load the head's script a second time."""
        self._found[name] = function

    def permit(self, name: str) -> None:
        """Raise if a function of this name may not be run here. Imports nothing."""
        module_name, _, function = name.partition(":")
        own = module_name == OWN_TASKS and not function.startswith("_")
        if self.allow is not None and not own and not covers(self.allow, module_name):
            allowed = ", ".join(["Shoal's own tasks", *sorted(self.allow)])
            raise UsageError(
                f"this worker may not run {name}: it was started for {allowed}. "
                f"If you trust that module, start the worker with --allow {module_name}"
            )

    def _find(self, name: str) -> Callable[..., object]:
        self.permit(name)
        module_name, _, function_name = name.partition(":")
        module = self._load_main() if module_name == MAIN else importlib.import_module(module_name)
        function: object = getattr(module, function_name, None)
        if not callable(function):
            raise UsageError(f"this worker found no function {function_name} in {module_name} ({module.__file__})")
        if self.allow is not None and getattr(function, "__module__", None) != module.__name__:
            raise UsageError(f"this worker may not run {name}: {module_name} only imports it from another module")
        return function

    def _load_main(self) -> ModuleType:
        if _MAIN_ON_WORKER in sys.modules:
            return sys.modules[_MAIN_ON_WORKER]
        if self.main is None:
            raise UsageError("the head has no script file (an interactive session?). Put the function into a module")
        loader = None if self.source is None else _ScriptLoader(self.main, self.source)
        spec = importlib.util.spec_from_file_location(_MAIN_ON_WORKER, self.main, loader=loader)
        if spec is None or spec.loader is None:
            raise UsageError(f"the worker cannot load the script {self.main}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MAIN_ON_WORKER] = module
        try:
            with being_imported():
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[_MAIN_ON_WORKER]
            raise
        return module


class _ScriptLoader(importlib.abc.SourceLoader):
    """Loads a script from its text; `path` is its file on the head."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str | bytes) -> bytes:
        if path != self.path:
            raise OSError(f"the head sent {self.path} only, not {path!r}")
        return self.source
