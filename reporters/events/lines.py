"""The lines of ``trainer_event.v1``: one struct per kind, its fields in the order in which they are written.

Keys of a line are sorted. msgspec writes fields in declaration order, so the order below is part of the format.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar, get_args

import msgspec

from ...adapter.contract.exceptions import FailureCategory, StopReason

__all__ = [
    "FAILURE_CATEGORIES",
    "MAX_STEP",
    "RESUMED_METRIC",
    "ROLLED_BACK_METRIC",
    "SCHEMA_VERSION",
    "STOP_REASONS",
    "TERMINAL_EVENTS",
    "Artifact",
    "Completed",
    "Failed",
    "Metric",
    "Started",
    "checked_step",
    "checked_text",
    "encode_line",
    "error_text",
    "finite_float",
    "metric_lines",
    "path_text",
    "timestamp_ms",
]

SCHEMA_VERSION: Final = "trainer_event.v1"
TERMINAL_EVENTS: Final = frozenset({"completed", "failed"})
FAILURE_CATEGORIES: Final = frozenset(get_args(FailureCategory))
STOP_REASONS: Final = frozenset(get_args(StopReason))
RESUMED_METRIC: Final = "trainer/resumed_from_step"
"""The metric by which an attempt says where it resumed; its value is its step."""
ROLLED_BACK_METRIC: Final = "trainer/rolled_back_to_step"
"""The metric by which an attempt says to which step it goes back, from its own; later steps are told once more."""
MAX_STEP = 2**63 - 1

_Unset = msgspec.UnsetType
_encoder = msgspec.json.Encoder()
_Event = TypeVar("_Event", bound=msgspec.Struct)


class Started(msgspec.Struct, gc=False):
    """An attempt begins; `attempt` is there from the second on."""

    attempt: int | _Unset
    event: str
    metadata: dict[str, Any] | _Unset
    run_id: str
    schema_version: str
    seq: int
    timestamp_ms: int


class Metric(msgspec.Struct, gc=False):
    """One scalar; `value_text` names a value that JSON has no number for."""

    event: str
    name: str
    run_id: str
    schema_version: str
    seq: int
    step: int
    timestamp_ms: int
    value: float | None
    value_text: str | _Unset = msgspec.UNSET


class Artifact(msgspec.Struct, gc=False):
    """A checkpoint or a sample is on disk."""

    event: str
    path: str
    run_id: str
    schema_version: str
    seq: int
    step: int
    timestamp_ms: int


class Completed(msgspec.Struct, gc=False):
    """An attempt ended as planned; `stopped` says what ended it before its last step."""

    event: str
    final_checkpoint: str | None
    run_id: str
    schema_version: str
    seq: int
    step: int
    stopped: str | _Unset
    timestamp_ms: int


class Failed(msgspec.Struct, gc=False):
    """An attempt ended by an exception or a stop."""

    category: str
    error: str
    event: str
    resumable: bool
    run_id: str
    schema_version: str
    seq: int
    step: int
    timestamp_ms: int


def encode_line(event: msgspec.Struct) -> bytes:
    """The line of `event`, newline included; half surrogate pairs, which UTF-8 has no bytes for, are spelled out."""
    try:
        return _encoder.encode(event) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(event)) + b"\n"


def metric_lines(
    reports: Iterable[tuple[Mapping[str, float | str], int, int]], *, run_id: str, seq: int
) -> list[bytes]:
    """A line for each metric of many reports, in their order; as `encode_line`, at half of its cost.

    Args:
        reports: Values by name, as `finite_float` gives them, their step, and nanoseconds since the epoch.
        run_id: Whose metrics these are.
        seq: Of the first line.
    """
    lines, encode = [], _encoder.encode
    # One event for all of them: memory that is fresh costs more than what is written to it.
    event = Metric("metric", "", run_id, SCHEMA_VERSION, seq, 0, 0, None)
    for values, step, now_ns in reports:
        event.step, event.timestamp_ms = step, timestamp_ms(now_ns)
        for name, value in values.items():
            event.name = name
            event.value, event.value_text = (None, value) if isinstance(value, str) else (value, msgspec.UNSET)
            try:
                lines.append(encode(event) + b"\n")
            except UnicodeEncodeError:
                lines.append(encode_line(event))
            event.seq += 1
    return lines


def timestamp_ms(now_ns: int) -> int:
    """Nanoseconds since the epoch as an event has them: whole milliseconds that fit into 64 bits, from 0 on.

    A machine whose clock was never set may count from before 1970, or far in the future.
    """
    return max(0, min(now_ns // 1_000_000, 2**63 - 1))


def _without_surrogates(event: _Event) -> _Event:
    texts = {name: value for name, value in msgspec.structs.asdict(event).items() if isinstance(value, str)}
    spelled = {name: text.encode("utf-8", "backslashreplace").decode("utf-8") for name, text in texts.items()}
    return msgspec.structs.replace(event, **spelled)


def checked_text(field: str, value: Any) -> str:
    """`value` as a plain, non-empty text.

    Raises:
        TypeError: It is not a string.
        ValueError: It is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"Invalid `{field}`. Expected a string, but received {value!r}.")
    if not value:
        raise ValueError(f"Invalid `{field}`. Expected a non-empty string, but received ''.")
    return str.__str__(value)


def path_text(field: str, value: Any) -> str:
    """A path of any kind as text.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty.
    """
    try:
        return checked_text(field, os.fsdecode(value))
    except TypeError:
        raise TypeError(f"Invalid `{field}`. Expected a path, but received {value!r}.") from None


def checked_step(value: Any) -> int:
    """A number of completed steps.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is negative, or does not fit into 64 bits.
    """
    try:
        step = operator.index(value)
    except TypeError:
        raise TypeError(f"Invalid `step`. Expected an integer >= 0, but received {value!r}.") from None
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"Invalid `step`. Expected an integer from 0 to 2**63 - 1, but received {step}.")
    return int(step)


def finite_float(name: str, value: Any) -> float | str:
    """The value of a metric, from a number, a numpy scalar or a tensor of one element: a text if it is not finite.

    Raises:
        TypeError: The value is not a real number.
        ValueError: It is an integer beyond the range of a float.
    """
    number = value if type(value) is float else _as_float(name, value)
    if math.isfinite(number):
        return number
    return "nan" if number != number else ("inf" if number > 0 else "-inf")


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"Invalid value of metric {name!r}. Expected a number, but received {value!r}.")
    try:
        # `item` before `float`: tensors that require a gradient and one-element arrays warn on `float`.
        return float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        raise ValueError(
            f"Invalid value of metric {name!r}. Expected a number within the range of a float, "
            f"but received an integer of {value.bit_length()} bits."
        ) from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"Invalid value of metric {name!r}. Expected one number, but received {type(value).__name__}: {error}."
        ) from error


def error_text(error: Any, category: str) -> str:
    """The text of a failure, which begins with its category; of a stop, which is its reason.

    Raises:
        ValueError: The category is unknown, or a stop's text is another one than its reason.
    """
    if category in STOP_REASONS:
        if error != category:
            raise ValueError(f"Invalid `error`. Expected {category!r} for that stop, but received {error!r}.")
        return category
    if category not in FAILURE_CATEGORIES:
        known = ", ".join(sorted(FAILURE_CATEGORIES | STOP_REASONS))
        raise ValueError(f"Invalid `category`. Expected one of {known}, but received {category!r}.")
    text = str(error)
    return text if text.startswith(f"{category}:") else f"{category}:{text}"
