"""Messages as they lie in Redis: who says what to whom, for which run and epoch, sealed.

A message is a signature, a header and a frame. The signature is an HMAC over the key's name in Redis, the header and
the frame, so a message cannot be changed, sent elsewhere or, as serial numbers only rise, sent twice. Without a key
there is none, and whoever gets into the server is believed; what workers do for them is limited all the same
(`functions.OWN_TASKS`).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import struct
from typing import Any, TypeVar

import msgspec

from shoal.errors import WireError

log = logging.getLogger("shoal.redis")

PREFIX = "shoal:"
"""What all of Shoal's keys in Redis begin with."""
LARGEST = 512 * 2**20 - 2**16
"""Bytes of the largest frame: Redis takes values of 512 MiB."""
_MAGIC = b"shr1"
_START = struct.Struct("<4s32sI")
_LARGEST_HEADER = 2**20
_UNSIGNED = bytes(32)

T = TypeVar("T")


class Word(enum.IntEnum):
    """Kinds of messages beside those that all engines have."""

    LOOK = 20  # head to machine: runs have changed
    LEAVE = 21  # head to machine: this worker was given up
    REFUSE = 22  # head to machine: this machine would compute other bits
    ALIVE = 30  # machine to head: these workers are alive
    LEFT = 31  # machine to head: this worker is gone


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What stands before a frame."""

    run: str
    epoch: int
    machine: str
    worker: int
    serial: int
    kind: int
    number: int


def seal(key: bytes, name: str, header: Any, frame: bytes | bytearray | memoryview = b"") -> bytes:
    """A header and a frame as they are put under a name in Redis."""
    packed = msgspec.msgpack.encode(header)
    sign = _sign(key, name, packed, frame) if key else _UNSIGNED
    return b"".join((_START.pack(_MAGIC, sign, len(packed)), packed, frame))


def unseal(key: bytes, name: str, content: bytes, kind: type[T]) -> tuple[T, memoryview]:
    """Header and frame of what was found under a name; WireError if it is not what it should be."""
    view = memoryview(content)
    try:
        magic, sign, size = _START.unpack_from(view)
    except struct.error:
        raise WireError("these bytes are not a message of Shoal: they are cut off") from None
    start = _START.size + size
    if magic != _MAGIC or size > _LARGEST_HEADER or start > len(view):
        raise WireError("these bytes are not a message of Shoal")
    packed, frame = view[_START.size : start], view[start:]
    if key and not hmac.compare_digest(sign, _sign(key, name, packed, frame)):
        raise WireError("a message has no valid signature: its sender has another key (SHOAL_KEY_FILE), or none")
    if not key and sign != _UNSIGNED:
        raise WireError("a message is signed, and there is no key here to check it by: set SHOAL_KEY_FILE")
    return unpack(packed, kind), frame


def unpack(frame: memoryview, kind: type[T]) -> T:
    """What a short message says, if it is of the right kind."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise WireError(f"a message does not say what it should: {error}") from None


def _sign(key: bytes, name: str, packed: bytes | memoryview, frame: bytes | bytearray | memoryview) -> bytes:
    total = hmac.new(key, digestmod=hashlib.sha256)
    total.update(struct.pack("<II", len(name), len(packed)))
    for part in (name.encode(), packed, frame):
        total.update(part)
    return total.digest()


class Refusals:
    """What was refused: counted, and each kind of it said once."""

    def __init__(self) -> None:
        self.count = 0
        self._said: set[str] = set()

    def add(self, where: str, error: WireError) -> None:
        """Count one."""
        self.count += 1
        kind = str(error).partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            log.warning("refused a message in %s: %s. More of the kind are counted, not said", where, error)


class Serials:
    """Serial numbers that were seen, by sender: they only rise.

    Looked at only where there is a key. Elsewhere they prove nothing, and anybody could say that he was at a billion.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last: dict[tuple[str, int, str], int] = {}

    def check(self, header: Header) -> None:
        """Refuse a message that was seen before."""
        if not self._key:
            return
        sender = (header.run, header.epoch, header.machine)
        if header.serial <= self._last.get(sender, -1):
            raise WireError("a message came a second time: its serial number is not above the one before")
        self._last[sender] = header.serial
