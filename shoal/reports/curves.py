"""Learning curves as an SVG: panels next to each other that share one scale of returns."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

PANEL, GAP, LEFT, RIGHT, TOP, HEIGHT, BOTTOM = 380, 46, 66, 18, 62, 250, 50
LONE = 690  # width of a single panel
LETTER = 7.2  # approximate width of a character

# Okabe and Ito's palette: distinguishable with any kind of colour vision, and by lightness in greyscale.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9")
DASHES = ("", "7 3", "2 3", "10 3 2 3")  # one for each pass through the colours


@dataclass(frozen=True)
class Curve:
    """A line of points (x, return), and optionally a band of (x, lowest, highest) around it."""

    label: str
    points: Sequence[Sequence[float]]
    band: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Panel:
    """Curves over the same x axis."""

    axis: str
    """Label of the x axis."""
    curves: Sequence[Curve]


def draw_curves(title: str, panels: Sequence[Panel]) -> str:
    """Draw the figure. Curves with the same index have the same colour in all panels and share one legend entry."""
    width = LONE if len(panels) == 1 else PANEL
    total = LEFT + len(panels) * width + (len(panels) - 1) * GAP + RIGHT
    labels = [curve.label for curve in panels[0].curves]
    legend, rows = _legend(labels, total)
    top = TOP + 20 * (rows - 1)
    high = top + HEIGHT + BOTTOM
    returns = [y for panel in panels for curve in panel.curves for _, *ys in (*curve.points, *curve.band) for y in ys]
    lowest, highest, step = _scale(min(returns), max(returns), 5)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {high}" font-family="sans-serif" '
        f'font-size="12" fill="#333">',
        f'<rect width="{total}" height="{high}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold" fill="#111">{html.escape(title)}</text>',
        *legend,
        f'<text transform="translate(16 {top + HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">return</text>',
    ]
    for number, panel in enumerate(panels):
        left = LEFT + number * (width + GAP)
        parts += _panel(panel, left, top, width, (lowest, highest, step), high)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    panel: Panel, left: int, top: int, width: int, scale: tuple[float, float, float], high: int
) -> list[str]:  # fmt: skip
    lowest, highest, step = scale
    end = max(x for curve in panel.curves for x, *_ in curve.points)
    _, _, x_step = _scale(0.0, end, 6)

    def across(x: float) -> float:
        return left + x / end * width

    def up(y: float) -> float:
        return top + HEIGHT - (y - lowest) / (highest - lowest) * HEIGHT

    def path(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)

    parts = []
    for tick in range(round((highest - lowest) / step) + 1):
        y = lowest + tick * step
        parts.append(
            f'<line x1="{left}" y1="{up(y):.1f}" x2="{left + width}" y2="{up(y):.1f}" stroke="#e3e3e3"/>'
            f'<text x="{left - 7}" y="{up(y) + 4:.1f}" text-anchor="end">{_short(y)}</text>'
        )
    for tick in range(int(end / x_step + 1e-9) + 1):
        x = tick * x_step
        parts.append(
            f'<line x1="{across(x):.1f}" y1="{top + HEIGHT}" x2="{across(x):.1f}" y2="{top + HEIGHT + 5}" '
            f'stroke="#999"/>'
            f'<text x="{across(x):.1f}" y="{top + HEIGHT + 18}" text-anchor="middle">{_short(x)}</text>'
        )
    parts.append(f'<line x1="{left}" y1="{top + HEIGHT}" x2="{left + width}" y2="{top + HEIGHT}" stroke="#999"/>')
    for number, curve in enumerate(panel.curves):
        if curve.band:
            edge = [(x, top_y) for x, _, top_y in curve.band] + [(x, low_y) for x, low_y, _ in reversed(curve.band)]
            colour, _ = _style(number)
            parts.append(f'<polygon points="{path(edge)}" fill="{colour}" fill-opacity="0.16"/>')
    for number, curve in enumerate(panel.curves):
        parts.append(
            f'<polyline points="{path([(x, y) for x, y in curve.points])}" fill="none" {_stroke(number)} '
            f'stroke-linejoin="round"/>'
        )
    parts.append(
        f'<text x="{left + width / 2:.0f}" y="{high - 12}" text-anchor="middle">{html.escape(panel.axis)}</text>'
    )
    return parts


def _legend(labels: Sequence[str], total: int) -> tuple[list[str], int]:
    """Draw the legend. Returns its SVG elements and the number of rows it takes."""
    parts, x, row = [], float(LEFT), 0
    for number, label in enumerate(labels):
        wide = 34 + LETTER * len(label) + 20
        if x > LEFT and x + wide > total - RIGHT:
            x, row = float(LEFT), row + 1
        y = 42 + 20 * row
        parts.append(
            f'<line x1="{x:.0f}" y1="{y}" x2="{x + 26:.0f}" y2="{y}" {_stroke(number)}/>'
            f'<text x="{x + 32:.0f}" y="{y + 4}">{html.escape(label)}</text>'
        )
        x += wide
    return parts, row + 1


def _style(number: int) -> tuple[str, str]:
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _stroke(number: int) -> str:
    colour, dash = _style(number)
    return f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _scale(low: float, high: float, ticks: int) -> tuple[float, float, float]:
    """Round a range outwards to tick marks. Their distance, also returned, is 1, 2 or 5 times a power of ten."""
    if high - low < 1e-9:
        low, high = low - 1.0, high + 1.0
    rough = (high - low) / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step


def _short(number: float) -> str:
    for size, letter, least in ((1e6, "M", 1e6), (1e3, "k", 1e4)):
        if abs(number) >= least:
            return f"{round(number / size, 6):g}{letter}"
    return f"{round(number, 6):,g}"
