"""The events of ``trainer_event.v1``, declared once.

Writer, reader, validation, goodput and JSON Schema use these structs. A line of the log is one event as compact JSON
with sorted keys.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from ...adapter.contract.exceptions import FailureCategory, StopReason

__all__ = [
    "MAX_STEP",
    "RESUMED_METRIC",
    "ROLLED_BACK_METRIC",
    "SCHEMA_VERSION",
    "STOP_REASONS",
    "TERMINAL_EVENTS",
    "Checkpoint",
    "Completed",
    "Event",
    "Failed",
    "Metric",
    "Sample",
    "Started",
    "checked_step",
    "checked_text",
    "decode_event",
    "decode_events",
    "encode_event",
    "error_text",
    "event_faults",
    "event_schema",
    "finite_float",
    "path_text",
    "timestamp_ms",
]

SCHEMA_VERSION: Final = "trainer_event.v1"
FAILURE_CATEGORIES: Final = frozenset(get_args(FailureCategory))
STOP_REASONS: Final = frozenset(get_args(StopReason))
TERMINAL_EVENTS: Final = frozenset({"completed", "failed"})
RESUMED_METRIC: Final = "trainer/resumed_from_step"
"""The metric by which an attempt says where it resumed; its value is its step."""
ROLLED_BACK_METRIC: Final = "trainer/rolled_back_to_step"
"""The metric by which an attempt says to which step it goes back, from its own; later steps are logged once more."""
MAX_STEP: Final = 2**63 - 1

_Unset = msgspec.UnsetType
_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP, description="Completed steps.")]


class Git(msgspec.Struct):
    """The commit of an attempt's code."""

    commit: str | _Unset = msgspec.UNSET
    dirty: bool | _Unset = msgspec.UNSET


class Metadata(msgspec.Struct):
    """How an attempt came to be, without secrets; `run_metadata` makes it. Other members are allowed."""

    command: str | _Unset = msgspec.UNSET
    git: Git | _Unset = msgspec.UNSET
    host: str | _Unset = msgspec.UNSET
    job: dict[str, Any] | _Unset = msgspec.UNSET
    last_step: Annotated[int, msgspec.Meta(ge=0)] | _Unset = msgspec.UNSET
    notes: str | _Unset = msgspec.UNSET
    packages: dict[str, str] | _Unset = msgspec.UNSET
    ranks: Annotated[int, msgspec.Meta(ge=1)] | _Unset = msgspec.UNSET
    seed: int | _Unset = msgspec.UNSET
    tags: list[str] | _Unset = msgspec.UNSET


class _Common(msgspec.Struct, tag_field="event", tag=str.lower, gc=False, kw_only=True):
    """The fields of every line. Unknown keys are ignored, so that a reader takes the lines of later releases."""

    run_id: Annotated[str, msgspec.Meta(min_length=1, description="The run; the same on all lines of an attempt.")]
    schema_version: Literal["trainer_event.v1"] = SCHEMA_VERSION
    seq: Annotated[
        int,
        msgspec.Meta(
            ge=1, description="1 at the first line of the file, one more on each line after it, also over restarts."
        ),
    ]
    timestamp_ms: Annotated[int, msgspec.Meta(ge=0, description="Milliseconds since the epoch.")]


class Started(_Common):
    """An attempt begins."""

    attempt: (
        Annotated[int, msgspec.Meta(ge=2, description="Which attempt of the run; absent on the first.")] | _Unset
    ) = msgspec.UNSET
    metadata: (
        Annotated[
            dict[str, Any],
            msgspec.Meta(
                description="How the attempt came to be: `command`, `git` (`commit`, `dirty`), `host`, `packages` "
                "(versions by name), the job's `tags`, `notes` and `seed`, and its settings by dotted name (`job`); "
                "how many `ranks` train, and the `last_step` by its limits and its data, where both are known. Without "
                "secrets."
            ),
        ]
        | _Unset
    ) = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.metadata is not msgspec.UNSET:
            msgspec.convert(self.metadata, Metadata)


class Metric(_Common):
    """One scalar."""

    name: _Name
    step: _Step
    value: float | None
    value_text: (
        Annotated[
            Literal["nan", "inf", "-inf"], msgspec.Meta(description="Names the value that JSON has no number for.")
        ]
        | _Unset
    ) = msgspec.UNSET

    def __post_init__(self) -> None:
        if (self.value is None) is (self.value_text is msgspec.UNSET):
            raise ValueError("`value_text` names a `value` that is null, and is absent for any other")

    @property
    def number(self) -> float:
        """The value as a float, also where it is not finite."""
        return float(self.value_text) if self.value is None else self.value  # type: ignore[arg-type]


class Checkpoint(_Common):
    """A checkpoint is durable."""

    path: _Name
    step: _Step


class Sample(_Common):
    """A sample was written."""

    path: _Name
    step: _Step


class Completed(_Common):
    """The attempt ended as planned."""

    final_checkpoint: str | None
    step: _Step
    stopped: (
        Annotated[
            str,
            msgspec.Meta(
                min_length=1,
                description="What ended it before its last step.",
                examples=["should_stop", "data_exhausted"],
            ),
        ]
        | _Unset
    ) = msgspec.UNSET
    finite: (
        Annotated[bool, msgspec.Meta(description="False where a final weight is nan or infinite; else absent.")]
        | _Unset
    ) = msgspec.UNSET


class Failed(_Common):
    """The attempt ended by an exception or a stop."""

    run_id: Annotated[
        str, msgspec.Meta(description="The run; empty where the run failed before its identity was known.")
    ]
    error: Annotated[str, msgspec.Meta(description="Safe text that begins with its category; of a stop, the reason.")]
    step: Annotated[
        int,
        msgspec.Meta(ge=0, le=MAX_STEP, description="The step that was being executed, else the completed steps."),
    ]
    # The runtime before genlight wrote neither of these two; `event_faults` demands them.
    category: FailureCategory | StopReason | _Unset = msgspec.UNSET
    resumable: (
        Annotated[
            bool,
            msgspec.Meta(description="Whether a restart can be expected to go on where this attempt ended."),
        ]
        | _Unset
    ) = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.category is not msgspec.UNSET and error_text(self.error, self.category) != self.error:
            raise ValueError(f"`error` of category {self.category!r} begins with '{self.category}:'")


Event = Started | Metric | Checkpoint | Sample | Completed | Failed

KINDS: Final[Mapping[str, type[Event]]] = {kind.__name__.lower(): kind for kind in get_args(Event)}
"""Each kind of event by its ``event``."""
_OPTIONAL: Final = frozenset({"attempt", "finite", "metadata", "stopped", "value_text"})
"""Keys that a sound line may lack."""

_encode = msgspec.json.Encoder(order="sorted").encode
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
decode_event: Final = _decoder.decode
"""The event of a line. Raises ValueError, or RecursionError for one that is nested too deeply."""
decode_events: Final = _decoder.decode_lines
"""The events of many lines; as `decode_event`."""


def encode_event(event: Event) -> bytes:
    """The line of `event`, newline included; half surrogate pairs, which UTF-8 has no bytes for, are spelled out."""
    try:
        return _encode(event) + b"\n"
    except UnicodeEncodeError:
        texts = {name: text for name, text in msgspec.structs.asdict(event).items() if isinstance(text, str)}
        spelled = {name: text.encode("utf-8", "backslashreplace").decode("utf-8") for name, text in texts.items()}
        return _encode(msgspec.structs.replace(event, **spelled)) + b"\n"


def event_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one line of an event log."""
    _, shapes = msgspec.json.schema_components([*KINDS.values(), Metadata], ref_template="#/$defs/{name}")
    started = shapes["Started"]["properties"]
    started["metadata"] = {
        "type": "object",
        "$ref": "#/$defs/Metadata",
        "description": started["metadata"]["description"],
    }
    shapes["Metric"]["oneOf"] = [
        {"properties": {"value": {"type": "number"}, "value_text": False}},
        {"properties": {"value": {"type": "null"}}, "required": ["value_text"]},
    ]
    error_of = {category: {"pattern": f"^{category}:"} for category in sorted(FAILURE_CATEGORIES)}
    error_of |= {reason: {"const": reason} for reason in sorted(STOP_REASONS)}
    shapes["Failed"]["anyOf"] = [
        {"properties": {"category": {"const": category}, "error": error}} for category, error in error_of.items()
    ]
    for kind in KINDS.values():
        shapes[kind.__name__] |= {"required": sorted(_required(kind)), "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:genlight:{SCHEMA_VERSION}",
        "title": SCHEMA_VERSION,
        "description": "One line of a training run's event log. Rules between lines (seq, one terminal event an "
        "attempt, order) are beyond a schema; `genlight events FILE --check` proves them.",
        "oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in KINDS.values()],
        "$defs": shapes,
    }


def event_faults(event: object) -> list[str]:
    """The reasons why `event_schema` refuses an event, in words; empty for a sound one.

    JSON Schema takes 1.0 for an integer, which no writer writes; here it is a fault.
    """
    try:
        kind = type(msgspec.convert(event, Event))
    except (ValueError, RecursionError) as error:
        return [str(error)]
    assert isinstance(event, dict), "a struct is made from an object"
    known = {"event", *kind.__struct_fields__}
    faults = [f"`{name}` is missing" for name in sorted(_required(kind) - event.keys())]
    return faults + [f"`{name}` is not a field of {event['event']!r}" for name in event if name not in known]


def _required(kind: type[Event]) -> frozenset[str]:
    return frozenset({"event", *kind.__struct_fields__}) - _OPTIONAL


def timestamp_ms(now_ns: int) -> int:
    """Nanoseconds since the epoch as an event has them: whole milliseconds that fit into 64 bits, from 0 on.

    A machine whose clock was never set may count from before 1970, or far in the future.
    """
    return max(0, min(now_ns // 1_000_000, 2**63 - 1))


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


def checked_step(value: Any, name: str = "step") -> int:
    """A number of completed steps, or whatever else `name` counts.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is negative, or does not fit into 64 bits.
    """
    try:
        step = operator.index(value)
    except TypeError:
        raise TypeError(f"Invalid `{name}`. Expected an integer >= 0, but received {value!r}.") from None
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"Invalid `{name}`. Expected an integer from 0 to 2**63 - 1, but received {step}.")
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
