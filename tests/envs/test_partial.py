import gymnasium
import numpy as np
import pytest

from shoal.commands.check_env import env_verdicts
from shoal.envs.make import EnvSpec, make_env, time_limit


@pytest.mark.parametrize(
    ("name", "whole", "shown"),
    [("shoal/CartPolePartial-v1", "CartPole-v1", [0, 2]), ("shoal/PendulumPartial-v1", "Pendulum-v1", [0, 1])],
)
def test_the_same_task_without_velocities(name: str, whole: str, shown: list[int]) -> None:
    ours, plain = make_env(EnvSpec(name)), gymnasium.make(whole)
    assert ours.observation_space.shape == (2,)
    plain.action_space.seed(0)
    np.testing.assert_array_equal(ours.reset(seed=3)[0], plain.reset(seed=3)[0][shown])
    for _ in range(50):
        action = plain.action_space.sample()
        one, other = ours.step(action), plain.step(action)
        np.testing.assert_array_equal(one[0], other[0][shown])
        assert ours.observation_space.contains(one[0])
        assert one[1:3] == other[1:3]
        if other[2]:
            break
    record = gymnasium.spec(whole)
    assert time_limit(EnvSpec(name)) == record.max_episode_steps
    assert gymnasium.spec(name).reward_threshold == record.reward_threshold


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    ["shoal/CartPolePartial-v1", "shoal/PendulumPartial-v1", "LunarLanderContinuous-v3", "Ant-v5", "Humanoid-v5"],
)
def test_they_keep_every_rule(name: str) -> None:
    assert [verdict for verdict in env_verdicts(EnvSpec(name), seconds=0.2) if verdict.works is False] == []


def test_settings_of_the_environment_reach_it() -> None:
    env = make_env(EnvSpec("shoal/PendulumPartial-v1", {"g": 2.0}))
    assert env.unwrapped.g == 2.0
