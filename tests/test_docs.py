"""Every command in the documentation is run, in order, as it is written there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs import commands

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def run_all(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, words in {"python": "", "shoal": "-m shoal"}.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (binaries / name).chmod(0o755)
    path = os.pathsep.join([str(binaries), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    for line in lines:
        done = subprocess.run(
            shlex.split(line), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_commands(tmp_path: Path) -> None:
    pages = ("README", "docs/runs", "docs/compare", "docs/sweep", "docs/environments", "docs/es")
    found = [line for page in pages for line in commands(ROOT / f"{page}.md")]  # later pages use runs of the first
    assert len(found) >= 9
    run_all(found, tmp_path)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_commands_about_ray(tmp_path: Path) -> None:
    found = commands(ROOT / "docs/ray.md")
    assert len(found) >= 5
    run_all(found, tmp_path)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {target for page in PAGES for target in re.findall(r"(?:`|^)make (\w+)", page.read_text(), re.MULTILINE)}
    assert {"demo", "test", "check", "bench"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:shoal|tests|bench|examples|docs)/[\w./]+)(?![\w./]*-v\d)", text):  # no environments
        assert (ROOT / path).exists(), path


def test_promised_tests_exist() -> None:
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    files = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    names = set(re.findall(r"\btest_\w+", (ROOT / "README.md").read_text()))
    assert len(names) >= 10
    assert {name for name in names if f"def {name}(" not in source and name not in files} == set()


@pytest.mark.processes
def test_examples_give_the_same_result_on_every_engine() -> None:
    outputs = []
    for engine in ("serial", "processes"):
        command = [sys.executable, str(ROOT / "examples/policy_search.py"), "--engine", engine]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        outputs.append(done.stdout.splitlines()[:-1])
    assert outputs[0] == outputs[1]
