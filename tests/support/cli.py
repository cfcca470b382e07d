"""The `shoal` command as a process."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shoal.runs.folder import RunDir

ROOT = Path(__file__).parents[2]
SMALL = ["--batch-steps=256", "--lanes=2", "--width=4", "--hidden", "8", "--value-epochs=1", "--workers=2"]


def start(
    *words: str, cwd: Path, through: str | None = None, extra: dict[str, str] | None = None
) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (extra or {})
    first = [sys.executable] if through is None else [sys.executable, "-c", through]
    command = [*first, "-P", "-m", "shoal", *words]  # -P: as the installed `shoal` command, not from this folder
    return subprocess.Popen(
        command, cwd=cwd, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    """Read the output of a process until it contains these words."""
    assert process.stdout is not None
    text = ""
    while words not in text:
        line = process.stdout.readline()
        assert line, text
        text += line
    return text


def shoal(*words: str, cwd: Path, timeout: float = 110, **options: Any) -> tuple[int, str, str]:
    process = start(*words, cwd=cwd, **options)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for(process: "subprocess.Popen[str]", run: RunDir, iterations: int) -> None:
    deadline = time.monotonic() + 60
    while len(run.metrics()) < iterations:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
