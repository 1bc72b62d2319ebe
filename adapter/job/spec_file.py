"""Reading the JSON object of a job spec from a file or a pipe."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from .errors import ConfigErrors

__all__ = ["read_job_spec"]

LARGEST_SPEC_BYTES = 128 << 20
"""Of a file; a device, or data named by mistake, would fill the memory."""

MOST_DIGITS = 400
"""Of an integer; Python itself refuses more than it was told to, which differs between processes."""

_YAML = (".yaml", ".yml")


def read_job_spec(path: Path, errors: ConfigErrors) -> dict[str, Any] | None:
    """The JSON object in the file at `path`; None when that is not possible, which is then an error."""
    try:
        content = _content(path) if path.is_file() else _content_of_pipe(path)
    except FileNotFoundError:
        errors.add(
            f"There is no job spec at {str(path)!r}. Name an existing JSON file.", code="startup.missing_job_spec_path"
        )
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        errors.add(f"The job spec {str(path)!r} cannot be read: {reason}. Name a readable JSON file.")
        return None
    if len(content) > LARGEST_SPEC_BYTES:
        errors.add(f"The job spec {str(path)!r} has more than {LARGEST_SPEC_BYTES >> 20} MiB. Name a JSON file.")
        return None
    if not content.strip():
        pipe = "" if path.is_file() else "; a pipe can be read once, and each process of a run reads its job spec"
        errors.add(f"The job spec {str(path)!r} is empty{pipe}. Expected a JSON object, {{...}}.")
        return None
    try:
        decoded = json.loads(
            content, parse_int=_integer, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
        )
    except RecursionError:
        errors.add(f"The job spec {str(path)!r} is nested too deeply.")
        return None
    except ValueError as error:
        way_out = " A LightningCLI configuration is for `genlight fit --config`." if path.suffix in _YAML else ""
        why = _habit(error)
        errors.add(f"The job spec {str(path)!r} is not JSON: {_decode_reason(error)}.{why}{way_out}")
        return None
    if not isinstance(decoded, dict):
        errors.add(f"The job spec {str(path)!r} holds {_kind(decoded)}. Expected a JSON object, {{...}}.")
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


def _habit(error: ValueError) -> str:
    """A sentence about what other formats allow at this place, after a space; empty where it is none of that."""
    if not isinstance(error, json.JSONDecodeError):
        return ""
    before, rest = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    if rest.startswith(("//", "/*", "#")):
        return " JSON has no comments; remove it."
    if rest.startswith("'"):
        return " JSON has double quotes alone."
    if (before.endswith(",") and rest[:1] in ("}", "]", "")) or (
        rest.startswith(",") and rest[1:].lstrip()[:1] in "}]"
    ):
        return " Remove the comma after the last entry."
    return ""


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} appears twice in one object")
        found[name] = value
    return found


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
