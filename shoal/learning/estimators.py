"""Maths that algorithms share, in JAX: advantages, conjugate gradients, weighted means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.policies.networks import MLP


def advantages(
    rewards: jax.Array, values: jax.Array, next_values: jax.Array, ended: jax.Array, gamma: float, lam: float
) -> jax.Array:
    """Compute generalised advantage estimates (T, N).

    `next_values` (T, N) are the values of the states after each step: 0 after a termination, the value of the final
    observation after a truncation. `ended` (T, N) is True where an episode ended either way.
    """
    deltas = rewards + gamma * next_values - values
    decay = gamma * lam * (1.0 - ended.astype(deltas.dtype))

    def back(following: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, keep = at
        advantage = delta + keep * following
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros_like(deltas[0]), (deltas, decay), reverse=True)[1]


_Search = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def conjugate_gradient(product: Callable[[jax.Array], jax.Array], b: jax.Array, iterations: int) -> jax.Array:
    """Solve product(x) = b for a positive definite `product`, starting from zero; stop early once accurate enough."""

    def go_on(state: _Search) -> jax.Array:
        return (state[0] < iterations) & (state[4] > 1e-10)

    def step(state: _Search) -> _Search:
        index, x, residual, direction, size = state
        image = product(direction)
        alpha = size / (direction @ image)
        residual = residual - alpha * image
        new_size = residual @ residual
        return index + 1, x + alpha * direction, residual, residual + (new_size / size) * direction, new_size

    start = (jnp.zeros((), jnp.int32), jnp.zeros_like(b), b, b, b @ b)
    return jax.lax.while_loop(go_on, step, start)[1]


def mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Compute the mean over entries whose weight is 1; the others have weight 0."""
    return (values * weights).sum() / weights.sum()


def standardise(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Standardise to mean 0 and deviation 1 over the weighted entries; others become 0."""
    centred = (values - mean(values, weights)) * weights
    return centred / (jnp.sqrt(mean(centred**2, weights)) + 1e-8)


def explained_variance(predicted: jax.Array, actual: jax.Array, weights: jax.Array) -> jax.Array:
    """Compute 1 - Var(actual - predicted) / Var(actual): 1 is perfect, 0 no better than a constant."""
    error = actual - predicted
    spread = mean((actual - mean(actual, weights)) ** 2, weights)
    return 1.0 - mean((error - mean(error, weights)) ** 2, weights) / (spread + 1e-8)


def track_returns(statistics: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Update the running [mean, mean square, batches] (3,) of the value function's targets.

    A plain average over the first batches, then an exponential one: returns grow while a policy learns.
    """
    batches = statistics[2] + 1
    rate = jnp.maximum(1 / batches, 0.1)
    now = jnp.stack([mean(targets, weights), mean(targets**2, weights)])
    return jnp.concatenate([statistics[:2] + rate * (now - statistics[:2]), batches[None]])


def shift_and_scale(statistics: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and deviation of returns, which turn network outputs into values; (0, 1) before the first batch."""
    spread = jnp.sqrt(jnp.maximum(statistics[1] - statistics[0] ** 2, 1e-6))
    return statistics[0], jnp.where(statistics[2] > 0, spread, 1.0)


def keep_outputs(critic: jax.Array, width: int, old: jax.Array, new: jax.Array) -> jax.Array:
    """Rescale the last layer of a flat value network so that its values stay the same under new statistics (PopArt).

    `width` is that of the last hidden layer; the weights and bias of the last layer are at the end of the vector.
    """
    (old_shift, old_scale), (new_shift, new_scale) = shift_and_scale(old), shift_and_scale(new)
    layer = critic[-(width + 1) :] * (old_scale / new_scale)
    layer = layer.at[-1].add((old_shift - new_shift) / new_scale)
    return jnp.concatenate([critic[: -(width + 1)], layer])


class Assessment(NamedTuple):
    """Values, advantages and targets of a batch of T steps and N slots."""

    values: jax.Array
    """Value of each observation acted on (T, N)."""
    estimates: jax.Array
    """Advantages (T, N)."""
    targets: jax.Array
    """Targets of the value function (T, N)."""
    normal_targets: jax.Array
    """The targets as network outputs, normalised by the new statistics."""
    normal_values: jax.Array
    """The values as network outputs, normalised by the new statistics."""
    returns: jax.Array
    """The new statistics of returns (3,)."""
    critic: jax.Array
    """Parameters of the value network, rescaled so that its values are unchanged under the new statistics."""


def assess(
    value: MLP, critic: jax.Array, returns: jax.Array, features: jax.Array, finals: jax.Array,
    batch: dict[str, jax.Array], gamma: float, lam: float,
) -> Assessment:  # fmt: skip
    """Compute advantages and value targets of a batch (see `sampling.batch`).

    `features` (T+1, N, inputs) belong to its observations, `finals` (K, inputs) to its final observations. The value
    network learns returns normalised by their running statistics, whatever the scale of the rewards.
    """
    low, spread = shift_and_scale(returns)
    values = low + spread * value(critic, features)[..., 0]
    final_values = low + spread * value(critic, finals)[:, 0]
    next_values = values[1:].reshape(-1).at[batch["finals_at"]].set(final_values, mode="drop")
    next_values = jnp.where(batch["terminated"], 0.0, next_values.reshape(batch["rewards"].shape))
    estimates = advantages(batch["rewards"], values[:-1], next_values, batch["ended"], gamma, lam)
    targets = estimates + values[:-1]
    new_returns = track_returns(returns, targets, batch["weights"])
    low, spread = shift_and_scale(new_returns)
    return Assessment(
        values[:-1],
        estimates,
        targets,
        (targets - low) / spread,
        (values[:-1] - low) / spread,
        new_returns,
        keep_outputs(critic, value.sizes[-2], returns, new_returns),
    )


def weights_not_finite(iteration: int, measures: Mapping[str, float], remedy: str) -> str:
    """Word the message about an update whose weights are not finite."""
    return (
        f"iteration {iteration} computed weights that are not finite ({dict(measures)}); they were not kept. "
        f"Likely causes: rewards or a learning rate that are far too large; try {remedy}"
    )
