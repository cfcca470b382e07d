"""What algorithms that search for a policy by its score alone have in common: settings, the policy, where to start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from shoal.base import seeding, validation
from shoal.base.trees import Tree
from shoal.errors import UsageError
from shoal.policies import actions
from shoal.policies.actions import Bins, Gaussian, Head, Point
from shoal.policies.policy import Policy, SavedPolicy
from shoal.sampling.population import Outcome, Plan

Activation = Literal["tanh", "relu", "sigmoid", "softsign", "identity"]


@dataclass(frozen=True)
class SearchConfig:
    """Settings that every search has."""

    population: int = 64
    """Policies that are evaluated in each generation."""
    episodes: int = 1
    """Episodes of an evaluation; its score is their mean return."""
    min_steps: int = 0
    """An evaluation plays more episodes until it has taken this many steps."""
    fixed_seeds: bool = False
    """Evaluate in the same environments in every generation; new ones in each unless told."""
    length_factor: float = 0.0
    """Cut episodes off at this many times the mean length of the generation before (2 is usual); 0 never does."""
    score_episodes: int = 8
    """Episodes in each generation of the policy that the search has arrived at, for its score alone."""
    tasks: int | None = None
    """Lanes that a generation is cut into; at most this many workers are busy. Part of the result. Unless told, one for
    every 16 policies, and two for 8 to 32."""
    width: int = 24
    """Episodes of a lane that are played together, at most."""
    hidden: tuple[int, ...] = ()
    """Hidden layers; none for a linear policy."""
    activation: Activation = "tanh"
    """Hidden activation."""
    output: Activation = "identity"
    """Activation of the outputs. tanh and softsign are stretched to the bounds of actions that are numbers."""
    memory: Literal["none", "elman", "lstm"] = "none"
    """Whether hidden layers remember what they computed before."""
    bins: int = 0
    """Choose each number of an action among so many values between its bounds; 0 computes the number."""
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Start from the policy of this run, or from a policy file."""

    @property
    def lanes(self) -> int:
        """Lanes that a generation is cut into: those in a lane share what a step costs beside the environment."""
        return self.tasks or max(self.population // 16, min(2, self.population // 4), 1)

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
        found = validation.field_problems(
            self,
            at_least_one=("population", "episodes", "tasks", "width", "hidden"),
            not_negative=("min_steps", "length_factor", "score_episodes", "bins"),
        )
        if 0 < self.length_factor <= 1:
            found.append(
                f"length_factor must be 0 or above 1, not {self.length_factor}: episodes could only get shorter"
            )
        if self.bins == 1:
            found.append("bins must be 0, or 2 or more: with one there is nothing to choose")
        if self.memory != "none" and not self.hidden:
            found.append(f"memory {self.memory} needs hidden layers to remember with: give --hidden 16")
        return found

    def plan(self, generation: int, mean_length: float) -> Plan:
        """How to evaluate in a generation, after one with episodes of that mean length."""
        limit = math.ceil(self.length_factor * mean_length) or None
        return Plan(generation, self.episodes, self.min_steps, limit, self.fixed_seeds)


def policy_for(config: SearchConfig, spaces: Tree, normalise: bool) -> Policy:
    """The policy that a search looks for."""
    head = _head(config, actions.from_tree(spaces["head"]))
    return Policy(
        tuple(spaces["shape"]), spaces["dtype"], head, config.hidden, config.activation, normalise,
        memory=config.memory, output=config.output,
    )  # fmt: skip


def _head(config: SearchConfig, head: Head) -> Head:
    """Actions without chance: a search tries policies, not actions."""
    if not isinstance(head, Gaussian):
        if config.bins:
            raise UsageError(
                "--bins is for actions that are numbers (a Box space); this environment has choices already"
            )
        return head
    bounded = np.isfinite([*head.low, *head.high]).all()
    if not config.bins:
        return Point(
            head.shape, head.low, head.high, head.dtype, config.output in ("tanh", "softsign") and bool(bounded)
        )
    if not bounded:
        raise UsageError(
            f"--bins needs bounds for every number of an action, and here they are {head.low} to {head.high}. "
            f"Leave it out, or wrap the environment so that its actions have bounds"
        )
    numbers = math.prod(head.shape)
    return Bins((config.bins,) * numbers, (0,) * numbers, False, head.shape, head.low, head.high, head.dtype)


def saved_start(config: SearchConfig) -> SavedPolicy | None:
    """The policy to start from, if there is one."""
    return None if config.start is None else SavedPolicy.load(Path(config.start))


def first_weights(saved: SavedPolicy | None, policy: Policy, seed: int) -> Tree:
    """Weights to start from: new ones, or those of a saved policy. `params`, `mean` and `scale`."""
    if saved is None:
        nothing = {"mean": np.zeros(policy.inputs, np.float32), "scale": np.ones(policy.inputs, np.float32)}
        return {"params": policy.init(seeding.rng(seed, "weights"))} | nothing
    differs = [
        f"{name.replace('_', ' ')} {_words(getattr(saved.policy, name))} there, {_words(getattr(policy, name))} here"
        for name in ("observation_shape", "hidden", "activation", "memory", "output", "dueling", "normalise")
        if getattr(saved.policy, name) != getattr(policy, name)
    ]
    if saved.policy.network.count != policy.network.count and not differs:
        differs = [f"actions: {saved.policy.head} there, {policy.head} here"]
    if differs:
        raise UsageError(
            f"the policy of --from does not fit: {'; '.join(differs)}. Give the settings that it was learned with"
        )
    # Standard deviations at the end, which gradient algorithms learn too, have no use here.
    return saved.weights | {"params": saved.weights["params"][: policy.network.count].copy()}


def _words(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def score(outcome: Outcome, episodes: int) -> dict[str, float]:
    """The score of the policy itself, whose episodes come first, as metrics."""
    own = outcome.record(slice(0, episodes))
    if not episodes:
        return {}
    return {"eval/mean_reward": float(own["returns"].mean()), "eval/mean_ep_length": float(own["lengths"].mean())}
