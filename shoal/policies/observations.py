"""Observations that are no arrays (Dict, Tuple, Discrete, text, ...), flattened to one vector as Gymnasium does.

A policy file holds the space as plain data, so that a loaded policy takes the observations of its environment.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from shoal.errors import UsageError

Space: TypeAlias = spaces.Space[Any]
SpaceRecord: TypeAlias = dict[str, Any]
"""A space as plain data: its `kind` and what flattening needs to know."""

TEXT_LENGTH = 256
"""Characters of a text whose space states no length, as that of MiniGrid's missions."""


class Flattener:
    """Turns the observations of a space into vectors: categories one-hot, text as padded character codes."""

    def __init__(self, space: Space) -> None:
        self.space = _with_text(space)
        flat = spaces.utils.flatten_space(self.space)
        if not isinstance(flat, spaces.Box):
            raise UsageError(
                f"the observation space {space} is not supported, because its size is not fixed. "
                f"Supported spaces: Box, Discrete, MultiDiscrete, MultiBinary, Text, and Dict or Tuple of these"
            )
        self.flat = flat

    def __call__(self, observation: Any) -> np.ndarray:
        """Flatten one observation."""
        return np.asarray(spaces.utils.flatten(self.space, observation))

    def rows(self, observation: Any) -> tuple[np.ndarray, bool]:
        """Flatten one observation, or a batch: a list of observations, or one whose arrays have one more dimension.

        Returns rows (n, size), and whether it was a single observation.
        """
        try:
            if isinstance(observation, list) and not isinstance(self.space, spaces.Tuple):
                return np.stack([self(one) for one in observation]), False
            count = _batch_size(self.space, observation)
            if count is None:
                return self(observation)[None], True
            return np.stack([self(_pick(self.space, observation, at)) for at in range(count)]), False
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError(
                f"the observation does not fit the space of this policy, {self.space} ({type(error).__name__}: {error})"
            ) from None

    def to_record(self) -> SpaceRecord:
        """Convert to plain data."""
        return _to_record(self.space)

    @staticmethod
    def from_record(record: SpaceRecord) -> Flattener:
        """Rebuild from `to_record`."""
        return Flattener(_from_record(record))


def _with_text(space: Space) -> Space:
    """Replace spaces of strings that Gymnasium cannot flatten, wherever they are, by its own space of text."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _with_text(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_with_text(part) for part in space.spaces])
    if np.dtype(space.dtype).kind == "U" and not isinstance(space, spaces.Text):
        return spaces.Text(TEXT_LENGTH, min_length=0, charset=string.printable)
    return space


def _batch_size(space: Space, observation: Any) -> int | None:
    """Return how many observations a batch holds; None for a single observation."""
    if isinstance(space, spaces.Dict):
        key, part = next(iter(space.spaces.items()))
        return _batch_size(part, observation[key])
    if isinstance(space, spaces.Tuple):
        return _batch_size(space.spaces[0], observation[0])
    if isinstance(space, spaces.Text):
        return None if isinstance(observation, str) else len(observation)
    array = np.asarray(observation)
    return None if array.ndim == len(space.shape or ()) else len(array)


def _pick(space: Space, batch: Any, at: int) -> Any:
    """Take one observation out of a batch."""
    if isinstance(space, spaces.Dict):
        return {key: _pick(part, batch[key], at) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_pick(part, found, at) for part, found in zip(space.spaces, batch, strict=True))
    return batch[at]


def _to_record(space: Space) -> SpaceRecord:
    match space:
        case spaces.Dict():
            return {"kind": "dict", "spaces": [[key, _to_record(part)] for key, part in space.spaces.items()]}
        case spaces.Tuple():
            return {"kind": "tuple", "spaces": [_to_record(part) for part in space.spaces]}
        case spaces.Text():
            return {"kind": "text", "length": space.max_length, "characters": "".join(space.character_list)}
        case spaces.Discrete():
            return {"kind": "discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"kind": "multi_discrete", "n": space.nvec.tolist(), "start": space.start.tolist()}
        case spaces.MultiBinary():
            return {"kind": "multi_binary", "shape": list(space.shape)}
        case spaces.Box():
            return {"kind": "box", "shape": list(space.shape), "dtype": space.dtype.str}
    raise UsageError(f"the observation space {space} is not supported")


def _from_record(record: Mapping[str, Any]) -> Space:
    match record["kind"]:
        case "dict":
            return spaces.Dict({key: _from_record(part) for key, part in record["spaces"]})
        case "tuple":
            return spaces.Tuple([_from_record(part) for part in record["spaces"]])
        case "text":
            return spaces.Text(record["length"], min_length=0, charset=record["characters"])
        case "discrete":
            return spaces.Discrete(record["n"], start=record["start"])
        case "multi_discrete":
            return spaces.MultiDiscrete(np.array(record["n"]), start=np.array(record["start"]))
        case "multi_binary":
            return spaces.MultiBinary(record["shape"])
        case "box":
            dtype = np.dtype(record["dtype"])
            low, high = (0, 1) if dtype.kind in "ub" else (-1, 1)  # flattening ignores the bounds
            return spaces.Box(low, high, tuple(record["shape"]), dtype=dtype.type)
    raise ValueError(f"there is no kind of space {record['kind']!r}")
