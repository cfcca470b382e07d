"""The figures of the Python API, measured briefly."""

import re

import pytest

from bench.api import POLICIES, ApiOptions, run

pytestmark = pytest.mark.processes


def test_every_figure_is_measured() -> None:
    lines: list[str] = []
    report = run(ApiOptions(rounds=1, seconds=0.05), lines.append)
    assert len(lines) == 1
    rows = re.findall(r"\| (.+?) +\| ([\d.]+) (ms|µs) \(.*?\) +\| (\d+) \3 ", report.table)
    assert [row[0] for row in rows] == [
        "`import shoal`",
        "`shoal.load` and the first `act`",
        *(f"`act`, {name}" for name in POLICIES),
    ]
    assert all(0.1 < float(figure) < 10_000 for _, figure, _, _ in rows)
    assert "Median of 1 fresh processes per policy" in report.notes
