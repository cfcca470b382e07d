import subprocess
import sys

import shoal


def test_public_names() -> None:
    assert shoal.__all__ == ["Engine", "Shared", "__version__", "engine", "errors"]
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None


def test_import_is_light() -> None:
    """`import shoal` costs nothing until something is used."""
    code = "import sys, shoal; print(sorted({'numpy', 'jax', 'gymnasium', 'rich', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
