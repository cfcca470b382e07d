"""What es and nevergrad share: both search for a policy by the scores of whole episodes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.algos.base import AlgorithmConfig
from shoal.base import validation
from shoal.errors import UsageError
from shoal.policies import actions
from shoal.policies.actions import Bins, Distribution, Gaussian, Point
from shoal.policies.policy import Policy, Spaces
from shoal.sampling.population import Outcome, Plan

Activation = Literal["tanh", "relu", "sigmoid", "softsign", "identity"]


@dataclass(frozen=True)
class SearchConfig(AlgorithmConfig):
    """Settings of every search."""

    population: int = 64
    """Policies evaluated in each generation."""
    episodes: int = 1
    """Episodes per evaluation; the score is their mean return."""
    min_steps: int = 0
    """Minimum environment steps per evaluation: more episodes are played until it is reached."""
    fixed_seeds: bool = False
    """Use the same environment seeds in every generation (default: new ones in each)."""
    length_factor: float = 0.0
    """Truncate episodes at this multiple of the previous generation's mean length (usually 2); 0: no truncation."""
    score_episodes: int = 8
    """Episodes in each generation that evaluate the current policy itself; reported, not learned from."""
    tasks: int | None = None
    """Lanes per generation; at most this many workers are busy. Changes the result. Default: one for every 16 policies,
    and two for 8 to 32."""
    width: int = 24
    """Maximum number of episodes that a lane plays at the same time."""
    hidden: tuple[int, ...] = ()
    """Hidden layers (default: none, a linear policy)."""
    activation: Activation = "tanh"
    """Activation of the hidden layers."""
    output: Activation = "identity"
    """Activation of the output layer. tanh and softsign are scaled to the bounds of continuous actions."""
    memory: Literal["none", "elman", "lstm"] = "none"
    """Recurrence of the hidden layers."""
    bins: int = 0
    """Discretise each component of a continuous action into this many values; 0: continuous."""

    @property
    def lanes(self) -> int:
        """Lanes per generation. Policies in a lane share the cost of a step outside the environment."""
        return self.tasks or max(self.population // 16, min(2, self.population // 4), 1)

    @property
    def samples(self) -> Literal["scores"]:
        """What workers send: scores alone."""
        return "scores"

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        found = validation.field_problems(
            self,
            at_least_one=("population", "episodes", "tasks", "width", "hidden"),
            not_negative=("min_steps", "length_factor", "score_episodes", "bins"),
        )
        if 0 < self.length_factor <= 1:
            found.append(
                f"length_factor must be 0 or above 1, not {self.length_factor}: episodes could only become shorter"
            )
        if self.bins == 1:
            found.append("bins must be 0, or 2 or more: one value leaves no choice")
        if self.memory != "none" and not self.hidden:
            found.append(f"memory {self.memory} needs hidden layers, for example --hidden 16")
        return found

    def plan(self, generation: int, mean_length: float) -> Plan:
        """Plan the evaluations of a generation; `mean_length` is that of the previous generation's episodes."""
        limit = math.ceil(self.length_factor * mean_length) or None
        return Plan(generation, self.episodes, self.min_steps, limit, self.fixed_seeds)


def policy_for(config: SearchConfig, spaces: Spaces, normalise: bool) -> Policy:
    """Build the policy whose weights a search looks for."""
    distribution = _deterministic(config, actions.from_record(spaces["distribution"]))
    return Policy.fitting(
        spaces, distribution, hidden=config.hidden, activation=config.activation, normalise=normalise,
        memory=config.memory, output=config.output,
    )  # fmt: skip


def _deterministic(config: SearchConfig, found: Distribution) -> Distribution:
    """Make actions deterministic: a search explores policies, not actions."""
    if not isinstance(found, Gaussian):
        if config.bins:
            raise UsageError("--bins is for continuous actions (a Box space); this environment's are discrete already")
        return found
    bounded = bool(np.isfinite([*found.low, *found.high]).all())
    if not config.bins:
        scaled = config.output in ("tanh", "softsign") and bounded
        return Point(found.shape, found.low, found.high, found.dtype, scaled)
    if not bounded:
        raise UsageError(
            f"--bins needs finite bounds for every component of an action; here they are {found.low} to {found.high}. "
            f"Leave it out, or wrap the environment so that its actions have bounds"
        )
    count = math.prod(found.shape)
    return Bins((config.bins,) * count, (0,) * count, False, found.shape, found.low, found.high, found.dtype)


def own_score(outcome: Outcome, episodes: int) -> dict[str, float]:
    """Report the score of the current policy itself, whose episodes come first."""
    own = outcome.scores(slice(0, episodes))
    if not episodes:
        return {}
    return {"eval/mean_reward": float(own["returns"].mean()), "eval/mean_ep_length": float(own["lengths"].mean())}
