"""Every head against autodiff, exhaustive sums or sampling."""

import itertools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.policies import actions
from shoal.policies.actions import Categorical, EpsilonGreedy, Gaussian, Head

HEADS = [
    Categorical((4,), (0,), scalar=True),
    Categorical((2, 3), (0, 1), scalar=False),
    Gaussian((2,), (-1.0, -2.0), (1.0, 2.0), "<f4"),
]
ids = ["categorical", "multi", "gaussian"]


def outs(head: Head, rows: int = 1, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, head.outputs)).astype(np.float32) * 0.7)


@pytest.mark.parametrize("head", HEADS, ids=ids)
def test_fisher_is_the_hessian_of_the_divergence(head: Head) -> None:
    out = outs(head)[0]
    hessian = jax.hessian(lambda new: head.kl(out, new))(out)
    for direction in np.eye(head.outputs, dtype=np.float32):
        np.testing.assert_allclose(head.fisher(out, jnp.asarray(direction)), hessian @ direction, atol=2e-5)


@pytest.mark.parametrize("head", HEADS, ids=ids)
def test_divergence_is_zero_only_at_home(head: Head) -> None:
    old, new = outs(head, 50), outs(head, 50, seed=1)
    np.testing.assert_allclose(head.kl(old, old), 0, atol=1e-6)
    assert (head.kl(old, new) > 0).all()


@pytest.mark.parametrize("head", HEADS[:2], ids=ids[:2])
def test_categorical_sums_over_all_actions(head: Categorical) -> None:
    old, new = outs(head)[0], outs(head, seed=1)[0]
    actions = jnp.array(list(itertools.product(*map(range, head.choices))))
    log_p = head.log_prob(jnp.broadcast_to(old, (len(actions), head.outputs)), actions)
    log_q = head.log_prob(jnp.broadcast_to(new, (len(actions), head.outputs)), actions)
    p = np.exp(log_p)
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(head.entropy(old), -(p * log_p).sum(), rtol=1e-4)
    np.testing.assert_allclose(head.kl(old, new), (p * (log_p - log_q)).sum(), rtol=1e-4)


def test_gaussian_by_hand() -> None:
    head = HEADS[2]
    old = jnp.array([0.5, -1.0, 0.0, np.log(2.0)], jnp.float32)
    action = jnp.array([1.5, 1.0], jnp.float32)
    # unit normal at distance 1, and deviation 2 at distance 2
    expected = 2 * (-0.5 - 0.5 * np.log(2 * np.pi)) - np.log(2.0)
    np.testing.assert_allclose(head.log_prob(old, action), expected, rtol=1e-6)
    np.testing.assert_allclose(head.entropy(old), np.log(2 * np.pi * np.e) + np.log(2.0), rtol=1e-6)
    new = jnp.array([1.5, -1.0, 0.0, 0.0], jnp.float32)
    np.testing.assert_allclose(head.kl(old, new), 0.5 + (-np.log(2.0) + 0.5 * (4 - 1)), rtol=1e-6)


@pytest.mark.parametrize("head", HEADS, ids=ids)
def test_samples_follow_the_distribution(head: Head) -> None:
    width = 20_000
    out = np.asarray(outs(head)[0])
    noise = head.noise(np.random.default_rng(0), 1, width)[0]
    computed = np.broadcast_to(out[: head.outputs - head.free], (width, head.outputs - head.free))
    actions = head.sample(computed, out[head.outputs - head.free :], noise)
    assert actions.shape == (width, *head.action_shape)
    entropy = -np.asarray(
        head.log_prob(jnp.broadcast_to(jnp.asarray(out), (width, len(out))), jnp.asarray(actions))
    ).mean()
    np.testing.assert_allclose(entropy, head.entropy(jnp.asarray(out)), rtol=0.02)


def test_what_the_environment_gets() -> None:
    single, multi, box = HEADS
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


@pytest.mark.parametrize("head", [*HEADS, BY_VALUE], ids=[*ids, "by value"])
def test_plain_data_and_back(head: Head) -> None:
    assert actions.from_tree(actions.to_tree(head)) == head


def test_head_for_every_supported_space() -> None:
    spaces = gymnasium.spaces
    assert actions.head_for(spaces.Discrete(3, start=2)) == Categorical((3,), (2,), scalar=True)
    assert actions.head_for(spaces.MultiDiscrete([2, 3])) == Categorical((2, 3), (0, 0), scalar=False)
    head = actions.head_for(spaces.Box(-1, 1, (2, 2), np.float64))
    assert isinstance(head, Gaussian)
    taken = head.to_env(np.zeros((5, 4), np.float32))
    assert [action.shape for action in taken] == [(2, 2)] * 5
    assert taken[0].dtype == np.float64
