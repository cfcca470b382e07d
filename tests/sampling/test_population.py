"""Populations: every member is scored as if it had played alone, whatever lane and slot it was in."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.algos.es import Config
from shoal.algos.search import policy_for
from shoal.base import seeding
from shoal.base.trees import Tree
from shoal.engines.serial import SerialEngine
from shoal.envs.make import EnvSpec, make_env
from shoal.errors import EnvironmentFault, LearningFault
from shoal.policies.policy import Policy
from shoal.sampling import noise_table
from shoal.sampling.population import Members, Outcome, Plan, Population, shares
from shoal.sampling.tasks import describe

TABLE = (3, 100_000)
PLAN = Plan(generation=4, episodes=2, steps=0, limit=None)


def setting(env: EnvSpec, **config: Any) -> tuple[Policy, Tree]:
    policy = policy_for(Config(**config), describe(env.to_record()), config.get("normalise", False))
    weights = {
        "params": policy.init(seeding.rng(0, "weights")) + np.float32(0.1),
        "mean": np.full(policy.inputs, 0.1, np.float32),
        "scale": np.full(policy.inputs, 0.7, np.float32),
    }
    return policy, weights


def members(policy: Policy, count: int) -> Members:
    rng = np.random.default_rng(1)
    offsets = rng.integers(0, TABLE[1] - policy.count, count)
    return Members(np.arange(count), offsets=offsets, scales=np.linspace(-1, 1, count).astype(np.float32))


def evaluated(
    env: EnvSpec, policy: Policy, weights: Tree, who: Members, plan: Plan = PLAN, lanes: int = 2, width: int = 3
) -> Outcome:
    with SerialEngine() as engine:
        population = Population(engine, env, policy, 5, lanes, width, TABLE)
        return population.evaluate(engine.share(weights), plan, who)


def alone(env: EnvSpec, policy: Policy, weights: Tree, params: np.ndarray, who: int, number: int) -> tuple[float, int]:
    """Return and length of one episode, played by hand."""
    act = policy.actor(weights | {"params": params})
    memory = np.zeros((1, policy.remembered), np.float32)
    made = make_env(env)
    observation, _ = made.reset(seed=seeding.integer(5, "fitness", 4, who, number))
    total, length, over = 0.0, 0, False
    while not over:
        actions = act(np.asarray(observation, policy.observation_dtype)[None], None, memory)
        observation, reward, terminated, truncated, _ = made.step(policy.distribution.to_env(actions)[0])
        total, length, over = total + float(reward), length + 1, terminated or truncated
    return total, length


CASES = [
    ({}, {}),
    ({"observation": "float64", "action": "box"}, {"hidden": (5,), "output": "tanh"}),
    ({"observation": "uint8", "action": "multi"}, {"hidden": (5, 4), "activation": "relu"}),
    ({"observation": "dict", "action": "from one"}, {"hidden": (4,), "memory": "elman", "normalise": True}),
    ({"action": "box"}, {"hidden": (4, 3), "memory": "lstm", "bins": 5}),
]


@pytest.mark.parametrize(("kwargs", "config"), CASES, ids=lambda case: "-".join(map(str, case.values())) or "plain")
def test_members_score_as_if_they_had_played_alone(kwargs: Tree, config: Tree) -> None:
    env = EnvSpec("tests.support.toys:Walk-v0", kwargs)
    policy, weights = setting(env, **config)
    who = members(policy, 9)
    assert who.offsets is not None
    assert who.scales is not None
    outcome = evaluated(env, policy, weights, who)
    assert outcome.members.tolist() == np.repeat(np.arange(9), 2).tolist()
    table = noise_table.open_table(*TABLE)
    for index, (member, number) in enumerate((member, number) for member in range(9) for number in range(2)):
        step = who.scales[member] * table[who.offsets[member] : who.offsets[member] + policy.count]
        total, length = alone(env, policy, weights, weights["params"] + step, member, number)
        assert outcome.lengths[index] == length
        assert outcome.returns[index] == pytest.approx(total, abs=1e-4)
    assert outcome.fitness(9) == pytest.approx(outcome.returns.reshape(9, 2).mean(axis=1))
    if config.get("normalise"):
        assert outcome.moments.count == outcome.lengths.sum()
        assert (outcome.moments.m2 > 0).all()


@pytest.mark.parametrize("config", [{"hidden": (5,)}, {"hidden": (4, 3), "memory": "lstm"}], ids=["plain", "lstm"])
def test_scores_do_not_depend_on_who_else_is_in_a_lane(config: Tree) -> None:
    env = EnvSpec("tests.support.toys:Walk-v0")
    policy, weights = setting(env, **config)
    who = replace(members(policy, 21), seeds=np.arange(21) - 4)
    plan = Plan(4, 2, 30, None)
    one, *others = (
        evaluated(env, policy, weights, who, plan, lanes=lanes, width=width)
        for lanes, width in ((1, 1), (1, 16), (1, 40), (3, 7), (21, 2))
    )
    assert len(set(one.lengths.tolist())) > 5, "lanes get narrower bit by bit"
    for other in others:
        np.testing.assert_array_equal(one.members, other.members)
        np.testing.assert_array_equal(one.returns, other.returns)


def test_given_weights_and_steps_from_the_centre_are_the_same() -> None:
    env = EnvSpec("tests.support.toys:Walk-v0")
    policy, weights = setting(env, hidden=(4,))
    who = members(policy, 7)
    assert who.offsets is not None
    assert who.scales is not None
    table = noise_table.open_table(*TABLE)
    rows = [s * table[p : p + policy.count] for s, p in zip(who.scales, who.offsets, strict=True)]
    given = Members(who.seeds, params=np.array(rows, np.float32) + weights["params"])
    one, other = (evaluated(env, policy, weights, chosen) for chosen in (who, given))
    np.testing.assert_array_equal(one.returns, other.returns)


def test_equal_seeds_mean_equal_environments() -> None:
    env = EnvSpec("tests.support.toys:Walk-v0")
    policy, weights = setting(env)
    still = {"offsets": np.zeros(4, np.int64), "scales": np.zeros(4, np.float32)}
    outcome = evaluated(env, policy, weights, Members(np.array([1, 2, 1, 2]), **still))
    first, second, third, fourth = outcome.returns.reshape(4, 2).tolist()
    assert first == third
    assert second == fourth
    assert first != second
    later = evaluated(env, policy, weights, Members(np.array([1, 2, 1, 2]), **still), Plan(5, 2, 0, None))
    assert not set(later.returns) & set(outcome.returns)


def test_at_least_so_many_steps() -> None:
    env = EnvSpec("tests.support.toys:Walk-v0")
    policy, weights = setting(env)
    outcome = evaluated(env, policy, weights, members(policy, 6), Plan(4, 1, 20, None))
    for member in range(6):
        lengths = outcome.lengths[outcome.members == member]
        assert lengths.sum() >= 20
        assert lengths[:-1].sum() < 20, "no more episodes than it takes"


def test_episodes_are_cut_but_not_those_of_the_policy_itself() -> None:
    env = EnvSpec("shoal.testing.environments:testing/Identity-v0")  # episodes of 8 steps
    policy, weights = setting(env)
    who = members(policy, 5)
    who.seeds[:2] = [-1, -2]
    assert evaluated(env, policy, weights, who, Plan(4, 1, 0, 3)).lengths.tolist() == [8, 8, 3, 3, 3]
    assert evaluated(env, policy, weights, who, Plan(4, 1, 0, 9)).lengths.tolist() == [8] * 5
    counts = np.bincount(evaluated(env, policy, weights, who, Plan(4, 3, 30, 3)).members)
    assert counts.tolist() == [1, 1, 10, 10, 10], "nor do these play more than one"
    shorter = EnvSpec("shoal.testing.environments:testing/Identity-v0", max_episode_steps=2)
    assert evaluated(shorter, policy, weights, who, Plan(4, 1, 0, 3)).lengths.tolist() == [2] * 5


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nan reward", r"rewards that add up to nan\nin .*reset seed"),
        ("nan observation", r"the observation nan\nin .*reset seed \d+\), step 3"),
        ("raises", r"raised RuntimeError: the simulation diverged\nin .*slot 0, .*step 2"),
        (
            "odd observation",
            r"returned something that .*\(ValueError: .*\nin .*slot 0, .*step 2\n.*check-env",
        ),
        ("never ends", r"an episode does not end: .*--max-episode-steps"),
    ],
)
def test_environments_that_misbehave(how: str, message: str) -> None:
    env = EnvSpec("tests.support.toys:Trouble-v0", {"how": how}, step_limit=300)
    policy, weights = setting(env)
    with pytest.raises(EnvironmentFault, match=message):
        evaluated(env, policy, weights, members(policy, 5))


@pytest.mark.parametrize(
    ("config", "weight", "message"),
    [
        ({}, np.inf, "generation 4 has weights that are not finite.*--sigma"),
        (
            {"hidden": (4,), "memory": "elman", "activation": "relu"},
            1e30,
            "generation 4 computed .* finite observations.*it is relu",
        ),
    ],
)
def test_policies_that_misbehave(config: Tree, weight: float, message: str) -> None:
    env = EnvSpec("tests.support.toys:Walk-v0")
    policy, weights = setting(env, **config)
    weights["params"][:] = weight
    with pytest.raises(LearningFault, match=message):
        evaluated(env, policy, weights, members(policy, 5), replace(PLAN, fixed_seeds=True))


def test_what_a_slot_computes_after_it_was_left_does_not_count() -> None:
    env = EnvSpec("shoal.testing.environments:testing/Identity-v0")  # episodes of 8 steps
    policy, weights = setting(env, hidden=(4,), memory="elman", activation="identity")
    cells, _ = policy.network.layers(weights["params"])[0]  # a view
    cells[policy.inputs :] = 300 * np.eye(4)  # 300 ** 8 is a float32, 300 ** 16 is none
    who = replace(members(policy, 5), seeds=np.array([-1, 0, 1, 2, 3]), scales=np.zeros(5, np.float32))
    outcome = evaluated(env, policy, weights, who, Plan(4, 1, 400, None), lanes=1, width=5)
    assert outcome.lengths.tolist() == [8] * 201, "the first plays one episode, the others fifty"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[EnvSpec]:
    """Environments that lanes make."""
    found: list[EnvSpec] = []
    monkeypatch.setattr("shoal.sampling.lane.make_env", lambda spec: found.append(spec) or make_env(spec))
    return found


def test_every_slot_makes_its_environment_anew(made: list[EnvSpec]) -> None:
    env = EnvSpec(
        "shoal.testing.environments:testing/Identity-v0", recreate_after=2
    )  # episodes of 8 steps: slots end together
    policy, weights = setting(env)
    evaluated(env, policy, weights, members(policy, 12), lanes=1)
    assert len(made) == 3 * 4, "24 episodes in 3 slots are 8 in each"


def test_slots_of_a_lane_that_got_narrower_keep_their_age(made: list[EnvSpec]) -> None:
    env = EnvSpec("shoal.testing.environments:testing/Identity-v0", recreate_after=2)
    policy, weights = setting(env)
    who = replace(members(policy, 5), seeds=np.array([-1, -2, -3, 0, -4]))  # the fourth plays five episodes
    evaluated(env, policy, weights, who, Plan(4, 1, 40, None), lanes=1, width=4)
    assert len(made) == 4 + 2, "the slot of the fourth has had two, then four episodes"


def test_environments_of_slots_that_were_left_are_used_again(made: list[EnvSpec]) -> None:
    env = EnvSpec("tests.support.toys:Walk-v0", step_limit=999)  # nobody else has this one
    policy, weights = setting(env)
    for _ in range(2):
        evaluated(env, policy, weights, members(policy, 9), lanes=1, width=4)
    assert len(made) == 4


@pytest.mark.parametrize("count", [1, 2, 7, 24, 64, 1001])
@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_shares(count: int, lanes: int) -> None:
    found = shares(count, lanes)
    assert sum(found) == count
    assert min(found) >= 1
    assert len(found) <= lanes
    if count >= 8 * lanes:
        assert len(found) == lanes
        assert (found[0] > 2 * found[-1]) if lanes == 8 else (found[0] - found[-1] <= 1)


def test_lanes_follow_from_the_population() -> None:
    lanes = [Config(population=count).lanes for count in (2, 8, 16, 64, 128, 1024)]
    assert lanes == [1, 2, 2, 4, 8, 64]
    assert Config(population=64, tasks=3).lanes == 3
