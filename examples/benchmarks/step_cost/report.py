"""The figures as a table, a JSON file and a picture."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

OURS, THEIRS = "#1f6f8b", "#b8b8b8"


def about() -> dict[str, Any]:
    """Machine and versions."""
    return {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("genlight", "torch", "lightning")},
        "load_average": os.getloadavg(),
    }


def show(hosts: dict[str, dict[str, Any]], *, wall: bool) -> None:
    """Print one line for each host, of CPU time or of wall-clock time."""
    time = "wall-clock" if wall else "CPU"
    sys.stdout.write(f"\n{time} time of a step\n")
    sys.stdout.write(f"  {'':<40}{'floor us':>9}{'added us':>10}{'(IQR)':>18}{'ratio':>8}{'(IQR)':>16}{'of sums':>9}\n")
    for name, line in hosts.items():
        added, ratio, floor = line["added_us"], line["ratio"], line["floor_us"]
        sums = f"{line['total_ratio']:>9.3f}"
        if wall:
            ratio, floor, sums = line["wall_ratio"], line["floor_wall_us"], ""
            added = {key: (ratio[key] - 1) * floor["median"] for key in ratio}
        sys.stdout.write(
            f"  {name:<40}{floor['median']:>9.1f}{added['median']:>10.1f}{added['q1']:>9.1f} to{added['q3']:>6.1f}"
            f"{ratio['median']:>8.3f}{ratio['q1']:>8.2f} to{ratio['q3']:>5.2f}{sums}\n"
        )


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write every figure."""
    path.write_text(json.dumps(report, indent=2) + "\n")


def plot(hosts: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars of the microseconds that each host adds to a step, with quartiles; needs matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.stderr.write("no plot: matplotlib is not installed (pip install matplotlib)\n")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted(hosts, key=lambda name: hosts[name]["added_us"]["median"], reverse=True)
    added = [hosts[name]["added_us"] for name in names]
    figure, axes = pyplot.subplots(figsize=(9, 0.36 * len(names) + 1.2), layout="constrained")
    for place, (name, us) in enumerate(zip(names, added, strict=True)):
        axes.barh(place, max(0.0, us["median"]), color=OURS if name.startswith("genlight") else THEIRS)
        axes.plot([max(0.0, us["q1"]), max(0.0, us["q3"])], [place, place], color="#444444", linewidth=1)
        label = f"{us['median']:.1f} µs   {hosts[name]['ratio']['median']:.2f}x"
        beside = axes.annotate(label, (max(0.0, us["q3"]), place), (6, 0), textcoords="offset points", fontsize=8)
        beside.set_verticalalignment("center")
    most = max([10.0, *(us["q3"] for us in added)])
    ticks = [tick for tick in (0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if tick < 1.5 * most]
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("symlog", linthresh=10, linscale=0.6)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0, 6 * most)
    axes.set_title("CPU time that a host adds to a step of a bare torch loop, and its ratio to that loop", fontsize=10)
    axes.set_xlabel("µs (median and quartiles; logarithmic from 10 on)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
