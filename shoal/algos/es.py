"""Evolution strategies (Salimans et al., 2017): follow the gradient of the score, estimated from random steps away.

Each generation draws directions from a table of noise, evaluates the policy a small step along each of them and the
same step back, and moves towards those that scored well. Workers send scores back and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.algos import Step
from shoal.algos.search import SearchConfig, first_weights, policy_for, saved_start, score
from shoal.base import seeding, validation
from shoal.base.moments import Moments
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec, describe
from shoal.errors import LearningFault, UsageError
from shoal.policies.policy import SavedPolicy
from shoal.sampling import noise_table
from shoal.sampling.population import Members, Population
from shoal.sampling.scores import Scores


@dataclass(frozen=True)
class Config(SearchConfig):
    """Settings of evolution strategies."""

    sigma: float = 0.05
    """Size of the steps that are tried: standard deviation of each weight."""
    sigma_decay: float = 1.0
    """By what it is multiplied after each generation."""
    sigma_min: float = 0.0
    """It does not fall below this."""
    lr: float = 0.02
    """Learning rate."""
    lr_decay: float = 1.0
    """By what it is multiplied after each generation."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """What turns the gradient into a step."""
    momentum: float = 0.9
    """How much of the last step goes on in the next, for sgd."""
    weight_decay: float = 0.0
    """Share of each weight that is taken off, times the learning rate, after each generation."""
    shaping: Literal["ranks", "utilities", "standard", "raw"] = "ranks"
    """What a score counts for: its rank in -0.5..0.5; its rank with all weight on the better half (as in NES); scores
    shifted and scaled to mean 0 and deviation 1; or as it is."""
    environments: Literal["pair", "all", "independent"] = "pair"
    """Who is evaluated in equal environments: both steps along a direction, everybody, or nobody."""
    normalise: bool = False
    """Shift and scale observations by their running statistics."""
    table_size: int = 1 << 24
    """Numbers in the table of noise, four bytes each; each machine has one. Part of the result."""
    table_seed: int = 0
    """What the table is made from. Runs that have the same one share it."""

    def problems(self) -> list[str]:
        """What is wrong with the values, all of it."""
        found = super().problems() + validation.field_problems(
            self,
            at_least_one=("table_size",),
            above_zero=("sigma", "lr", "sigma_decay", "lr_decay"),
            not_negative=("sigma_min", "weight_decay", "table_seed"),
            fractions=("momentum", "sigma_decay", "lr_decay"),
        )
        if self.momentum == 1:
            found.append("momentum must be below 1: with 1 the last step goes on for ever, and nothing is learned")
        if self.sigma_min > self.sigma:
            found.append(f"sigma_min must be at most sigma ({self.sigma:g}), not {self.sigma_min:g}")
        if self.population % 2:
            found.append(f"population must be even, not {self.population}: steps are tried in pairs, there and back")
        return found


def train(
    config: Config, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
) -> Iterator[Step]:
    """Learn for ever, from the start or from a state. Decays go by generations, so `steps` does not matter."""
    spaces = engine.submit(describe, env.to_tree()).result()
    policy = policy_for(config, spaces, config.normalise)
    if config.table_size < policy.count:
        raise UsageError(f"table_size must be at least {policy.count}, the number of weights, not {config.table_size}")
    where = (config.table_seed, config.table_size)
    table = noise_table.table(*where)
    population = Population(engine, env, policy, seed, config.lanes, config.width, where)

    state = state or {}
    first = state or first_weights(saved_start(config), policy, seed)
    params = state.get("policy", first).get("params")
    optimizer = state.get("optimizer", {name: np.zeros(policy.count, np.float32) for name in SLOTS[config.optimizer]})
    moments = Moments.from_tree(state["moments"]) if state else _moments(config, first)
    scores = Scores(state.get("scores"))
    iteration, mean_length = state.get("iteration", 0), state.get("mean_length", 0.0)
    own, pairs = config.score_episodes, config.population // 2
    plus, minus = slice(own, None, 2), slice(own + 1, None, 2)
    who = {
        "pair": np.repeat(np.arange(pairs), 2),
        "all": np.zeros(2 * pairs, np.int64),
        "independent": np.arange(2 * pairs),
    }[config.environments]
    env_seeds = np.concatenate([-1 - np.arange(own), who])

    while True:
        iteration += 1
        begun = time.perf_counter()
        sigma = max(config.sigma * config.sigma_decay ** (iteration - 1), config.sigma_min)
        lr = config.lr * config.lr_decay ** (iteration - 1)
        directions = seeding.rng(seed, "direction", iteration)
        places = directions.integers(0, config.table_size - policy.count, pairs, endpoint=True)
        # The policy itself comes first: no step away from it.
        scales = np.concatenate([np.zeros(own), np.tile([sigma, -sigma], pairs)]).astype(np.float32)
        shift, scale = moments.normaliser()
        members = Members(
            env_seeds, places=np.concatenate([np.zeros(own, np.int64), np.repeat(places, 2)]), scales=scales
        )
        weights = engine.share({"params": params, "mean": shift, "scale": scale})
        outcome = population.evaluate(weights, config.plan(iteration, mean_length), members)
        sampled = time.perf_counter()

        fitness = outcome.fitness(len(scales))
        worth = np.zeros(len(scales))
        worth[own:] = shaped(config.shaping, fitness[own:])
        gradient = noise_table.weighted_sum(table, worth[plus] - worth[minus], places, policy.count)
        gradient *= np.float32(1 / (2 * pairs * sigma))
        before = params
        with np.errstate(over="ignore", invalid="ignore"):  # looked at next
            optimizer, step = ascend(config, optimizer, gradient, iteration)
            params = (1 - np.float32(lr * config.weight_decay)) * params + np.float32(lr) * step
        if not np.isfinite(params).all():
            raise LearningFault(
                f"iteration {iteration} computed weights that are not finite (scores {fitness.min():g} to "
                f"{fitness.max():g}); they were not kept. Likely causes: --shaping raw with scores that are far too "
                f"large, or a learning rate that is; try --lr {config.lr / 10:g}"
            )
        record = outcome.record(slice(own, len(scales)))
        scores.add([record])
        scores.steps += int(outcome.record(slice(0, own))["lengths"].sum())
        mean_length = float(record["lengths"].mean())
        if config.normalise:
            moments = moments.merge(outcome.moments)

        new_shift, new_scale = moments.normaliser()
        learned = {
            "policy": {"params": params},
            "optimizer": optimizer,
            "moments": moments.to_tree(),
            "scores": scores.state(),
            "iteration": iteration,
            "mean_length": mean_length,
        }
        measures = {
            "rollout/fitness_mean": float(fitness[own:].mean()),
            "rollout/fitness_max": float(fitness[own:].max()),
            "train/gradient_norm": float(np.linalg.norm(gradient)),
            "train/step_norm": float(np.linalg.norm(params - before)),
            "train/learning_rate": lr,
            "train/sigma": sigma,
        }
        timing = {"time/sample_seconds": sampled - begun, "time/learn_seconds": time.perf_counter() - sampled}
        yield Step(
            metrics=scores.metrics() | {"time/iterations": iteration} | score(outcome, own) | measures | timing,
            learned=learned,
            state=lambda learned=learned: learned,  # type: ignore[misc]
            policy=SavedPolicy(policy, {"params": params, "mean": new_shift, "scale": new_scale}, env.to_tree()),
        )


def shaped(name: str, scores: np.ndarray) -> np.ndarray:
    """What scores (n,) count for. Equal scores count the same."""
    if name == "raw":
        return scores
    if name == "standard":
        standard: np.ndarray = (scores - scores.mean()) / (scores.std() + 1e-8)
        return standard
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts + 1) / 2)[inverse]  # from 0 for the worst; the mean rank of those that are equal
    if name == "ranks":
        return ranks / max(len(scores) - 1, 1) - 0.5
    count = len(scores)
    utilities = np.maximum(0.0, np.log(count / 2 + 1) - np.log(count - ranks))
    total: np.ndarray = utilities / utilities.sum() - 1 / count
    return total


SLOTS = {"adam": ("mean", "square"), "sgd": ("speed",)}
"""What each optimizer keeps for each weight."""


def ascend(config: Config, kept: Tree, gradient: np.ndarray, iteration: int) -> tuple[Tree, np.ndarray]:
    """What the optimizer keeps, anew, and the step for a learning rate of 1."""
    if config.optimizer == "sgd":
        momentum = np.float32(config.momentum)
        speed = momentum * kept["speed"] + (1 - momentum) * gradient
        return {"speed": speed}, speed
    slow, slower = np.float32(0.9), np.float32(0.999)
    mean = slow * kept["mean"] + (1 - slow) * gradient
    square = slower * kept["square"] + (1 - slower) * gradient**2
    unbiased = np.sqrt(square / np.float32(1 - 0.999**iteration))
    return {"mean": mean, "square": square}, mean / np.float32(1 - 0.9**iteration) / (unbiased + np.float32(1e-8))


_STARTED = 100_000  # observations that the statistics of a saved policy count as; it does not say how many there were


def _moments(config: Config, weights: Tree) -> Moments:
    """Statistics to begin with: none, or those of the policy to start from."""
    size = len(weights["mean"])
    if config.start is None or not config.normalise:
        return Moments.empty(size)
    variance = np.maximum(weights["scale"].astype(np.float64) ** -2 - 1e-8, 0.0)
    return Moments(_STARTED, weights["mean"].astype(np.float64), variance * _STARTED)
