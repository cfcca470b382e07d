"""Curves of return against steps, as an SVG."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 300, 56, 44, 20
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#e08e0b", "#7b4fa3")


def draw(title: str, curves: Sequence[Sequence[Sequence[float]]]) -> str:
    """One line for each curve of points (steps, return)."""
    right = max(x for curve in curves for x, _ in curve)
    low = min(0.0, *(y for curve in curves for _, y in curve))
    high = max(y for curve in curves for _, y in curve)

    def at(x: float, y: float) -> str:
        across = LEFT + x / right * (WIDTH - LEFT - 16)
        up = HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - BOTTOM - TOP)
        return f"{across:.1f},{up:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y, x = low + share * (high - low), share * right
        (x0, y0), (x1, _) = at(0, y).split(","), at(right, y).split(",")
        parts.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y0}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y0) + 4}" text-anchor="end" fill="#444">{y:.0f}</text>')
        x0 = at(x, low).split(",")[0]
        parts.append(
            f'<text x="{x0}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#444">{x / 1000:.0f}k</text>'
        )
    for number, curve in enumerate(curves):
        points = " ".join(at(x, y) for x, y in curve)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle" fill="#222">{title}</text></svg>'
    )
    return "\n".join(parts) + "\n"
