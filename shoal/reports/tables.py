"""Markdown tables, and the statistics that they show."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with columns as wide as what stands in them."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def interquartile_mean(scores: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter (of 5 scores: without the lowest and the highest)."""
    ordered, cut = sorted(scores), len(scores) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])
