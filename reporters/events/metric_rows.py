"""The metrics of an event log as rows, as a logger gets them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from .lines import RESUMED_METRIC
from .reader import read_events

__all__ = ["metric_rows"]


def metric_rows(path: str | os.PathLike[str], *, up_to: int) -> Iterator[tuple[int, dict[str, float]]]:
    """The metrics of each step up to `up_to`, by rising step; what an attempt made again stands as it made it last.

    Raises:
        EventLogError: The log is absent or unreadable, or a line is not an event.
    """
    rows: dict[int, dict[str, float]] = {}
    is_new_attempt = False
    for event in read_events(path):
        name, step = event.get("name"), event.get("step")
        if event.get("event") == "started":
            is_new_attempt = True  # one that trains nothing, as the job has finished, takes nothing back
        if event.get("event") != "metric" or not isinstance(name, str) or not isinstance(step, int):
            continue
        if is_new_attempt:
            resumed_from = step if name == RESUMED_METRIC else 0
            rows = {at: row for at, row in rows.items() if at <= resumed_from}
            is_new_attempt = False
        if name != RESUMED_METRIC and step <= up_to:
            rows.setdefault(step, {})[name] = _value(event)
    return iter(sorted(rows.items()))


def _value(event: dict[str, Any]) -> float:
    value = event.get("value")
    return float(event.get("value_text", "nan") if value is None else value)
