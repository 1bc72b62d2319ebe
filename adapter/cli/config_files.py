"""The configurations of ``fit``, ``validate``, ``test`` and ``predict``, looked at before Lightning is loaded."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["config_file_fault", "configuration_fault", "is_configuration_name"]

_OPTIONS = ("--config", "-c")
_SUFFIXES = (".yaml", ".yml", ".json")
MOST_VALUES = 100_000
"""Of a configuration; anchors within anchors stand for billions in a few lines, and each would be built."""
_OF_CONTENT = frozenset(":{\n")
"""Characters that a configuration on the command line itself has, and hardly a path."""


def is_configuration_name(path: str | None) -> bool:
    """Whether a file is a LightningCLI configuration rather than a job, as its name says."""
    return path is not None and path.endswith((".yaml", ".yml"))


def config_file_fault(words: Sequence[str]) -> str | None:
    """The fault of the first file among the arguments `words` that holds no configuration; None where all do."""
    stray = next((word for word in words[1:2] if word.endswith(_SUFFIXES)), None)
    values = _values(words) if stray is None else (stray,)
    fault = next((fault for value in values if (fault := configuration_fault(value)) is not None), None)
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


def configuration_fault(value: str) -> str | None:
    """Why the file `value`, as an argument names it, holds no configuration; None where it does."""
    path = Path(value).expanduser()
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        if _OF_CONTENT & set(value):
            return _syntax_fault("on the command line", value) if "&" in value else None
        if value.strip() in ("", "-"):
            return None
        reason = error.strerror if isinstance(error, OSError) else error
        return f"The configuration {value!r} cannot be read: {reason}. Name a YAML file."
    if not content.strip():
        return f"The configuration {value!r} is empty. Name a YAML file."
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return f"The configuration {value!r} is not text: byte {error.start} is not {error.encoding}. Name a YAML file."
    if _is_job_spec(text):
        return f"{value!r} is a job spec. Run it with `genlight run {value}`."
    return _syntax_fault(value, text)


def _syntax_fault(name: str, text: str) -> str | None:
    import yaml

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        return f"The configuration {name!r} is not YAML: {error.problem}{line}."
    except yaml.reader.ReaderError as error:
        return f"The configuration {name!r} is not YAML: {error.reason}."
    except RecursionError:
        return f"The configuration {name!r} is nested too deeply."
    repeated: list[str] = []
    if _expanded(tree, {}, repeated) > MOST_VALUES:
        return (
            f"The configuration {name!r} has more than {MOST_VALUES:,} values with its anchors filled in. Write it "
            "without nested anchors."
        )
    if not isinstance(tree, yaml.MappingNode):
        return f"The configuration {name!r} holds no settings. Name a YAML file with `trainer:`, `model:`, `data:`."
    settings = {str(key.value): value for key, value in tree.value}
    if "run_id" in settings and isinstance(settings.get("trainer"), yaml.ScalarNode):
        return f"{name!r} is a job spec in YAML. Write it as JSON, and run it with `genlight run`."
    return f"The key {repeated[0]} appears twice in {name!r}, in {repeated[1]}." if repeated else None


def _expanded(node: Any, known: dict[int, float], repeated: list[str]) -> float:
    """How many values a node stands for, once each alias is filled in; infinitely many for one that holds itself.

    Notes keys that stand twice in one mapping, of which YAML would take the last without a word, and their lines.
    """
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = math.inf
    inner = node.value if isinstance(node.value, list) else []
    pairs = [part for part in inner if isinstance(part, tuple)]
    lines: dict[str, int] = {}
    for key, _ in pairs:
        line, text = key.start_mark.line + 1, str(key.value)
        if text in lines and text != "<<":
            places = f"lines {lines[text]} and {line}" if lines[text] != line else f"line {line}"
            repeated += [repr(text), places]
        lines[text] = line
    parts = itertools.chain.from_iterable(pairs) if pairs else inner
    known[id(node)] = 1 + sum(_expanded(part, known, repeated) for part in parts)
    return known[id(node)]


def _is_job_spec(text: str) -> bool:
    """Where a configuration has the settings of a Lightning trainer, a job names its trainer class."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, Mapping) and "run_id" in content and isinstance(content.get("trainer"), str)
