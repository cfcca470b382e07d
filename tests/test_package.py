"""What the package promises as a whole: its public names, its weight, and one name for one thing."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import shoal
from tests.support.policies import KINDS, random_policy

PACKAGE = Path(shoal.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_public_names() -> None:
    assert " ".join(shoal.__all__) == (
        "Engine Iteration LoadedPolicy Run Shared ShoalError SweepResult __version__ engine errors evaluate iterate "
        "load open_run sweep train"
    )
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None


@pytest.mark.processes
def test_import_is_light() -> None:
    """`import shoal` costs nothing until something is used."""
    code = "import sys, shoal; print(sorted({'numpy', 'jax', 'gymnasium', 'rich', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.processes
def test_acting_is_light(tmp_path: Path) -> None:
    """A program that acts with a saved policy loads NumPy and safetensors, nothing larger."""
    path = tmp_path / "policy.safetensors"
    path.write_bytes(random_policy(KINDS["logits"]).to_bytes())
    heavy = "{'jax', 'gymnasium', 'rich', 'msgspec', 'onnx', 'torch'}"
    code = f"import sys, shoal; shoal.load({str(path)!r}).act([0] * 4); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    # The contract of algorithms fixes this name: every algorithm's module has one.
    assert all(home.startswith("algos/") for home in homes.pop("Config"))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


# Phrases that made Shoal read as translated, and what to write instead. docs/how.md has the glossary.
PHRASES = {
    r"\bbeside\b": "next to, besides, compared with",
    r"\b(whoever|nobody|somebody|anybody|everybody)\b": "any worker, no process, ...",
    r"\bunless told\b": "default: X",
    r"\bfor ever\b": "indefinitely, until ...",
    r"\bso many\b": "this many",
    r"\banew\b": "again, re-create",
    r"\binside of\b": "inside",
    r"\bmend(s|ed)?\b": "fix",
    r"\btype: (?=shoal|pip|ray|make|\{|%)": "run: COMMAND",
    r"what (is|was) said": "the message",
    r"has had enough": "has stopped reading",
    r"\bis let go\b": "is released",
    r"what it gave": "its result",
}


def test_plain_english() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {match[0]!r} (write: {instead})"
        for path in SOURCES
        for phrase, instead in PHRASES.items()
        for match in re.finditer(phrase, path.read_text(), re.IGNORECASE)
    ]
    assert found == []
