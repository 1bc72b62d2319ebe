"""The reference of a job's keys, made from the types in `spec`: a JSON Schema for editors, a table for readers.

``make reference`` writes both anew, and a test holds that what stands in the repository is what this module makes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..contract.types import TrainingJobSpec
from .spec import JobSpec, SampleRequest
from .spec_keys import ALIASES, Key, inner_keys, keys_of, spec_keys

__all__ = ["GROUPS", "SCHEMA_FILE", "job_outline", "job_reference", "job_schema", "schema_text"]

SCHEMA_FILE = Path(__file__).with_name("job.schema.json")


_DEFAULTS: Mapping[str, Any] = {
    f.name: f.default for f in dataclasses.fields(TrainingJobSpec) if f.default not in (dataclasses.MISSING, "")
} | {
    "checkpoint_weights": "all",
    "on_nonfinite": "warn",
    "resume_from_latest": False,
    "orchestrated": False,
    "max_runtime_seconds": 0,
}
"""What a key of the top level is where neither the job nor the environment says it; there None means that."""


def job_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a job file; unknown keys are allowed, as `parse_job_spec` allows them."""
    _, definitions = msgspec.json.schema_components([JobSpec], ref_template="#/$defs/{name}")
    root = definitions.pop("JobSpec")
    for block, aliases in ALIASES.items():
        properties = root["properties"] if not block else definitions["InputsSpec"]["properties"]
        properties |= {alias: properties[name] for alias, name in aliases.items()}
    for name, value in _DEFAULTS.items():
        root["properties"][name] = {**root["properties"][name], "default": value}
    items = root["properties"]["sample_prompts"]
    items["items"] = {"anyOf": [{"type": "string"}, items["items"]]}
    definitions["SampleRequest"]["required"] = []
    root["properties"]["$schema"] = {"type": "string", "description": "This file, for editors."}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "genlight job"}
    return {**head, **{name: value for name, value in root.items() if name != "title"}, "$defs": definitions}


def schema_text() -> str:
    """`job_schema` as the file holds it."""
    return json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n"


def job_reference() -> str:
    """Every key of a job as Markdown: type, default, meaning and example, one table for each block."""
    blocks = [("", spec_keys())]
    blocks += [(f"{name}.", inner_keys(name)) for name in spec_keys() if inner_keys(name)]
    blocks.append(("sample_prompts[].", keys_of(SampleRequest)))
    return "\n".join(line for prefix, keys in blocks for line in _table(prefix, keys.values()))


GROUPS = {
    "the run": ("run_id", "owner", "release_ref", "tags", "notes"),
    "what is trained": (
        "trainer",
        "trainer_api_version",
        "hyperparams",
        "max_steps",
        "on_nonfinite",
        "sync_each_batch",
        "recover",
        "lightning",
    ),
    "data and inputs": ("dataset", "mock_batches", "inputs"),
    "cadences": ("metric_every", "checkpoint_every", "checkpoint_weights", "validate"),
    "samples": ("sample_every", "sample_prompts", "sample_seed"),
    "resume and stop": ("resume_from_latest", "resume_checkpoint_path", "max_runtime_seconds", "cancel_file_path"),
    "where results go": ("uploads", "capability_token", "orchestrated"),
}
"""The keys of a job by what they are about."""


def job_outline() -> str:
    """The keys of a job in groups, one in a line with the first sentence about it, for a terminal of 80 columns."""
    known = spec_keys()
    lines = []
    for group, names in GROUPS.items():
        lines.append(f"{group}:")
        for name in names:
            lines += _outlined(name, known[name].description)
            inner = ", ".join(inner_keys(name))
            if inner:
                lines += textwrap.wrap(inner, 80, initial_indent=" " * _INDENT, subsequent_indent=" " * _INDENT)
        lines.append("")
    return "keys of a job, by what they are about\n\n" + "\n".join(lines[:-1])


_INDENT = 26


def _outlined(name: str, description: str) -> list[str]:
    sentence = re.split(r"[.;:](?:\s|$)", description, maxsplit=1)[0].replace("`", "")
    return textwrap.wrap(
        sentence, 80, initial_indent=f"  {name}".ljust(_INDENT), subsequent_indent=" " * _INDENT, break_on_hyphens=False
    )


def _table(prefix: str, keys: Any) -> Iterator[str]:
    yield f"#### `{prefix}`" if prefix else "#### Top level"
    yield ""
    yield "| key | what | default | meaning | example |"
    yield "|---|---|---|---|---|"
    for key in keys:
        example = f"`{json.dumps(key.examples[0], ensure_ascii=False)}`" if key.examples else ""
        meaning = key.description.replace("``", "`")
        yield f"| `{key.name}` | {_what(key)} | {_default(prefix, key)} | {meaning} | {example} |"
    yield ""


def _what(key: Key) -> str:
    if key.block is not None:
        return "an object, below"
    if key.item is not None:
        return (
            "a list; each an object, below, or a string" if key.item.block else f"a list; each {key.item.rule.expected}"
        )
    return key.rule.expected.replace("|", "\\|")


def _default(prefix: str, key: Key) -> str:
    value = _DEFAULTS.get(key.name) if not prefix else key.default
    return "" if value in (None, (), {}) or key.block is not None else f"`{json.dumps(value)}`"
