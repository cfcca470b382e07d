"""Against numbers computed by hand or by slower means."""

import jax
import jax.numpy as jnp
import numpy as np

from shoal.base import seeding
from shoal.learning.estimators import (
    advantages,
    conjugate_gradient,
    explained_variance,
    keep_outputs,
    mean,
    shift_and_scale,
    standardise,
    track_returns,
)
from shoal.policies.networks import MLP


def test_advantages_by_hand() -> None:
    """gamma 0.5, lambda 0.5; slot 0 terminates at time 1, slot 1 is truncated there with a final value of 4."""
    rewards = jnp.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    values = jnp.array([[10.0, 10.0], [20.0, 20.0], [30.0, 30.0]])
    next_values = jnp.array([[20.0, 20.0], [0.0, 4.0], [40.0, 40.0]])
    ended = jnp.array([[False, False], [True, True], [False, False]])
    # delta: 1 + 10 - 10 = 1; 2 + 0 - 20 = -18 (or 2 + 2 - 20 = -16); 3 + 20 - 30 = -7
    expected = [[1 + 0.25 * -18, 1 + 0.25 * -16], [-18, -16], [-7, -7]]
    np.testing.assert_allclose(advantages(rewards, values, next_values, ended, 0.5, 0.5), expected)


def test_advantages_with_lambda_one_are_returns_minus_values() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(6, 3)), rng.normal(size=(7, 3))
    ended = np.zeros((6, 3), bool)
    estimate = advantages(rewards, values[:-1], values[1:], ended, 0.9, 1.0)
    returns = values[6]
    for time in reversed(range(6)):
        returns = rewards[time] + 0.9 * returns
        np.testing.assert_allclose(estimate[time], returns - values[time], rtol=1e-5)


def test_conjugate_gradient_solves() -> None:
    rng = np.random.default_rng(1)
    root = rng.normal(size=(12, 12))
    matrix, b = root @ root.T + np.eye(12), rng.normal(size=12)
    x = conjugate_gradient(lambda v: jnp.asarray(matrix, jnp.float32) @ v, jnp.asarray(b, jnp.float32), 40)
    np.testing.assert_allclose(x, np.linalg.solve(matrix, b), rtol=2e-3, atol=2e-3)


def test_conjugate_gradient_of_zero_is_zero() -> None:
    assert not jax.jit(lambda b: conjugate_gradient(lambda v: 2 * v, b, 5))(jnp.zeros(4)).any()


def test_weighted_means_ignore_padding() -> None:
    values, weights = jnp.array([1.0, 3.0, 99.0]), jnp.array([1.0, 1.0, 0.0])
    assert mean(values, weights) == 2
    np.testing.assert_allclose(standardise(values, weights), [-1, 1, 0], atol=1e-6)
    np.testing.assert_allclose(explained_variance(values, values, weights), 1.0)
    np.testing.assert_allclose(explained_variance(jnp.zeros(3), values, weights), 0.0, atol=1e-6)


def test_values_stay_the_same_when_statistics_move() -> None:
    network = MLP((3, 16, 1))
    critic = jnp.asarray(network.init(seeding.rng(0, "value"), 1.0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)), jnp.float32)
    old, new = jnp.array([3.0, 13.0, 5.0]), jnp.array([-100.0, 10_400.0, 6.0])
    (low, spread), (new_low, new_spread) = shift_and_scale(old), shift_and_scale(new)
    assert (low, spread, new_low, new_spread) == (3, 2, -100, 20)
    before = low + spread * network(critic, x)
    after = new_low + new_spread * network(keep_outputs(critic, 16, old, new), x)
    np.testing.assert_allclose(before, after, rtol=1e-4, atol=1e-3)


def test_return_statistics_average_first_and_then_forget() -> None:
    weights = jnp.array([1.0, 1.0, 0.0])
    statistics = jnp.zeros(3)
    assert shift_and_scale(statistics) == (0, 1)
    statistics = track_returns(statistics, jnp.array([1.0, 3.0, 99.0]), weights)
    np.testing.assert_allclose(statistics, [2, 5, 1])
    np.testing.assert_allclose(shift_and_scale(statistics), [2, 1])
    statistics = track_returns(statistics, jnp.array([5.0, 7.0, 99.0]), weights)
    np.testing.assert_allclose(statistics, [4, 21, 2])
    for _ in range(100):
        statistics = track_returns(statistics, jnp.array([10.0, 12.0, 99.0]), weights)
    np.testing.assert_allclose(shift_and_scale(statistics), [11, 1], rtol=1e-2)
