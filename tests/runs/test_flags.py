"""Settings spelled as flags are parsed to the same settings: what verify and presets rely on."""

import dataclasses

import pytest

from shoal import algos
from shoal.cli.parsing import parse_spec
from shoal.learning import xla
from shoal.runs.flags import flags_of, spelled
from shoal.runs.settings import Settings

xla.start(1)


@pytest.mark.parametrize("algo", algos.ALGORITHMS)
def test_spelled_settings_are_parsed_to_the_same(algo: str) -> None:
    kind = algos.load(algo).Config
    settings = Settings(
        "Nope-v0", seed=3, env_kwargs='{"gravity": -5}', wrap=("A:1", "B"), tensorboard=False, task_timeout=1.5
    )
    config = kind(hidden=(7, 9), start="first")  # type: ignore[call-arg]
    words = [*spelled(dataclasses.asdict(settings), Settings), *spelled(dataclasses.asdict(config), kind)]
    spec = parse_spec("train", [algo, "Nope-v0", "--no-preset", *words])
    assert (spec.settings, spec.config) == (settings, config)


def test_every_spelling_of_a_flag() -> None:
    flags = flags_of(Settings)
    assert flags["steps"].names == ("--steps", "-n", "--total-timesteps")
    assert flags["tensorboard"].names == ("--tensorboard", "--no-tensorboard")
    assert (flags["wrap"].several, flags["wrap"].repeats) == (True, True)
    assert flags_of(algos.load("es").Config)["start"].names == ("--from",)
