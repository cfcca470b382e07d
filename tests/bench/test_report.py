from pathlib import Path

import pytest

from bench import report
from bench.contest import BARE, ContestResult, contest_table
from bench.report import Report
from bench.rounds import SideFailed, Spread
from shoal.base import disk
from shoal.errors import DiskFault, UsageError

PAGE = """# Benchmarks

Before.

<!-- shoal bench ppo: begin -->
old
<!-- shoal bench ppo: end -->

Between.

<!-- shoal bench trpo: begin -->
kept
<!-- shoal bench trpo: end -->
"""


def test_only_the_part_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    for content in ("new", "newer"):
        report.write(path, Report("ppo", content, "Notes."))
        assert path.read_text() == PAGE.replace("old", f"{content}\n\nNotes.")
    assert [child.name for child in tmp_path.iterdir()] == ["page.md"]


def test_a_part_without_a_place_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    report.write(path, Report("lanes", "table", "Notes."))
    report.write(path, Report("lanes", "table 2", "Notes."))
    assert path.read_text() == (
        "# Benchmarks\n\n## lanes\n\n<!-- shoal bench lanes: begin -->\ntable 2\n\nNotes.\n"
        "<!-- shoal bench lanes: end -->\n"
    )


def test_a_crash_while_writing_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", fail)
    with pytest.raises(DiskFault, match="No space left"):
        report.write(path, Report("ppo", "new", "Notes."))
    assert path.read_text() == PAGE


def test_a_page_with_half_a_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE.replace("<!-- shoal bench ppo: end -->", ""))
    with pytest.raises(UsageError, match="no line <!-- shoal bench ppo: end -->"):
        report.write(path, Report("ppo", "new", "Notes."))


def test_the_page_of_this_repository_has_a_place_for_every_part() -> None:
    from bench import PARTS

    page = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text()
    for part in PARTS:
        begin, end = report.markers(part)
        assert page.count(begin) == page.count(end) == 1
        assert page.index(begin) < page.index(end)


def test_table_of_a_contest() -> None:
    rounds = [
        {BARE: 1000.0, "Shoal": 500.0, "Peer": 100.0, "Other": SideFailed("ImportError: a | b")},
        {BARE: 2000.0, "Shoal": 900.0, "Peer": 300.0, "Other": SideFailed("ImportError: a | b")},
    ]
    chosen = {"Shoal": "2 lanes", "Peer": "8 in-process", "Other": "1 thread"}
    lines = contest_table([ContestResult("CartPole-v1", chosen, rounds)]).splitlines()
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    assert len(lines) == 6
    assert len({len(line) for line in lines}) == 1
    assert cells[2][1:4] == [BARE, "no policy, no learning", "1,500 (1,000 to 2,000)"]
    assert cells[3][3:] == ["700 (500 to 900)", "47.5% (45.0 to 50.0)", "|"]
    assert cells[4][2:] == ["8 in-process", "200 (100 to 300)", "12.5% (10.0 to 15.0)", "4.0x (3.0 to 5.0) |"]
    assert "1 thread; failed in 2 of 2 rounds: ImportError: a \\| b" in lines[5]


def test_numbers() -> None:
    assert report.times(Spread(1.234, 0.5, 123.4)) == "1.23x (0.50 to 123)"
    assert report.seconds(Spread(1.25, 1, 20)) == "1.2 (1.0 to 20.0)"
    assert report.times(None) == report.counted(None) == report.percent(None) == report.seconds(None) == ""
