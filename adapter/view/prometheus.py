"""Figures of runs in the text format of Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from .summary import State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MEANINGS = {
    "step": "Completed steps.",
    "max_steps": "Steps to train.",
    "steps_per_second": "Speed of a run that is running.",
    "loss": "The last loss.",
    "checkpoint_age_seconds": "Time since a run that is running has saved its newest checkpoint.",
    "uploads_waiting": "Uploads that are not delivered yet.",
    "goodput_ratio": "Share of the newest attempt's time that was spent on training steps.",
    "device_hours": "Hours of all attempts, times their number of processes.",
    "cost": "Device hours times the price_per_device_hour of the job.",
}


def exposition(runs: Iterable[Mapping[str, Any]], now_ms: int) -> str:
    """Return the figures of runs for a scrape; a figure that a run does not have is absent.

    Args:
        runs: Runs as in `RunSummary.as_json`, each with its ``address``.
        now_ms: The time, in milliseconds since 1970.
    """
    # JSON escapes what Prometheus wants to have escaped in a label: quotes, backslashes and line breaks.
    listed = [(json.dumps(run["address"], ensure_ascii=False), run, _figures(run, now_ms)) for run in runs]
    lines = ["# HELP genlight_run_state Whether the run is in this state.", "# TYPE genlight_run_state gauge"]
    for label, run, _ in listed:
        for state in get_args(State):
            lines += [f'genlight_run_state{{run={label},state="{state}"}} {int(run["state"] == state)}']
    for name, meaning in _MEANINGS.items():
        lines += [f"# HELP genlight_run_{name} {meaning}", f"# TYPE genlight_run_{name} gauge"]
        for label, _, figures in listed:
            if figures[name] is not None:
                lines.append(f"genlight_run_{name}{{run={label}}} {float(figures[name])!r}")
    return "\n".join(lines) + "\n"


def _figures(run: Mapping[str, Any], now_ms: int) -> dict[str, Any]:
    is_running, saved_ms = run["state"] == "running", run["checkpoint_ms"]
    return {
        "step": run["step"],
        "max_steps": run["max_steps"],
        "steps_per_second": run["steps_per_s"] if is_running else None,
        "loss": run["loss"],
        "checkpoint_age_seconds": (now_ms - saved_ms) / 1000 if is_running and saved_ms is not None else None,
        "uploads_waiting": run["waiting_uploads"],
        "goodput_ratio": run["attempt_goodput"],
        "device_hours": run["device_hours"],
        "cost": run["cost"],
    }
