"""The command line as a user meets it: processes, exit codes and output, and how arguments are parsed."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.cli.parsing import parse_spec
from shoal.errors import UsageError
from shoal.runs.folder import RunDir
from tests.support.cli import SMALL, shoal, start, wait_for

pytestmark = pytest.mark.processes

# A disk that takes files of up to 3,000 bytes: writing more fails as it does on a full one.
SMALL_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, 3_000))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def train(cwd: Path, *words: str, env: str = "tests.support.toys:Walk-v0", **options: Any) -> tuple[int, str, str]:
    given = {word.partition("=")[0] for word in words}
    small = [word for word in SMALL if word.partition("=")[0] not in given]
    return shoal("train", "trpo", env, *small, *words, cwd=cwd, **options)


def test_help_is_short_and_quick(tmp_path: Path) -> None:
    code, out, _ = shoal("--help", cwd=tmp_path)
    assert code == 0
    assert len(out.splitlines()) < 25  # fits a terminal
    for command in ("train", "resume", "evaluate", "replay", "runs", "verify", "doctor"):
        assert f"shoal {command}" in out
        code, text, _ = shoal(command, "--help", cwd=tmp_path)
        assert code == 0
        assert len(text.splitlines()) < 40
    code, text, _ = shoal("train", "trpo", "--help", cwd=tmp_path)
    assert code == 0
    assert "--max-kl" in text
    assert "Example: shoal train trpo CartPole-v1" in text


def test_train_evaluate_runs_resume(tmp_path: Path) -> None:
    code, out, err = train(tmp_path, "--iterations=3")
    assert (code, err) == (0, "")
    assert "Saved:  runs/trpo-Walk-v0-0001" in out
    run = RunDir(tmp_path / "runs/trpo-Walk-v0-0001")
    lines = run.metrics()
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert list(run.path.glob("events.out.tfevents.*"))
    for name in ("rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps", "time/total_timesteps", "time/idle_share"):
        assert isinstance(lines[-1][name], float | int)

    code, out, _ = shoal("evaluate", run.name, "--episodes=20", "--json", cwd=tmp_path)
    assert code == 0
    assert json.loads(out)["episodes"] == 20
    again = shoal("evaluate", run.name, "--episodes=20", "--json", "--engine=serial", cwd=tmp_path)
    assert again[1] == out, "the same on every engine"

    code, out, _ = shoal("runs", cwd=tmp_path)
    assert re.search(r"trpo-Walk-v0-0001 +trpo +tests.support.toys:Walk-v0 +0 +3 +768 +\S+ +finished", out)

    code, out, _ = shoal("resume", run.name, "--iterations=5", "--engine=serial", cwd=tmp_path)
    assert code == 0
    assert len(run.metrics()) == 5
    times = [line["time/time_elapsed"] for line in run.metrics()]
    assert times == sorted(times), "time goes on where it was"
    assert times[3] > times[2] + 0.1, "and counts what a resume takes to start"
    code, _, _ = train(tmp_path, "--iterations=5", "--name=whole")
    assert [line["digest"] for line in RunDir(tmp_path / "runs/whole").metrics()] == [
        line["digest"] for line in run.metrics()
    ]


def test_resume_of_a_finished_run_and_of_a_new_goal(tmp_path: Path) -> None:
    train(tmp_path, "--iterations=2", "--name=mine")
    run = RunDir(tmp_path / "runs/mine")
    before = run.metrics_file.read_bytes()
    code, out, _ = shoal("resume", "mine", cwd=tmp_path)
    assert code == 0
    assert "has reached its goal already. To continue it, run: shoal resume mine --steps" in out
    assert run.metrics_file.read_bytes() == before
    process = start("resume", "mine", "--steps=100_000_000", cwd=tmp_path)
    wait_for(process, run, 4)
    process.terminate()
    process.communicate(timeout=20)
    assert re.search(r"mine .*stopped", shoal("runs", cwd=tmp_path)[1]), "the new goal is kept"


def test_resume_with_other_versions_is_said(tmp_path: Path) -> None:
    train(tmp_path, "--iterations=1", "--name=mine")
    path = tmp_path / "runs/mine/config.json"
    path.write_text(path.read_text().replace('"jax": "', '"jax": "0.0.'))
    _, out, _ = shoal("resume", "mine", "--iterations=2", cwd=tmp_path)
    assert re.search(r"other versions.*jax 0\.0\.\S+ then, \S+ now", out)


def test_last_save_that_fails_is_a_failure(tmp_path: Path) -> None:
    large = [word for word in SMALL if word not in ("--hidden", "8")]
    words = ["train", "trpo", "tests.support.toys:Walk-v0", *large, "--iterations=1", "--name=mine", "--no-tensorboard"]
    code, _, err = shoal(*words, cwd=tmp_path, through=SMALL_FILES)
    assert code == 1
    assert "there is no checkpoint yet" in err


def test_surroundings_that_get_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "selectors.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "mine.py").write_text("import tests.support.toys")
    odd = {"OPENBLAS_NUM_THREADS": "2", "HOME": "/proc/nowhere", "XDG_CACHE_HOME": ""}
    code, out, err = train(tmp_path, "--iterations=1", env="mine:Walk-v0", extra=odd)
    assert (code, err) == (0, "")
    assert "compiled code cannot be cached" in out


def test_more_workers_than_the_system_allows(tmp_path: Path) -> None:
    limited = "import resource, os, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); "
    limited += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    code, _, err = train(tmp_path, "--workers=30", through=limited)
    assert code == 1
    # Whichever needs the next file first says so.
    assert "Too many open files" in err
    assert "Traceback" not in err


def test_damaged_runs_do_not_hide_the_others(tmp_path: Path) -> None:
    train(tmp_path, "--iterations=1", "--name=good")
    for name, content in {"bad": "{}", "worse": "{"}.items():
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "config.json").write_text(content)
    code, out, err = shoal("runs", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert re.search(r"good .*finished(.|\n)*bad +unreadable(.|\n)*worse +unreadable", out)
    assert shoal("resume", "bad", cwd=tmp_path)[0] == 2


@pytest.mark.parametrize(
    ("alias", "plain"),
    [
        (["ppo", "Nope-v0", "--learning-rate", "0.01"], ["ppo", "Nope-v0", "--lr", "0.01"]),
        (["es", "lander", "--learning_rate=0.01"], ["es", "lander", "--lr=0.01"]),
        (["ppo", "Nope-v0", "--n-envs", "24"], ["ppo", "Nope-v0", "--width", "6"]),
        (["ppo", "CartPole-v1", "--n_envs=24"], ["ppo", "CartPole-v1", "--width=12"]),  # the preset has 2 lanes
        (["trpo", "--env-id=A-v0", "--n-envs=24", "--lanes=3"], ["trpo", "A-v0", "--lanes=3", "--width=8"]),
        (["dqn", "Nope-v0", "--total-timesteps", "9"], ["dqn", "Nope-v0", "-n", "9"]),
    ],
)
def test_aliases_mean_the_plain_flags(alias: list[str], plain: list[str]) -> None:
    assert parse_spec("train", alias) == parse_spec("verify", plain)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n-envs=30"], r"--n-envs 30 is not a multiple of the number of lanes, 8 .*: use --n-envs 24 or 32"),
        (["--n-envs", "5", "--lanes=6"], r"--n-envs 5 is not a multiple of the number of lanes, 6 .*: use --n-envs 6,"),
        (["--n-envs=-8"], r"--n-envs -8 is not a positive multiple of the number of lanes, 8 .*: use --n-envs 8,"),
        (["--n-envs=many"], "--n-envs must be a number, not 'many'"),
        (["--n-envs=32", "--width", "4"], "--n-envs 32 and --width 4 both set the width"),
    ],
)
def test_numbers_of_environments_that_do_not_fit(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_spec("train", ["trpo", "Nope-v0", *words])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "1", "--lr", "2"], r"only the last would count: --lr\. Give each only once"),
        (["--lr=1", "--learning-rate=2"], "would count: --lr"),
        (["-n", "5", "--steps", "6", "--seed=1", "--seed=1"], "would count: --steps/-n, --seed"),
        (["--batch_steps=64", "--batch-steps=128"], "would count: --batch-steps"),
        (["--no-tensorboard", "--tensorboard"], "would count: --tensorboard/--no-tensorboard"),
        (["--n-envs=8", "--n-envs=16"], "--n-envs is given more than once"),
        (["--hidden=9", "--hidden", "8", "--lr=1", "--lr=2"], r"--lr\. [\s\S]*: --hidden\. All values follow one flag"),
        (["--preset=CartPole-v1", "--preset=CartPole-v1"], "would count: --preset"),
    ],
)
def test_a_setting_that_is_given_twice(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_spec("train", ["ppo", "Nope-v0", *words])


def test_a_flag_that_adds_may_be_repeated() -> None:
    spec = parse_spec("train", ["trpo", "Nope-v0", "--wrap=TimeAwareObservation", "--wrap=FrameStackObservation:3"])
    assert spec.settings.wrap == ("TimeAwareObservation", "FrameStackObservation:3")


def test_flags_that_do_not_exist() -> None:
    """Also an alias of a setting that the algorithm lacks. All are named at once, each with the nearest flag."""
    with pytest.raises(UsageError, match="Unrecognized options: --learning-rate"):
        parse_spec("train", ["trpo", "Nope-v0", "--learning-rate=1"])
    with pytest.raises(UsageError, match=r"--epoch \(did you mean --epochs\?\), --gama \(did you mean --gamma\?\)"):
        parse_spec("train", ["ppo", "Nope-v0", "--epoch", "3", "--gama=0.9", "--no-normalise", "-n", "5"])


def test_help_names_each_default_once_and_the_aliases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_spec("train", ["ppo", "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Number of workers (default: one per core; on redis, how many to wait for). Does not" in words
    assert "environment's limit). --step-limit" in words
    assert words.endswith("--learning-rate X is --lr X; --n-envs N is --width W with lanes x W = N.")


def test_signal_during_verify(tmp_path: Path) -> None:
    process = start("verify", "trpo", "CartPole-v1", "--iterations=1000", cwd=tmp_path, extra={"TMPDIR": str(tmp_path)})
    while not (folders := list(tmp_path.glob("shoal-verify-*"))):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert (process.returncode, folders[0].exists()) == (143, False)
    assert "Traceback" not in err


def test_signal_while_verify_waits_for_a_head_of_its_own(tmp_path: Path) -> None:
    words = [
        "verify",
        "trpo",
        "tests.support.toys:Walk-v0",
        *SMALL[:-1],
        "--iterations=400",
        "--engines=serial",
        "--kill-head",
    ]
    process = start(*words, cwd=tmp_path, extra={"TMPDIR": str(tmp_path)})
    while not list(tmp_path.glob("shoal-verify-*/way-1/checkpoints/*")):
        assert process.poll() is None
        time.sleep(0.01)
    head = psutil.Process(process.pid).children()
    assert head
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert (process.returncode, list(tmp_path.glob("shoal-verify-*"))) == (143, [])
    assert "Traceback" not in err
    assert not psutil.wait_procs(head, timeout=15)[1]


def test_tensorboard_can_read_the_events(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 - the format it writes

    train(tmp_path, "--iterations=2")
    (path,) = (tmp_path / "runs").glob("*/events.out.tfevents.*")
    content, at, tags = path.read_bytes(), 0, set()
    while at < len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + size])
        tags |= {(value.tag, event.step) for value in event.summary.value}
        at += 12 + size + 4
    assert ("rollout/ep_rew_mean", 256) in tags
    assert ("train/kl_divergence_loss", 512) in tags


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    code, _, err = train(
        tmp_path, "--gamma=2", "--seed=-1", "--engine=procesess", "--name=..", "--env-kwargs={", env="CartPol-v1"
    )
    assert code == 2
    assert "Traceback" not in err
    for words in (
        "gamma must be",
        "seed must be",
        "Did you mean processes?",
        "is not a valid name",
        "must be a JSON object",
        "CartPol",
    ):
        assert words in err
    assert not (tmp_path / "runs").exists(), "nothing was written"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "trpo", "Nope-v0"], "there is no environment 'Nope-v0'"),
        (["train", "trpo", "nomodule:Nope-v0"], "module nomodule cannot be imported"),
        (["train", "tpro", "CartPole-v1"], "Did you mean trpo?"),
        (["train", "trpo", "CartPole-v1", "--max_kll", "1"], "(?i)unrecognized.*max.kll"),
        (["train", "trpo", "CartPole-v1", "--lanes", "many"], "many"),
        (["train", "trpo", "CartPole-v1", "--hidden=9", "--hidden", "8"], "more than once.*: --hidden"),
        (["train", "trpo", "CartPole-v1", "--lanes", "0"], "lanes must be at least 1, not 0"),
        (["train", "trpo", "CartPole-v1", "--engine", "serial", "--workers", "4"], "cannot have 4 workers"),
        (["train", "trpo", "CartPole-v1", "--env-kwargs", '{"gravitas": 1}', *SMALL], "does not take --env-kwargs"),
        (["train", "trpo", "tests.support.toys:Walk-v0", "--env-kwargs", '{"action": "binary"}'], "MultiBinary.*not"),
        (["resume", "none"], "there is no run 'none'.*shoal runs"),
        (["resume", "../../etc"], "there is no run"),
        (["evaluate", "none"], "there is no run 'none'"),
        (["evaluate", "none", "--seed", "-1", "--episodes", "0"], "episodes must be at least 1.*seed must be in 0"),
        (["verify", "trpo", "CartPole-v1", "--engines", "serial,proceses:x"], "not an engine with a number"),
        (["trian"], "Did you mean train?"),
    ],
)  # fmt: skip
def test_mistakes(words: list[str], message: str, tmp_path: Path) -> None:
    code, out, err = shoal(*words, cwd=tmp_path)
    assert code == 2
    assert re.search(message, err + out, re.DOTALL), err + out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "raised RuntimeError: the simulation diverged\nin tests.support.toys:Trouble-v0, lane"),
        ("nan reward", "returned the reward nan"),
        ("nan observation", "observation nan"),
        ("never ends", "does not end.*--max-episode-steps"),
    ],
)
def test_environments_that_misbehave(how: str, message: str, tmp_path: Path) -> None:
    kwargs = json.dumps({"how": how})
    code, _, err = train(tmp_path, f"--env-kwargs={kwargs}", "--step-limit=200", env="tests.support.toys:Trouble-v0")
    assert code == 2
    assert re.search(message, err, re.DOTALL)
    assert "shoal/runs/run.py" not in err, "Shoal's own frames are not the user's business"


def test_environment_that_kills_workers(tmp_path: Path) -> None:
    code, out, err = train(tmp_path, '--env-kwargs={"how": "kills"}', env="tests.support.toys:Trouble-v0")
    assert code == 1
    assert re.search(r"lane \d was running on 3 workers", err)
    assert "ended with exit code 7; task" in out


def test_unknown_flag_suggests_the_nearest(tmp_path: Path) -> None:
    _, out, err = shoal("train", "trpo", "CartPole-v1", "--max-kll", "1", cwd=tmp_path)
    assert "--max-kl" in out + err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_say_how_to_go_on(number: int, code: int, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs/mine")
    process = start("train", "trpo", "CartPole-v1", *SMALL, "--steps=100_000_000", "--name=mine", cwd=tmp_path)
    wait_for(process, run, 3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    begun = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - begun < 10
    assert process.returncode == code
    assert err == ""
    saved = run.saved()[0]
    assert saved == len(run.metrics())
    assert f"saved iteration {saved}; continue with: shoal resume mine" in out
    assert not psutil.wait_procs(children, timeout=15)[1]
    code, out, _ = shoal("resume", "mine", f"--iterations={saved + 1}", cwd=tmp_path)
    assert code == 0


def test_killed_head_leaves_a_run_that_resumes_exactly(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs/mine")
    process = start(
        "train", "trpo", "tests.support.toys:Walk-v0", *SMALL, "--steps=100_000_000", "--name=mine",
        "--checkpoint-every=2",
        cwd=tmp_path,
    )  # fmt: skip
    wait_for(process, run, 5)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(children, timeout=15)[1]
    assert run.saved()
    assert not run.busy()
    code, _, err = shoal("resume", "mine", "--iterations=9", "--workers=3", cwd=tmp_path)
    assert (code, err) == (0, "")
    train(tmp_path, "--iterations=9", "--name=whole", "--engine=serial", "--workers=1")
    whole = RunDir(tmp_path / "runs/whole")
    assert [line["digest"] for line in run.metrics()][:9] == [line["digest"] for line in whole.metrics()]


def test_second_head_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs/mine")
    process = start("train", "trpo", "CartPole-v1", *SMALL, "--steps=100_000_000", "--name=mine", cwd=tmp_path)
    wait_for(process, run, 1)
    code, _, err = shoal("resume", "mine", cwd=tmp_path)
    assert code == 2
    assert f"is being trained by pid {process.pid} on" in err
    assert re.search(r"mine.*running", shoal("runs", cwd=tmp_path)[1])
    process.terminate()
    process.communicate(timeout=20)


def test_damaged_checkpoints(tmp_path: Path) -> None:
    train(tmp_path, "--iterations=4", "--checkpoint-every=2", "--name=mine")
    run = RunDir(tmp_path / "runs/mine")
    assert run.saved() == [4, 2]
    newest = run.checkpoints / "000004/state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    code, out, _ = shoal("resume", "mine", "--iterations=4", cwd=tmp_path)
    assert code == 0
    assert "bytes instead of" in out
    assert "going back to iteration 2" in out
    for folder in run.checkpoints.iterdir():
        (folder / "manifest.json").write_text("{}")
    code, _, err = shoal("resume", "mine", "--iterations=6", cwd=tmp_path)
    assert code == 2
    assert "has no checkpoint left to resume from" in err


def test_full_disk(tmp_path: Path) -> None:
    words = ["--iterations=30", "--checkpoint-every=1", "--name=mine", "--no-tensorboard"]
    code, out, err = train(tmp_path, *words, through=SMALL_FILES)
    assert code == 1
    assert "Traceback" not in err
    assert "could not be written to runs/mine" in err
    assert "shoal resume mine" in err
    assert "could not be written" in out, "it was tried again before giving up"
    code, _, err = shoal("resume", "mine", "--iterations=3", cwd=tmp_path)
    assert (code, err) == (0, ""), "and goes on once there is room"


def test_verify_equal_with_every_fault(tmp_path: Path) -> None:
    words = ["--engines=serial,processes:1,processes:3", "--kill-workers", "--kill-head", "--iterations=4"]
    code, out, err = shoal("verify", "trpo", "tests.support.toys:Walk-v0", *SMALL[:-1], *words, cwd=tmp_path)
    assert code == 0, out + err
    assert "Equal: all 8 ways" in out
    assert re.search(r"[345] workers lost", out)
    assert not list(tmp_path.iterdir())


def test_verify_names_the_first_difference(tmp_path: Path) -> None:
    code, out, _ = shoal("verify", "trpo", "tests.support.toys:Careless-v0", *SMALL[:-1], cwd=tmp_path)
    assert code == 1
    assert re.search(r"DIFFERENT: iteration 1 differs between serial \(\w+\) and processes:1 \(\w+\), in: .*value", out)


def test_doctor(tmp_path: Path) -> None:
    code, out, _ = shoal("doctor", cwd=tmp_path)
    assert code == 0
    assert re.search(r"ok +engine processes +\d+ worker", out)
    assert re.search(r"ok +engine redis +1 worker", out)
    assert re.search(r"ok +learner +jax", out)


def test_version(tmp_path: Path) -> None:
    import shoal as package

    assert shoal("--version", cwd=tmp_path)[1].strip() == package.__version__
