"""The reference of a job's keys, made from the declaration in `spec`: a JSON Schema for editors, tables for readers.

``make reference`` writes both anew, and a test holds that what stands in the repository is what this module makes.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from .environment import VARIABLES
from .keys import Key, job_keys, keys_of
from .spec import JobSpec, SampleRequest
from .standard_callbacks import STANDARD_CALLBACKS

__all__ = [
    "SCHEMA_FILE",
    "callbacks_reference",
    "job_outline",
    "job_reference",
    "job_schema",
    "schema_text",
    "variables_reference",
]

SCHEMA_FILE = Path(__file__).with_name("job.schema.json")


def job_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a job file; other keys are allowed, as a newer orchestrator may write them."""
    _, definitions = msgspec.json.schema_components(
        [JobSpec], ref_template="#/$defs/{name}", schema_hook=lambda _: {"type": "string"}
    )
    root = definitions.pop("JobSpec")
    blocks = [(root, job_keys()), *((definitions[name], keys_of(key.block)) for name, key in _blocks())]
    for shape, keys in [*blocks, (definitions["SampleRequest"], keys_of(SampleRequest))]:
        for name, key in keys.items():
            shape["properties"][name] = {"description": key.description, **shape["properties"][name]}
        aliases = {key.alias: name for name, key in keys.items() if key.alias}
        shape["properties"] |= {alias: shape["properties"][name] for alias, name in aliases.items()}
    root["required"] = []  # the environment and `--set` may give them
    items = root["properties"]["sample_prompts"]
    items["items"] = {"anyOf": [{"type": "string"}, items["items"]]}
    root["properties"]["$schema"] = {"type": "string", "description": "This file, for editors."}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "genlight job"}
    return {**head, **{name: value for name, value in root.items() if name != "title"}, "$defs": definitions}


def _blocks() -> Iterator[tuple[str, Any]]:
    for key in job_keys().values():
        if key.block is not None:
            yield key.block.__name__, key


def schema_text() -> str:
    """`job_schema` as the file holds it."""
    return json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n"


def job_reference() -> str:
    """Every key of a job as Markdown: type, default, meaning and example, one table for each block."""
    tables = [("Top level", job_keys())]
    tables += [(f"`{key.name}`", keys_of(key.block)) for key in job_keys().values() if key.block is not None]
    tables.append(("Each of `sample_prompts`", keys_of(SampleRequest)))
    return "\n".join(line for title, keys in tables for line in _table(title, keys.values()))


def _table(title: str, keys: Iterable[Key]) -> Iterator[str]:
    yield from (f"### {title}", "", "| key | what | default | meaning | example |", "|---|---|---|---|---|")
    for key in keys:
        example = f"`{json.dumps(key.examples[0], ensure_ascii=False)}`" if key.examples else ""
        alias = f" Also `{key.alias}`." if key.alias else ""
        yield f"| `{key.name}` | {_what(key)} | {_default(key)} | {key.description}{alias} | {example} |"
    yield ""


def _what(key: Key) -> str:
    if key.block is not None:
        return "an object, below"
    if key.item is not None:
        return f"a list; each {'an object, below, or a string' if key.item.block else key.item.rule.expected}"
    return key.rule.expected.replace("|", "\\|")


def _default(key: Key) -> str:
    if key.is_required:
        return "required"
    return "" if key.block is not None or key.default in (None, (), {}, "") else f"`{json.dumps(key.default)}`"


def variables_reference() -> str:
    """Every environment variable as Markdown, with the setting that it gives."""
    lines = ["| variable | setting | meaning |", "|---|---|---|"]
    for variable in VARIABLES:
        in_file = "" if variable.setting.partition(".")[0] in job_keys() else ", not in a job file"
        lines.append(f"| `{variable.name}` | `{variable.setting}`{in_file} | {variable.key.description} |")
    return "\n".join([*lines, ""])


def callbacks_reference() -> str:
    """Which callbacks run without being asked for, as Markdown."""
    lines = ["| callback | what it does | in a job | in a fit |", "|---|---|---|---|"]
    for name, callback in STANDARD_CALLBACKS.items():
        in_job = "always" if callback.required else "yes" if callback.in_job else "add it"
        lines.append(f"| `{name}` | {callback.purpose} | {in_job} | {'yes' if callback.in_fit else 'add it'} |")
    return "\n".join([*lines, ""])


_INDENT = 26


def job_outline() -> str:
    """The keys of a job in groups, one in a line with the first sentence about it, for a terminal of 80 columns."""
    lines = ["keys of a job, by what they are about"]
    for name, key in job_keys().items():
        lines += ["", f"{key.group}:"] if key.group else []
        sentence = re.split(r"[.;:](?:\s|$)", key.description, maxsplit=1)[0].replace("`", "")
        lines += _wrapped(sentence, f"  {name}".ljust(_INDENT))
        lines += _wrapped(", ".join(keys_of(key.block)), " " * _INDENT) if key.block is not None else []
    return "\n".join(lines)


def _wrapped(text: str, begin: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=begin, subsequent_indent=" " * _INDENT, break_on_hyphens=False)
