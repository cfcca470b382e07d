import tracemalloc

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from shoal.engines import wire
from shoal.errors import WireError

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda d: npst.arrays(d, npst.array_shapes(min_dims=0, min_side=0, max_side=4))
)
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
trees = st.recursive(
    plain | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)  # type: ignore[index, call-overload]
    return a == b or repr(a) == repr(b) == "nan"


@given(trees)
def test_round_trip(tree: object) -> None:
    assert same(tree, wire.decode(wire.encode(tree)))


@given(trees)
@settings(max_examples=50)
def test_arrays_are_aligned_views(tree: object) -> None:
    frame = wire.encode({"x": np.arange(7.0), "tree": tree})
    array = wire.decode(frame)["x"]
    start = np.frombuffer(frame, np.uint8).ctypes.data
    assert (array.ctypes.data - start) % 64 == 0
    assert not array.flags.writeable


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_random_bytes_are_refused(data: bytes) -> None:
    for frame in (data, b"sho1" + data, wire._START.pack(b"sho1", len(data)) + data):
        try:
            wire.decode(frame)
        except WireError:
            continue


@given(trees, st.data())
@settings(max_examples=300)
def test_damaged_frames_never_crash(tree: object, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(tree))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (frame, frame[:cut]):
        try:
            wire.decode(damaged)
        except WireError:
            continue


def hostile(code: int, content: object) -> bytes:
    header = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content)))
    return wire._START.pack(b"sho1", len(header)) + header + bytes(256)


@pytest.mark.parametrize(
    "content",
    [
        ("|O", [1], 0),
        ("<f8", [2**40], 0),
        ("<f8", [-1], 0),
        ("<f8", [2**31, 2**31, 2**31], 0),
        ("<f8", [1], -8),
        ("<f8", [1], 2**62),
        ("<f8", [1.5], 0),
        ("<f8", [1] * 64, 0),
        ("<f8", "x", 0),
        ("V1000000000", [1], 0),
    ],
)
def test_hostile_arrays_are_refused_before_memory_is_taken(content: object) -> None:
    tracemalloc.start()
    with pytest.raises(WireError):
        wire.decode(hostile(1, content))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_pickles_and_unknown_extensions_are_refused() -> None:
    import pickle

    with pytest.raises(WireError):
        wire.decode(pickle.dumps({"a": 1}))
    with pytest.raises(WireError, match="extension type 99"):
        wire.decode(hostile(99, 1))
    with pytest.raises(WireError):
        wire.decode(hostile(4, 12345))  # a shared value that was never sent


def test_deep_nesting_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(WireError):
        wire.encode(deep)
    header = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(WireError):
        wire.decode(wire._START.pack(b"sho1", len(header)) + header)
