"""Write this machine's golden digests, or compare them with those of another commit.

python -m tests.golden                  run every case and store the digests (make golden)
python -m tests.golden COMMIT           run every case here and on COMMIT, and compare (make golden BASE=COMMIT)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "digests.json"


def measure(tree: Path) -> tuple[str, dict[str, list[str]]]:
    """The key of this machine, and the digests of every case with the `shoal` package of a source tree."""
    with tempfile.TemporaryDirectory() as folder:
        # The cases come from this checkout, whatever tests the other commit has.
        (Path(folder) / "shoal").symlink_to(tree / "shoal")
        done = subprocess.run(
            [sys.executable, "-m", "tests.golden.runner"], stdout=subprocess.PIPE, check=True, cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([folder, str(ROOT)])},
        )  # fmt: skip
    result = json.loads(done.stdout)
    return result["key"], result["digests"]


def stored() -> dict[str, dict[str, list[str]]]:
    """Digests of every case by machine key."""
    known: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return known


def differences(expected: dict[str, list[str]], found: dict[str, list[str]]) -> list[str]:
    """One line for each case whose digests differ."""
    return [
        f"{name}: expected {expected.get(name)}, got {found.get(name)}"
        for name in sorted(expected | found)
        if expected.get(name) != found.get(name)
    ]


def main(words: list[str]) -> int:
    """Run the command; the exit code is 1 if digests differ."""
    key, found = measure(ROOT)
    if not words:
        FILE.write_text(json.dumps(stored() | {key: found}, indent=1) + "\n")
        print(f"wrote {len(found)} cases for {key}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", tree, words[0]], check=True)
        try:
            _, base = measure(tree)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    differs = differences(base, found)
    print("\n".join(differs) or f"all {len(found)} cases equal those of {words[0]}")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
