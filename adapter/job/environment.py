"""The environment variables that a run reads, from the declaration in `spec`, and how their texts become values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cluster.job_context import build_job_context
from ..plumbing.text import nearest
from .errors import ConfigErrors
from .keys import Key, all_keys

__all__ = [
    "JOB_VARIABLE",
    "TRUE_WORDS",
    "VARIABLES",
    "Variable",
    "is_true",
    "rank_errors",
    "read_environment",
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
"""What a run reads from its environment besides `JOB_VARIABLE`. ``HF_TOKEN`` and ``HF_HOME`` are huggingface_hub's."""

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
_NUMBER_LIKE = re.compile(r"[-+]?(\d{1,12}(\.\d{0,12})?(e[-+]?\d{1,4})?|nan|inf(inity)?)", re.IGNORECASE)


def is_true(text: str) -> bool:
    """Whether `text` is one of the true words, in any case; every other text is false."""
    return text.strip().lower() in TRUE_WORDS


def value_of(name: str, key: Key, text: str, errors: ConfigErrors, *, setting: str) -> Any:
    """The value of a text for `key`, or None when it is an error.

    Args:
        name: What the error calls it.
        key: What it is to be.
        text: The text.
        errors: Where an error goes.
        setting: The dotted name of the setting.
    """
    text = text.strip()
    value: Any = text
    if key.item is not None:
        value = [entry for entry in re.split(r"[\s,]+", text) if entry]
        fault = next(filter(None, map(key.item.fault, value)), "")
        rule = key.item.rule
    else:
        if key.type_is(bool):
            value = is_true(text)
            if text.lower() not in TRUE_WORDS | FALSE_WORDS:
                errors.warn(f"`{name}` is none of the true words 1 true t yes y, so it counts as false.")
        elif key.type_is(float):
            try:
                value = float(text)
            except ValueError:
                value = math.nan
        fault, rule = key.fault(value), key.rule
    if not fault:
        return value
    errors.add(f"Invalid `{name}`. Expected {fault}, but received {_shown(text)}.", name=setting, code=rule.code)
    return None


def _shown(text: str) -> str:
    """What a message may say of a variable's value: a number as it is, of anything else the length alone.

    Variables get mixed up, and then this one holds a token.
    """
    return text if _NUMBER_LIKE.fullmatch(text) else f"a string of length {len(text)}"


def rank_errors(environ: Mapping[str, str]) -> list[str]:
    """What is wrong with the variables by which Lightning and genlight tell a process's number and its job."""
    wrong = [
        f"Invalid `{name}`. Expected the number of a process, as launchers set it, but received "
        f"{_shown(environ[name].strip())}. Unset it."
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


def read_environment(environ: Mapping[str, str], errors: ConfigErrors) -> dict[str, Any]:
    """The settings that the environment gives, by dotted name; a blank variable gives none.

    A variable that looks like a misspelled one of ours is a warning.
    """
    values = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        if text.strip():
            value = value_of(variable.name, variable.key, text, errors, setting=variable.setting)
            if value is not None:
                values[variable.setting] = value
    for error in rank_errors(environ):
        errors.add(error)
    known = [JOB_VARIABLE, *(variable.name for variable in VARIABLES)]
    for name in environ:
        if name.startswith("TRAINER_") and name not in known and nearest(name, known):
            errors.warn(f"Unknown environment variable `{name}` is ignored.{nearest(name, known)}")
    return values
