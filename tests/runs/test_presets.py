import dataclasses
import re
from pathlib import Path

import pytest

from shoal import algos
from shoal.cli import parsing
from shoal.learning import xla
from shoal.runs import presets
from shoal.runs.presets import listing
from shoal.runs.settings import Settings
from tests.support.cli import shoal

xla.start(1)

ALL = [(algo, name) for algo in algos.ALGORITHMS for name in presets.presets(algo)]


@pytest.mark.parametrize(("algo", "name"), ALL, ids=[f"{algo}-{name}" for algo, name in ALL])
def test_every_preset_is_valid(algo: str, name: str) -> None:
    preset = presets.find_preset(algo, name)
    assert preset is not None
    config_class = algos.load(algo).Config
    of_run = {field.name for field in dataclasses.fields(Settings)}
    of_algo = {field.name for field in dataclasses.fields(config_class)}
    assert set(preset) <= of_run | of_algo, "no misspelt key"
    settings = Settings(**{key: value for key, value in preset.items() if key in of_run})
    config = config_class(**{key: value for key, value in preset.items() if key in of_algo})
    assert settings.problems() + config.problems() == []
    for key, value in preset.items():
        default = getattr(config_class() if key in of_algo else Settings(""), key)
        assert default is None or type(default) is type(value)


GRADIENT = {
    "CartPole-v1", "Acrobot-v1", "LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3", "Pendulum-v1",
    "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Humanoid-v5", "Pong-ram",
}  # fmt: skip
BIG = {"ant", "humanoid", "go9x9"}
SEARCH = {
    "lander", "ant", "pendulum", "pendulum-lstm", "pendulum-partial", "cartpole-partial", "humanoid", "go9x9",
}  # fmt: skip


@pytest.mark.parametrize(
    ("algo", "names"),
    [("ppo", GRADIENT), ("trpo", GRADIENT), ("es", SEARCH), ("nevergrad", SEARCH - BIG)],
)
def test_what_the_documents_promise_is_there(algo: str, names: set[str]) -> None:
    assert names <= set(presets.presets(algo))


@pytest.mark.parametrize(("algo", "name"), ALL, ids=[f"{algo}-{name}" for algo, name in ALL])
def test_a_preset_is_shown_as_it_could_be_typed(algo: str, name: str) -> None:
    (listed,) = listing.by_name([], algo, name)
    short = parsing.parse_spec("train", [algo, name])
    typed = parsing.parse_spec("train", [algo, listed.preset.env, *listed.flags(), "--no-preset"])
    assert typed == short


@pytest.mark.processes
def test_a_misspelt_preset_is_said(tmp_path: Path) -> None:
    code, _, err = shoal("train", "es", "landr", cwd=tmp_path)
    assert (code, "es has a preset 'lander'; did you mean that?" in err) == (2, True)
    code, _, err = shoal("train", "ppo", "lander", cwd=tmp_path)
    assert code == 2
    assert "'lander' is a preset of es and nevergrad, on LunarLanderContinuous-v3; ppo has none of that name" in err


def test_no_preset_for_a_name_that_has_none() -> None:
    assert presets.find_preset("ppo", "Nope-v0") is None
    assert presets.presets("nope") == {}


@pytest.mark.processes
def test_a_preset_is_used_and_said_and_can_be_overridden_or_left_out(tmp_path: Path) -> None:
    words = ["train", "ppo", "CartPole-v1", "--iterations=1", "--workers=1", "--epochs=1"]
    code, out, _ = shoal(*words, "--name=with", cwd=tmp_path)
    assert code == 0
    assert "Using the preset CartPole-v1 of ppo" in out
    code, out, _ = shoal(*words, "--no-preset", "--name=without", cwd=tmp_path)
    assert code == 0
    assert "preset" not in out
    algo, env, *flags = words[1:]
    assert shoal("train", algo, *flags, "--name=last", env, cwd=tmp_path)[0] == 0
    gammas = [
        re.findall(r'"(?:gamma|epochs)": (\S+?),', (tmp_path / f"runs/{n}/config.json").read_text())
        for n in ("with", "without", "last")
    ]
    assert gammas == [["0.98", "1"], ["0.99", "1"], ["0.98", "1"]], "also where the environment comes last"


@pytest.mark.processes
def test_presets_are_listed_and_shown(tmp_path: Path) -> None:
    assert "ppo: CartPole-v1, " in shoal("presets", cwd=tmp_path)[1]
    short = r"shoal train ppo CartPole-v1\n  is short for: CartPole-v1 --steps=100000.*--gamma=0.98"
    everything = shoal("presets", "ppo", cwd=tmp_path)[1]
    assert re.search(short, everything)
    assert "Humanoid-v5" in everything
    one = shoal("presets", "ppo", "CartPole-v1", cwd=tmp_path)[1]
    assert re.search(short, one)
    assert "Humanoid-v5" not in one
    assert shoal("presets", "pppo", cwd=tmp_path)[0] == 2
    code, _, err = shoal("presets", "ppo", "Nope-v0", cwd=tmp_path)
    assert (code, "there is no preset 'Nope-v0' of ppo, only CartPole-v1, " in err) == (2, True)
