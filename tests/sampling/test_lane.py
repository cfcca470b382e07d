"""Lanes: a fragment is the same whoever computes it, and records say what happened."""

from typing import Any

import numpy as np
import pytest

from shoal.base import seeding
from shoal.base.trees import digest
from shoal.engines.base import Engine
from shoal.engines.serial import SerialEngine
from shoal.envs.make import EnvSpec, make_env
from shoal.errors import EnvironmentFault, UsageError
from shoal.sampling import lane, lanes, tasks
from shoal.sampling.tasks import describe
from tests.support.lanes import WALK, forget_everything, head_side, policy_for

SPACES = [
    {"observation": observation, "action": action}
    for observation, action in (
        ("float32", "discrete"),
        ("float64", "box"),
        ("uint8", "multi"),
        ("dict", "from one"),
        ("tuple", "discrete"),
    )
]


ENVS = [EnvSpec("tests.support.toys:Walk-v0", kwargs) for kwargs in SPACES] + [EnvSpec("tests.support.toys:Single-v0")]


@pytest.mark.parametrize("env", ENVS, ids=lambda env: "-".join([env.id.split(":")[1], *env.kwargs.values()]))
def test_fragments_are_the_same_wherever_the_lane_lives(env: EnvSpec) -> None:
    _, weights = policy_for(env)
    with SerialEngine() as engine:
        shared = engine.share(weights)
        rounds = (7, 7, 40, 7, 7)  # 40 steps hold several episodes of a slot
        staying, moving = head_side(engine, env), head_side(engine, env)
        here = [[digest(record) for record in staying.fragments(shared, steps)] for steps in rounds]
        for steps, expected in zip(rounds, here, strict=True):
            forget_everything()
            assert [digest(record) for record in moving.fragments(shared, steps)] == expected


def test_head_resumes_in_the_middle_of_episodes() -> None:
    _, weights = policy_for(WALK)
    with SerialEngine() as engine:
        shared = engine.share(weights)
        whole = head_side(engine, WALK)
        records = [whole.fragments(shared, 5) for _ in range(6)]
        first = head_side(engine, WALK)
        for _ in range(3):
            first.fragments(shared, 5)
        second = head_side(engine, WALK, state=first.state()())
        for expected in records[3:]:
            assert [digest(r) for r in second.fragments(shared, 5)] == [digest(r) for r in expected]


def test_state_is_a_snapshot() -> None:
    _, weights = policy_for(WALK)
    with SerialEngine() as engine:
        lanes_ = head_side(engine, WALK)
        lanes_.fragments(engine.share(weights), 5)
        state = lanes_.state()
        before = digest(state())
        lanes_.fragments(engine.share(weights), 5)
        assert digest(state()) == before


def test_record_replays_step_by_step() -> None:
    """Every number of a record follows from seeds and actions, with plain Gymnasium."""
    policy, weights = policy_for(WALK)
    with SerialEngine() as engine:
        side = head_side(engine, WALK, count=2)
        record = side.fragments(engine.share(weights), 40)[1]
    ends = {(int(t), int(s)): k for k, (t, s) in enumerate(record["ends"])}
    assert {True, False} == set(record["terminated"].tolist()), "both kinds of end occur"
    for slot in range(3):
        env, episode, total, length = make_env(WALK), 0, 0.0, 0
        observation, _ = env.reset(seed=seeding.integer(5, "episode", 1, slot, 0))
        for time in range(40):
            np.testing.assert_array_equal(record["observations"][time, slot], observation)
            (action,) = policy.distribution.to_env(record["actions"][time, slot][None])
            observation, reward, terminated, truncated, _ = env.step(action)
            assert record["rewards"][time, slot] == np.float32(reward)
            total, length = total + reward, length + 1
            assert (terminated or truncated) == ((time, slot) in ends)
            if terminated or truncated:
                k = ends[time, slot]
                assert record["terminated"][k] == terminated
                np.testing.assert_array_equal(record["finals"][k], observation)
                assert (record["returns"][k], record["lengths"][k], record["episodes"][k]) == (total, length, episode)
                episode, total, length = episode + 1, 0.0, 0
                observation, _ = env.reset(seed=seeding.integer(5, "episode", 1, slot, episode))
        np.testing.assert_array_equal(record["observations"][40, slot], observation)
    acted_on = record["observations"][:-1].reshape(-1, 3)
    np.testing.assert_allclose(record["moments"]["mean"], acted_on.mean(axis=0), rtol=1e-5)
    assert record["moments"]["count"] == 120


@pytest.mark.parametrize("budget", [{"episodes": 7}, {"episodes": 2}, {"steps": 50}])
def test_episodes_are_whole(budget: dict[str, int]) -> None:
    policy, weights = policy_for(WALK)
    place = {"seed": 5, "purpose": "episode", "lane": 3, "width": 4, "env": WALK.to_record()}
    record = tasks.episodes(place, policy.to_record(), weights, budget)
    assert record["lengths"].sum() == record["steps"].sum(), "no step belongs to an episode that was cut off"
    if "episodes" in budget:
        assert len(record["returns"]) == budget["episodes"]
    else:
        assert record["steps"].sum() >= 50
        assert record["steps"].sum() - sorted(record["lengths"])[-4:][0] < 50 + 4 * 13
    again = tasks.episodes(place, policy.to_record(), weights, budget)
    assert digest(again) == digest(record)
    other = tasks.episodes(place | {"lane": 4}, policy.to_record(), weights, budget)
    assert digest(other) != digest(record)


def test_greedy_actions_are_the_likeliest() -> None:
    policy, weights = policy_for(WALK)
    place = {"seed": 5, "purpose": "evaluate", "lane": 0, "width": 4, "env": WALK.to_record()}
    record = tasks.episodes(place, policy.to_record(), weights, {"episodes": 4}, True)
    features = policy.features(record["observations"][:-1], weights["mean"], weights["scale"])
    expected = policy.out(weights["params"], features).argmax(axis=-1)
    for slot, steps in enumerate(record["steps"]):
        np.testing.assert_array_equal(record["actions"][:steps, slot, 0], expected[:steps, slot])


def test_bytes_stay_bytes() -> None:
    env = EnvSpec("tests.support.toys:Walk-v0", {"observation": "uint8"})
    policy, weights = policy_for(env)
    with SerialEngine() as engine:
        (record,) = head_side(engine, env, count=1).fragments(engine.share(weights), 4)
    assert record["observations"].dtype == np.uint8
    assert record["observations"].shape == (5, 3, 4, 3)
    assert policy.flatten(record["observations"]).max() <= 1.0
    assert record["moments"]["mean"].max() <= 1.0


def test_environments_are_reused_or_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EnvSpec] = []

    def counting(spec: EnvSpec) -> Any:
        made.append(spec)
        return make_env(spec)

    monkeypatch.setattr(lane, "make_env", counting)
    tasks.idle.clear()
    reused, recreated = EnvSpec("tests.support.toys:Walk-v0"), EnvSpec("tests.support.toys:Walk-v0", recreate_after=2)
    outcomes = []
    for env in (reused, recreated):
        policy, weights = policy_for(env)
        place = {"seed": 5, "purpose": "episode", "lane": 0, "width": 2, "env": env.to_record()}
        for _ in range(3):
            record = tasks.episodes(place, policy.to_record(), weights, {"episodes": 8})
        outcomes.append(digest(record))
    assert made.count(reused) == 2
    assert made.count(recreated) > 12, "also by whole episodes"
    assert outcomes[0] == outcomes[1], "this environment keeps nothing between episodes"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "raises",
            r"raised RuntimeError: the simulation diverged\nin .*reset seed \d+\), step 2(.|\n)*raise RuntimeError",
        ),
        (
            "nan reward",
            r"returned the reward nan\nin tests.support.toys:Trouble-v0, lane 0, slot \d, episode 0 .*step 2\.",
        ),
        ("nan observation", r"returned the (final )?observation nan"),
        ("never ends", r"does not end: .*--max-episode-steps N.*--step-limit N \(now 300\)"),
    ],
)
@pytest.mark.parametrize("mode", ["fragments", "episodes"])
def test_environments_that_misbehave(how: str, message: str, mode: str) -> None:
    env = EnvSpec("tests.support.toys:Trouble-v0", {"how": how}, step_limit=300)
    _, weights = policy_for(env)
    with SerialEngine() as engine:
        side = head_side(engine, env)
        with pytest.raises(EnvironmentFault, match=message):
            getattr(side, mode)(engine.share(weights), 500)


def test_spaces_that_are_not_supported() -> None:
    for kwargs, what in (({"observation": "text"}, "observation space"), ({"action": "binary"}, "action space")):
        with pytest.raises(UsageError, match=f"the {what} .* is not supported"):
            describe(EnvSpec("tests.support.toys:Walk-v0", kwargs).to_record())


def test_replay_that_ends_early_is_named() -> None:
    env = EnvSpec("tests.support.toys:Flaky-v0")
    _, weights = policy_for(env)

    def move_until_it_shows(engine: Engine, side: lanes.Lanes) -> None:
        for _ in range(50):
            side.fragments(engine.share(weights), 4)
            forget_everything()

    with SerialEngine() as engine:
        side = head_side(engine, env)
        with pytest.raises(
            EnvironmentFault, match=r"not deterministic under its seed.*shoal check-env tests.support.toys:Flaky-v0"
        ):
            move_until_it_shows(engine, side)


def test_many_runs_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old runs give way, with their environments, whatever their specs were."""
    closed = 0

    def counting(spec: EnvSpec) -> Any:
        env = make_env(spec)
        close = env.close

        def closing() -> None:
            nonlocal closed
            closed += 1
            close()

        env.close = closing  # type: ignore[method-assign]
        return env

    monkeypatch.setattr(lane, "make_env", counting)
    tasks.idle.clear()
    tasks.held.clear()
    with SerialEngine() as engine:
        for limit in range(5, 5 + tasks.KEEP_RUNS + 6):
            env = EnvSpec("tests.support.toys:Walk-v0", max_episode_steps=limit)
            head_side(engine, env, count=1).fragments(engine.share(policy_for(env)[1]), 4)
    assert closed >= 9, "three slots of each run that is gone"
    assert (len(tasks.held), len(tasks.idle.counts())) == (tasks.KEEP_RUNS, lane._KEEP_SPECS)


def test_a_lane_that_moved_away_gives_its_environments_back() -> None:
    policy, weights = policy_for(WALK)
    tasks.idle.clear()
    tasks.held.clear()
    with SerialEngine() as engine:
        side = head_side(engine, WALK, count=1)
        side.fragments(engine.share(weights), 4)
    place = {**side._address(0), "token": side._token, "fragment": 5}
    assert tasks.fragment(place, policy.to_record(), weights, 4) is None
    assert tasks.idle.counts() == [3]
