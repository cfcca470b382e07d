from __future__ import annotations

import gymnasium
import numpy as np

import shoal
from bench.bare import recorded, replayed_rate
from bench.es import Generations
from shoal.algos import es
from shoal.envs.make import EnvSpec


def test_recorded_episodes_are_those_that_the_bare_environment_plays_again() -> None:
    with shoal.engine("serial") as engine:
        episodes = Generations(engine, "CartPole-v1", population=4).recorded()
        assert replayed_rate(engine, "CartPole-v1", 0.01, episodes) > 0

    env = gymnasium.make("CartPole-v1")
    for episode in episodes:
        env.reset(seed=episode["seed"])
        ends = [any(env.step(action)[2:4]) for action in episode["actions"].tolist()]
        assert ends == [False] * (len(ends) - 1) + [True]
    assert len({tuple(episode["actions"]) for episode in episodes}) > 2, "policies differ"


def test_enough_is_recorded_of_every_policy() -> None:
    with shoal.engine("serial") as engine:
        saved = next(es.train(es.Config(population=4), EnvSpec("Pendulum-v1"), engine, seed=0, steps=1)).policy
    still = saved.weights | {"params": np.zeros_like(saved.weights["params"])}
    episodes = recorded("Pendulum-v1", saved.policy, [saved.weights, still], steps=500)
    assert [len(episode["actions"]) for episode in episodes] == [200, 200, 200]
    assert not episodes[1]["actions"].any()
    assert episodes[0]["actions"].any()
