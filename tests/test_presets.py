import dataclasses
import re
from pathlib import Path

import pytest

from shoal import algos, learner, presets
from shoal.settings import Settings
from tests.test_cli import shoal

learner.start(1)

ALL = [(algo, name) for algo in algos.ALGOS for name in presets.presets(algo)]


@pytest.mark.parametrize(("algo", "name"), ALL, ids=[f"{algo}-{name}" for algo, name in ALL])
def test_every_preset_is_valid(algo: str, name: str) -> None:
    preset = presets.find(algo, name)
    assert preset is not None
    config_class = algos.load(algo).Config
    of_run = {field.name for field in dataclasses.fields(Settings)}
    of_algo = {field.name for field in dataclasses.fields(config_class)}
    assert set(preset) <= of_run | of_algo, "no misspelt key"
    settings = Settings(**{key: value for key, value in preset.items() if key in of_run})
    config = config_class(**{key: value for key, value in preset.items() if key in of_algo})
    assert settings.problems() + config.problems() == []
    for key, value in preset.items():
        default = getattr(config if key in of_algo else settings, key)
        assert type(default) is type(value)


def test_no_preset_for_a_name_that_has_none() -> None:
    assert presets.find("ppo", "Nope-v0") is None
    assert presets.presets("nope") == {}


def test_a_preset_is_used_and_said_and_can_be_overridden_or_left_out(tmp_path: Path) -> None:
    words = ["train", "ppo", "CartPole-v1", "--iterations=1", "--workers=1", "--epochs=1"]
    code, out, _ = shoal(*words, "--name=with", cwd=tmp_path)
    assert code == 0
    assert "Using the preset CartPole-v1 of ppo" in out
    code, out, _ = shoal(*words, "--no-preset", "--name=without", cwd=tmp_path)
    assert code == 0
    assert "preset" not in out
    gammas = [
        re.findall(r'"(?:gamma|epochs)": (\S+?),', (tmp_path / f"runs/{n}/config.json").read_text())
        for n in ("with", "without")
    ]
    assert gammas == [["0.98", "1"], ["0.99", "1"]]


def test_presets_are_listed_and_shown(tmp_path: Path) -> None:
    assert "ppo: CartPole-v1, " in shoal("presets", cwd=tmp_path)[1]
    assert re.search(
        r"shoal train ppo CartPole-v1\n  --steps 100000.*--gamma 0.98", shoal("presets", "ppo", cwd=tmp_path)[1]
    )
    assert shoal("presets", "pppo", cwd=tmp_path)[0] == 2
