"""The shared values of an engine that are still in use."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

from shoal.engines import wire
from shoal.engines.wire import Shared
from shoal.errors import UsageError


class SharedValues:
    """Keeps track of the values that one engine has shared, without keeping them alive."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()
        self._released: list[int] = []

    def add(self, number: int, value: object, largest: int = wire.MAX_FRAME) -> Shared:
        """Encode a value that is to be shared under a number."""
        shared = Shared(number, wire.encode(value, "the shared value", largest))
        self._alive[number] = shared
        # A finalizer may run at any moment in any thread, so it only leaves a note.
        weakref.finalize(shared, self._released.append, number)
        return shared

    def refuse_others(self, values: Iterable[Shared]) -> None:
        """Raise if one of these values was shared with another engine."""
        for value in values:
            if self._alive.get(value.number) is not value:
                raise UsageError(f"{value} was shared with another engine. Share the value again with this one")

    def released(self) -> Iterator[int]:
        """Yield, once each, the numbers of values that are no longer referred to."""
        while self._released:
            yield self._released.pop()

    def __getitem__(self, number: int) -> Shared:
        return self._alive[number]

    def __len__(self) -> int:
        return len(self._alive)
