"""Tables, and the page that they are written to: each part has its own section there, between two markers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bench.rounds import Spread
from shoal.base import disk
from shoal.errors import DiskFault, UsageError


@dataclass(frozen=True)
class Report:
    """The result of a part."""

    part: str
    table: str
    """Markdown."""
    notes: str
    """How and on what machine it was measured."""

    def signed(self, command: str, remark: str) -> Report:
        """Put a remark and the command that produced the report at the start of the notes."""
        return replace(self, notes=f"{remark}Written by `{command}`. {self.notes}")

    @property
    def text(self) -> str:
        return f"{self.table}\n\n{self.notes}\n"


def times(found: Spread | None) -> str:
    """Format a ratio: median, lowest and highest."""
    return "" if found is None else f"{_short(found.middle)}x ({_short(found.low)} to {_short(found.high)})"


def percent(found: Spread | None) -> str:
    """Format a share as a percentage: median, lowest and highest."""
    if found is None:
        return ""
    middle, low, high = (_short(100 * share) for share in (found.middle, found.low, found.high))
    return f"{middle}% ({low} to {high})"


def counted(found: Spread | None) -> str:
    """Format steps or steps per second: median, lowest and highest."""
    return "" if found is None else f"{found.middle:,.0f} ({found.low:,.0f} to {found.high:,.0f})"


def seconds(found: Spread | None) -> str:
    """Format seconds: median, lowest and highest."""
    return "" if found is None else f"{found.middle:.1f} ({found.low:.1f} to {found.high:.1f})"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 2 else f"{number:.2f}"


def markers(part: str) -> tuple[str, str]:
    """Return the lines before and after a part's section."""
    return f"<!-- shoal bench {part}: begin -->", f"<!-- shoal bench {part}: end -->"


def write(path: Path, report: Report) -> None:
    """Replace a part's section of the page atomically, or append one if the page has none."""
    begin, end = markers(report.part)
    try:
        page = path.read_text() if path.exists() else "# Benchmarks\n"
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    section = f"{begin}\n{report.text}{end}"
    before, found, rest = page.partition(begin)
    if not found:
        page = f"{page.rstrip()}\n\n## {report.part}\n\n{section}\n"
    else:
        _, closed, after = rest.partition(end)
        if not closed:
            raise UsageError(f"{path} has the line {begin} but no line {end} after it: add that line, or remove both")
        page = before + section + after
    try:
        disk.write_file(path, page.encode())
    except OSError as error:
        raise DiskFault(f"{path} could not be written: {error.strerror}. The table is above") from None
