"""TRPO: the maths of one update, and learning where the answer is known."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shoal import engines
from shoal.algos import trpo
from shoal.base import seeding
from shoal.envs.make import EnvSpec
from shoal.errors import LearningFault
from shoal.learning import xla
from shoal.policies.actions import Categorical, Gaussian
from shoal.policies.networks import MLP
from shoal.policies.policy import Policy
from shoal.sampling.batch import minibatch_orders

pytestmark = pytest.mark.trains

xla.start(1)

SMALL = trpo.Config(batch_steps=512, lanes=2, width=4, hidden=(16,), value_epochs=4, value_batch=64)


def steps(
    config: trpo.Config, env: str, count: int, engine: str = "serial", seed: int = 0, **options: Any
) -> list[Any]:
    found = []
    with engines.make(engine, **options) as pool:
        for step in trpo.train(config, EnvSpec(env), pool, seed, 10**6):
            found.append(step)
            if len(found) == count:
                return found
    raise AssertionError


def test_learns_to_aim() -> None:
    config = trpo.Config(batch_steps=1024, lanes=2, width=8, hidden=(16,), max_kl=0.05)
    found = steps(config, "tests.support.toys:Aim-v0", 40)
    assert found[0].metrics["rollout/ep_rew_mean"] < -8
    assert found[-1].metrics["rollout/ep_rew_mean"] > -1.5


@pytest.mark.processes
def test_solves_cart_pole() -> None:
    found = steps(trpo.Config(), "CartPole-v1", 26, engine="processes")
    assert max(step.metrics["rollout/ep_rew_mean"] for step in found) > 475


def one_update(config: trpo.Config, distribution: Any, batch_seed: int = 0) -> tuple[Any, ...]:
    """A policy, its parameters before and after one update on random data, the batch and the metrics."""
    policy = Policy((3,), "<f4", distribution, (8,))
    value = MLP((3, 8, 1))
    rng = np.random.default_rng(batch_seed)
    time, slots = 32, 4
    if isinstance(distribution, Categorical):
        actions = rng.integers(0, distribution.choices[0], (time, slots, 1))
    else:
        actions = rng.normal(size=(time, slots, 2)).astype(np.float32)
    weights = np.ones((time, slots), np.float32)
    weights[20:, 1] = 0
    finals_at = np.full(slots, time * slots)
    finals_at[0] = 4 * slots + 2
    terminated, ended = np.zeros((time, slots), bool), np.zeros((time, slots), bool)
    terminated[3, 0] = ended[3, 0] = ended[4, 2] = True  # slot 2 is truncated at time 4
    batch = {
        "observations": rng.normal(size=(time + 1, slots, 3)).astype(np.float32),
        "actions": actions,
        "rewards": rng.normal(size=(time, slots)).astype(np.float32),
        "weights": weights,
        "terminated": terminated,
        "ended": ended,
        "finals": rng.normal(size=(slots, 3)).astype(np.float32) * 5,
        "finals_at": finals_at,
    }
    params = policy.init(seeding.rng(0, "weights")) * 3
    critic = value.init(seeding.rng(0, "value"), 1.0)
    optimizer = optax.adam(config.value_lr)
    update = trpo.make_update(config, policy, value, optimizer)
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    adam, returns = optimizer.init(jnp.asarray(critic)), jnp.zeros(3)
    orders = minibatch_orders(seeding.rng(0, "learn"), batch, config.value_epochs, config.value_batch)
    new, *_, metrics = update(params, critic, adam, returns, zeros, ones, batch, orders)
    return policy, params, np.asarray(new), batch, metrics


DISTRIBUTIONS = [Categorical((3,), (0,), scalar=True), Gaussian((2,), (-1.0, -1.0), (1.0, 1.0), "<f4")]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=["categorical", "gaussian"])
def test_update_stays_in_the_trust_region_and_improves(distribution: Any) -> None:
    policy, params, new, batch, metrics = one_update(trpo.Config(value_batch=16), distribution)
    assert metrics["train/is_line_search_success"] == 1
    old_out = policy.out(jnp.asarray(params), jnp.asarray(batch["observations"][:-1]))
    new_out = policy.out(jnp.asarray(new), jnp.asarray(batch["observations"][:-1]))
    kl = (policy.distribution.kl(old_out, new_out) * batch["weights"]).sum() / batch["weights"].sum()
    np.testing.assert_allclose(kl, metrics["train/kl_divergence_loss"], rtol=1e-3)
    assert 0.3 * 0.01 < kl <= 0.01, "the step uses the region, and no more"
    assert metrics["train/policy_objective"] > 0


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=["categorical", "gaussian"])
def test_step_is_along_the_natural_gradient(distribution: Any) -> None:
    """Against the Fisher matrix written out as the Hessian of the mean divergence."""
    config = trpo.Config(cg_iterations=200, cg_damping=0.1, value_epochs=0)
    policy, params, new, batch, _ = one_update(config, distribution)
    x, used = jnp.asarray(batch["observations"][:-1]), jnp.asarray(batch["weights"])
    old = policy.out(jnp.asarray(params), x)

    def divergence(p: Any) -> Any:
        return (policy.distribution.kl(old, policy.out(p, x)) * used).sum() / used.sum()

    fisher = jax.jit(jax.hessian(divergence))(jnp.asarray(params))
    step = new - params
    # (F + damping) step is parallel to the gradient, so it must agree with it after solving.
    gradient = np.asarray(fisher + 0.1 * jnp.eye(len(params))) @ step
    direction = np.linalg.solve(np.asarray(fisher, np.float64) + 0.1 * np.eye(len(params)), gradient)
    cosine = direction @ step / np.linalg.norm(direction) / np.linalg.norm(step)
    assert cosine > 0.999
    expected = _gradient(policy, params, batch, config)
    assert gradient @ expected / np.linalg.norm(gradient) / np.linalg.norm(expected) > 0.999


def _gradient(policy: Policy, params: Any, batch: Any, config: trpo.Config) -> np.ndarray:
    """The policy gradient, with advantages computed by a plain loop."""
    value = MLP((3, 8, 1))
    critic = value.init(seeding.rng(0, "value"), 1.0)
    values = np.asarray(value(critic, batch["observations"]))[..., 0].astype(np.float64)
    following_values = values[1:].copy()
    following_values[3, 0] = 0.0  # terminated: nothing follows
    following_values[4, 2] = value(critic, batch["finals"][:1])[0, 0]  # truncated: what would have followed
    estimate, following = np.zeros((32, 4)), np.zeros(4)
    for time in reversed(range(32)):
        delta = batch["rewards"][time] + config.gamma * following_values[time] - values[time]
        following = np.where(batch["ended"][time], 0.0, following)
        following = estimate[time] = delta + config.gamma * config.lam * following
    used = batch["weights"]
    centred = (estimate - (estimate * used).sum() / used.sum()) * used
    scaled = centred / np.sqrt((centred**2).sum() / used.sum())

    def objective(p: Any) -> Any:
        log_prob = policy.distribution.log_prob(
            policy.out(p, jnp.asarray(batch["observations"][:-1])), batch["actions"]
        )
        return (log_prob * scaled).sum() / used.sum()

    return np.asarray(jax.grad(objective)(jnp.asarray(params)))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=["categorical", "gaussian"])
def test_line_search_shortens_steps_that_leave_the_region(distribution: Any) -> None:
    """A region so large that the quadratic model misjudges it."""
    metrics = one_update(trpo.Config(max_kl=0.5, cg_damping=0.001, cg_iterations=30, value_epochs=0), distribution)[-1]
    assert 0 < metrics["train/step_fraction"] < 1
    assert 0.1 < metrics["train/kl_divergence_loss"] <= 0.5


def test_fisher_subsampling_changes_little() -> None:
    _, params, new, *_ = one_update(trpo.Config(value_epochs=0), DISTRIBUTIONS[0])
    _, _, sampled, *_ = one_update(trpo.Config(value_epochs=0, fisher_stride=4), DISTRIBUTIONS[0])
    cosine = (new - params) @ (sampled - params) / np.linalg.norm(new - params) / np.linalg.norm(sampled - params)
    assert 0.8 < cosine < 0.99999


def test_numbers_that_are_not_finite_are_not_kept() -> None:
    config = trpo.Config(**{**vars(SMALL), "value_lr": 1e38})
    with pytest.raises(LearningFault, match=r"not finite.*not kept.*--value-lr"):
        steps(config, "tests.support.toys:Walk-v0", 3)


def test_every_problem_is_listed() -> None:
    config = trpo.Config(
        lanes=0, gamma=2.0, hidden=(0,), max_kl=-1, line_search_shrink=1.0, cg_damping=-1, value_epochs=-1
    )
    assert len(config.problems()) == 7
    assert trpo.Config().problems() == []
