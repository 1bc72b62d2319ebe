"""WASR telemetry: one JSON object per line about the progress of a run, in a local file. Nothing is sent anywhere.

Several processes and threads may write to one file: each line is written under the file's lock, completely or not
at all, and the next writer cuts off a line that a crash left incomplete. Existing code imports
``worldflux.telemetry.wasr``; if that package is not installed, any import of genlight provides this module there.
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
from .events.json_lines import LineFile, Position, complete_lines, decode_line, decode_object, encode_json

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
"""Keys without a required value; if it is missing, null or an empty list is written."""
REQUIRED_EVENT_FIELDS: Final = tuple(f.name for f in msgspec.structs.fields(TelemetryEvent) if f.required)
"""Keys with a value in every event; of these, only an unknown number is null."""

TRIES = 200
"""Number of times that a writer tries to take the lock, 50 ms apart; others hold it only while they write a line."""


def make_run_id() -> str:
    """Return a new run id: 32 hexadecimal digits (``uuid4``)."""
    return uuid.uuid4().hex


def telemetry_path(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the telemetry file: `path`, or the value of ``WORLDFLUX_METRICS_PATH``, or `DEFAULT_PATH`."""
    return Path(path or os.environ.get(PATH_VARIABLE, "").strip() or DEFAULT_PATH).expanduser()


def default_metrics_path() -> Path:
    """Return the telemetry file that is used if a call names none."""
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
    """Append one event to the telemetry file and return the event as written.

    Every key is written; missing values and non-finite numbers are null. Secrets of the environment and credentials in
    URLs are removed from texts.

    Args:
        event: The kind of event: ``heartbeat``, ``diagnostic``, or the caller's own name.
        scenario: A name for the task of the run.
        success: Whether the reported operation succeeded.
        duration_sec: Its duration in seconds.
        ttfi_sec: Seconds to the first iteration.
        artifacts: JSON values by name; paths are written as strings.
        error: Error text; empty or None if there was no error.
        run_id: The same for all events of a run; None makes a new id.
        epoch: Completed epochs.
        step: Completed steps.
        throughput_steps_per_sec: Steps a second.
        flops_estimate: Floating point operations a second.
        watts_estimate: Power in watts.
        flops_per_watt: Floating point operations a second for each watt.
        suggestions: Advice for the user.
        timestamp: Seconds since the epoch; None means now.
        path: The file; see `telemetry_path`.

    Raises:
        TypeError: A value has the wrong type; the message names it.
        ValueError: A required string is empty, or `epoch` or `step` is negative.
        EventLogError: The file cannot be written, or another process holds it.
    """
    fields: dict[str, Any] = {name: value for name, value in locals().items() if name != "path"}
    fields["suggestions"] = suggestions if isinstance(suggestions, str) else list(suggestions or ())
    fields["artifacts"] = {} if artifacts is None else artifacts
    fields["timestamp"] = time.time() if timestamp is None else timestamp
    fields["run_id"] = make_run_id() if run_id is None else run_id
    fields |= {name: checked_text(name, fields[name]) for name in ("event", "scenario", "run_id")}
    fields |= {name: checked_step(fields[name], name) for name in ("epoch", "step") if fields[name] is not None}
    try:
        plain = msgspec.to_builtins({**fields, "error": error or ""}, enc_hook=_plain, str_keys=True)
        record = msgspec.convert(plain, TelemetryEvent)
    except msgspec.ValidationError as invalid:
        name = str(invalid).partition("`$.")[2].rstrip("`")
        raise TypeError(f"Invalid `{name}`. {str(invalid).partition(' - at')[0]}.") from None
    record.error = hide_environment(record.error)
    record.suggestions = [hide_environment(text) for text in record.suggestions]
    line = encode_json(record)
    with contextlib.closing(LineFile(telemetry_path(path), tries=TRIES)) as file:
        file.append(line + b"\n")
    return decode_object(line)


def read_events(path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Return all events of a telemetry file, oldest first; an empty list if there is no file.

    Blank lines are skipped, and so is a last line without its newline: it is still being written, or was torn.

    Args:
        path: The file; see `telemetry_path`.

    Raises:
        EventLogError: The file cannot be read, or one of its lines is not a JSON object.
    """
    file = telemetry_path(path)
    if not file.exists():
        return []
    position = Position()
    return [decode_line(file, position.line, line) for line in complete_lines(file, position) if line.strip()]


def _plain(value: Any) -> str | float:
    """Convert a path to text, and a number of numpy or torch to a float."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__qualname__
        raise TypeError(f"Invalid event. Expected values that JSON can represent, but received a {kind}.") from None
