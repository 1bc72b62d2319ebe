"""The configuration files of ``fit``, ``validate`` and ``test``, looked at before Lightning is loaded to read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["config_file_fault"]

_OPTIONS = ("--config", "-c")
_SUFFIXES = (".yaml", ".yml", ".json")
_OF_CONTENT = frozenset(":{\n")
"""What a configuration that stands on the command line itself has, and hardly a path."""


def config_file_fault(words: Sequence[str]) -> str | None:
    """What is wrong with the first file among the arguments `words` that holds no configuration; None where all do."""
    stray = next((word for word in words[1:2] if word.endswith(_SUFFIXES)), None)
    values = _values(words) if stray is None else (stray,)
    fault = next((fault for value in values if (fault := _fault(value)) is not None), None)
    if fault is None and stray is not None:
        return f"The configuration is an option: `genlight {words[0]} --config {stray}`."
    return fault


def _values(words: Sequence[str]) -> Iterator[str]:
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in _OPTIONS and equals:
            yield value
        elif word in _OPTIONS and index + 1 < len(words):
            yield words[index + 1]


def _fault(value: str) -> str | None:
    path = Path(value).expanduser()
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        if _OF_CONTENT & set(value) or value.strip() in ("", "-"):
            return None
        reason = error.strerror if isinstance(error, OSError) else error
        return f"The configuration {value!r} cannot be read: {reason}. Name a YAML file."
    if not content.strip():
        return f"The configuration {value!r} is empty. Name a YAML file."
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return f"The configuration {value!r} is no text: byte {error.start} is not {error.encoding}. Name a YAML file."
    return f"{value!r} is a job spec. Run it by `genlight run {value}`." if _is_job_spec(text) else None


def _is_job_spec(text: str) -> bool:
    """Where a configuration has the settings of a Lightning trainer, a job names its trainer class."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, Mapping) and "run_id" in content and isinstance(content.get("trainer"), str)
