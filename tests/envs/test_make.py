import gymnasium
import numpy as np
import pytest

from shoal.envs import make as making
from shoal.envs.make import EnvSpec, make_env, time_limit
from shoal.envs.names import env_problems
from shoal.errors import EnvironmentFault, UsageError
from shoal.sampling.tasks import describe


@pytest.mark.processes
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "LunarLander-v3", "HalfCheetah-v5"])
def test_same_steps_as_plain_gymnasium(env_id: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Without the wrappers that a lane does itself, every number is the same."""
    spec = EnvSpec(env_id)
    ours, plain = make_env(spec), gymnasium.make(env_id)
    plain.action_space.seed(0)
    np.testing.assert_array_equal(ours.reset(seed=3)[0], plain.reset(seed=3)[0])
    for _ in range(200):
        action = plain.action_space.sample()
        one, other = ours.step(action), plain.step(action)
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1:3] == other[1:3]
        if other[2] or other[3]:
            break
    assert time_limit(spec) == plain.spec.max_episode_steps
    assert "WARNING" not in capfd.readouterr().err


def test_limits_of_ones_own() -> None:
    assert time_limit(EnvSpec("CartPole-v1", max_episode_steps=7)) == 7
    assert time_limit(EnvSpec("tests.support.toys:Walk-v0")) is None


def test_environments_with_wrappers_keep_them() -> None:
    wrapper = gymnasium.wrappers.RescaleObservation.wrapper_spec(min_obs=np.float32(-1), max_obs=np.float32(1))
    gymnasium.register(
        "Wrapped-v0",
        entry_point="gymnasium.envs.classic_control:PendulumEnv",
        max_episode_steps=5,
        additional_wrappers=(wrapper,),
    )
    try:
        env = make_env(EnvSpec("Wrapped-v0"))
        env.reset(seed=0)
        assert [env.step(np.zeros(1, np.float32))[3] for _ in range(5)] == [False] * 4 + [True]
        assert time_limit(EnvSpec("Wrapped-v0")) is None
        shorter = make_env(EnvSpec("Wrapped-v0", max_episode_steps=2))
        shorter.reset(seed=0)
        assert [shorter.step(np.zeros(1, np.float32))[3] for _ in range(2)] == [False, True]
    finally:
        del gymnasium.registry["Wrapped-v0"]


def test_names() -> None:
    assert env_problems("CartPole-v1") == []
    assert env_problems("tests.support.toys:Walk-v0") == []
    assert "CartPole" in env_problems("CartPol-v1")[0]
    assert "cannot be imported" in env_problems("no.such.module:Walk-v0")[0]


def test_environments_that_cannot_be_made() -> None:
    with pytest.raises(UsageError, match="does not take --env-kwargs"):
        make_env(EnvSpec("CartPole-v1", {"gravitas": 1}))
    with pytest.raises(EnvironmentFault, match="raised KeyError when it was made"):
        make_env(EnvSpec("tests.support.toys:Walk-v0", {"observation": "smell"}))


def test_float64_is_cut_and_bytes_are_not() -> None:
    assert describe(EnvSpec("tests.support.toys:Walk-v0", {"observation": "float64"}).to_record())["dtype"] == "<f4"
    assert describe(EnvSpec("tests.support.toys:Walk-v0", {"observation": "uint8"}).to_record())["dtype"] == "|u1"
    assert describe(EnvSpec("tests.support.toys:Walk-v0", {"observation": "dict"}).to_record())["shape"] == [6]


def test_mujoco_says_a_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    making._warned.clear()
    for moment in range(3):
        making._warn_once(f"Nan, Inf or huge value in QACC at DOF {moment}")
    making._warn_once("attribute 'x' is deprecated")
    assert capsys.readouterr().err == "MuJoCo warns: Nan, Inf or huge value in QACC at DOF 0\n"


def test_atari_needs_no_module_name() -> None:
    found = describe(EnvSpec("ALE/Pong-v5", {"obs_type": "ram"}).to_record())
    assert (found["shape"], found["dtype"]) == ([128], "|u1")
