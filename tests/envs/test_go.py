"""Go: its rules as the environment shows them, its opponents, and programs that misbehave."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shoal.commands.check_env import env_verdicts
from shoal.envs.go import PASS, _point, _vertex
from shoal.envs.make import EnvSpec, make_env
from shoal.errors import EnvironmentFault, MissingExtra, UsageError
from tests.support.cli import shoal, start

pytestmark = pytest.mark.processes

pytest.importorskip("pyspiel", reason="OpenSpiel is not installed: pip install 'shoal[go]'")
needs_gnugo = pytest.mark.skipif(
    not (shutil.which("gnugo") or shutil.which("gnugo", path="/usr/games")),
    reason="GNU Go is not installed: apt-get install gnugo",
)
GO = "shoal/Go9x9-v0"

# A program that plays by a list of answers, one for each genmove; anything else it agrees to, and keeps all of it.
SCRIPTED = """
import sys
answers = sys.argv[1].split(",")
for line in sys.stdin:
    print(line, end="", file=open(sys.argv[2], "a"))
    words = line.split()
    if words[0] == "list_commands":
        print("= play\\ngenmove\\nset_random_seed\\n")
    elif words[0] == "genmove":
        print(f"{answers.pop(0)}\\n", flush=True)
    else:
        print("= \\n")
    sys.stdout.flush()
"""


@pytest.fixture
def scripted(tmp_path: Path) -> Any:
    script = tmp_path / "player.py"
    script.write_text(SCRIPTED)

    def command(*answers: str) -> str:
        return f"{sys.executable} -I {script} '{','.join(answers)}' {tmp_path / 'asked'}"

    return command


@pytest.fixture
def go() -> Iterator[Any]:
    made = []

    def new(**kwargs: Any) -> Any:
        made.append(make_env(EnvSpec(GO, kwargs)))
        return made[-1]

    yield new
    for env in made:
        env.close()
    assert [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE] == []


def at(vertex: str) -> int:
    point = _point(vertex)
    assert point is not None
    return point


def test_points_have_their_names() -> None:
    assert [_vertex(move) for move in (0, 8, 9, 80, PASS)] == ["A1", "J1", "A2", "J9", "pass"]
    assert [_point(_vertex(move)) for move in range(PASS + 1)] == list(range(PASS + 1))
    assert [_point(text) for text in ("I5", "A0", "K1", "A10", "", "resign", "D")] == [None] * 7


def test_planes_and_mask(go: Any, scripted: Any) -> None:
    env = go(opponent=scripted("= E5", "= PASS", "= A2"))
    observation, info = env.reset(seed=0)
    assert (observation.dtype, observation.shape) == (np.uint8, (6, 9, 9))
    assert [plane.sum() // 255 for plane in observation] == [0, 0, 81, 0, 0, 81]
    assert info["action_mask"].tolist() == [1] * 82
    observation, reward, terminated, truncated, info = env.step(at("D4"))
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert [np.flatnonzero(plane).tolist() for plane in observation[[0, 1, 3]]] == [[at("D4")], [at("E5")], [at("E5")]]
    assert np.flatnonzero(observation[2] == 0).tolist() == np.flatnonzero(info["action_mask"][:81] == 0).tolist()
    assert set(np.flatnonzero(info["action_mask"] == 0)) == {at("D4"), at("E5")}
    observation = env.step(at("A1"))[0]
    assert [plane.sum() // 255 for plane in observation] == [2, 1, 78, 0, 81, 81], "the other has passed"
    observation = env.step(at("B1"))[0]
    assert observation[3].flat[at("A2")] == 255


def test_stones_are_taken_and_games_scored(go: Any, scripted: Any) -> None:
    env = go(opponent=scripted("= A1", "= PASS"))
    env.reset(seed=0)
    assert env.step(at("A2"))[0][1].flat[at("A1")] == 255
    observation, reward, terminated, _, _ = env.step(at("B1"))
    assert observation[1].sum() == 0, "A1 is taken"
    observation, reward, terminated, _, _ = env.step(PASS)
    assert (reward, terminated) == (1.0, True), "all of the board is black's"
    for colour, won in (("black", -1.0), ("white", 1.0)):
        env = go(opponent=scripted("= PASS", "= PASS"), colour=colour)
        env.reset(seed=0)
        assert env.step(PASS)[1:3] == (won, True), "an empty board is white's, by komi"
    env = go(opponent=scripted("= resign"))
    env.reset(seed=0)
    assert env.step(at("E5"))[1:3] == (1.0, True)


def test_a_program_is_told_the_game_and_the_seed(go: Any, scripted: Any, tmp_path: Path) -> None:
    env = go(opponent=scripted("= E5"), komi=6.5)
    for seed in (1, 1, 2):
        env.reset(seed=seed)
    env.step(at("D4"))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked.count("list_commands") == 1, "one program for all games"
    assert [line for line in asked if line in ("boardsize 9", "clear_board", "komi 6.5")] == asked[1:4] * 3
    one, again, other = [line for line in asked if line.startswith("set_random_seed")]
    assert one == again != other
    assert asked[-2:] == ["play b D4", "genmove w"]


def test_an_illegal_move_loses_or_is_replaced(go: Any) -> None:
    env = go()
    for _ in range(2):
        env.reset(seed=1)
        env.step(40)
        observation, reward, terminated, truncated, info = env.step(40)
        assert (reward, terminated, truncated, info["illegal"]) == (-1.0, True, False, True)
        assert observation[0].flat[40] == 255
    env = go(illegal="random")
    env.reset(seed=1)
    env.step(40)
    observation, reward, terminated, _, _ = env.step(40)
    assert (reward, terminated) == (0.0, False)
    assert observation[0].sum() == 2 * 255


@pytest.mark.parametrize("colour", ["black", "white"])
def test_random_keeps_every_rule(colour: str) -> None:
    spec = EnvSpec(GO, {"colour": colour, "illegal": "random"})
    assert [verdict for verdict in env_verdicts(spec, seconds=0.2) if verdict.works is False] == []


@needs_gnugo
def test_gnugo_keeps_every_rule_and_ends_with_its_environment() -> None:
    spec = EnvSpec(GO, {"opponent": "gnugo", "illegal": "random"}, max_episode_steps=10)
    verdicts = list(env_verdicts(spec, seconds=0.2))
    assert [verdict for verdict in verdicts if verdict.works is False] == []
    assert [child for child in psutil.Process().children(recursive=True) if child.name() == "gnugo"] == []


@needs_gnugo
def test_gnugo_wins_against_random_moves(go: Any) -> None:
    env = go(opponent="gnugo", illegal="random")
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(100):
        _, reward, over, _, _ = env.step(env.action_space.sample())
        if over:
            break
    assert (reward, over) == (-1.0, True)


@needs_gnugo
def test_no_program_outlives_its_worker(tmp_path: Path) -> None:
    words = ["train", "ppo", GO, '--env-kwargs={"opponent": "gnugo"}', "--lanes=1", "--width=2", "--workers=1"]
    process = start(*words, "--batch-steps=64", "--minibatch=32", "--hidden", "8", "--steps=1000000", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while len(players := _players(process.pid)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for player in players:
        player.suspend()  # like one that thinks for a long time and does not notice its parent's death
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    assert psutil.wait_procs(players, timeout=10)[1] == []


def _players(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children(recursive=True) if child.name() == "gnugo"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("= Z9", "plays 'Z9', which is not a legal move"),
        ("= D4", "plays 'D4', which is not a legal move"),
        ("? unknown command", r"answered '\? unknown command' when sent 'genmove w'"),
        ("Segmentation fault", "answered 'Segmentation fault'"),
    ],
)
def test_an_answer_that_is_none_is_said(go: Any, scripted: Any, answer: str, message: str) -> None:
    env = go(opponent=scripted(answer))
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match=message):
        env.step(at("D4"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cat", "'cat' answered 'list_commands'"),
        ("false", "exited with code 1"),
        ("yes", "answered 'y"),
    ],
)
def test_programs_that_are_no_players(go: Any, command: str, message: str) -> None:
    env = go(opponent=command)
    with pytest.raises(EnvironmentFault, match=message):
        env.reset(seed=0)


def test_program_that_does_not_answer(go: Any) -> None:
    env = go(opponent="sleep 100", timeout=0.3)
    with pytest.raises(EnvironmentFault, match=r"did not answer within 0\.3 s"):
        env.reset(seed=0)


def test_a_player_that_was_killed_is_started_again_for_the_next_game(go: Any, scripted: Any) -> None:
    env = go(opponent=scripted("= E5", "= C3"))
    env.reset(seed=0)
    os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="exited with code -9"):
        env.step(at("D4"))
    env.reset(seed=0)
    assert env.step(at("D4"))[0][1].flat[at("E5")] == 255


def test_settings_that_cannot_be(go: Any) -> None:
    with pytest.raises(MissingExtra, match=r"no program 'nosuchgo'.*apt-get install gnugo"):
        go(opponent="nosuchgo --gtp")
    with pytest.raises(UsageError, match=r"colour must be black or white, not 'red'.*illegal must be.*timeout must"):
        go(colour="red", illegal="maybe", timeout=0)


def test_it_can_be_learned(tmp_path: Path) -> None:
    words = ["--lanes=2", "--width=4", "--batch-steps=256", "--hidden", "16", "--iterations=2", "--workers=2"]
    code, out, err = shoal("train", "ppo", GO, *words, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "Return: " in out
