"""The job spec: one JSON object that says what to train.

`parse_job_spec` reads it field by field, so that every fault is found in one go, each with the field's name, its
value and what was expected. An unknown key is a warning, because a newer orchestrator may write one. A field that
is null counts as absent.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .errors import FaultList, nearest, render_value
from .spec_fields import LARGEST, NESTED_FIELDS, NON_BLANK, PROMPT_FIELDS, SPEC_FIELDS, VALIDATE_FIELDS, Rule

__all__ = [
    "WHOLE_SPEC",
    "DatasetSpec",
    "InputsSpec",
    "JobSpec",
    "SampleRequest",
    "UploadUrls",
    "parse_job_spec",
    "read_job_spec",
]


@dataclass(frozen=True)
class DatasetSpec:
    """Which Parquet files are trained on, and how their rows become batches."""

    parquet_paths: tuple[str, ...] = ()
    batch_size: int = 32
    """Rows a batch, per rank."""
    readahead: int = 2
    columns: tuple[str, ...] | None = None
    """None means all."""
    shuffle: bool = False
    seed: int = 0
    epochs: int | None = None
    """Passes over the data; None repeats until ``max_steps``."""
    shard: str | None = None
    """How ranks share the rows; None leaves it to the feed."""


@dataclass(frozen=True)
class InputsSpec:
    """References that are brought to this machine before training; a URL may hold a credential, so none is shown."""

    base_model_ref: str | None = field(default=None, repr=False)
    dataset_parquet_refs: tuple[str, ...] = field(default=(), repr=False)
    resume_checkpoint_ref: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class UploadUrls:
    """Where results are posted, None meaning not at all; a URL may hold a credential, so none is shown."""

    metrics_url: str | None = field(default=None, repr=False)
    checkpoint_url: str | None = field(default=None, repr=False)
    sample_url: str | None = field(default=None, repr=False)
    terminal_url: str | None = field(default=None, repr=False)
    targets: tuple[str, ...] = field(default=(), repr=False)
    """Further destinations of checkpoints and samples: ``hf://owner/name``, or any URL that fsspec opens."""


UPLOAD_URLS = ("metrics_url", "checkpoint_url", "sample_url", "terminal_url")
"""Fields of `UploadUrls` that are endpoints, which get the token."""


@dataclass(frozen=True)
class SampleRequest:
    """One sample that is drawn at every sample cadence."""

    name: str
    task: str = "t2i"
    prompt: str = ""
    negative_prompt: str = ""
    instruction: str = ""
    source_image: str | None = None
    seed: int | None = None


@dataclass(frozen=True)
class JobSpec:
    """A job as its file says it; None where the file says nothing."""

    run_id: str | None = None
    trainer: str | None = None
    trainer_api_version: str | None = None
    max_steps: int | None = None
    metric_every: int | None = None
    checkpoint_every: int | None = None
    sample_every: int | None = None
    owner: str | None = None
    release_ref: str | None = None
    hyperparams: Mapping[str, Any] = field(default_factory=dict)
    dataset: DatasetSpec | None = None
    mock_batches: tuple[Any, ...] | None = None
    inputs: InputsSpec = InputsSpec()
    resume_from_latest: bool | None = None
    resume_checkpoint_path: str | None = None
    sample_prompts: tuple[SampleRequest, ...] = ()
    sample_seed: int | None = None
    capability_token: str | None = field(default=None, repr=False)
    orchestrated: bool | None = None
    max_runtime_seconds: float | None = None
    cancel_file_path: str | None = None
    uploads: UploadUrls = UploadUrls()
    lightning: Mapping[str, Any] = field(default_factory=dict, repr=False)
    validate: Mapping[str, Any] | None = None


LARGEST_SPEC_BYTES = 128 << 20
"""Of a file; a device, or data named by mistake, would fill the memory."""

MOST_DIGITS = 400
"""Of an integer; Python itself refuses more than it was told to, which differs between processes."""

WHOLE_SPEC = "job spec"
"""Name of faults that leave no field of the spec to speak of."""

_TARGET = re.compile(r"hf://[^/@]+/[^/@]+/?(@.*)?|(?!hf:)[^:/]+://.+")

_YAML = (".yaml", ".yml")

DEEPEST = 100
"""Levels of nesting; whatever walks through hyperparameters later may recurse."""


def read_job_spec(path: Path, faults: FaultList) -> dict[str, Any] | None:
    """The JSON object in the file at `path`; None when that is not possible, which is then a fault."""
    try:
        content = _content(path) if path.is_file() else _content_of_pipe(path)
    except FileNotFoundError:
        faults.add(
            f"There is no job spec at {str(path)!r}. Name an existing JSON file.", code="startup.missing_job_spec_path"
        )
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        faults.add(f"The job spec {str(path)!r} cannot be read: {reason}. Name a readable JSON file.")
        return None
    if len(content) > LARGEST_SPEC_BYTES:
        faults.add(f"The job spec {str(path)!r} has more than {LARGEST_SPEC_BYTES >> 20} MiB. Name a JSON file.")
        return None
    if not content.strip():
        pipe = "" if path.is_file() else "; a pipe can be read once, and each process of a run reads its job spec"
        faults.add(f"The job spec {str(path)!r} is empty{pipe}. Expected a JSON object, {{...}}.")
        return None
    try:
        decoded = json.loads(
            content, parse_int=_integer, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
        )
    except RecursionError:
        faults.add(f"The job spec {str(path)!r} is nested too deeply.")
        return None
    except ValueError as error:
        way_out = " A LightningCLI configuration is for `genlight fit --config`." if path.suffix in _YAML else ""
        faults.add(f"The job spec {str(path)!r} is not JSON: {_decode_reason(error)}.{way_out}")
        return None
    if not isinstance(decoded, dict):
        faults.add(f"The job spec {str(path)!r} holds {_kind(decoded)}. Expected a JSON object, {{...}}.")
        return None
    return decoded


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LARGEST_SPEC_BYTES + 1)


@functools.cache
def _content_of_pipe(path: Path) -> bytes:
    """Kept, for a failed start reads the spec once more to find out where to report."""
    return _content(path)


def _decode_reason(error: ValueError) -> str:
    """Why decoding failed; the messages of a UnicodeDecodeError would quote the file's bytes."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not {error.encoding}"
    return str(error).rstrip(".")


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} stands twice in one object")
        found[name] = value
    return found


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def parse_job_spec(raw: Mapping[str, Any], faults: FaultList) -> JobSpec:
    """The typed job spec of a decoded JSON object.

    Faults and warnings go to `faults`; a faulty field is left out of the result, which is then of no use beyond
    finding further faults.
    """
    if _is_deeper_than(raw, DEEPEST):
        faults.add(f"The job spec is nested too deeply. Expected at most {DEEPEST} levels.", name=WHOLE_SPEC)
        return JobSpec()
    values = _fields("", _without_alias(raw, faults), SPEC_FIELDS, faults)
    for name, rules in NESTED_FIELDS.items():
        if name in values:
            values[name] = _fields(f"{name}.", values[name], rules, faults)
    if "dataset" in values:
        values["dataset"] = _dataset(values["dataset"], faults)
    if "inputs" in values:
        values["inputs"] = _inputs(values["inputs"], faults)
    if "uploads" in values:
        values["uploads"] = _uploads(values["uploads"], faults)
    if "mock_batches" in values:
        values["mock_batches"] = tuple(values["mock_batches"])
    if "validate" in values:
        values["validate"] = _validate(values["validate"], faults)
    if "sample_prompts" in values:
        values["sample_prompts"] = _sample_prompts(values["sample_prompts"], faults)
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


def _without_alias(raw: Mapping[str, Any], faults: FaultList) -> dict[str, Any]:
    """`raw` with ``request_id`` read as ``run_id``, which wins where both are given."""
    renamed = dict(raw)
    alias = renamed.pop("request_id", None)
    if renamed.get("run_id") is None and alias is not None:
        renamed["run_id"] = alias
    elif alias is not None and alias != renamed["run_id"]:
        faults.warn("`request_id` is an alias of `run_id` and differs from it; `run_id` is used.")
    return renamed


def _fields(prefix: str, raw: Mapping[str, Any], rules: Mapping[str, Rule], faults: FaultList) -> dict[str, Any]:
    """The fields of one object that are present and sound; a blank text counts as absent."""
    values = {}
    for name, value in raw.items():
        if name not in rules:
            faults.warn(f"Unknown key `{prefix}{_shown(name)}` is ignored.{nearest(name, rules)}")
        elif value is not None:
            converted = _convert(f"{prefix}{name}", value, rules[name], faults)
            if converted is not None and not _blank(converted):
                values[name] = converted
    return values


def _shown(name: str) -> str:
    return name.encode("ascii", "backslashreplace").decode()[:60]


def _blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _convert(name: str, value: Any, rule: Rule, faults: FaultList) -> Any:
    """`value` as the rule's type, or None when it is a fault."""
    try:
        converted = msgspec.convert(value, rule.type)
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError):  # the last of half a surrogate pair
        converted = None
    if converted is None or not rule.holds(converted):
        too_large = type(value) is int and value > LARGEST
        expected = f"{rule.expected} and below 2**63" if too_large and ">=" in rule.expected else rule.expected
        faults.invalid(name, expected, value, way_out=rule.way_out, code=rule.code, secret=rule.secret)
        return None
    return converted


def _texts(name: str, values: list[Any], faults: FaultList) -> tuple[str, ...]:
    converted = [_convert(f"{name}[{index}]", value, NON_BLANK, faults) for index, value in enumerate(values)]
    return tuple(text for text in converted if text is not None)


def _uploads(values: dict[str, Any], faults: FaultList) -> UploadUrls:
    targets = _texts("uploads.targets", values.pop("targets", []), faults)
    for index, target in enumerate(targets):
        if not _TARGET.fullmatch(target):
            expected = "a URL such as hf://owner/name or s3://bucket/folder"
            faults.invalid(f"uploads.targets[{index}]", expected, target)
    return UploadUrls(**{name: url.strip() for name, url in values.items()}, targets=targets)


def _dataset(values: dict[str, Any], faults: FaultList) -> DatasetSpec:
    for name in ("parquet_paths", "columns"):
        if name in values:
            values[name] = _texts(f"dataset.{name}", values[name], faults)
    if values.get("columns") == () and not faults.concern_part("dataset.columns"):
        faults.invalid("dataset.columns", "at least one column", [], way_out="Leave it out to read all columns.")
    twice = [name for name, count in Counter(values.get("columns", ())).items() if count > 1]
    if twice:
        text = f"Expected different columns, but received {render_value(twice)} more than once. Name each once."
        faults.add(f"Invalid `dataset.columns`. {text}", name="dataset.columns")
    return DatasetSpec(**values)


def _validate(given: dict[str, Any], faults: FaultList) -> dict[str, Any]:
    values = _fields("validate.", given, VALIDATE_FIELDS, faults)
    if given and given.get("every_n_steps") is None:
        faults.add(
            '`validate.every_n_steps` is missing. Add "every_n_steps": 100, or leave out `validate`.',
            name="validate.every_n_steps",
        )
    return values


def _inputs(values: dict[str, Any], faults: FaultList) -> InputsSpec:
    """The inputs under one name each; ``*_url`` and ``*_ref`` are two spellings of the same field."""
    merged: dict[str, Any] = {}
    for target in ("base_model_ref", "dataset_parquet_refs", "resume_checkpoint_ref"):
        other = target.replace("_ref", "_url")
        if target in values and other in values and values[target] != values[other]:
            faults.add(f"`inputs.{target}` and `inputs.{other}` name two different things. Give one of them.")
        found = values.get(target, values.get(other))
        if isinstance(found, list):
            found = _texts(f"inputs.{target if target in values else other}", found, faults)
        if found is not None:
            merged[target] = found
    return InputsSpec(**merged)


def _sample_prompts(values: list[Any], faults: FaultList) -> tuple[SampleRequest, ...]:
    requests = []
    for index, value in enumerate(values):
        name = f"sample_prompts[{index}]"
        given = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(given, dict):
            faults.invalid(name, "a text or an object", value)
            continue
        fields = _fields(f"{name}.", given, PROMPT_FIELDS, faults)
        requests.append(SampleRequest(**{"name": f"{index:02d}", **fields}))
    return tuple(requests)
