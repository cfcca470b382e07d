"""Lanes of native vector environments keep the same rules."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.base.trees import Tree, digest
from shoal.engines.serial import SerialEngine
from shoal.envs.make import EnvSpec
from shoal.errors import UsageError
from shoal.policies.policy import SavedPolicy
from shoal.runs.settings import Settings
from shoal.sampling import evaluation, lanes
from shoal.sampling.batch import make_batch
from shoal.sampling.scores import Scores
from shoal.sampling.tasks import describe
from tests.support.cli import shoal
from tests.support.lanes import forget_everything, head_side, policy_for

ENVS = [
    EnvSpec("CartPole-v1", vector="gymnasium"),
    EnvSpec("CartPole-v1", max_episode_steps=9, vector="gymnasium"),
    *[EnvSpec(name, vector="envpool") for name in ("CartPole-v1", "Pendulum-v1", "LunarLander-v3")],
]


def records_of(env: EnvSpec, rounds: int, move: bool = False) -> list[list[Tree]]:
    _, weights = policy_for(env)
    with SerialEngine() as engine:
        side, shared, found = head_side(engine, env), engine.share(weights), []
        for _ in range(rounds):
            if move:
                forget_everything()
            found.append(side.fragments(shared, 20))
    return found


@pytest.mark.parametrize("env", ENVS, ids=str)
def test_same_wherever_the_lane_lives_and_across_renewals(env: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LIFE", 60)
    staying, moving = records_of(env, 8), records_of(env, 8, move=True)
    assert [list(map(digest, records)) for records in staying] == [list(map(digest, records)) for records in moving]
    starts = [records[0]["observations"][0] for records in staying]
    assert not any((starts[0] == other).all() for other in starts[1:]), "a renewed lane has other episodes"


def test_head_resumes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LIFE", 60)
    env = EnvSpec("CartPole-v1", vector="gymnasium")
    _, weights = policy_for(env)
    with SerialEngine() as engine:
        shared = engine.share(weights)
        whole, first = head_side(engine, env), head_side(engine, env)
        expected = [whole.fragments(shared, 20) for _ in range(7)]
        for _ in range(4):
            first.fragments(shared, 20)
        second = head_side(engine, env, state=first.state()())
        for records in expected[4:]:
            assert list(map(digest, second.fragments(shared, 20))) == list(map(digest, records))


@pytest.mark.parametrize("env", ENVS[:2], ids=str)
def test_steps_spent_on_resets_do_not_count(env: EnvSpec) -> None:
    records = [record for records in records_of(env, 4) for record in records]
    ends = sum(len(record["ends"]) for record in records)
    assert ends > 8
    for record in records:
        skipped = {tuple(pair) for pair in record["skipped"].tolist()}
        following = {(time + 1, slot) for time, slot in record["ends"].tolist() if time < 19}
        assert following <= skipped, "what follows an end is a reset"
        assert all(record["rewards"][time, slot] == 0 for time, slot in skipped)
        batch = make_batch([record])
        assert {tuple(pair) for pair in np.argwhere(batch["weights"] == 0).tolist()} == skipped
        assert record["moments"]["count"] == record["steps"].sum() - len(skipped)
        np.testing.assert_array_equal(record["returns"], record["lengths"], "CartPole pays 1 per step")
        for (time, slot), final in zip(record["ends"].tolist(), record["finals"], strict=True):
            np.testing.assert_array_equal(record["observations"][time + 1, slot], final)
    scores = Scores()
    scores.add(records)
    assert scores.steps == sum(int(make_batch([record])["weights"].sum()) for record in records)
    if env.max_episode_steps:
        cut = np.concatenate([record["lengths"][~record["terminated"]] for record in records])
        assert set(cut) == {9}


@pytest.mark.processes
def test_a_policy_is_played_outside_of_the_vector(tmp_path: Path) -> None:
    words = ["--iterations=1", "--workers=1", "--vector=gymnasium", "--no-preset", "--name=mine"]
    assert shoal("train", "ppo", "CartPole-v1", *words, cwd=tmp_path)[0] == 0
    code, out, _ = shoal("evaluate", "mine", "--episodes=8", cwd=tmp_path)
    assert code == 0
    assert "trained with --vector gymnasium; these episodes ran in Gymnasium's environment" in out
    saved = SavedPolicy.load(tmp_path / "runs/mine/policy.safetensors")
    other = replace(saved, env=saved.env | {"id": "Pendulum-v1"})
    with SerialEngine() as engine, pytest.raises(UsageError, match=r"cannot be evaluated.* \[3\] <f4 and \(1,\)"):
        evaluation.evaluate_policy(engine, other, 8)


@pytest.mark.processes
def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="registers no vector_entry_point"):
        describe(EnvSpec("Pendulum-v1", vector="gymnasium").to_record())
    found = Settings("CartPole-v1", vector="gymnasium", recreate_after=3).problems()
    assert any("recreate_after" in problem for problem in found)
    code, _, err = shoal("train", "ppo", "CartPole-v1", "--vector", "gymnasium", "--batch", "episodes", cwd=tmp_path)
    assert code == 2
    assert "--batch fragments" in err
