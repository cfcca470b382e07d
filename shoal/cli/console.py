"""Print to the console, also what Shoal logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rich.console import Console


def console() -> Console:
    """Make a console through which Shoal's log lines go, too: they would break a live line otherwise."""
    out = Console()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(out, f"{record.levelname.lower()}: {record.getMessage()}")

    logger = logging.getLogger("shoal")
    logger.handlers = [Handler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return out


def say(out: Console, text: str) -> None:
    """Print text as it is: without markup, colours, or wrapping that would break a command to copy."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(out: Console, rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say(out, "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
