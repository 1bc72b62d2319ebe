"""What a single event must look like, as the published JSON Schema says and as plain code checks.

The two say the same, which the tests prove; the code spares users a validator library and words each fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, Final

from .lines import FAILURE_CATEGORIES, MAX_STEP, SCHEMA_VERSION, STOP_REASONS

__all__ = ["event_faults", "event_schema"]

_Test = Callable[[Any], bool]
_Field = tuple[_Test, str]


def event_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one line of an event log."""
    text = resources.files(__package__).joinpath(f"{SCHEMA_VERSION}.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def event_faults(event: object) -> list[str]:
    """What is wrong with one event, in words; empty for one that the schema accepts."""
    if not isinstance(event, dict):
        return [f"expected an object, found {_show(event)}"]
    kind = event.get("event")
    if not isinstance(kind, str) or kind not in _KINDS:
        return [f"`event`: expected one of {', '.join(_KINDS)}, found {_show(kind)}"]
    fields, optional = _KINDS[kind]
    faults = [f"`{name}` is missing" for name in fields if name not in event and name not in optional]
    faults += [f"`{name}` is not a field of {kind!r}" for name in event if name not in fields]
    faults += [
        f"`{name}`: expected {expected}, found {_show(event[name])}"
        for name, (test, expected) in fields.items()
        if name in event and not test(event[name])
    ]
    if not faults and kind in _FAULTS_BETWEEN_FIELDS:
        faults = _FAULTS_BETWEEN_FIELDS[kind](event)
    return faults


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _integer(minimum: int, maximum: int | None = None) -> _Field:
    def test(value: Any) -> bool:
        # To JSON Schema 1.0 is an integer.
        whole = _is_number(value) and (isinstance(value, int) or value.is_integer())
        return whole and value >= minimum and (maximum is None or value <= maximum)

    return test, f"an integer >= {minimum}" + ("" if maximum is None else f" and <= {maximum}")


def _one_of(*values: str) -> _Field:
    return lambda value: isinstance(value, str) and value in values, " or ".join(repr(value) for value in values)


_TEXT: Final[_Field] = (lambda value: isinstance(value, str), "a string")
_NAME: Final[_Field] = (lambda value: isinstance(value, str) and value != "", "a non-empty string")
_NAME_OR_NULL: Final[_Field] = (lambda value: value is None or _NAME[0](value), "a non-empty string, or null")
_NUMBER_OR_NULL: Final[_Field] = (lambda value: value is None or _is_number(value), "a number or null")
_BOOLEAN: Final[_Field] = (lambda value: isinstance(value, bool), "true or false")
_STEP: Final = _integer(0, MAX_STEP)


def _is_object_of(value: Any, **known: _Test) -> bool:
    """Whether `value` is an object whose known members are sound; it may have others."""
    return isinstance(value, dict) and all(test(value[name]) for name, test in known.items() if name in value)


def _is_metadata(value: Any) -> bool:
    is_text, is_flag = _TEXT[0], _BOOLEAN[0]
    return _is_object_of(
        value,
        command=is_text,
        git=lambda git: _is_object_of(git, commit=is_text, dirty=is_flag),
        host=is_text,
        notes=is_text,
        packages=lambda packages: isinstance(packages, dict) and all(map(is_text, packages.values())),
        tags=lambda tags: isinstance(tags, list) and all(map(is_text, tags)),
    )


_METADATA: Final[_Field] = (_is_metadata, "an object as `run_metadata` makes it")


def _kind(kind: str, /, *optional: str, **own: _Field) -> tuple[dict[str, _Field], frozenset[str]]:
    common = {
        "event": _one_of(kind),
        "run_id": _NAME,
        "schema_version": _one_of(SCHEMA_VERSION),
        "seq": _integer(1),
        "timestamp_ms": _integer(0),
    }
    return common | own, frozenset(optional)


_KINDS: Final[Mapping[str, tuple[dict[str, _Field], frozenset[str]]]] = {
    "started": _kind("started", "attempt", "metadata", attempt=_integer(2), metadata=_METADATA),
    "metric": _kind(
        "metric",
        "value_text",
        name=_NAME,
        step=_STEP,
        value=_NUMBER_OR_NULL,
        value_text=_one_of("nan", "inf", "-inf"),
    ),
    "checkpoint": _kind("checkpoint", path=_NAME, step=_STEP),
    "sample": _kind("sample", path=_NAME, step=_STEP),
    "completed": _kind("completed", "stopped", final_checkpoint=_NAME_OR_NULL, step=_STEP, stopped=_NAME),
    "failed": _kind(
        "failed",
        category=_one_of(*sorted(FAILURE_CATEGORIES | STOP_REASONS)),
        error=_TEXT,
        resumable=_BOOLEAN,
        run_id=_TEXT,  # empty where the run failed before its identity was known
        step=_STEP,
    ),
}


def _metric_faults(event: Mapping[str, Any]) -> list[str]:
    if event["value"] is None and "value_text" not in event:
        return ["`value` is null and `value_text` does not say why"]
    if event["value"] is not None and "value_text" in event:
        return ["`value_text` is only for a `value` that is null"]
    return []


def _failed_faults(event: Mapping[str, Any]) -> list[str]:
    category, error = event["category"], event["error"]
    if category in STOP_REASONS and error != category:
        return [f"`error`: expected {category!r}, the reason of the stop, found {_show(error)}"]
    if category in FAILURE_CATEGORIES and not error.startswith(f"{category}:"):
        return [f"`error`: expected a string that begins with '{category}:', found {_show(error)}"]
    return []


_FAULTS_BETWEEN_FIELDS: Final = {"metric": _metric_faults, "failed": _failed_faults}
