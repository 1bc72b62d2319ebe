"""WASR telemetry: one JSON object a line about how a run does, in a file of this machine. Nothing is sent anywhere.

Several processes and threads may write to one file: each line is written under the file's lock, whole or not at all,
and a line that a crash tore is cut off by the next writer. The import path that existing code uses,
``worldflux.telemetry.wasr``, works after any import of genlight if that package is not installed.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ..adapter.plumbing.redaction import hide_environment
from .events.event_log import checked_step, checked_text
from .events.json_lines import LineFile, Position, decode_line, decode_object, encode_json, whole_lines

__all__ = [
    "DEFAULT_PATH",
    "OPTIONAL_EVENT_FIELDS",
    "PATH_VARIABLE",
    "REQUIRED_EVENT_FIELDS",
    "default_metrics_path",
    "make_run_id",
    "read_events",
    "telemetry_path",
    "write_event",
]

PATH_VARIABLE: Final = "WORLDFLUX_METRICS_PATH"
"""The environment variable that names the file."""
DEFAULT_PATH: Final = Path(".worldflux", "metrics.jsonl")
"""Default path of events, below the working directory."""


class TelemetryEvent(msgspec.Struct, kw_only=True):
    """One line; every key is written, and missing values are null."""

    event: str
    timestamp: float | None
    run_id: str
    scenario: str
    success: bool
    duration_sec: float | None
    ttfi_sec: float | None
    artifacts: dict[str, Any]
    error: str
    epoch: int | None = None
    step: int | None = None
    throughput_steps_per_sec: float | None = None
    flops_estimate: float | None = None
    watts_estimate: float | None = None
    flops_per_watt: float | None = None
    suggestions: list[str] = []


OPTIONAL_EVENT_FIELDS: Final = tuple(f.name for f in msgspec.structs.fields(TelemetryEvent) if not f.required)
"""Keys that are null, or an empty list, in events that have no such value."""
REQUIRED_EVENT_FIELDS: Final = tuple(f.name for f in msgspec.structs.fields(TelemetryEvent) if f.required)
"""Keys that every event has a value for, though a number that is not known is null."""

TRIES = 200
"""How often a writer tries for the lock, 50 ms apart: others hold it for one line."""


def make_run_id() -> str:
    """A new id of a run: 32 hexadecimal digits (``uuid4``)."""
    return uuid.uuid4().hex


def telemetry_path(path: str | os.PathLike[str] | None = None) -> Path:
    """The file of the telemetry: `path`, else what ``WORLDFLUX_METRICS_PATH`` says, else `DEFAULT_PATH`."""
    return Path(path or os.environ.get(PATH_VARIABLE, "").strip() or DEFAULT_PATH).expanduser()


def default_metrics_path() -> Path:
    """The default telemetry file, for calls that name none."""
    return telemetry_path()


def write_event(
    *,
    event: str,
    scenario: str,
    success: bool,
    duration_sec: float | None = None,
    ttfi_sec: float | None = None,
    artifacts: Mapping[str, Any] | None = None,
    error: str | None = "",
    run_id: str | None = None,
    epoch: int | None = None,
    step: int | None = None,
    throughput_steps_per_sec: float | None = None,
    flops_estimate: float | None = None,
    watts_estimate: float | None = None,
    flops_per_watt: float | None = None,
    suggestions: Iterable[str] | None = None,
    timestamp: float | None = None,
    path: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Append one event to the telemetry file and return it as it was written.

    Every key is written; missing values are null. Numbers that are not finite are null too. Texts are written
    without secrets of the environment and credentials of URLs.

    Args:
        event: Its kind: ``heartbeat``, ``diagnostic``, or a name of the caller's.
        scenario: What the run does.
        success: Whether what the event reports went well.
        duration_sec: Seconds that it took.
        ttfi_sec: Seconds to the first iteration.
        artifacts: Anything JSON can hold, by name; paths are written as strings.
        error: What went wrong; empty or None where nothing did.
        run_id: The same for all events of a run; None makes one up.
        epoch: Completed epochs.
        step: Completed steps.
        throughput_steps_per_sec: Steps a second.
        flops_estimate: Floating point operations a second.
        watts_estimate: Power in watts.
        flops_per_watt: Floating point operations a second for each watt.
        suggestions: What to try, in words.
        timestamp: Seconds since the epoch; None takes the time of the call.
        path: The file; see `telemetry_path`.

    Raises:
        TypeError: A value is of a type that its key does not take; names it.
        ValueError: A string that must not be empty is, or `epoch` or `step` is negative.
        EventLogError: The file cannot be written, or another process holds it.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name != "path"}  # fields of the event
    given["suggestions"] = suggestions if isinstance(suggestions, str) else list(suggestions or ())
    given["artifacts"] = {} if artifacts is None else artifacts
    given["timestamp"] = time.time() if timestamp is None else timestamp
    given["run_id"] = make_run_id() if run_id is None else run_id
    given |= {name: checked_text(name, given[name]) for name in ("event", "scenario", "run_id")}
    given |= {name: checked_step(given[name], name) for name in ("epoch", "step") if given[name] is not None}
    try:
        plain = msgspec.to_builtins({**given, "error": error or ""}, enc_hook=_plain, str_keys=True)
        record = msgspec.convert(plain, TelemetryEvent)
    except msgspec.ValidationError as wrong:
        where = str(wrong).partition("`$.")[2].rstrip("`")
        raise TypeError(f"Invalid `{where}`. {str(wrong).partition(' - at')[0]}.") from None
    record.error = hide_environment(record.error)
    record.suggestions = [hide_environment(text) for text in record.suggestions]
    line = encode_json(record)
    with contextlib.closing(LineFile(telemetry_path(path), tries=TRIES)) as file:
        file.append(line + b"\n")
    return decode_object(line)


def read_events(path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """All events of a telemetry file, oldest first; none where there is no file yet.

    A last line without its newline is being written, or was torn, and is left out, and so are blank lines.

    Args:
        path: The file; see `telemetry_path`.

    Raises:
        EventLogError: The file cannot be read, or a line within it is not a JSON object.
    """
    file = telemetry_path(path)
    if not file.exists():
        return []
    position = Position()
    return [decode_line(file, position.line, line) for line in whole_lines(file, position) if line.strip()]


def _plain(value: Any) -> str | float:
    """A path as text, and a number of numpy or torch as a float."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__qualname__
        raise TypeError(f"Invalid event. Expected what JSON can hold, but received a {kind}.") from None
