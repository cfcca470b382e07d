"""The wire format of all engines: MessagePack for the structure of a tree, raw aligned blocks for its arrays.

A frame is

    magic  u32 header size  header (MessagePack)  padding  array 0  padding  array 1 ...

and the header refers to arrays by (dtype, shape, offset). Nothing is ever unpickled; dtypes come from a fixed list;
every size is checked against the frame before an array is made, and decoded arrays are read-only views of the frame.

Head and workers exchange messages: a kind, a number (ticket or shared value) and a frame. Streams send `PREFIX` before
the frame, so that a frame that goes to many workers is encoded once.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec
import numpy as np

from shoal.errors import WireError

MAX_FRAME = 2**31
"""Largest frame that is accepted, in bytes."""

Buffer = bytes | bytearray | memoryview

_MAGIC = b"sho1"
_START = struct.Struct("<4sI")
_ALIGN = 64  # so that array views start on cache lines, as NumPy's own arrays do
_ARRAY, _SCALAR, _TUPLE, _SHARED = 1, 2, 3, 4
_MAX_DIMENSIONS = 32

_DTYPES = {
    np.dtype(name).str: np.dtype(name)
    for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
_PLAIN = frozenset({type(None), bool, float, str, bytes})


class Kind(enum.IntEnum):
    """Kinds of messages, with what their frames hold: first those to workers, then those to the head."""

    WELCOME = 1  # WorkerSettings
    TASK = 2  # (name of a function, list of arguments)
    SHARE = 3  # the shared value
    FORGET = 4  # no frame
    HELLO = 10  # dict[str, str]: the worker's fingerprint
    DONE = 11  # DoneBody
    FAILED = 12  # FailedBody


class Message(NamedTuple):
    """One message: `number` is a ticket (TASK, DONE, FAILED) or the number of a shared value (SHARE, FORGET)."""

    kind: int
    number: int
    frame: Buffer = b""


PREFIX = struct.Struct("<BxxxxxxxQQ")
"""Kind, number and frame size, sent before each frame of a stream."""


class WorkerSettings(TypedDict):
    """Body of WELCOME: how a worker finds functions, and which ones it may run."""

    path: list[str]
    """The head's `sys.path`."""
    main: str | None
    """File of the head's script."""
    allow: list[str] | None
    """Modules whose functions may be run, in addition to Shoal's own tasks; None allows any."""
    source: NotRequired[bytes | None]
    """Text of the script, for workers that may not have the file."""


class DoneBody(TypedDict):
    """Body of DONE: how long the task took on the worker, and its result."""

    seconds: float
    result: Any


class ErrorBody(TypedDict):
    """An error as text: the name of its class, its message, and the traceback from the task down."""

    type: str
    message: str
    traceback: str


class FailedBody(ErrorBody):
    """Body of FAILED: how long the task took on the worker, and the error that it raised."""

    seconds: float


class Shared:
    """A shared value: sent once to each worker that needs it. Pass it to tasks in place of the value."""

    __slots__ = ("__weakref__", "frame", "number")

    def __init__(self, number: int, frame: bytes | bytearray) -> None:
        self.number = number
        self.frame = frame

    def __repr__(self) -> str:
        return f"Shared({self.number}, {len(self.frame)} bytes)"


class _Layout:
    """Arrays and shared values found while packing, and the size of the arrays' blocks so far."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []
        self.size = 0
        self.shared: list[Shared] = []

    def add(self, array: np.ndarray) -> bytes:
        offset = self.size
        self.blocks.append(array)
        self.size = _aligned(offset + array.nbytes)
        return msgspec.msgpack.encode((array.dtype.str, array.shape, offset))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def encode(tree: object, what: str = "the value", largest: int = MAX_FRAME) -> bytearray:
    """Encode a tree as a frame. `what` names the tree in the error message if it cannot be sent."""
    return encode_with_shared(tree, what, largest)[0]


def encode_with_shared(
    tree: object, what: str = "the value", largest: int = MAX_FRAME
) -> tuple[bytearray, list[Shared]]:
    """Encode a tree as a frame, and list the shared values that it refers to."""
    layout = _Layout()
    try:
        header = msgspec.msgpack.encode(_pack(tree, layout))
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise WireError(f"{what} cannot be sent to a worker: {_locate(tree) or error}") from None
    start = _aligned(_START.size + len(header))
    frame = bytearray(start + layout.size)
    if len(frame) > largest:
        raise WireError(f"{what} has {len(frame):,} bytes; a message holds at most {largest:,}. Send it in parts")
    _START.pack_into(frame, 0, _MAGIC, len(header))
    frame[_START.size : _START.size + len(header)] = header
    offset = start
    for block in layout.blocks:
        frame[offset : offset + block.nbytes] = block.reshape(-1).view(np.uint8).data
        offset = _aligned(offset + block.nbytes)
    return frame, layout.shared


def _pack(value: Any, layout: _Layout) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        if not -(2**63) <= value < 2**64:
            raise OverflowError("an int beyond 64 bits")
        return value
    if kind is np.ndarray:
        if value.dtype.str not in _DTYPES:
            raise TypeError(f"array of dtype {value.dtype}")
        return msgspec.msgpack.Ext(_ARRAY, layout.add(value if value.flags.c_contiguous else value.copy()))
    if kind is dict:
        for key in value:
            if type(key) is not str and type(key) is not int:
                raise TypeError(f"dict key {key!r}")
        return {key: _pack(item, layout) for key, item in value.items()}
    if kind is list:
        return [_pack(item, layout) for item in value]
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_pack(item, layout) for item in value]))
    if kind is Shared:
        layout.shared.append(value)
        return msgspec.msgpack.Ext(_SHARED, msgspec.msgpack.encode(value.number))
    if isinstance(value, np.generic) and value.dtype.str in _DTYPES:
        return msgspec.msgpack.Ext(_SCALAR, msgspec.msgpack.encode((value.dtype.str, value.tobytes())))
    raise TypeError(kind.__name__)


def _locate(tree: object, path: str = "") -> str | None:
    """Describe where in a tree the first value is that cannot be packed."""
    children: list[tuple[str, object]] = []
    if type(tree) is dict:
        children = [(f"{path}[{key!r}]", item) for key, item in tree.items()]
    elif type(tree) is list or type(tree) is tuple:
        children = [(f"{path}[{index}]", item) for index, item in enumerate(tree)]
    for where, item in children:
        if len(where) < 1000 and (found := _locate(item, where)):
            return found
    try:
        _pack(tree, _Layout())
    except (TypeError, OverflowError) as error:
        return (
            f"at {path or 'the top'} it holds {error}. Only None, bool, int (64 bits), float, str, bytes, list, tuple, "
            f"dict (str or int keys) and NumPy arrays of numbers can be sent; convert it, or create it inside the task."
        )
    except RecursionError:
        return f"at {path[:60]} it is nested too deeply"
    except UnicodeEncodeError as error:
        return f"at {path or 'the top'} it holds text that is not valid Unicode: {error.reason}"
    return None


def decode(frame: Buffer, shared: Mapping[int, object] | None = None) -> Any:
    """Decode the tree of a frame. Arrays are read-only views of the frame; shared values come from `shared`."""
    view = memoryview(frame)
    try:
        magic, size = _START.unpack_from(view)
        start = _aligned(_START.size + size)
        if magic != _MAGIC or _START.size + size > len(view) or len(view) > MAX_FRAME:
            raise WireError("these bytes are not a Shoal message, or are truncated")
        hook = _unpacker(view[start:], {} if shared is None else shared)
        return msgspec.msgpack.decode(view[_START.size : _START.size + size], ext_hook=hook)
    except (
        msgspec.MsgspecError,
        struct.error,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
        OverflowError,
    ) as error:
        raise WireError(f"these bytes are not a valid Shoal message: {error}") from None


def _unpacker(payload: memoryview, shared: Mapping[int, object]) -> Callable[[int, memoryview], object]:
    def hook(code: int, data: memoryview) -> object:
        content = msgspec.msgpack.decode(data, ext_hook=hook)
        if code == _ARRAY:
            return _array(content, payload)
        if code == _TUPLE:
            return tuple(content)
        if code == _SCALAR:
            name, raw = content
            return np.frombuffer(raw, _DTYPES[name], count=1)[0]
        if code == _SHARED:
            return shared[content]
        raise WireError(f"extension type {code} is unknown")

    return hook


def _array(content: Any, payload: memoryview) -> np.ndarray:
    name, shape, offset = content
    dtype = _DTYPES[name]
    if len(shape) > _MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape) or type(offset) is not int:
        raise WireError(f"an array has the impossible shape {shape}")
    count = math.prod(shape)
    if offset < 0 or offset + count * dtype.itemsize > len(payload):
        raise WireError(f"an array of shape {shape} and dtype {dtype} reaches beyond its message")
    array = np.frombuffer(payload, dtype, count=count, offset=offset) if count else np.empty(0, dtype)
    array = array.reshape(shape)
    array.flags.writeable = False
    return array
