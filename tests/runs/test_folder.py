"""Runs on disk: whatever happens while saving, a run can be loaded; whatever is damaged, it is noticed."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from shoal.base.trees import digest
from shoal.errors import CheckpointFault, RunBusy, UsageError
from shoal.policies.actions import Categorical
from shoal.policies.policy import Policy, SavedPolicy
from shoal.runs.folder import RunDir, name_problems

STATE = {
    "policy": {"params": np.arange(5, dtype=np.float32)},
    "lanes": {"0": {"actions": np.zeros((0, 1), np.int32), "episode": 3}},
    "scalar": np.full((), 0.1),
    "iteration": 7,
    "rate": 0.1,
    "nothing": None,
}


def policy() -> SavedPolicy:
    spec = Policy((2,), "<f4", Categorical((2,), (0,), scalar=True), (2,))
    return SavedPolicy(spec, {"params": np.ones(12, np.float32)}, {"id": "X-v0"})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "run", "stem", {})


def test_save_and_load(run: RunDir) -> None:
    assert run.load() == (0, None)
    run.save(7, STATE, policy(), keep=2)
    iteration, state = run.load()
    assert iteration == 7
    assert digest(state) == digest(STATE)
    assert SavedPolicy.load(run.policy_file).policy == policy().policy


def test_only_the_newest_are_kept(run: RunDir) -> None:
    for iteration in range(1, 6):
        run.save(iteration, STATE, policy(), keep=2)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["000004", "000005"]


def test_names_that_count_up(tmp_path: Path) -> None:
    names = [RunDir.create(tmp_path, None, "trpo-ALE/Pong-v5", {}).name for _ in range(3)]
    assert names == ["trpo-ALE-Pong-v5-0001", "trpo-ALE-Pong-v5-0002", "trpo-ALE-Pong-v5-0003"]


def test_a_name_that_is_taken(run: RunDir) -> None:
    with pytest.raises(UsageError, match="shoal resume run"):
        RunDir.create(run.path.parent, "run", "stem", {})


@given(
    st.text(max_size=80)
    | st.sampled_from(["..", ".hidden", "a/b", "a\\b", "a\0b", "a..b", "%2e%2e", "", "x" * 65, "ä"])
)
def test_names(name: str) -> None:
    fine = 0 < len(name) <= 64 and name.isascii() and all(c.isalnum() or c in "._-" for c in name)
    fine = fine and not name.startswith(".") and ".." not in name
    assert (name_problems(name) == []) == fine


def test_every_damaged_byte_is_noticed(run: RunDir) -> None:
    run.save(1, STATE, policy(), keep=9)
    good = digest(run.load().state)
    run.save(2, STATE | {"iteration": 8}, policy(), keep=9)
    for name in ("manifest.json", "state.safetensors"):
        path = run.checkpoints / "000002" / name
        content = path.read_bytes()
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0x21]) + content[at + 1 :])
            iteration, state = run.load()
            assert (iteration, digest(state)) == (1, good), f"byte {at} of {name}"
        for length in range(0, len(content), 7):
            path.write_bytes(content[:length])
            assert run.load().iteration == 1
        path.unlink()
        assert run.load().iteration == 1
        path.write_bytes(content)
    assert run.load().iteration == 2


def test_nothing_left_to_load(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    run.save(1, STATE, policy(), keep=9)
    (run.checkpoints / "000001" / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointFault, match=r"0 bytes instead of(.|\n)*no checkpoint left"):
        run.load()


def test_metrics_survive_a_torn_line_and_are_cut(run: RunDir) -> None:
    run.metrics_file.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3}\n{"itera')
    assert [line["iteration"] for line in run.metrics()] == [1, 2, 3]
    run.cut_metrics(2)
    assert run.metrics_file.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'


def test_one_head_at_a_time(run: RunDir) -> None:
    assert not run.busy()
    with run.lock():
        assert run.busy()
        again = RunDir(run.path)
        with pytest.raises(RunBusy, match=f"pid {os.getpid()} on"), again.lock():
            pass
    assert not run.busy()
    with run.lock():
        pass


SAVE_AGAIN = textwrap.dedent("""
    import sys
    from pathlib import Path
    from shoal.policies.policy import SavedPolicy
    from shoal.runs.folder import RunDir
    run = RunDir(Path(sys.argv[1]))
    _, state = run.load()
    run.save(2, state | {"iteration": 2}, SavedPolicy.load(run.policy_file), keep=1)
""")


def traced(run: RunDir, *inject: str) -> subprocess.CompletedProcess[str]:
    """Save a second checkpoint in a process whose system calls can be made to fail."""
    calls = "openat,write,fsync,rename,mkdir,unlink,rmdir,unlinkat"
    command = ["strace", "-f", "-qq", "-e", f"trace={calls}", *inject, sys.executable, "-c", SAVE_AGAIN, str(run.path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: apt-get install strace")
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "unlinkat"])
@pytest.mark.parametrize("fault", ["signal=SIGKILL", "error=ENOSPC"])
def test_a_fault_at_any_step_of_saving_leaves_a_loadable_run(run: RunDir, call: str, fault: str) -> None:
    run.save(1, STATE | {"iteration": 1}, policy(), keep=1)
    backup = run.path.with_name("backup")
    shutil.copytree(run.path, backup)
    total = sum(f"{call}(" in line for line in traced(run).stderr.splitlines())
    assert total, "the call is made"
    for nth in range(1, total + 1):
        shutil.rmtree(run.path)
        shutil.copytree(backup, run.path)
        traced(run, "-e", f"inject={call}:{fault}:when={nth}")
        iteration, state = run.load()
        assert iteration == state["iteration"] in (1, 2)
        with run.lock():
            assert not list(run.path.glob(".tmp-*"))
        run.save(3, STATE | {"iteration": 3}, policy(), keep=1)
        assert run.load().iteration == 3
        SavedPolicy.load(run.policy_file)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: apt-get install strace")
def test_everything_is_synced_before_and_after_it_gets_its_name(run: RunDir) -> None:
    """What power loss would need: files and their folder on disk before the rename, the rename before going on."""
    run.save(1, STATE | {"iteration": 1}, policy(), keep=1)
    calls = [
        line.split("(")[0].split()[-1]
        for line in traced(run).stderr.splitlines()
        if "fsync(" in line or "rename(" in line
    ]
    assert calls[:6] == ["fsync"] * 4 + ["rename", "fsync"], "three files, their folder, its name, its parent"
    assert calls[6:9] == ["fsync", "rename", "fsync"], "the policy file"


def test_config_that_cannot_be_read(run: RunDir) -> None:
    run.config_file.write_text("{")
    with pytest.raises(CheckpointFault, match=r"config\.json cannot be read"):
        run.record()
    run.config_file.write_text("{}")
    with pytest.raises(CheckpointFault, match="it lacks algo, settings"):
        run.record()


def test_checkpoints_are_ordered_by_number(run: RunDir) -> None:
    for iteration in (999_999, 1_000_000):
        run.save(iteration, STATE, policy(), keep=1)
    assert run.saved() == [1_000_000]


def test_damaged_line_of_metrics_is_left_out(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    run.metrics_file.write_text('{"iteration": 1}\n{"iter\n{"iteration": 3}\n')
    assert [line["iteration"] for line in run.metrics()] == [1, 3]
    assert "line 2" in caplog.text
