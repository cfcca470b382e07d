import dataclasses
import json
import re
from pathlib import Path

import pytest

from bench.learn import references
from bench.results import Result, Results
from shoal import algos
from shoal.errors import UsageError
from shoal.runs import presets
from tests.support.cli import shoal

RESULT = Result("ppo", "A", 0, {"steps": 9}, "0", 1.5, 0.1, 20, None, 9, 0.5, "d", [[1, 2.5]])


def test_results_are_on_disk_at_once_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "new/results.json"
    Results(path).add(RESULT)
    Results(path).add(dataclasses.replace(RESULT, seed=1))
    back = Results(path)
    assert back.find("ppo", "A", 0, {"steps": 9}, 20) == RESULT
    assert back.find("ppo", "A", 1, {"steps": 9}, 20) is not None
    assert back.find("ppo", "A", 2, {"steps": 9}, 20) is None
    assert back.find("trpo", "A", 0, {"steps": 9}, 20) is None
    assert back.find("ppo", "A", 0, {"steps": 10}, 20) is None, "a setting has changed"
    assert back.find("ppo", "A", 0, {"steps": 9}, 100) is None, "other episodes"


@pytest.mark.parametrize(
    "content", ["", "{}", '{"format": "other", "results": []}', '{"format": "shoal-bench-2", "results": [{}]}']
)
def test_a_file_that_is_no_results_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="not a file of results"):
        Results(path)
    assert path.read_text() == content


@pytest.mark.processes
def test_a_campaign_goes_on_where_it_was(tmp_path: Path) -> None:
    words = ["bench", "learn", "--algo=trpo", "--env=CartPole-v1", "--steps=4096", "--episodes=5", "--results=r.json"]
    code, out, err = shoal(*words, "--seeds=1", cwd=tmp_path)
    assert (code, err) == (0, "")
    (first,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert (first["algo"], first["env"], first["seed"], first["steps"]) == ("trpo", "CartPole-v1", 0, 4096)
    # Marked, so that a second run of it would be seen.
    (tmp_path / "r.json").write_text((tmp_path / "r.json").read_text().replace(first["digest"], "marked"))
    code, out, err = shoal(*words, "--seeds=2", "--svg=c.svg", "--out=page.md", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "digest marked" in out
    second = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [(r["seed"], r["digest"] == "marked") for r in second] == [(0, True), (1, False)]
    assert (tmp_path / "c.svg").read_text().count("<polyline") == 2
    page = (tmp_path / "page.md").read_text()
    row = next(line for line in page.splitlines() if "| trpo" in line)
    scores = sorted(r["score"] for r in second)
    assert f"| {scores[0]:.0f} to {scores[1]:.0f} " in row
    assert "zoo 500 @100k" in row
    typed = "--algo=trpo --env=CartPole-v1 --steps=4096 --episodes=5 --results FILE --seeds=2"
    assert f"Written by `shoal bench learn {typed}`" in page
    code, out, err = shoal(*words, "--seeds=3", "--no-train", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert row in out, "a table of earlier results"
    assert "give one with --results" in shoal("bench", "learn", "--no-train", cwd=tmp_path)[2]


@pytest.mark.processes
def test_a_run_that_fails_is_in_the_report(tmp_path: Path) -> None:
    """And is tried again next time."""
    words = ["bench", "learn", "--algo=trpo", "--env=CartPole-v1", "--seeds=1", "--results=r.json"]
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow/sitecustomize.py").write_text("import sys\nif 'train' in sys.argv: sys.exit('it broke')")
    shadow = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path / 'shadow'}"}
    code, out, _ = shoal(*words, cwd=tmp_path, extra=shadow)
    assert code == 0
    assert re.search(r"Failed: trpo CartPole-v1 seed 0: .*it broke", out)
    assert not (tmp_path / "r.json").exists()


def test_references_are_whole_and_meet_the_presets() -> None:
    table = references()
    for of_algo in table.values():
        for entries in of_algo.values():
            for entry in entries:
                assert set(entry) <= {"source", "score", "deviation", "steps", "of"}
                assert {"source", "score", "steps"} <= set(entry)
    met = {(algo, env) for algo in algos.ALGORITHMS for env in presets.presets(algo) if env in table.get(algo, {})}
    assert {("ppo", "CartPole-v1"), ("ppo", "LunarLander-v3"), ("trpo", "HalfCheetah-v5")} <= met
