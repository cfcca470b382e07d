"""Shoal: distributed reinforcement learning with the same results on every engine and any number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Engine", "Shared", "__version__", "engine", "errors"]

if TYPE_CHECKING:
    from shoal import errors
    from shoal.engines import make as engine
    from shoal.engines.base import Engine
    from shoal.engines.wire import Shared


def __getattr__(name: str) -> object:
    # Imported on first use, because `import shoal` is part of every start of a worker and of the command line.
    if name == "engine":
        from shoal.engines import make

        return make
    if name == "Engine":
        from shoal.engines.base import Engine

        return Engine
    if name == "Shared":
        from shoal.engines.wire import Shared

        return Shared
    if name == "errors":
        import shoal.errors

        return shoal.errors
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
