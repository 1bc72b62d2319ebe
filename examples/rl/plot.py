"""The learning curve of a run as a picture: ``python plot.py runs/ppo ppo.svg``."""

from __future__ import annotations

import sys
from pathlib import Path

from genlight.reporters import read_events

WIDTH, HEIGHT, EDGE = 640, 320, 48


def curve(run: Path, name: str) -> list[tuple[float, float]]:
    """Return environment steps and values of a metric."""
    by_step: dict[int, dict[str, float]] = {}
    for event in read_events(run / "metrics" / "events.jsonl"):
        if event["event"] == "metric":
            by_step.setdefault(event["step"], {})[event["name"]] = event["value"]
    rows = (by_step[step] for step in sorted(by_step))
    return [(row["trainer/agent_step"], row[name]) for row in rows if "trainer/agent_step" in row and name in row]


def picture(points: list[tuple[float, float]], title: str) -> str:
    """Return an SVG with axes from 0 to the largest values."""
    right, top = max(x for x, _ in points), max(y for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        return EDGE + x / right * (WIDTH - 2 * EDGE), HEIGHT - EDGE - y / top * (HEIGHT - 2 * EDGE)

    def text(x: float, y: float, words: str, anchor: str) -> str:
        font = 'font-size="12" font-family="sans-serif"'
        return f'<text x="{x:.0f}" y="{y:.0f}" {font} text-anchor="{anchor}">{words}</text>'

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    axes = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(0, top), place(0, 0), place(right, 0)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<polyline points="{axes}" fill="none" stroke="black"/>',
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>',
        text(WIDTH / 2, EDGE / 2, title, "middle"),
        text(EDGE - 6, place(0, top)[1] + 4, f"{top:.0f}", "end"),
        text(EDGE - 6, place(0, 0)[1] + 4, "0", "end"),
        text(WIDTH - EDGE, HEIGHT - EDGE + 16, f"{right:,.0f} environment steps", "end"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    run, target = map(Path, sys.argv[1:3])
    target.write_text(picture(curve(run, "episode_return"), f"{run.name}: mean return of the last 100 episodes"))
