"""Advantage actor-critic (Mnih et al., 2016, synchronous): one gradient step per batch of short rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shoal.algos.base import AlgorithmConfig, Step
from shoal.base import seeding, validation
from shoal.base.trees import Tree
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import LearningFault
from shoal.learning.estimators import assess, mean, standardise, weights_not_finite
from shoal.policies.networks import MLP
from shoal.policies.policy import Policy, SavedPolicy
from shoal.policies.start import first_weights, load_start
from shoal.sampling import tasks
from shoal.sampling.batch import make_batch
from shoal.sampling.lanes import Lanes
from shoal.sampling.scores import Scores


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    """Settings of A2C. Every field becomes a flag, with its docstring as help."""

    lanes: int = 4
    """Groups of environments (n_envs = lanes x width); at most this many workers are busy."""
    width: int = 8
    """Environments in a lane, stepped together."""
    fragment_steps: int = 16
    """Steps of each environment per iteration."""
    gamma: float = 0.99
    """Discount factor."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation."""
    hidden: tuple[int, ...] = (64, 64)
    """Hidden layers of the policy and of the value function."""
    lr: float = 7e-4
    """Learning rate of RMSProp."""
    entropy: float = 0.01
    """Coefficient of the entropy bonus."""

    def problems(self) -> list[str]:
        counts = ("lanes", "width", "fragment_steps", "hidden")
        return validation.field_problems(self, at_least_one=counts, above_zero=("lr",), fractions=("gamma", "lam"))


def train(
    config: Config, env: EnvSpec, engine: Engine, seed: int, steps: int, state: Tree | None = None
) -> Iterator[Step]:
    # 1. The policy fits the environment's spaces, which a worker reports.
    spaces = engine.submit(tasks.describe, env.to_record()).result()
    policy = Policy.fitting(spaces, hidden=config.hidden)
    distribution = policy.distribution
    value = MLP((policy.inputs, *config.hidden, 1))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(config.lr, decay=0.99, eps=1e-5))

    # 2. Everything learned: from the start, or from the state of a checkpoint.
    init = first_weights(policy, load_start(config.start), seed)  # and observation statistics, kept as they are
    params: Any = {"policy": init["params"], "value": value.init(seeding.rng(seed, "value"), out_scale=1.0)}
    moving, returns, saved = optimizer.init(params), np.zeros(3, np.float32), state or {}
    if saved:
        params, returns = saved["params"], saved["returns"]
        moving = jax.tree.unflatten(jax.tree.structure(moving), [saved["rmsprop"][k] for k in sorted(saved["rmsprop"])])
    scores = Scores(saved.get("scores"))
    lanes = Lanes(engine, env, policy, seed, config.lanes, config.width, saved.get("lanes"))
    iteration = saved.get("iteration", 0)

    @jax.jit
    def update(params: Any, moving: Any, returns: Any, batch: Any) -> Any:
        used = batch["weights"]  # 0 for padding
        features, finals = (policy.features(batch[k], init["mean"], init["scale"]) for k in ("observations", "finals"))
        known = assess(value, params["value"], returns, features, finals, batch, config.gamma, config.lam)

        def loss(params: Any) -> Any:
            out = policy.out(params["policy"], features[:-1])
            gain = mean(distribution.log_prob(out, batch["actions"]) * standardise(known.estimates, used), used)
            error = mean((value(params["value"], features[:-1])[..., 0] - known.normal_targets) ** 2, used)
            entropy = mean(distribution.entropy(out), used)
            measures = {"train/value_loss": error, "train/entropy_loss": -entropy}
            return error / 2 - gain - config.entropy * entropy, measures

        params = params | {"value": known.critic}
        gradient, measures = jax.grad(loss, has_aux=True)(params)
        change, moving = optimizer.update(gradient, moving)
        return optax.apply_updates(params, change), moving, known.returns, measures

    # 3. Sample, learn, yield. The caller tracks, saves and stops.
    while True:
        iteration += 1
        weights = init | {"params": np.asarray(params["policy"])}
        records = lanes.fragments(engine.share(weights), config.fragment_steps)
        begun = time.perf_counter()
        params, moving, returns, measures = update(params, moving, returns, make_batch(records))
        if not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
            raise LearningFault(weights_not_finite(iteration, measures, f"--lr {config.lr / 10:g}"))
        scores.add(records)
        learned = {
            "params": {name: np.asarray(array) for name, array in params.items()},
            "rmsprop": {f"{i:03}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(moving))},
            "returns": np.asarray(returns), "scores": scores.state(), "iteration": iteration,
        }  # fmt: skip
        ledger, acting = lanes.state(), weights | {"params": learned["params"]["policy"]}
        timing = {"time/sample_seconds": lanes.sampled.seconds, "time/learn_seconds": time.perf_counter() - begun}
        losses = {name: float(number) for name, number in measures.items()}
        yield Step(
            metrics=scores.metrics() | lanes.metrics() | timing | losses,
            learned=learned,
            state=lambda learned=learned, ledger=ledger: learned | {"lanes": ledger()},
            policy=SavedPolicy(policy, acting, env.to_record()),
        )
