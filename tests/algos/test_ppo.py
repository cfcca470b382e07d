"""PPO: the maths of one update, and learning where the answer is known."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shoal import engines
from shoal.algos import ppo
from shoal.base import seeding
from shoal.base.trees import digest
from shoal.envs.make import EnvSpec
from shoal.errors import LearningFault
from shoal.learning import xla
from shoal.policies.actions import Categorical
from shoal.policies.networks import MLP
from shoal.policies.policy import Policy
from shoal.sampling.batch import minibatch_orders
from shoal.sampling.tasks import describe

pytestmark = pytest.mark.trains

xla.start(1)

SMALL = ppo.Config(batch_steps=256, lanes=2, width=4, hidden=(16,), epochs=3, minibatch=64)


def steps(config: ppo.Config, env: str, count: int, engine: str = "serial", seed: int = 0, **options: Any) -> list[Any]:
    found = []
    with engines.make(engine, **options) as pool:
        for step in ppo.train(config, EnvSpec(env), pool, seed, 10_000):
            found.append(step)
            if len(found) == count:
                return found
    raise AssertionError


def test_learns_to_aim() -> None:
    config = ppo.Config(batch_steps=512, lanes=2, width=8, hidden=(16,), lr=3e-3, gamma=0.5)
    found = steps(config, "tests.support.toys:Aim-v0", 60)
    assert found[0].metrics["rollout/ep_rew_mean"] < -8
    assert found[-1].metrics["rollout/ep_rew_mean"] > -1.5


def test_with_a_lag_a_batch_is_acted_with_the_weights_from_before() -> None:
    found = steps(replace(SMALL, lag=1), "tests.support.toys:Walk-v0", 3)
    choices = describe(EnvSpec("tests.support.toys:Walk-v0").to_record())["distribution"]["choices"]
    start = Policy((3,), "<f4", Categorical(tuple(choices), (0,), scalar=True), (16,)).init(seeding.rng(0, "weights"))
    acting = [step.learned["acting"]["params"] for step in found]
    np.testing.assert_array_equal(acting[0], start, "the second batch is acted while the first is learned from")
    np.testing.assert_array_equal(acting[1], found[0].learned["policy"]["params"])
    np.testing.assert_array_equal(acting[2], found[1].learned["policy"]["params"])
    first = steps(SMALL, "tests.support.toys:Walk-v0", 1)[0]
    assert digest(first.learned["policy"]) == digest(found[0].learned["policy"]), "the first update is the same"


def test_schedules_fall_to_zero_at_the_last_step() -> None:
    config = ppo.Config(**{**vars(SMALL), "batch_steps": 2500, "lr_schedule": "linear", "clip_schedule": "linear"})
    found = steps(config, "tests.support.toys:Walk-v0", 6)
    rates = [step.metrics["train/learning_rate"] / config.lr for step in found]
    np.testing.assert_allclose(rates, [1.0, 0.7496, 0.4992, 0.2488, 0.0, 0.0], atol=1e-3)
    np.testing.assert_allclose([step.metrics["train/clip_range"] / config.clip for step in found], rates)
    assert digest(found[4].learned["policy"]) == digest(found[5].learned["policy"]), "a rate of 0 changes nothing"


POLICY = Policy((3,), "<f4", Categorical((3,), (0,), scalar=True), (8,))
VALUE = MLP((3, 8, 1))
TIME, SLOTS = 8, 4


def random_batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    weights = np.ones((TIME, SLOTS), np.float32)
    weights[5:, 1] = 0
    finals_at = np.full(SLOTS, TIME * SLOTS)
    finals_at[0] = 4 * SLOTS + 2
    terminated, ended = np.zeros((TIME, SLOTS), bool), np.zeros((TIME, SLOTS), bool)
    terminated[3, 0] = ended[3, 0] = ended[4, 2] = True  # slot 2 is truncated at time 4
    return {
        "observations": rng.normal(size=(TIME + 1, SLOTS, 3)).astype(np.float32),
        "actions": rng.integers(0, 3, (TIME, SLOTS, 1)),
        "rewards": rng.normal(size=(TIME, SLOTS)).astype(np.float32),
        "weights": weights,
        "terminated": terminated,
        "ended": ended,
        "finals": rng.normal(size=(SLOTS, 3)).astype(np.float32) * 5,
        "finals_at": finals_at,
    }


def update(config: ppo.Config, clip: float = 0.2) -> tuple[Any, ...]:
    """Parameters before and after one update, and the metrics."""
    params, critic = POLICY.init(seeding.rng(0, "weights")) * 3, VALUE.init(seeding.rng(0, "value"), 1.0)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
    behaviour = {"params": params, "mean": np.zeros(3, np.float32), "scale": np.ones(3, np.float32)}
    step = ppo.make_update(config, POLICY, VALUE, optimizer)
    adam = {"policy": optimizer.init(jnp.asarray(params)), "value": optimizer.init(jnp.asarray(critic))}
    returns = jnp.zeros(3)
    rates = np.float32(config.lr), np.float32(clip)
    batch = random_batch()
    orders = minibatch_orders(seeding.rng(0, "learn"), batch, config.epochs, config.minibatch)
    new, new_critic, *_, metrics = step(params, critic, adam, returns, behaviour, batch, orders, *rates)
    return params, critic, np.asarray(new), np.asarray(new_critic), metrics


def reference_targets(config: ppo.Config) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and value targets of the steps that were taken, by a plain loop."""
    batch = random_batch()
    critic = VALUE.init(seeding.rng(0, "value"), 1.0)
    values = np.asarray(VALUE(critic, batch["observations"]))[..., 0]
    following_values = values[1:].copy()
    following_values[3, 0] = 0.0  # terminated: nothing follows
    following_values[4, 2] = VALUE(critic, batch["finals"][:1])[0, 0]  # truncated: what would have followed
    estimate, following = np.zeros((TIME, SLOTS)), np.zeros(SLOTS)
    for time in reversed(range(TIME)):
        delta = batch["rewards"][time] + config.gamma * following_values[time] - values[time]
        following = np.where(batch["ended"][time], 0.0, following)
        following = estimate[time] = delta + config.gamma * config.lam * following
    used = batch["weights"].astype(bool)
    return estimate[used], (estimate + values[:-1])[used]


def reference_loss(params: Any, critic: Any, config: ppo.Config) -> Any:
    """PPO's loss on the whole batch, for parameters that are still the old ones."""
    batch = random_batch()
    used = batch["weights"].astype(bool)
    x, actions = batch["observations"][:-1][used], batch["actions"][used]
    old_params = POLICY.init(seeding.rng(0, "weights")) * 3
    estimate, targets = reference_targets(config)
    scaled = (estimate - estimate.mean()) / estimate.std()
    out = POLICY.out(params, jnp.asarray(x))
    ratio = jnp.exp(
        POLICY.distribution.log_prob(out, actions) - POLICY.distribution.log_prob(POLICY.out(old_params, x), actions)
    )
    gain = jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled).mean()
    normal = (targets - targets.mean()) / targets.std()
    value_loss = ((VALUE(critic, jnp.asarray(x))[:, 0] - normal) ** 2).mean()
    return -gain - config.entropy * POLICY.distribution.entropy(out).mean() + value_loss / 2


def test_one_step_against_a_reference() -> None:
    """One epoch of one minibatch is one Adam step along the gradient of the whole batch, clipped for each network."""
    config = ppo.Config(epochs=1, minibatch=TIME * SLOTS, lr=1e-3, entropy=0.01)
    params, critic, new, new_critic, _ = update(config)
    _, targets = reference_targets(config)
    critic = critic.copy()
    critic[-9:] /= targets.std()  # the last layer, so that values stay what they were
    critic[-1] -= targets.mean() / targets.std()
    gradient = jax.grad(lambda both: reference_loss(both[: len(params)], both[len(params) :], config))
    g = np.asarray(gradient(jnp.concatenate([params, critic])), np.float64)
    for part in (slice(len(params)), slice(len(params), None)):
        g[part] *= min(1.0, config.max_grad_norm / np.linalg.norm(g[part]))
    expected = -config.lr * g / (np.abs(g) + 1e-5)  # Adam's first step
    moved = np.concatenate([new - params, new_critic - critic])
    clear = np.abs(g) > 1e-4  # where rounding does not decide the sign
    np.testing.assert_allclose(moved[clear], expected[clear], rtol=2e-2, atol=1e-6)


def test_clip_limits_how_far_the_policy_moves() -> None:
    tight = update(ppo.Config(epochs=50, minibatch=32, lr=1e-2), clip=0.01)[-1]
    loose = update(ppo.Config(epochs=50, minibatch=32, lr=1e-2), clip=10.0)[-1]
    assert tight["train/approx_kl"] < loose["train/approx_kl"] / 3
    assert tight["train/clip_fraction"] > 0.2
    assert loose["train/clip_fraction"] == 0


def test_kl_stop_ends_an_update_early() -> None:
    free = update(ppo.Config(epochs=50, minibatch=32, lr=1e-2))
    held = update(ppo.Config(epochs=50, minibatch=32, lr=1e-2, max_kl=0.005))
    assert held[-1]["train/approx_kl"] < 0.03 < free[-1]["train/approx_kl"]
    assert np.linalg.norm(held[2] - held[0]) < np.linalg.norm(free[2] - free[0]) / 2
    np.testing.assert_array_equal(held[3], free[3], "the value function goes on")


def test_value_clip_slows_the_value_function() -> None:
    free = update(ppo.Config(epochs=50, minibatch=32, lr=1e-2))
    held = update(ppo.Config(epochs=50, minibatch=32, lr=1e-2, value_clip=0.01))
    assert np.linalg.norm(held[3] - held[1]) < np.linalg.norm(free[3] - free[1])


def test_numbers_that_are_not_finite_are_not_kept() -> None:
    config = ppo.Config(**{**vars(SMALL), "lr": 1e38})
    with pytest.raises(LearningFault, match=r"not finite.*not kept.*--lr"):
        steps(config, "tests.support.toys:Walk-v0", 3)


def test_every_problem_is_listed() -> None:
    config = ppo.Config(lanes=0, gamma=2.0, hidden=(0,), lr=-1, max_kl=0.0, entropy=-1, minibatch=9999)
    assert len(config.problems()) == 7
    assert ppo.Config().problems() == []
