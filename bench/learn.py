"""Does it learn? Trains over seeds, evaluates with the likeliest actions, prints scores, and can draw the curves.

python bench/learn.py [--algo trpo] [--env CartPole-v1] [--steps 120000] [--seeds 5] [--svg docs/cartpole.svg]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal.rundir import RunDir

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 300, 56, 44, 20
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#e08e0b", "#7b4fa3")


def shoal(*words: str) -> str:
    command = [sys.executable, "-m", "shoal", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def draw(title: str, curves: list[list[tuple[float, float]]]) -> str:
    """Curves of return against steps, as an SVG."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="trpo")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--svg", type=Path, default=None)
    wanted = parser.parse_args()
    curves, scores = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(wanted.seeds):
            place = ["--runs", folder]
            shoal("train", wanted.algo, wanted.env, f"--seed={seed}", f"--name=s{seed}", *place)
            result: dict[str, Any] = json.loads(shoal("evaluate", f"s{seed}", "--json", *place))
            lines = RunDir(Path(folder) / f"s{seed}").metrics()
            curves.append([(line["time/total_timesteps"], line.get("rollout/ep_rew_mean", 0.0)) for line in lines])
            scores.append(result["mean"])
            last = lines[-1]
            print(
                f"seed {seed}: {result['mean']:.1f} ± {result['std']:.1f} over {result['episodes']} episodes after "
                f"{last['time/total_timesteps']:,} steps in {last['time/time_elapsed']:.1f} s; digest {last['digest']}",
                flush=True,
            )
    middle = statistics.median(scores)
    print(f"{wanted.algo} {wanted.env}: median {middle:.1f}, from {min(scores):.1f} to {max(scores):.1f}")
    if wanted.svg is not None:
        wanted.svg.write_text(draw(f"{wanted.algo.upper()} on {wanted.env}: return against environment steps", curves))


if __name__ == "__main__":
    main()
