"""The environment variables that a run reads, from the declaration in `spec`, and how their texts become values."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cluster.job_context import build_job_context
from ..plumbing.text import nearest
from .errors import ConfigErrors, render_text
from .keys import Key, all_keys

__all__ = [
    "JOB_VARIABLE",
    "VARIABLES",
    "Variable",
    "check_environment",
    "is_true",
    "rank_errors",
    "value_of",
]

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n", "off", "none"})
JOB_VARIABLE = "TRAINER_JOB_SPEC_PATH"
"""Names the job file; no setting of a job itself."""


@dataclass(frozen=True)
class Variable:
    """One environment variable and the setting that it gives."""

    name: str
    setting: str
    """Dotted."""
    key: Key


VARIABLES = tuple(Variable(key.variable, name, key) for name, key in all_keys() if key.variable)
"""The variables that a run reads besides `JOB_VARIABLE`. ``HF_TOKEN`` and ``HF_HOME`` are huggingface_hub's."""

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def is_true(text: str) -> bool:
    """Whether `text` is one of the true words, in any case; every other text is false."""
    return text.strip().lower() in TRUE_WORDS


def value_of(key: Key | None, text: str) -> Any:
    """The value that a text means for `key`: JSON, a number, a true or false word, entries between commas, or itself.

    A key that is a text keeps what was typed, so that ``run_id=17`` needs no quotes.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if key is None:
        return value
    if key.is_text:
        return value if isinstance(value, str | None) else text
    if key.type_is(bool) and text.strip().lower() in TRUE_WORDS | FALSE_WORDS:
        return is_true(text)
    if key.item is not None and key.variable and not isinstance(value, list | None):
        return [entry for entry in re.split(r"[\s,]+", text) if entry]
    if key.type_is(float) and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def rank_errors(environ: Mapping[str, str]) -> list[str]:
    """Errors in the variables that give the number of a process and its job."""
    wrong = [
        f"Invalid `{name}`. Expected the number of a process, as launchers set it, but received "
        f"{render_text(environ[name].strip())}. Unset it."
        for name in _RANKS
        if name in environ and not environ[name].strip().isdecimal()
    ]
    if wrong or "SLURM_JOB_ID" not in environ:
        return wrong
    try:
        build_job_context(environ)
    except ValueError as error:
        return [str(error)]
    return []


def check_environment(environ: Mapping[str, str], errors: ConfigErrors) -> None:
    """Note ranks that are none; a variable that looks like a misspelled one of ours is a warning."""
    for error in rank_errors(environ):
        errors.add(error)
    known = [JOB_VARIABLE, *(variable.name for variable in VARIABLES)]
    for name in environ:
        if name.startswith("TRAINER_") and name not in known and nearest(name, known):
            errors.warn(f"Unknown environment variable `{name}` is ignored.{nearest(name, known)}")
