"""Every command in the documentation is run, in order, as it is written there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.support.docs import commands, files, python_blocks, python_sections

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
    names = ("runs", "compare", "sweep", "environments", "algorithms", "es")
    pages = [ROOT / "README.md", *[ROOT / f"docs/{name}.md" for name in names]]  # later pages use runs of the first
    found = [line for page in pages for line in commands(page)]
    assert len(found) >= 9
    for path, content in files(ROOT / "docs/runs.md").items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
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
@pytest.mark.timeout(300)
def test_python_examples(tmp_path: Path) -> None:
    """Each section is a script; the later ones use runs of the first."""
    sections = python_sections(ROOT / "docs/python.md") | {"README": readme_example()}
    assert len(sections) >= 7
    for number, code in enumerate(sections.values()):
        script = tmp_path / f"script{number}.py"
        script.write_text(f"import numpy as np\nimport shoal\n{code}")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-W", "error", script.name],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def readme_example() -> str:
    found = [block for block in python_blocks((ROOT / "README.md").read_text()) if "shoal.train" in block]
    assert len(found) == 1
    return found[0]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_example_runs_in_a_notebook(tmp_path: Path) -> None:
    """Also an environment that is defined in a cell, which only the serial engine finds."""
    corridor = python_sections(ROOT / "docs/python.md")["Your own environment"].partition("if __name__")[0]
    settings = "iterations=2, env_kwargs={'length': 5}, max_episode_steps=50"
    cells = [
        "import jax.numpy as jnp; jnp.ones(3).sum()",
        readme_example(),
        "import numpy as np\n" + corridor,
        f"print('digest', shoal.train('ppo', Corridor, engine='serial', {settings}).digest)",
        f"try:\n    shoal.train('ppo', Corridor, {settings})\nexcept shoal.ShoalError as error:\n    print(error)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "first.ipynb")
    command = ["jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace", "first.ipynb"]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = [cell.outputs for cell in nbformat.read(tmp_path / "first.ipynb", as_version=4).cells]
    assert "digest" in outputs[3][0].text
    assert "%%writefile my_env.py" in outputs[4][0].text


@pytest.mark.parametrize("page", ["docs/algorithms.md"])
def test_quoted_code_is_that_of_the_example(page: str) -> None:
    example = (ROOT / "examples/a2c.py").read_text()
    blocks = [block for block in python_blocks((ROOT / page).read_text()) if "AlgorithmContract" not in block]
    assert len(blocks) >= 5
    for block in blocks:
        assert block in example


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_contract_of_a_users_algorithm(tmp_path: Path) -> None:
    block = next(b for b in python_blocks((ROOT / "docs/algorithms.md").read_text()) if "AlgorithmContract" in b)
    (tmp_path / "test_mine.py").write_text(block)
    (tmp_path / "a2c.py").write_text((ROOT / "examples/a2c.py").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


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
