"""Markdown tables and the statistics in them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def interquartile_mean(scores: Sequence[float]) -> float:
    """Mean without the lowest and the highest quarter (of 5 scores: without the lowest and the highest)."""
    ordered, cut = sorted(scores), len(scores) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])
