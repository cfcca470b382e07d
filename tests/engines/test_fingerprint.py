import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.engines.fingerprint import PACKAGE, RESULT_CODE, code_digest

# Modules that sampling imports although they are not in the fingerprint: they cannot change a result.
INFRASTRUCTURE = {
    "__init__.py",  # the version, and late imports
    "errors.py",  # classes and messages
    "base/__init__.py",  # empty
    "base/arrays.py",  # a type
    "base/disk.py",  # writes the noise table whole, or not at all
    "engines/__init__.py",  # engines by name
    "engines/base.py",  # types of the head's side
    "engines/fingerprint.py",  # the digests themselves
    "engines/functions.py",  # finds tasks by name
    "engines/scheduler.py",  # which worker runs a task
    "engines/user_code.py",  # finds and compares the user's modules
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGE, tmp_path / "shoal", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("cli/train.py", False),
        ("commands/verify.py", False),
        ("engines/scheduler.py", False),
        ("sampling/lane.py", True),
        ("policies/networks.py", True),
        ("base/seeding.py", True),
        ("engines/wire.py", True),
    ],
)
def test_only_code_that_computes_results_counts(copy: Path, file: str, changes: bool) -> None:
    before = code_digest(*RESULT_CODE, root=copy)
    assert before == code_digest(*RESULT_CODE)
    with (copy / file).open("a") as source:
        source.write("\n# edited\n")
    assert (code_digest(*RESULT_CODE, root=copy) != before) is changes


def test_a_new_or_renamed_file_counts(copy: Path) -> None:
    found = {code_digest("policies", root=copy)}
    (copy / "policies/more.py").write_text("")
    found.add(code_digest("policies", root=copy))
    (copy / "policies/more.py").rename(copy / "policies/renamed.py")
    found.add(code_digest("policies", root=copy))
    assert len(found) == 3


def test_order_and_overlap_of_paths_do_not_count() -> None:
    assert code_digest("policies", "envs") == code_digest("envs", "policies", "policies/policy.py")


def test_a_path_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        code_digest("policies", "no/such/module.py")


@pytest.mark.processes
def test_every_module_that_computes_on_a_worker_is_covered() -> None:
    script = (
        "import json, sys, shoal.sampling.tasks\n"
        "print(json.dumps([sys.modules[name].__file__ for name in sys.modules if name.partition('.')[0] == 'shoal']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = {Path(file).relative_to(PACKAGE) for file in json.loads(done.stdout)}
    assert Path("sampling/lane.py") in loaded
    covered = {Path(path) for path in RESULT_CODE}
    missing = {file.as_posix() for file in loaded if not covered & {file, *file.parents}} - INFRASTRUCTURE
    assert not missing, "add them to RESULT_CODE, or to INFRASTRUCTURE if they cannot change a result"
