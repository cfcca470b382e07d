"""Evolution strategies (Salimans et al., 2017): follow the gradient of the score, estimated by random perturbations.

Each generation draws directions from a noise table, evaluates the policy perturbed along each of them and against it
(mirrored sampling), and moves towards those that scored well. Workers send back scores and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.algos.base import Step
from shoal.algos.search import SearchConfig, own_score, policy_for
from shoal.base import seeding, validation
from shoal.base.moments import Moments
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import LearningFault, UsageError
from shoal.policies.policy import SavedPolicy
from shoal.policies.start import first_moments, first_weights, load_start
from shoal.sampling import noise_table, tasks
from shoal.sampling.population import Members, Population
from shoal.sampling.scores import Scores


@dataclass(frozen=True)
class Config(SearchConfig):
    """Settings of evolution strategies."""

    sigma: float = 0.05
    """Standard deviation of the perturbations."""
    sigma_decay: float = 1.0
    """Factor of sigma after each generation."""
    sigma_min: float = 0.0
    """Lower bound of sigma."""
    lr: float = 0.02
    """Learning rate."""
    lr_decay: float = 1.0
    """Factor of the learning rate after each generation."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of the weights."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay: the share of each weight, times the learning rate, subtracted after each generation."""
    shaping: Literal["ranks", "utilities", "standard", "raw"] = "ranks"
    """Fitness shaping: centred ranks in -0.5..0.5; utilities of NES (ranks with all weight on the better half); scores
    standardised to mean 0 and deviation 1; or raw scores."""
    environments: Literal["pair", "all", "independent"] = "pair"
    """Which members share environment seeds: each mirrored pair, all, or none."""
    normalise: bool = False
    """Normalise observations by their running mean and standard deviation."""
    table_size: int = 1 << 24
    """Size of the noise table, in numbers of four bytes; each machine has one. Changes the result."""
    table_seed: int = 0
    """Seed of the noise table. Runs with the same seed and size share one table."""

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the values."""
        found = super().problems() + validation.field_problems(
            self,
            at_least_one=("table_size",),
            above_zero=("sigma", "lr", "sigma_decay", "lr_decay"),
            not_negative=("sigma_min", "weight_decay", "table_seed"),
            fractions=("momentum", "sigma_decay", "lr_decay"),
        )
        if self.momentum == 1:
            found.append("momentum must be below 1: with 1 the first step is repeated and nothing is learned")
        if self.sigma_min > self.sigma:
            found.append(f"sigma_min must be at most sigma ({self.sigma:g}), not {self.sigma_min:g}")
        if self.population % 2:
            found.append(f"population must be even, not {self.population}: perturbations come in mirrored pairs")
        return found


def train(
    config: Config, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
) -> Iterator[Step]:
    """Learn until the caller stops, from the start or from a state. Decays count generations: `steps` is not used."""
    spaces = engine.submit(tasks.describe, env.to_record()).result()
    policy = policy_for(config, spaces, config.normalise)
    if config.table_size < policy.count:
        raise UsageError(f"table_size must be at least {policy.count}, the number of weights, not {config.table_size}")
    where = (config.table_seed, config.table_size)
    table = noise_table.open_table(*where)
    population = Population(engine, env, policy, seed, config.lanes, config.width, where)

    state = state or {}
    if state:
        params, moments = state["policy"]["params"], Moments.from_record(state["moments"])
    else:
        saved = load_start(config.start)
        params, moments = first_weights(policy, saved, seed)["params"], first_moments(policy, saved)
    optimizer = state.get("optimizer", {name: np.zeros(policy.count, np.float32) for name in SLOTS[config.optimizer]})
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
        offsets = directions.integers(0, config.table_size - policy.count, pairs, endpoint=True)
        # The unperturbed policy comes first.
        scales = np.concatenate([np.zeros(own), np.tile([sigma, -sigma], pairs)]).astype(np.float32)
        shift, scale = moments.normaliser()
        members = Members(
            env_seeds, offsets=np.concatenate([np.zeros(own, np.int64), np.repeat(offsets, 2)]), scales=scales
        )
        weights = engine.share({"params": params, "mean": shift, "scale": scale})
        outcome = population.evaluate(weights, config.plan(iteration, mean_length), members)
        sampled = time.perf_counter()

        fitness = outcome.fitness(len(scales))
        worth = np.zeros(len(scales))
        worth[own:] = shaped(config.shaping, fitness[own:])
        gradient = noise_table.weighted_sum(table, worth[plus] - worth[minus], offsets, policy.count)
        gradient *= np.float32(1 / (2 * pairs * sigma))
        before = params
        with np.errstate(over="ignore", invalid="ignore"):  # checked next
            optimizer, step = ascend(config, optimizer, gradient, iteration)
            params = (1 - np.float32(lr * config.weight_decay)) * params + np.float32(lr) * step
        if not np.isfinite(params).all():
            raise LearningFault(
                f"iteration {iteration} computed weights that are not finite (scores {fitness.min():g} to "
                f"{fitness.max():g}); they were not kept. Likely causes: --shaping raw with scores, or a learning "
                f"rate, that are far too large; try --lr {config.lr / 10:g}"
            )
        evaluated = outcome.scores(slice(own, len(scales)))
        scores.add([evaluated])
        scores.steps += int(outcome.scores(slice(0, own))["lengths"].sum())
        mean_length = float(evaluated["lengths"].mean())
        if config.normalise:
            moments = moments.merge(outcome.moments)

        new_shift, new_scale = moments.normaliser()
        learned = {
            "policy": {"params": params},
            "optimizer": optimizer,
            "moments": moments.to_record(),
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
            metrics=scores.metrics() | {"time/iterations": iteration} | own_score(outcome, own) | measures | timing,
            learned=learned,
            state=lambda learned=learned: learned,  # type: ignore[misc]
            policy=SavedPolicy(policy, {"params": params, "mean": new_shift, "scale": new_scale}, env.to_record()),
        )


def shaped(name: str, scores: np.ndarray) -> np.ndarray:
    """Shape scores (n,) into fitness values. Equal scores get equal values."""
    if name == "raw":
        return scores
    if name == "standard":
        standard: np.ndarray = (scores - scores.mean()) / (scores.std() + 1e-8)
        return standard
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts + 1) / 2)[inverse]  # from 0 for the worst; equal scores share their mean rank
    if name == "ranks":
        return ranks / max(len(scores) - 1, 1) - 0.5
    count = len(scores)
    utilities = np.maximum(0.0, np.log(count / 2 + 1) - np.log(count - ranks))
    total: np.ndarray = utilities / utilities.sum() - 1 / count
    return total


SLOTS = {"adam": ("mean", "square"), "sgd": ("speed",)}
"""State of each optimizer, for each weight."""


def ascend(config: Config, kept: Tree, gradient: np.ndarray, iteration: int) -> tuple[Tree, np.ndarray]:
    """Return the new state of the optimizer, and its step for a learning rate of 1."""
    if config.optimizer == "sgd":
        momentum = np.float32(config.momentum)
        speed = momentum * kept["speed"] + (1 - momentum) * gradient
        return {"speed": speed}, speed
    slow, slower = np.float32(0.9), np.float32(0.999)
    mean = slow * kept["mean"] + (1 - slow) * gradient
    square = slower * kept["square"] + (1 - slower) * gradient**2
    unbiased = np.sqrt(square / np.float32(1 - 0.999**iteration))
    return {"mean": mean, "square": square}, mean / np.float32(1 - 0.9**iteration) / (unbiased + np.float32(1e-8))
