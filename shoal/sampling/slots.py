"""The slots of a lane: which episode each of them is in, since when, and what it will act on."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium
import numpy as np

from shoal.envs.make import EnvSpec, observation_dtype
from shoal.errors import EnvironmentFault
from shoal.sampling.lane_address import LaneAddress, episode_seed


class Slots:
    """The `width` slots of a lane. Slot s is in episode `episodes[s]` (-1: left) and will act on `observations[s]`."""

    observations: np.ndarray

    def __init__(self, address: LaneAddress, remembered: int = 0) -> None:
        self.address, self.width = address, address["width"]
        self.spec = EnvSpec.from_record(address["env"])
        self.clock = 0  # steps of the lane so far
        self.taken = 0  # steps of all its slots so far
        self.episodes = [-1] * self.width
        self.begun = [0] * self.width  # by the clock
        self.returns = [0.0] * self.width  # of the running episodes, before this task
        self.memory = np.zeros((self.width, remembered), np.float32)  # recurrent state of each slot

    def allocate(self, space: gymnasium.Space[Any]) -> None:
        """Allocate observations (width, ...) of a space."""
        self.observations = np.zeros((self.width, *(space.shape or ())), observation_dtype(space))

    def seed(self, slot: int, episode: int) -> int:
        """Derive the seed with which the environment of a slot is reset."""
        return episode_seed(self.address, slot, episode)

    def where(self, slot: int, episode: int, step: int) -> str:
        """Name one step in a message."""
        seed, lane = self.seed(slot, episode), self.address["lane"]
        return f"{self.spec.id}, lane {lane}, slot {slot}, episode {episode} (reset seed {seed}), step {step}"

    def fault(self, slot: int, error: Exception) -> EnvironmentFault:
        """Wrap an exception that the environment of a slot has raised."""
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        trace = "".join(traceback.format_exception(type(error), error, below))
        where = self.where(slot, self.episodes[slot], max(self.clock - self.begun[slot] - 1, 0))
        if _raised_here(error.__traceback__):
            return EnvironmentFault(
                f"the environment returned something that does not fit ({type(error).__name__}: {error})\nin {where}\n"
                f"To see what, run: shoal check-env {self.spec.id}"
            )
        return EnvironmentFault(f"the environment raised {type(error).__name__}: {error}\nin {where}\n\n{trace}")


def _raised_here(trace: TracebackType | None) -> bool:
    """Whether an error was raised by the code of lanes, on what an environment has returned, not by other code."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == Path(__file__).parent
