"""Scripts under a real mpirun, as their users run them; and one process without MPI."""

import difflib
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shoal.errors import MissingExtra, UsageError
from shoal.spmd import launch
from shoal.spmd.launching import LaunchedRank, launched_rank
from shoal.spmd.world import _timeout
from tests.spmd import checks
from tests.support.docs import commands
from tests.support.packages import TORCH, needs_torch

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/spmd"

# No MPI, wherever Python looks for it.
WITHOUT_MPI = "import sys; sys.modules['mpi4py'] = None\n"


def run(*words: object, cwd: Path = ROOT, **variables: str) -> tuple[int, str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=110)
    return done.returncode, done.stdout, done.stderr


def run_ranks(folder: Path, processes: int, body: str, **variables: str) -> tuple[int, str, str]:
    """Run a script under mpirun whose ranks first make a common call, so that all have started when things go wrong."""
    script = folder / "script.py"
    head = f"import os, sys, time\nfrom shoal import spmd\nspmd.launch({processes})\nspmd.sum(1)\nrank = spmd.rank()\n"
    script.write_text(head + textwrap.dedent(body).strip() + "\n")
    return run(script, cwd=folder, **variables)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_collective(processes: int) -> None:
    code, out, err = run("-m", "tests.spmd.checks", processes)
    assert code == 0, err
    assert out.split("passed: ")[1:] == [f"{name}\n" for name in checks.LIGHT]
    assert len(checks.LIGHT) >= 12


def test_jax() -> None:
    code, out, err = run("-m", "tests.spmd.checks", 2, "check_jax")
    assert code == 0, err
    assert out == "passed: check_jax\n"


@needs_torch
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_torch(processes: int) -> None:
    code, out, err = run("-m", "tests.spmd.checks", processes, "check_torch")
    assert code == 0, err
    assert out == "passed: check_torch\n"


def test_import_is_light() -> None:
    heavy = {"numpy", "jax", "gymnasium", "torch", "mpi4py", "msgspec", "rich"}
    code, out, err = run("-c", f"import sys; from shoal import spmd; spmd.launch(1); print({heavy} & set(sys.modules))")
    assert (code, out) == (0, "set()\n"), err


def test_one_process_needs_no_mpi() -> None:
    code, out, err = run("-c", WITHOUT_MPI + "from tests.spmd import checks; checks.main([])")
    assert code == 0, err
    assert out.count("passed: ") == len(checks.LIGHT)


def test_launch_passes_arguments_threads_and_exit_code(tmp_path: Path) -> None:
    body = """
        cores = len(os.sched_getaffinity(0))
        shown = sys.argv[1:], os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"], spmd.size(), cores
        spmd.print0(repr(shown))
        sys.exit(3)
    """
    cores = len(os.sched_getaffinity(0))
    share = str(max(1, cores // 2))
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nfrom shoal import spmd\nspmd.launch(2)\n" + textwrap.dedent(body).strip())
    environment = {name: value for name, value in os.environ.items() if "_NUM_THREADS" not in name}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "7"}
    command = [sys.executable, "-u", str(script), "--env", "two words"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 3
    assert done.stdout.strip() == repr((["--env", "two words"], "7", share, 2, cores))


def test_launch_refuses_what_it_cannot_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"launch\(0\): the number of processes must be 1 or more"):
        launch(0)
    script = "from shoal import spmd; spmd.launch(2)"
    done = subprocess.run(
        [sys.executable, "-"], input=script, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "Put it into a file" in done.stderr
    code, _, err = run("-c", WITHOUT_MPI + script)
    assert code == 1
    assert "mpi4py was not found. Install it: pip install 'shoal[mpi]'" in err
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(MissingExtra, match=r"mpirun was not found. Install it: pip install 'shoal\[mpi\]'"):
        launch(2)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 2),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, 2),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, 8),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),  # a batch script: may launch
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # a single task: may launch
        ({"ALPS_APP_PE": "3"}, "unknown"),
        ({"PMIX_RANK": "3"}, "unknown"),
        ({"PMIX_RANK": "3", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, 4),
    ],
)
def test_ranks_are_known_by_their_launchers(variables: dict[str, str], expected: int | str | None) -> None:
    found = launched_rank(variables)
    if expected is None:
        assert found is None
    else:
        assert isinstance(found, LaunchedRank)
        assert found.size == (None if expected == "unknown" else expected)


def test_ranks_without_their_mpi_say_so() -> None:
    rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    code, _, err = run("-c", WITHOUT_MPI + "from shoal import spmd; spmd.launch(2); spmd.rank()", **rank)
    assert code == 1
    assert "mpirun (Open MPI) started this process as one of several, but mpi4py cannot be loaded" in err
    assert "pip install 'shoal[mpi]'" in err
    code, _, err = run("-c", "from shoal import spmd; spmd.rank()", **rank)
    assert code == 1
    assert "started 4 processes, but mpi4py sees 1" in err


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_timeout_must_be_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SHOAL_SPMD_TIMEOUT", text)
    with pytest.raises(UsageError, match=f"SHOAL_SPMD_TIMEOUT='{text}'"):
        _timeout()


def test_different_calls_are_named(tmp_path: Path) -> None:
    code, _, err = run_ranks(tmp_path, 3, "if rank == 1:\n    spmd.gather(1)\nspmd.sum(1)")
    assert code == 2
    assert "ranks 0, 2: sum at script.py:8" in err
    assert "rank 1: gather at script.py:7" in err
    assert err.count("make different calls") == 1


def test_same_call_from_another_line_is_different(tmp_path: Path) -> None:
    code, _, err = run_ranks(tmp_path, 2, "if rank == 1:\n    spmd.sum(1)\nelse:\n    spmd.sum(1)")
    assert code == 2
    assert "rank 0: sum at script.py:9" in err
    assert "rank 1: sum at script.py:7" in err


def test_early_end_is_named(tmp_path: Path) -> None:
    code, _, err = run_ranks(tmp_path, 2, "if rank == 1:\n    sys.exit(0)\nspmd.sum(1)")
    assert code == 2
    assert "rank 0: sum at script.py:8" in err
    assert "rank 1: the end of the script" in err


def test_missing_rank_is_named_after_the_time_limit(tmp_path: Path) -> None:
    body = "if rank == 1:\n    time.sleep(3600)\nspmd.sum(1)"
    code, _, err = run_ranks(tmp_path, 3, body, SHOAL_SPMD_TIMEOUT="3")
    assert code == 124
    assert "has waited 3 s for rank 1:" in err
    assert "ranks 0, 2: sum at script.py:8" in err
    assert "rank 1: has not arrived" in err
    assert "SHOAL_SPMD_TIMEOUT=6" in err


def test_one_rank_may_go_on_alone_at_the_end(tmp_path: Path) -> None:
    body = "if rank == 0:\n    time.sleep(2)\n    print('evaluated')"
    code, out, err = run_ranks(tmp_path, 2, body, SHOAL_SPMD_TIMEOUT="0.5")
    assert (code, out) == (0, "evaluated\n"), err


def test_rank_that_raises_ends_all(tmp_path: Path) -> None:
    code, _, err = run_ranks(tmp_path, 2, "if rank == 1:\n    raise ValueError('no such file')\nspmd.sum(1)")
    assert code == 1
    assert "Rank 1 of 2 raised:\nTraceback" in err
    assert "ValueError: no such file" in err


def test_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    code, _, err = run_ranks(tmp_path, 3, "spmd.gather({'obs': [1.0] if rank == 1 else [1]})")
    assert code == 2
    assert err.count("Traceback") == 1
    assert "'obs' is float64 with rows of shape () on rank 1, but int64 with rows of shape () on rank 0" in err


@pytest.mark.parametrize(("death", "expected"), [("os.kill(os.getpid(), 9)", 137), ("os._exit(0)", 1)])
def test_rank_that_dies_ends_all(tmp_path: Path, death: str, expected: int) -> None:
    code, out, _ = run_ranks(tmp_path, 2, f"if rank == 1:\n    {death}\nspmd.sum(1)\nprint('went on')")
    assert code == expected
    assert out == ""


def test_numpy_example_finds_the_same_with_any_number_of_processes() -> None:
    outputs = [run(EXAMPLES / "search.py", "--processes", n, "--generations", 3) for n in (1, 2, 3)]
    assert [code for code, _, _ in outputs] == [0, 0, 0], outputs
    assert outputs[0][1] == outputs[1][1] == outputs[2][1]
    assert outputs[0][1].count("generation") == 3


SMALL = ["--iterations", "3", "--steps", "300"]


def without_speed(out: str) -> list[str]:
    *lines, speed = out.splitlines()
    assert speed.endswith(" samples/s")
    return lines


@needs_torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["reinforce_parallel", "reinforce_averaged"])
def test_torch_examples(name: str) -> None:
    outputs = []
    for words in (["reinforce.py"], *([f"{name}.py", "--processes", str(n)] for n in (1, 2, 3, 3))):
        code, out, err = run(EXAMPLES / words[0], *words[1:], *SMALL)
        assert code == 0, err
        outputs.append(without_speed(out))
    plain, one, two, three, again = outputs
    assert one == plain  # with one process nothing is changed
    assert three == again
    assert [len(lines) for lines in outputs] == [3] * 5
    assert two != one


def test_guide_commands() -> None:
    found = commands(ROOT / "docs/spmd.md")
    assert len(found) == 2
    for line in found:
        if "reinforce" in line and not TORCH:
            continue
        python, *words = shlex.split(line)
        assert python == "python"
        code, _, err = run(*words)
        assert code == 0, f"{line}\n{err}"


def test_guide_shows_the_edits_as_they_are() -> None:
    guide = (ROOT / "docs/spmd.md").read_text()
    before, after = ((EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("reinforce", "reinforce_parallel"))
    lines = list(difflib.unified_diff(before[1:], after[1:], n=0, lineterm=""))[2:]  # line 1 is the title
    edits = [line for line in lines if not line.startswith("@@") and line not in "+-"]
    shown = re.search(r"```diff\n(.*?)```", guide, re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == edits
    added, removed = (sum(line.startswith(sign) for line in edits) for sign in "+-")
    assert f"{added} lines in, {removed} lines out" in guide
