"""The path from an algorithm to `env.step` is short, and drawn in the docs as it is."""

import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import pytest

import shoal
from shoal import engines
from shoal.algos import trpo
from shoal.engines.processes import ProcessTransport
from shoal.envs.make import EnvSpec
from shoal.learning import xla
from tests.support.toys import Walk

ROOT = Path(__file__).parents[1]
PACKAGE = str(Path(shoal.__file__).parent)
CONFIG = trpo.Config(batch_steps=32, lanes=1, width=2, hidden=(4,), value_epochs=1)


def road(frame: FrameType | None) -> list[str]:
    """Functions of Shoal on the stack, from the algorithm or the worker's entry point down."""
    found: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            found.append(f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)} {frame.f_code.co_name}")
            if found[-1] == "algos/trpo.py train":
                break
        frame = frame.f_back
    return found[::-1]


class Signpost(Walk):
    """Writes the road to its first step into a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def step(self, action: Any) -> Any:
        if not self.path.exists():
            self.path.write_text(json.dumps(road(sys._getframe(1))))
        return super().step(action)


gymnasium.register("Signpost-v0", entry_point=Signpost)


def travel(engine: str, path: Path) -> list[str]:
    xla.start(1)
    with engines.make(engine, 1) as made:
        env = EnvSpec(f"{__name__}:Signpost-v0", {"path": str(path)})
        next(trpo.train(CONFIG, env, made, 0, 100))
    found: list[str] = json.loads(path.read_text())
    return found


def drawn(engine: str) -> list[str]:
    """The road of an engine in docs/how.md."""
    text = (ROOT / "docs/how.md").read_text()
    match = re.search(rf"```text\n{engine}: (\d+) frames\n(.*?)```", text, re.DOTALL)
    assert match is not None, f"docs/how.md does not draw the path on {engine}"
    lines = [line.split("#")[0].strip() for line in match[2].splitlines()]
    frames = [re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith("-")]
    assert len(frames) == int(match[1])
    return frames


def test_serial(tmp_path: Path) -> None:
    found = travel("serial", tmp_path / "road.json")
    assert found == drawn("serial")
    assert len(found) <= 8


@pytest.mark.processes
def test_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[str]] = []
    write = ProcessTransport._write

    def watched(self: Any, process: Any) -> None:
        sent.append([*road(sys._getframe(1)), "engines/processes.py _write"])
        write(self, process)

    monkeypatch.setattr(ProcessTransport, "_write", watched)
    there = travel("processes", tmp_path / "road.json")
    roads = {tuple(found) for found in sent if found[0] == "algos/trpo.py train"}
    (here,) = [found for found in roads if "sampling/lanes.py request" in found]
    assert [*here, *there] == drawn("processes")
    assert len(here) + len(there) <= 12
