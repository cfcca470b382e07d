"""Every distribution against autodiff, exhaustive sums or sampling."""

import itertools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.policies import actions
from shoal.policies.actions import Categorical, Distribution, EpsilonGreedy, Gaussian

DISTRIBUTIONS = [
    Categorical((4,), (0,), scalar=True),
    Categorical((2, 3), (0, 1), scalar=False),
    Gaussian((2,), (-1.0, -2.0), (1.0, 2.0), "<f4"),
]
ids = ["categorical", "multi", "gaussian"]


def outs(distribution: Distribution, rows: int = 1, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, distribution.outputs)).astype(np.float32) * 0.7)


@pytest.mark.trains
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=ids)
def test_fisher_is_the_hessian_of_the_divergence(distribution: Distribution) -> None:
    out = outs(distribution)[0]
    hessian = jax.hessian(lambda new: distribution.kl(out, new))(out)
    for direction in np.eye(distribution.outputs, dtype=np.float32):
        np.testing.assert_allclose(distribution.fisher(out, jnp.asarray(direction)), hessian @ direction, atol=2e-5)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=ids)
def test_divergence_is_zero_only_at_home(distribution: Distribution) -> None:
    old, new = outs(distribution, 50), outs(distribution, 50, seed=1)
    np.testing.assert_allclose(distribution.kl(old, old), 0, atol=1e-6)
    assert (distribution.kl(old, new) > 0).all()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS[:2], ids=ids[:2])
def test_categorical_sums_over_all_actions(distribution: Categorical) -> None:
    old, new = outs(distribution)[0], outs(distribution, seed=1)[0]
    actions = jnp.array(list(itertools.product(*map(range, distribution.choices))))
    log_p = distribution.log_prob(jnp.broadcast_to(old, (len(actions), distribution.outputs)), actions)
    log_q = distribution.log_prob(jnp.broadcast_to(new, (len(actions), distribution.outputs)), actions)
    p = np.exp(log_p)
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(distribution.entropy(old), -(p * log_p).sum(), rtol=1e-4)
    np.testing.assert_allclose(distribution.kl(old, new), (p * (log_p - log_q)).sum(), rtol=1e-4)


def test_gaussian_by_hand() -> None:
    distribution = DISTRIBUTIONS[2]
    old = jnp.array([0.5, -1.0, 0.0, np.log(2.0)], jnp.float32)
    action = jnp.array([1.5, 1.0], jnp.float32)
    # unit normal at distance 1, and deviation 2 at distance 2
    expected = 2 * (-0.5 - 0.5 * np.log(2 * np.pi)) - np.log(2.0)
    np.testing.assert_allclose(distribution.log_prob(old, action), expected, rtol=1e-6)
    np.testing.assert_allclose(distribution.entropy(old), np.log(2 * np.pi * np.e) + np.log(2.0), rtol=1e-6)
    new = jnp.array([1.5, -1.0, 0.0, 0.0], jnp.float32)
    np.testing.assert_allclose(distribution.kl(old, new), 0.5 + (-np.log(2.0) + 0.5 * (4 - 1)), rtol=1e-6)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=ids)
def test_samples_follow_the_distribution(distribution: Distribution) -> None:
    width = 20_000
    out = np.asarray(outs(distribution)[0])
    noise = distribution.noise(np.random.default_rng(0), 1, width)[0]
    computed = np.broadcast_to(
        out[: distribution.outputs - distribution.free], (width, distribution.outputs - distribution.free)
    )
    actions = distribution.sample(computed, out[distribution.outputs - distribution.free :], noise)
    assert actions.shape == (width, *distribution.action_shape)
    entropy = -np.asarray(
        distribution.log_prob(jnp.broadcast_to(jnp.asarray(out), (width, len(out))), jnp.asarray(actions))
    ).mean()
    np.testing.assert_allclose(entropy, distribution.entropy(jnp.asarray(out)), rtol=0.02)


def test_what_the_environment_gets() -> None:
    single, multi, box = DISTRIBUTIONS
    assert single.to_env(np.array([[2], [0]])) == [2, 0]
    assert Categorical((3,), (5,), scalar=True).to_env(np.array([[2]])) == [7]
    np.testing.assert_array_equal(multi.to_env(np.array([[1, 2]])), [[1, 3]])
    np.testing.assert_array_equal(box.to_env(np.array([[3.0, -0.5]], np.float32)), [[1.0, -0.5]])
    assert box.to_env(np.zeros((1, 2), np.float32))[0].dtype == np.float32


BY_VALUE = EpsilonGreedy((4,), (2,), scalar=True)


def test_the_best_action_or_any() -> None:
    values = np.tile(np.array([[0.0, 3.0, 1.0, 2.0]], np.float32), (20_000, 1))
    noise = BY_VALUE.noise(np.random.default_rng(0), 1, len(values))[0]
    assert (BY_VALUE.sample(values, np.zeros(1), None) == 1).all()
    assert (BY_VALUE.sample(values, np.zeros(1), noise) == 1).all()
    shares = np.bincount(BY_VALUE.sample(values, np.full(1, 0.4), noise)[:, 0], minlength=4) / len(values)
    np.testing.assert_allclose(shares, [0.1, 0.7, 0.1, 0.1], atol=0.01)
    assert BY_VALUE.to_env(np.array([[3]])) == [5]


@pytest.mark.parametrize("distribution", [*DISTRIBUTIONS, BY_VALUE], ids=[*ids, "by value"])
def test_plain_data_and_back(distribution: Distribution) -> None:
    assert actions.from_record(actions.to_record(distribution)) == distribution


def test_distribution_for_every_supported_space() -> None:
    spaces = gymnasium.spaces
    assert actions.distribution_for(spaces.Discrete(3, start=2)) == Categorical((3,), (2,), scalar=True)
    assert actions.distribution_for(spaces.MultiDiscrete([2, 3])) == Categorical((2, 3), (0, 0), scalar=False)
    distribution = actions.distribution_for(spaces.Box(-1, 1, (2, 2), np.float64))
    assert isinstance(distribution, Gaussian)
    taken = distribution.to_env(np.zeros((5, 4), np.float32))
    assert [action.shape for action in taken] == [(2, 2)] * 5
    assert taken[0].dtype == np.float64
