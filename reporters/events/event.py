"""The events of ``trainer_event.v1``, declared once.

Writer, reader, validation, goodput and JSON Schema use these structs. A line of the log is one event as compact JSON
with sorted keys.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Final, Literal, TypedDict, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...adapter.contract.exceptions import FailureCategory, StopReason

SCHEMA_VERSION: Final = "trainer_event.v1"
FAILURE_CATEGORIES: Final = frozenset(get_args(FailureCategory))
STOP_REASONS: Final = frozenset(get_args(StopReason))
TERMINAL_EVENTS: Final = frozenset({"completed", "failed"})
RESUMED_METRIC: Final = "trainer/resumed_from_step"
"""Metric that reports the step from which an attempt resumed; the value is the same step."""
ROLLED_BACK_METRIC: Final = "trainer/rolled_back_to_step"
"""Metric whose value is the step that an attempt went back to. The steps after it are logged again."""
MAX_STEP: Final = 2**63 - 1

_Name = Annotated[str, Meta(min_length=1)]
_Step = Annotated[int, Meta(ge=0, le=MAX_STEP, description="Completed steps.")]
_Attempt = Annotated[int, Meta(ge=2, description="Which attempt of the run; absent on the first.")]
_Stopped = Annotated[str, Meta(min_length=1, description="Reason for an early end, such as should_stop.")]
_ValueText = Annotated[Literal["nan", "inf", "-inf"], Meta(description="The value, if JSON has no number for it.")]
_Finite = Annotated[bool, Meta(description="False if a final weight is nan or infinite; otherwise absent.")]
_Resumable = Annotated[bool, Meta(description="Whether a restart is expected to continue from here.")]
_Seq = Annotated[int, Meta(ge=1, description="1 on the first line, one more on each further one, also after restarts.")]


class Git(TypedDict, total=False):
    """The commit of an attempt's code."""

    commit: str
    dirty: bool


class Metadata(TypedDict, total=False):
    """The origin of an attempt, without secrets; made by `run_metadata`. Readers ignore other keys."""

    command: str
    git: Git
    host: str
    job: dict[str, Any]
    last_step: Annotated[int, Meta(ge=0)]
    notes: str
    numerics: dict[str, Any]
    packages: dict[str, str]
    ranks: Annotated[int, Meta(ge=1)]
    seed: int
    source: str
    stage: str
    tags: list[str]


class _Common(msgspec.Struct, tag_field="event", tag=str.lower, gc=False, kw_only=True):
    """The fields of every line. Unknown keys are ignored, so that a reader accepts the lines of later releases."""

    run_id: Annotated[str, Meta(min_length=1, description="The run; the same on all lines of an attempt.")]
    schema_version: Literal["trainer_event.v1"] = SCHEMA_VERSION
    seq: _Seq
    timestamp_ms: Annotated[int, Meta(ge=0, description="Milliseconds since the epoch.")]


class Started(_Common):
    """An attempt begins."""

    attempt: _Attempt | UnsetType = UNSET
    metadata: (
        Annotated[
            Metadata,
            Meta(
                description="The origin of the attempt: `command`, `git` (`commit`, `dirty`), `host`, `packages` "
                "(versions by name), the job's `tags`, `notes` and `seed`, and its settings by dotted name (`job`); "
                "settings that affect the exact numbers (`numerics`: threads, deterministic algorithms, TF32, versions "
                "of Python and CUDA); the number of `ranks`; the `last_step` by its limits and its data, if known; "
                "the `stage` (`validate`, `test`) of an attempt that does not train. Without secrets."
            ),
        ]
        | UnsetType
    ) = UNSET


class Metric(_Common):
    """One scalar."""

    name: _Name
    step: _Step
    value: float | None
    value_text: _ValueText | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.value is None) is (self.value_text is UNSET):
            raise ValueError("`value_text` names a `value` that is null, and is absent for any other")

    @property
    def number(self) -> float:
        """The value as a float, even if it is not finite."""
        return float(self.value_text) if self.value is None else self.value  # type: ignore[arg-type]


class Checkpoint(_Common):
    """A checkpoint is durable."""

    path: _Name
    step: _Step


class Sample(_Common):
    """A sample was written."""

    path: _Name
    step: _Step


class Finding(_Common):
    """Something that a reader of the run should know, such as a proof that a restart repeated steps exactly."""

    kind: Annotated[str, Meta(min_length=1, description="Kind of the finding, such as resume_proof.")]
    level: Annotated[Literal["ok", "warn", "fail"], Meta(description="Whether it is good news, or how bad it is.")]
    step: _Step
    text: Annotated[str, Meta(min_length=1, description="The finding in words, without secrets.")]


class Completed(_Common):
    """The attempt ended as planned."""

    final_checkpoint: str | None
    step: _Step
    stopped: _Stopped | UnsetType = UNSET
    finite: _Finite | UnsetType = UNSET


class Failed(_Common):
    """The attempt ended by an exception or a stop."""

    run_id: Annotated[str, Meta(description="The run; empty if the attempt failed before the run was known.")]
    error: Annotated[str, Meta(description="Its category and a text without secrets; for a stop, only the reason.")]
    step: Annotated[
        int, Meta(ge=0, le=MAX_STEP, description="The step that was running, or the number of completed steps.")
    ]
    # Optional only for reading: the older runtime did not write these two, and `key_faults` requires them.
    category: FailureCategory | StopReason | UnsetType = UNSET
    resumable: _Resumable | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.category is UNSET:
            return
        begins = self.category in FAILURE_CATEGORIES and self.error.startswith(f"{self.category}:")
        if not begins and not (self.category in STOP_REASONS and self.error == self.category):
            raise ValueError(f"`error` {self.error!r} does not say its `category` {self.category!r} first")


Event = Started | Metric | Checkpoint | Sample | Finding | Completed | Failed

_OPTIONAL: Final = frozenset({"attempt", "finite", "metadata", "stopped", "value_text"})
"""Keys that a valid line may lack."""

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
decode_event: Final = _decoder.decode
"""Return the event on a line. Raises ValueError, or RecursionError if it is nested too deeply."""
decode_events: Final = _decoder.decode_lines
"""Like `decode_event`, for many lines."""


def event_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one line of an event log."""
    kinds = get_args(Event)
    _, shapes = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    shapes["Metric"]["oneOf"] = [
        {"properties": {"value": {"type": "number"}, "value_text": False}},
        {"properties": {"value": {"type": "null"}}, "required": ["value_text"]},
    ]
    error_of = {category: {"pattern": f"^{category}:"} for category in sorted(FAILURE_CATEGORIES)}
    error_of |= {reason: {"const": reason} for reason in sorted(STOP_REASONS)}
    shapes["Failed"]["anyOf"] = [
        {"properties": {"category": {"const": category}, "error": error}} for category, error in error_of.items()
    ]
    for kind in kinds:
        shapes[kind.__name__] |= {"required": sorted(_required(kind)), "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:genlight:{SCHEMA_VERSION}",
        "title": SCHEMA_VERSION,
        "description": "One line of a training run's event log. A schema cannot express the rules between lines "
        "(seq, one terminal event per attempt, order); `genlight events RUN --check` checks them.",
        "oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds],
        "$defs": shapes,
    }


def key_faults(kind: type[Event], event: dict[str, Any]) -> list[str]:
    """Return the required keys that an event of this kind lacks, and its unknown keys, as reasons to reject it."""
    required = _required(kind)
    faults = [f"`{name}` is missing" for name in sorted(required - event.keys())]
    unknown = event.keys() - required - _OPTIONAL.intersection(kind.__struct_fields__)
    return faults + [f"`{name}` is not a field of {event['event']!r}" for name in event if name in unknown]


@functools.cache
def _required(kind: type[Event]) -> frozenset[str]:
    return frozenset({"event", *kind.__struct_fields__}) - _OPTIONAL
