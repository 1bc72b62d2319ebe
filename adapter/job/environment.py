"""The environment variables that a run reads, as data, and how their texts become values."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..cluster.job_context import build_job_context
from ..plumbing.text import nearest
from ..plumbing.urls import parse_origins, url_fault
from .errors import ConfigErrors

__all__ = ["TRUE_WORDS", "VARIABLES", "Variable", "is_true", "parse_setting", "rank_errors", "read_environment"]

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n", "off", "none"})


def is_true(text: str) -> bool:
    """Whether `text` is one of the true words, in any case; every other text is false."""
    return text.strip().lower() in TRUE_WORDS


def _text(text: str) -> str:
    try:
        os.fsencode(text)  # what is no UTF-8 may still be a path
    except UnicodeEncodeError:
        raise ValueError("a string that the system can encode") from None
    if any(ord(character) < 32 for character in text):
        raise ValueError("a string without control characters")
    return text


def _token(text: str) -> str:
    if not text.isascii() or not text.isprintable():
        raise ValueError("a string of printable ASCII characters")
    return text


def _url(text: str) -> str:
    if url_fault(text):
        raise ValueError("an http:// or https:// URL")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError("a number of seconds >= 0")
    return seconds


_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?", re.IGNORECASE)


def _private_hosts(text: str) -> tuple[str, ...]:
    """Host names, addresses and networks, or a star for all."""
    entries = tuple(entry for entry in re.split(r"[\s,]+", text) if entry)
    for entry in entries:
        if entry != "*" and not _HOST_NAME.fullmatch(entry):
            try:
                ipaddress.ip_network(entry, strict=False)
            except ValueError:
                raise ValueError("host names, addresses or networks, separated by commas, or *") from None
    return entries


@dataclass(frozen=True)
class Variable:
    """One environment variable: the setting it feeds and how its text is read."""

    name: str
    setting: str
    parse: Callable[[str], Any]
    code: str = "startup.invalid_job_spec"


NUMBER_LIKE = re.compile(r"[-+]?(\d{1,12}(\.\d{0,12})?(e[-+]?\d{1,4})?|nan|inf(inity)?)", re.IGNORECASE)

TIMEOUT = "startup.invalid_timeout"
PATHS = "startup.invalid_artifact_paths"

VARIABLES = (
    Variable("TRAINER_JOB_SPEC_PATH", "job_spec_path", _text, "startup.missing_job_spec_path"),
    Variable("TRAINER_PLUGIN", "trainer", _text, "startup.missing_trainer_import"),
    Variable("TRAINER_ARTIFACTS_DIR", "artifacts_dir", _text, PATHS),
    Variable("TRAINER_CHECKPOINTS_DIR", "checkpoints_dir", _text, PATHS),
    Variable("TRAINER_SAMPLES_DIR", "samples_dir", _text, PATHS),
    Variable("TRAINER_METRICS_DIR", "metrics_dir", _text, PATHS),
    Variable("TRAINER_EVENTS_PATH", "events_path", _text, PATHS),
    Variable("TRAINER_SHARED_ARTIFACTS", "shared_artifacts", is_true),
    Variable("TRAINER_ORCHESTRATED", "orchestrated", is_true),
    Variable("TRAINER_CAPABILITY_TOKEN", "capability_token", _token, "startup.missing_capability_token"),
    Variable("TRAINER_UPLOAD_METRICS_URL", "uploads.metrics_url", _url),
    Variable("TRAINER_UPLOAD_CHECKPOINT_URL", "uploads.checkpoint_url", _url),
    Variable("TRAINER_UPLOAD_SAMPLE_URL", "uploads.sample_url", _url),
    Variable("TRAINER_UPLOAD_TERMINAL_URL", "uploads.terminal_url", _url),
    Variable("TENSORHUB_URL", "file_store_url", _url),
    Variable("TRAINER_STOP_GRACE_SECONDS", "stop_grace_seconds", _seconds, TIMEOUT),
    Variable("TRAINER_UPLOAD_DEADLINE_SECONDS", "upload_deadline_seconds", _seconds, TIMEOUT),
    Variable("TRAINER_TOKEN_ORIGINS", "token_origins", parse_origins),
    Variable("TRAINER_PRIVATE_HOSTS", "private_hosts", _private_hosts),
    Variable("TRAINER_CANCELLED", "canceled", is_true),
    Variable("TRAINER_CANCEL_FILE", "cancel_file_path", _text),
    Variable("TRAINER_MAX_RUNTIME_SECONDS", "max_runtime_seconds", _seconds, TIMEOUT),
)
"""Everything that a run reads from its environment. ``HF_TOKEN`` and ``HF_HOME`` are huggingface_hub's own."""

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

BY_SETTING = {variable.setting: variable for variable in VARIABLES}


def parse_setting(name: str, variable: Variable, text: str, errors: ConfigErrors) -> Any:
    """The value of `text` for a variable's setting, or None when it is an error; `name` is what the error calls it."""
    stripped = text.strip()
    if variable.parse is is_true and stripped.lower() not in TRUE_WORDS | FALSE_WORDS:
        errors.warn(f"`{name}` is none of the true words 1 true t yes y, so it counts as false.")
    try:
        return variable.parse(stripped)
    except ValueError as error:
        errors.add(
            f"Invalid `{name}`. Expected {error}, but received {_shown(stripped)}.",
            name=variable.setting,
            code=variable.code,
        )
        return None


def _shown(text: str) -> str:
    """What a message may say of a variable's value: a number as it is, of anything else the length alone.

    Variables get mixed up, and then this one holds a token.
    """
    return text if NUMBER_LIKE.fullmatch(text) else f"a string of length {len(text)}"


def rank_errors(environ: Mapping[str, str]) -> list[str]:
    """What is wrong with the variables by which Lightning and genlight tell a process's number and its job."""
    wrong = [
        f"Invalid `{name}`. Expected the number of a process, as launchers set it, but received "
        f"{_shown(environ[name].strip())}. Unset it."
        for name in _RANKS
        if name in environ and not environ[name].strip().isdecimal()
    ]
    return wrong or slurm_errors(environ)


def slurm_errors(environ: Mapping[str, str]) -> list[str]:
    """What is wrong with the variables of the Slurm job that this process belongs to."""
    if "SLURM_JOB_ID" not in environ:
        return []
    try:
        build_job_context(environ)
    except ValueError as error:
        return [str(error)]
    return []


def read_environment(environ: Mapping[str, str], errors: ConfigErrors) -> dict[str, Any]:
    """The settings that the environment gives, by setting name; a blank variable gives none.

    A variable that looks like a misspelled one of ours is a warning.
    """
    values = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        if text.strip():
            value = parse_setting(variable.name, variable, text, errors)
            if value is not None:
                values[variable.setting] = value
    for error in rank_errors(environ):
        errors.add(error)
    known = [variable.name for variable in VARIABLES]
    for name in environ:
        if name.startswith("TRAINER_") and name not in known and nearest(name, known):
            errors.warn(f"Unknown environment variable `{name}` is ignored.{nearest(name, known)}")
    return values
