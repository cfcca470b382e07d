"""Messages as they are stored in Redis: a signature, a header and a frame.

The signature is an HMAC over the name of the Redis key, the header and the frame, so a message cannot be changed, sent
elsewhere or, because serial numbers only rise, sent twice. Without a signing key there is no signature, and messages of
any user of the server are accepted; even then workers only run what they may (`functions.OWN_TASKS`).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import struct
from typing import TypeVar

import msgspec

from shoal.errors import WireError

log = logging.getLogger("shoal.redis")

PREFIX = "shoal:"
"""Prefix of all of Shoal's keys in Redis."""
LARGEST = 512 * 2**20 - 2**16
"""Size of the largest frame in bytes: Redis takes values of up to 512 MiB."""
_MAGIC = b"shr1"
_START = struct.Struct("<4s32sI")
_LARGEST_HEADER = 2**20
_UNSIGNED = bytes(32)

T = TypeVar("T")


class Word(enum.IntEnum):
    """Kinds of messages in addition to `wire.Kind`."""

    LOOK = 20  # head to machine: read the records again
    LEAVE = 21  # head to machine: replace this worker, which was given up
    REFUSE = 22  # head to machine: this machine would compute different bits
    ALIVE = 30  # machine to head: these workers are alive
    LEFT = 31  # machine to head: this worker is gone, and why


class Header(msgspec.Struct, array_like=True, frozen=True):
    """Sender, recipient and kind of a message."""

    run: str
    epoch: int
    machine: str
    worker: int
    serial: int
    kind: int
    number: int


def seal(key: bytes, name: str, header: msgspec.Struct | None, frame: bytes | bytearray | memoryview = b"") -> bytes:
    """Pack a header and a frame for the Redis key `name`, signed with `key` unless that is empty."""
    packed = msgspec.msgpack.encode(header)
    sign = _sign(key, name, packed, frame) if key else _UNSIGNED
    return b"".join((_START.pack(_MAGIC, sign, len(packed)), packed, frame))


def unseal(key: bytes, name: str, content: bytes, kind: type[T]) -> tuple[T, memoryview]:
    """Check and unpack the header (of type `kind`) and the frame of a message; WireError if it is invalid."""
    view = memoryview(content)
    try:
        magic, sign, size = _START.unpack_from(view)
    except struct.error:
        raise WireError("not a message of Shoal: too short") from None
    start = _START.size + size
    if magic != _MAGIC or size > _LARGEST_HEADER or start > len(view):
        raise WireError("not a message of Shoal")
    packed, frame = view[_START.size : start], view[start:]
    if key and not hmac.compare_digest(sign, _sign(key, name, packed, frame)):
        raise WireError("a message has no valid signature: its sender has a different key (SHOAL_KEY_FILE), or none")
    if not key and sign != _UNSIGNED:
        raise WireError("a message is signed, but this process has no key to check it: set SHOAL_KEY_FILE")
    return unpack(packed, kind), frame


def unpack(frame: memoryview, kind: type[T]) -> T:
    """Decode MessagePack to the type `kind`."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise WireError(f"a message has invalid content: {error}") from None


def _sign(key: bytes, name: str, packed: bytes | memoryview, frame: bytes | bytearray | memoryview) -> bytes:
    total = hmac.new(key, digestmod=hashlib.sha256)
    total.update(struct.pack("<II", len(name), len(packed)))
    for part in (name.encode(), packed, frame):
        total.update(part)
    return total.digest()


class Refusals:
    """Counts refused messages, and logs the first of each kind."""

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[str] = set()

    def add(self, where: str, error: WireError) -> None:
        self.count += 1
        kind = str(error).partition(":")[0]
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("refused a message in %s: %s. Further ones of this kind are counted, not logged", where, error)


class Serials:
    """The last serial number of each sender, which may only rise.

    Checked only where messages are signed. Elsewhere a forged high number would silence a sender.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last: dict[tuple[str, int, str], int] = {}

    def check(self, header: Header) -> None:
        if not self._key:
            return
        sender = (header.run, header.epoch, header.machine)
        if header.serial <= self._last.get(sender, -1):
            raise WireError("a message was received twice: its serial number has not risen")
        self._last[sender] = header.serial
