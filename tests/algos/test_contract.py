"""Every algorithm keeps the contract, with each option that changes how it samples or resumes."""

from dataclasses import replace

import pytest

from shoal.algos import dqn, es, nevergrad, ppo, trpo
from shoal.testing.algorithms import AlgorithmContract


@pytest.mark.trains
class TestPPO(AlgorithmContract):
    algorithm = ppo
    config = ppo.Config(
        batch_steps=256, lanes=2, width=4, hidden=(16,), epochs=3, lr_schedule="linear", clip_schedule="linear"
    )
    learner = ppo.Config(batch_steps=512, lanes=2, width=8, hidden=(16,), lr=3e-3)
    iterations = 30
    invalid = {"lr": -1.0, "gamma": 2.0, "hidden": (0,), "minibatch": 1000, "max_grad_norm": 0.0}


class TestPPOWithLag(TestPPO):
    config = replace(TestPPO.config, lag=1)
    learner = replace(TestPPO.learner, lag=1)
    invalid = {"lag": 2, "clip": -1.0}


class TestPPOOnEpisodes(TestPPO):
    config = replace(TestPPO.config, batch="episodes")
    learner = replace(TestPPO.learner, batch="episodes")


@pytest.mark.trains
class TestTRPO(AlgorithmContract):
    algorithm = trpo
    config = trpo.Config(batch_steps=512, lanes=2, width=4, hidden=(16,), value_epochs=4, value_batch=64)
    learner = trpo.Config(batch_steps=1024, lanes=2, width=8, hidden=(16,), max_kl=0.03)
    iterations = 30
    invalid = {"max_kl": 0.0, "lam": 1.5, "line_search_shrink": 1.0, "lanes": 0}


class TestTRPOOnEpisodes(TestTRPO):
    config = replace(TestTRPO.config, batch="episodes")
    learner = replace(TestTRPO.learner, batch="episodes")


@pytest.mark.trains
class TestDQN(AlgorithmContract):
    algorithm = dqn
    config = dqn.Config(
        batch_steps=64, lanes=2, width=4, hidden=(16,), learning_starts=100, minibatch=16, buffer_size=400, n_step=3,
        epsilon_steps=400, target_every=24, priority=0.5, ladder=7.0,
    )  # fmt: skip
    learner = dqn.Config(
        batch_steps=128, lanes=2, width=8, hidden=(16,), lr=3e-3, gamma=0.5, epsilon=0.01, epsilon_steps=2000,
        learning_starts=200, replay_ratio=1.0,
    )  # fmt: skip
    iterations = 40
    invalid = {"lr": 0.0, "epsilon": 2.0, "tau": 1.5, "n_step": 0, "lag": 2}


class TestDQNWithoutLag(TestDQN):
    config = replace(TestDQN.config, lag=0, priority=0.0)
    learner = replace(TestDQN.learner, lag=0)


class TestES(AlgorithmContract):
    algorithm = es
    config = es.Config(
        population=12, tasks=3, width=4, table_size=10_000, score_episodes=2, hidden=(4,), normalise=True,
        length_factor=2.0,
    )  # fmt: skip
    learner = es.Config(population=32, sigma=0.1, lr=0.1, table_size=10_000)
    iterations = 30
    invalid = {"sigma": 0.0, "momentum": 1.0, "population": 13, "length_factor": 0.5}


@pytest.mark.trains
class TestNevergrad(AlgorithmContract):
    algorithm = nevergrad
    config = nevergrad.Config(population=8, tasks=2, width=4, score_episodes=2, optimizer="DE", hidden=(3,))
    learner = nevergrad.Config(population=24, optimizer="CMA", score_episodes=16)
    iterations = 40
    invalid = {"sigma": 0.0, "budget": 0, "optimizer": "CMAA", "bins": 1}
