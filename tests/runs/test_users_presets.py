"""The user's own presets: found by name or by file, on both doors, and refused with every mistake at once."""

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli.parsing import parse_spec
from shoal.commands.compare.plan import Comparison, plan_runs
from shoal.errors import UsageError
from shoal.learning import xla
from shoal.runs.keywords import make_spec
from shoal.runs.presets import files, find, listing
from shoal.runs.spec import RunSpec
from tests.support.cli import shoal as command

xla.start(1)

PPO = """
[fast-lander]
env = "LunarLander-v3"
steps = 5_000
lr = 1
hidden = [64, 64]
env_kwargs = {gravity = -5}
wrap = ["FrameStackObservation:2"]
engine = "serial"
normalise = false

[Acrobot-v1]
gamma = 0.5
"""
MINE = """
[fast]
env = "CartPole-v1"
lr = 0.01

[no-place]
algo = "ppo"
lr = 0.02

["Pendulum-v1"]
algo = "ppo"
gamma = 0.7

[search]
algo = "es"
env = "CartPole-v1"
population = 4
"""
ALGORITHM = """
from dataclasses import dataclass
from shoal.algos.base import AlgorithmConfig

@dataclass(frozen=True)
class Config(AlgorithmConfig):
    lanes: int = 1
    boldness: float = 0.5

def train(*args):
    yield None
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "presets").mkdir()
    return tmp_path


@pytest.fixture
def home(here: Path) -> Path:
    (here / "presets/ppo.toml").write_text(PPO)
    (here / "my.toml").write_text(MINE)
    return here


def typed(*words: str) -> RunSpec:
    return parse_spec("train", [*words])


@pytest.mark.parametrize(
    ("words", "arguments", "settings", "expected"),
    [
        ("ppo fast-lander", ("ppo", "fast-lander"), {}, ("LunarLander-v3", 1.0)),
        ("ppo --preset fast-lander", ("ppo",), {"preset": "fast-lander"}, ("LunarLander-v3", 1.0)),
        ("ppo --preset=presets/ppo.toml:fast-lander --lr 3", ("ppo",),
         {"preset": "presets/ppo.toml:fast-lander", "lr": 3}, ("LunarLander-v3", 3.0)),
        ("ppo --seed=3 --preset my.toml:fast", ("ppo",), {"preset": "my.toml:fast", "seed": 3}, ("CartPole-v1", 0.01)),
        ("trpo --preset my.toml:search-less Acrobot-v1", ("trpo", "Acrobot-v1"), {"preset": "my.toml:search-less"},
         ("Acrobot-v1", None)),
        ("ppo Acrobot-v1 --preset my.toml:no-place", ("ppo", "Acrobot-v1"), {"preset": "my.toml:no-place"},
         ("Acrobot-v1", 0.02)),
        ("ppo --lr=4 --preset my.toml:fast Acrobot-v1", ("ppo", "Acrobot-v1"), {"preset": "my.toml:fast", "lr": 4},
         ("Acrobot-v1", 4.0)),
        ("ppo --env Acrobot-v1 --preset CartPole-v1 --n-envs 4", ("ppo", "Acrobot-v1"),
         {"preset": "CartPole-v1", "n_envs": 4}, ("Acrobot-v1", 0.001)),
        ("ppo --preset Pendulum-v1", ("ppo",), {"preset": "Pendulum-v1"}, ("Pendulum-v1", 0.0007)),
        ("ppo fast-lander --wrap TimeAwareObservation --engine ray", ("ppo", "fast-lander"),
         {"wrap": ["TimeAwareObservation"], "engine": "ray"}, ("LunarLander-v3", 1.0)),
        ("es BipedalWalker-v3 --preset lander", ("es", "BipedalWalker-v3"), {"preset": "lander"},
         ("BipedalWalker-v3", 0.1)),
        ("ppo Acrobot-v1 --no-preset", ("ppo", "Acrobot-v1"), {"preset": False}, ("Acrobot-v1", 0.0003)),
    ],
)  # fmt: skip
def test_both_doors_give_the_same_run(
    words: str, arguments: tuple[str, ...], settings: dict[str, Any], expected: tuple[str, float | None], home: Path
) -> None:
    with (home / "my.toml").open("a") as mine:
        mine.write("[search-less]\ngamma = 0.9\n")
    spec = typed(*shlex.split(words))
    given = {"preset": True} | settings
    preset = given.pop("preset")
    assert make_spec(arguments[0], arguments[1] if len(arguments) > 1 else None, given, preset) == spec
    assert (spec.settings.env, getattr(spec.config, "lr", None)) == expected


def test_all_values_of_a_preset_arrive(home: Path) -> None:
    spec = typed("ppo", "fast-lander")
    settings = spec.settings
    assert (settings.steps, settings.env_kwargs, settings.engine) == (5000, '{"gravity": -5}', "serial")
    assert settings.wrap == ("FrameStackObservation:2",)
    assert (spec.config.hidden, spec.config.normalise, spec.config.gamma) == ((64, 64), False, 0.99)
    again = typed("ppo", "fast-lander", "--wrap=TimeAwareObservation", "--hidden=8", "--normalise")
    assert again.settings.wrap == ("TimeAwareObservation",), "a flag replaces the preset's value"
    assert (again.config.hidden, again.config.normalise) == ((8,), True)


def test_the_folder_comes_first_and_the_file_is_printed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("ppo", "Acrobot-v1").config.gamma == 0.5
    assert "Using the preset Acrobot-v1 of presets/ppo.toml, instead of the built-in one (" in capsys.readouterr().out
    typed("ppo", "fast-lander")
    assert "the preset fast-lander of presets/ppo.toml (to see it: shoal presets ppo fast-" in capsys.readouterr().out
    typed("ppo", "--preset=my.toml:fast")
    assert "Using the preset fast of my.toml (to see it: shoal presets my.toml fast)" in capsys.readouterr().out
    assert typed("trpo", "Acrobot-v1").config.gamma != 0.5, "another algorithm's"
    (home / "presets/more.toml").write_text('[Pong]\nalgo = "ppo"\nenv = "ALE/Pong-v5"\n[quick]\nlr = 1\n')
    assert typed("ppo", "Pong").settings.env == "ALE/Pong-v5"
    assert find("ppo", "quick") is None, "a table without algorithm, in a file without one"
    typed("ppo", "quick")
    hint = "presets/more.toml has a preset 'quick': to use it, add --preset presets/more.toml:quick"
    assert hint in capsys.readouterr().err


def test_an_algorithm_of_the_users_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "bold_algorithm.py").write_text(ALGORITHM)
    (here / "presets/bold_algorithm.toml").write_text('[CartPole-v1]\nboldness = 1\n[brave]\nenv="Acrobot-v1"\n')
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    for name in ("./bold_algorithm.py", "bold_algorithm"):
        spec = typed(name, "CartPole-v1")
        assert spec.config.boldness == 1.0  # type: ignore[attr-defined]
        assert spec == make_spec(name, "CartPole-v1", {})
        assert typed(name, "brave").settings.env == "Acrobot-v1"
    (here / "presets/bold_algorithm.toml").write_text("[CartPole-v1]\nbold = 1\n")
    with pytest.raises(UsageError, match=r"no setting 'bold'\. Did you mean boldness"):
        typed("bold_algorithm", "CartPole-v1")


REFUSED = {
    "ppo --preset my.toml:search": r"the preset search of my\.toml is for es \(its key algo\), not for ppo",
    "trpo --preset presets/ppo.toml:Acrobot-v1": r"is for ppo \(the name of the file\), not for trpo",
    "ppo --preset my.toml:no-place": "no-place of my.toml has no environment: name one",
    "ppo --preset my.toml:fats": r"my\.toml has no preset 'fats'. Did you mean my\.toml:fast\?",
    "ppo --preset my.toml": "name one of them. Presets in it: my.toml:fast, my.toml:no-place",
    "ppo --preset none.toml:fast": r"there is no file none\.toml",
    "ppo --preset fast-landr": "ppo has no preset 'fast-landr'. ppo has a preset 'fast-lander'",
    "ppo --preset zzz": "ppo has no preset 'zzz'. To list the presets, run: shoal presets ppo",
    "trpo --preset fast-lander": "'fast-lander' is a preset of ppo, on LunarLander-v3; trpo has none",
}


@pytest.mark.parametrize("words", REFUSED)
def test_presets_that_do_not_fit_are_refused_on_both_doors(words: str, home: Path) -> None:
    algo, _, reference = words.split()
    with pytest.raises(UsageError, match=REFUSED[words]) as caught:
        typed(*words.split())
    with pytest.raises(UsageError) as other:
        shoal.train(algo, preset=reference)
    assert other.value.problems == caught.value.problems
    assert not Path("runs").exists()


def test_what_contradicts_is_refused(home: Path) -> None:
    with pytest.raises(UsageError, match="--preset and --no-preset contradict"):
        typed("ppo", "--no-preset", "--preset", "my.toml:fast")
    for preset in (True, False):
        with pytest.raises(UsageError, match="name an environment, as in train"):
            shoal.iterate("ppo", preset=preset)
    with pytest.raises(UsageError) as caught:
        shoal.train("ppo", preset="my.toml:fats", lr="fast")
    assert len(caught.value.problems) == 2, "mistakes in keywords, too"


CONTENTS = {
    "lr = 'fast'\n[x": ["bad.toml is not valid TOML: ", "(at end of document)"],
    "x = " + "[" * 50_000: ["bad.toml is not valid TOML: maximum recursion depth"],
    "[CartPole-v1]\nlr = 'fast'\nlearning_rate = 1\nstepz = 1\nwrap = 5\nengine = 1979-05-27": [
        "presets/bad.toml: [CartPole-v1]: there is no setting 'learning_rate'. Did you mean lr?",
        "presets/bad.toml: [CartPole-v1]: there is no setting 'stepz'. Did you mean steps?",
        "presets/bad.toml: [CartPole-v1]: lr='fast' does not fit: expected `float`, got `str`",
        "presets/bad.toml: [CartPole-v1]: wrap=5 does not fit: expected a list, got `int`",
        "presets/bad.toml: [CartPole-v1]: engine=datetime.date(1979, 5, 27) does not fit",
    ],
    "[CartPole-v1]\nwrap = [5]\nenv_kwargs = {a = 1979-05-27}\nhidden = [64, 'x']": [
        "the wrapper must be a name", "env_kwargs must hold plain values", "hidden=[64, 'x'] does not fit",
    ],
    "CartPole-v1 = 3": ["presets/bad.toml: CartPole-v1 is not a table of settings"],
    "[[CartPole-v1]]\nlr = 1": ["presets/bad.toml: CartPole-v1 is not a table of settings"],
    "[CartPole-v1]\n[CartPole-v1.slow]\nlr = 1": ['"CartPole-v1.slow"', "is a table inside a table"],
    "[CartPole-v1]\nlr = 1\n#" + "x" * files.MAX_BYTES: ["bad.toml has more than 1,000,000 bytes"],
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content[:24])
def test_files_with_mistakes(content: str, here: Path) -> None:
    bad = here / "presets/bad.toml"
    bad.write_text(content.replace("[CartPole-v1]\n", '[CartPole-v1]\nalgo = "ppo"\n', 1))
    (here / "presets/trpo.toml").write_text("[good]\nlr = 3\n")
    with pytest.raises(UsageError) as caught:
        typed("ppo", "--preset", "presets/bad.toml:CartPole-v1")
    for words in CONTENTS[content]:
        assert words in str(caught.value)
    problems: list[str] = []
    found = listing.by_name(problems)
    assert set(caught.value.problems) <= set(problems), "listing names the same mistakes"
    assert [problem for problem in problems if "trpo.toml: [good]: there is no setting 'lr'" in problem]
    assert "good" not in [item.preset.name for item in found]


def test_files_that_cannot_be_read(here: Path) -> None:
    (here / "presets/a.toml").mkdir()
    os.mkfifo(here / "presets/b.toml")
    (here / "presets/c.toml").write_bytes(b"[\xff]")
    (here / "presets/d.toml").symlink_to("nowhere")
    expected = [
        "presets/a.toml is not a file", "presets/b.toml is not a file", "presets/c.toml is not UTF-8 text",
        "there is no file presets/d.toml",
    ]  # fmt: skip
    for ask in (lambda: typed("ppo", "CartPole-v1"), lambda: shoal.train("ppo", "CartPole-v1")):
        with pytest.raises(UsageError) as caught:
            ask()
        assert [problem.partition(",")[0] for problem in caught.value.problems] == expected
    assert typed("ppo", "CartPole-v1", "--no-preset").config.gamma == 0.99
    with pytest.raises(UsageError) as caught:
        plan_runs(Comparison("CartPole-v1", ("ppo", "dqn"), seeds=0))
    assert len(caught.value.problems) == len(expected) + 1, "each only once, and the number of seeds"


def test_a_name_in_two_files_is_refused(home: Path) -> None:
    (home / "presets/zoo.toml").write_text('[fast-lander]\nalgo = "ppo"\n')
    with pytest.raises(UsageError, match=r"presets/ppo.toml and presets/zoo.toml have .* the same name, fast-lander"):
        typed("ppo", "fast-lander")
    problems: list[str] = []
    listing.by_name(problems)
    assert len(problems) == 1


@pytest.mark.processes
def test_listing_shows_files_and_imports_nothing(home: Path) -> None:
    trap = "open('imported', 'w')"
    for name in ("a2c.py", "grid.py"):
        (home / name).write_text(trap)
    (home / "presets/a2c.toml").write_text(
        '[bold]\nenv = "./grid.py:Grid"\nwrap = ["./grid.py:W"]\nentropy = 1\nsteps = "x"\n[shy]\nenv = "grid:Grid"\n'
    )
    code, out, err = command("presets", cwd=home)
    assert code == 2
    assert err == "error: presets/a2c.toml: [bold]: steps='x' does not fit: expected `int`, got `str`\n"
    assert "ppo: CartPole-v1, " in out
    assert "ppo (presets/ppo.toml): fast-lander, Acrobot-v1 (instead of the built-in one)\n" in out
    assert "a2c (presets/a2c.toml): shy\n" in out
    code, out, _ = command("presets", "./a2c.py", "shy", cwd=home)
    assert (code, out.splitlines()[1]) == (0, "  is short for: grid:Grid --no-preset")
    assert not (home / "imported").exists()
    code, out, _ = command("presets", "my.toml", cwd=home)
    assert code == 0
    assert "shoal train ALGORITHM --preset my.toml:fast\n  is short for: CartPole-v1 --lr=0.01 --no-preset\n" in out
    assert "shoal train es --preset my.toml:search\n" in out


@pytest.mark.parametrize("name", ["fast-lander", "Acrobot-v1"])
def test_a_preset_is_shown_as_it_could_be_typed(name: str, home: Path) -> None:
    (listed,) = listing.by_name([], "ppo", name)
    assert listed.preset.file == Path("presets/ppo.toml")
    assert typed("ppo", listed.preset.env, *listed.flags(), "--no-preset") == typed("ppo", name)


def test_compare_uses_the_folder(home: Path) -> None:
    wanted = Comparison("fast-lander", ("ppo",), seeds=1)
    (job,) = plan_runs(wanted)
    alone = typed("ppo", "fast-lander")
    assert job.preset
    assert job.spec.config == alone.config
    for key in ("env", "env_kwargs", "wrap", "steps"):
        assert getattr(job.spec.settings, key) == getattr(alone.settings, key)
    ppo, trpo = plan_runs(Comparison("Acrobot-v1", ("ppo", "trpo"), seeds=1))
    assert (ppo.spec.config.gamma, trpo.spec.config.gamma) == (0.5, typed("trpo", "Acrobot-v1").config.gamma)
    (without,) = plan_runs(dataclasses.replace(wanted, env="Acrobot-v1", preset=False))
    assert without.spec.config.gamma == 0.99


@pytest.mark.processes
def test_a_run_needs_its_preset_only_once(home: Path) -> None:
    (home / "my.toml").write_text(
        '[tiny]\nenv = "CartPole-v1"\nbatch_steps = 64\nlanes = 2\nwidth = 2\nhidden = [8]\niterations = 1\n'
        'engine = "serial"\n'
    )
    run = shoal.train("ppo", preset="my.toml:tiny", name="first")
    (home / "my.toml").unlink()
    assert '"engine": "serial"' in (run.path / "config.json").read_text()
    assert run.resume(iterations=2).metrics[-1]["iteration"] == 2
    assert len(run.evaluate(2, engine="serial").returns) == 2
