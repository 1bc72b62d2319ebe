"""The keys of a job spec and what each must be, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from ..contract.types import TRAINER_API_VERSION
from ..plumbing.urls import url_fault

__all__ = [
    "LARGEST",
    "NESTED_FIELDS",
    "NON_BLANK",
    "PROMPT_FIELDS",
    "SPEC_FIELDS",
    "VALIDATE_FIELDS",
    "Rule",
    "is_storable",
]


@dataclass(frozen=True)
class Rule:
    """What a field must be: its type, the same in words, and a condition that the type cannot say."""

    type: Any
    expected: str
    holds: Callable[[Any], bool] = lambda _: True
    secret: bool = False
    code: str = "startup.invalid_job_spec"
    way_out: str = ""


def is_storable(text: str) -> bool:
    """Whether `text` can be a path, a header or a line of a log: UTF-8 and no control character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return all(ord(character) >= 32 and ord(character) != 127 for character in text)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _is_header_value(text: str) -> bool:
    return text.isascii() and is_storable(text)


LARGEST = 2**63 - 1


TEXT = Rule(str, "a text without control characters", is_storable)
NON_BLANK = Rule(str, "a text that is not empty", lambda text: bool(text.strip()) and is_storable(text))
PROSE = Rule(str, "a text", _is_utf8)
FLAG = Rule(bool, "true or false")
COUNT = Rule(Annotated[int, msgspec.Meta(ge=0, le=LARGEST)], "an integer >= 0")
POSITIVE = Rule(Annotated[int, msgspec.Meta(ge=1, le=LARGEST)], "an integer >= 1")
SEED = COUNT
OBJECT = Rule(dict[str, Any], "an object")
LIST = Rule(list[Any], "a list")
SECONDS = Rule(
    Annotated[float, msgspec.Meta(ge=0)],
    "a number of seconds >= 0",
    lambda seconds: seconds < float("inf"),
    code="startup.invalid_timeout",
    way_out="0 means no limit.",
)
TOKEN = Rule(str, "a text of printable ASCII characters", _is_header_value, secret=True)
URL = Rule(str, "an http:// or https:// URL", lambda url: not url.strip() or url_fault(url.strip()) is None)
SHARD = Rule(Literal["rows", "row_groups"], '"rows" or "row_groups"')
VERSION = Rule(str, f'"{TRAINER_API_VERSION}"', lambda version: version in ("", TRAINER_API_VERSION))

SPEC_FIELDS: Mapping[str, Rule] = {
    "run_id": TEXT,
    "trainer": TEXT,
    "trainer_api_version": VERSION,
    "max_steps": POSITIVE,
    "metric_every": COUNT,
    "checkpoint_every": COUNT,
    "sample_every": COUNT,
    "owner": TEXT,
    "release_ref": TEXT,
    "hyperparams": OBJECT,
    "dataset": OBJECT,
    "mock_batches": LIST,
    "inputs": OBJECT,
    "resume_from_latest": FLAG,
    "resume_checkpoint_path": TEXT,
    "sample_prompts": LIST,
    "sample_seed": SEED,
    "capability_token": TOKEN,
    "orchestrated": FLAG,
    "max_runtime_seconds": SECONDS,
    "cancel_file_path": TEXT,
    "uploads": OBJECT,
    "lightning": OBJECT,
    "validate": OBJECT,
}
"""Every key of a job spec; ``request_id`` is an alias of ``run_id``."""

DATASET_FIELDS: Mapping[str, Rule] = {
    "parquet_paths": LIST,
    "batch_size": POSITIVE,
    "readahead": COUNT,
    "columns": LIST,
    "shuffle": FLAG,
    "seed": SEED,
    "epochs": POSITIVE,
    "shard": SHARD,
}

INPUT_FIELDS: Mapping[str, Rule] = {
    "base_model_ref": TEXT,
    "base_model_url": TEXT,
    "dataset_parquet_refs": LIST,
    "dataset_parquet_urls": LIST,
    "resume_checkpoint_ref": TEXT,
    "resume_checkpoint_url": TEXT,
}

UPLOAD_FIELDS: Mapping[str, Rule] = {
    "metrics_url": URL,
    "checkpoint_url": URL,
    "sample_url": URL,
    "terminal_url": URL,
    "targets": LIST,
}

PROMPT_FIELDS: Mapping[str, Rule] = {
    "name": TEXT,
    "task": TEXT,
    "prompt": PROSE,
    "negative_prompt": PROSE,
    "instruction": PROSE,
    "source_image": TEXT,
    "seed": SEED,
}

VALIDATE_FIELDS: Mapping[str, Rule] = {"every_n_steps": COUNT, "critical": FLAG}

NESTED_FIELDS: Mapping[str, Mapping[str, Rule]] = {
    "dataset": DATASET_FIELDS,
    "inputs": INPUT_FIELDS,
    "uploads": UPLOAD_FIELDS,
}
