"""Shoal: distributed reinforcement learning with the same answer on every engine and any number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "Shared", "__version__", "engine", "errors"]

if TYPE_CHECKING:
    from shoal import errors
    from shoal.engines import make as engine
    from shoal.engines.base import Engine
    from shoal.engines.wire import Shared


def __getattr__(name: str) -> Any:
    # Late, so that `import shoal` stays cheap: workers and `shoal --help` pay for it at every start.
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
