"""From a decoded JSON object to a `JobSpec`.

It is read key by key, so that every error is found in one go, each with the key's name, its value and what was
expected. A key that is unknown and nearly a known one is an error; any other unknown key is a warning, because a newer
orchestrator may write one. A key that is null counts as absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from ..plumbing.text import nearest
from .errors import ConfigErrors, render_value
from .spec import LARGEST, DatasetSpec, JobSpec, RecoverSpec
from .spec_keys import ALIASES, Key, keys_of, spec_keys

__all__ = ["DEEPEST", "WHOLE_SPEC", "parse_job_spec"]

WHOLE_SPEC = "job spec"
"""Name of errors that leave no key of the spec to speak of."""

DEEPEST = 100
"""Levels of nesting; whatever walks through hyperparameters later may recurse."""

_FOR_EDITORS = "$schema"
"""Names the JSON Schema from which an editor completes; says nothing about the job."""


def parse_job_spec(raw: Mapping[str, Any], errors: ConfigErrors) -> JobSpec:
    """The typed job spec of a decoded JSON object.

    Errors and warnings go to `errors`; a faulty key is left out of the result, which is then of no use beyond finding
    further errors.
    """
    if _is_deeper_than(raw, DEEPEST):
        errors.add(f"The job spec is nested too deeply. Expected at most {DEEPEST} levels.", name=WHOLE_SPEC)
        return JobSpec()
    given = {name: value for name, value in raw.items() if name != _FOR_EDITORS}
    values = _block("", _under_one_name("", given, errors), spec_keys(), errors)
    return JobSpec(**values)


def _is_deeper_than(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested deeper than `levels`, told without recursion."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return False
    return True


def _under_one_name(block: str, raw: Mapping[str, Any], errors: ConfigErrors) -> dict[str, Any]:
    """`raw` with aliases read as the keys that they stand for; two that differ are told."""
    renamed = dict(raw)
    for alias, name in ALIASES.get(block, {}).items():
        value = renamed.pop(alias, None)
        if value is None:
            continue
        if renamed.get(name) is None:
            renamed[name] = value
        elif value != renamed[name] and not block:
            errors.warn(f"`{alias}` is an alias of `{name}` with a different value; `{name}` is used.")
        elif value != renamed[name]:
            errors.add(f"`{block}.{name}` and `{block}.{alias}` name two different things. Give one of them.")
    return renamed


def _block(prefix: str, raw: Mapping[str, Any], keys: Mapping[str, Key], errors: ConfigErrors) -> dict[str, Any]:
    """The keys of one object that are present and valid; a blank text counts as absent."""
    values = {}
    for name, value in raw.items():
        if name not in keys:
            _tell_unknown(prefix, name, keys, errors)
        elif value is not None:
            converted = _convert(f"{prefix}{name}", value, keys[name], errors)
            if converted is not None and not _is_blank(converted):
                values[name] = converted
    return values


def _tell_unknown(prefix: str, name: str, keys: Mapping[str, Key], errors: ConfigErrors) -> None:
    shown = f"{prefix}{name.encode('ascii', 'backslashreplace').decode()[:60]}"
    suggestion = nearest(name, keys)
    if suggestion and not prefix:
        errors.add(f"Unknown key `{shown}`.{suggestion}", name=shown)
    else:
        errors.warn(f"Unknown key `{shown}` is ignored.{suggestion}")


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _convert(name: str, value: Any, key: Key, errors: ConfigErrors) -> Any:
    """`value` as the key's type, or None when it is an error."""
    if key.block is not None:
        return _convert_block(name, value, key.block, errors)
    if key.item is not None:
        return _convert_list(name, value, key, key.item, errors)
    try:
        converted = msgspec.convert(value, key.type)
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError):  # the last of half a surrogate pair
        converted = None
    if converted is None or not key.rule.holds(converted):
        rule = key.rule
        too_large = type(value) is int and value > LARGEST
        expected = f"{rule.expected} and below 2**63" if too_large and ">=" in rule.expected else rule.expected
        errors.invalid(name, expected, value, way_out=rule.way_out, code=rule.code, secret=rule.secret)
        return None
    return converted


def _convert_block(name: str, value: Any, block: Any, errors: ConfigErrors) -> Any:
    if not isinstance(value, dict):
        errors.invalid(name, "an object", value)
        return None
    values = _block(f"{name}.", _under_one_name(name, value, errors), keys_of(block), errors)
    if name == "validate":
        if not value:
            return None
        _require_cadence(value, errors)
    if block is RecoverSpec:
        _check_ladder(values, errors)
    if name == "uploads":
        values = {key: url.strip() if isinstance(url, str) else url for key, url in values.items()}
    if block is DatasetSpec:
        _check_columns(values, errors)
    return block(**values)


def _convert_list(name: str, value: Any, key: Key, item: Key, errors: ConfigErrors) -> tuple[Any, ...] | None:
    if not isinstance(value, list):
        errors.invalid(name, key.rule.expected, value)
        return None
    convert = _convert_sample if name == "sample_prompts" else _convert
    converted = [convert(f"{name}[{index}]", entry, item, errors) for index, entry in enumerate(value)]
    return tuple(entry for entry in converted if entry is not None)


def _convert_sample(name: str, value: Any, item: Key, errors: ConfigErrors) -> Any:
    """A sample request; a string is its prompt, and its place in the list the name of one that has none."""
    given = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        errors.invalid(name, "a string or an object", value)
        return None
    assert item.block is not None
    place = int(name.rpartition("[")[2].rstrip("]"))
    return item.block(**{"name": f"sample-{place:02d}", **_block(f"{name}.", given, keys_of(item.block), errors)})


def _require_cadence(given: Mapping[str, Any], errors: ConfigErrors) -> None:
    if given.get("every_n_steps") is None:
        errors.add(
            '`validate.every_n_steps` is missing. Add "every_n_steps": 100, or leave out `validate`.',
            name="validate.every_n_steps",
        )


def _check_ladder(values: dict[str, Any], errors: ConfigErrors) -> None:
    for name in ("ladder", "faults"):
        if values.get(name) == () and not errors.concern_part(f"recover.{name}"):
            errors.invalid(f"recover.{name}", "at least one entry", [], way_out="Leave it out for the default.")
    known = RecoverSpec(**values)
    if known.max_attempts < len(known.ladder):
        errors.invalid(
            "recover.max_attempts", f"at least {len(known.ladder)}, the rungs of `ladder`", known.max_attempts
        )


def _check_columns(values: dict[str, Any], errors: ConfigErrors) -> None:
    columns = values.get("columns")
    if columns == () and not errors.concern_part("dataset.columns"):
        errors.invalid("dataset.columns", "at least one column", [], way_out="Leave it out to read all columns.")
    twice = [name for name, count in Counter(columns or ()).items() if count > 1]
    if twice:
        text = f"Expected different columns, but received {render_value(twice)} more than once. Name each once."
        errors.add(f"Invalid `dataset.columns`. {text}", name="dataset.columns")
