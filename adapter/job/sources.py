"""What a job file, the environment and ``--set`` say, put together as one object.

Each setting is resolved on its own: ``--set`` first, then the environment, then the job file, then the default.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plumbing.redaction import secrets_in
from ..plumbing.text import nearest
from .environment import JOB_VARIABLE, VARIABLES, read_environment, value_of
from .errors import ConfigErrors
from .keys import Key, job_keys, key_at, keys_of, settings_keys
from .parsing import DEEPEST, canonical, is_deeper_than, under_one_name

__all__ = ["JOB_FILE", "Sources", "read_job_file", "read_sources"]

JOB_FILE, COMMAND_LINE, DEFAULT = "job spec", "--set", "default"
"""Words for where a setting comes from; of the environment it is the variable's name."""

WHOLE_JOB = "job spec"
"""Name of errors that leave no key of the job to speak of."""

LARGEST_FILE_BYTES = 128 << 20
"""Of a job file; a device, or data named by mistake, would fill the memory."""

MOST_DIGITS = 400
"""Of an integer; Python itself refuses more than it was told to, which differs between processes."""

LONGEST_NAME = 60
_FOR_EDITORS = "$schema"
"""Names the JSON Schema from which an editor completes; says nothing about the job."""
_YAML = (".yaml", ".yml")


@dataclass
class Sources:
    """The settings that something gives, and where each comes from."""

    path: Path | None
    """The job file; None where none is named."""
    merged: dict[str, Any] = field(default_factory=dict, repr=False)
    """Settings as the job file spells them, with those of the environment and ``--set`` in place."""
    of: dict[str, str] = field(default_factory=dict)
    """The source of each setting, by dotted name."""
    readable: bool = False
    """Whether there is a job file that holds a JSON object."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """The token, what stands under secret names in the job, and credentials of its URLs."""

    @property
    def folder(self) -> Path:
        """The folder of the job file; the working directory for one that came through a pipe."""
        if self.path is None or self.path.parts[1:2] in (("dev",), ("proc",)):
            return Path.cwd()
        return self.path.parent

    def source_of(self, name: str) -> str:
        """Where a setting comes from, by its dotted name; that of an entry of a list is the list's."""
        name = name.partition("[")[0]
        while name not in self.of and "." in name:
            name = name.rpartition(".")[0]
            if keys_in(name):
                return DEFAULT  # the block is given, and this key of it is not
        return self.of.get(name, DEFAULT)

    def folder_of(self, name: str) -> Path:
        """Where a relative path of a setting starts: a job file's at its folder, others at the working directory."""
        return self.folder if self.source_of(name) == JOB_FILE else Path.cwd()

    def put(self, path: tuple[str, ...], value: Any, source: str) -> bool:
        """Set what is at `path`, copying the objects on the way; False where something on it is no object."""
        target = self.merged
        for name in path[:-1]:
            inner = target.get(name)
            if inner is not None and not isinstance(inner, dict):
                return False
            target[name] = dict(inner or {})
            target = target[name]
        target[path[-1]] = value
        depth = next(depth for depth in range(len(path), -1, -1) if not depth or key_at(path[:depth]) is not None)
        self.note(".".join(path[: depth or 1]), value if depth == len(path) else None, source)
        return True

    def note(self, name: str, value: Any, source: str) -> None:
        """Note the source of a setting, and of the keys of a block."""
        for older in [older for older in self.of if older.startswith(f"{name}.")]:
            del self.of[older]
        self.of[name] = source
        keys = keys_in(name)
        for inner in value if keys and isinstance(value, dict) else ():
            self.of[f"{name}.{inner}"] = source


def keys_in(name: str) -> Mapping[str, Key]:
    """The keys of the block `name`, dotted; none where it is not a block."""
    key = key_at(tuple(name.split(".")))
    return keys_of(key.block) if key is not None and key.block is not None else {}


def read_sources(
    job_file: str | os.PathLike[str] | None, overrides: Sequence[str], environ: Mapping[str, str], errors: ConfigErrors
) -> Sources:
    """Read all sources and note their errors; never raises because of what they hold."""
    sources = Sources(_path_of_job(job_file, environ, errors))
    raw = None if sources.path is None else read_job_file(sources.path, errors)
    sources.readable = raw is not None
    for name, value in under_one_name(_of_job(raw or {}, errors), job_keys(), errors).items():
        sources.put((name,), value, JOB_FILE)
    for setting, value in read_environment(environ, errors).items():
        (variable,) = (each.name for each in VARIABLES if each.setting == setting)
        sources.put(tuple(setting.split(".")), value, variable)  # a block that is no object is an error of its own
    for text in overrides:
        _override(text, sources, errors)
    tokens = ((raw or {}).get("capability_token"), environ.get("TRAINER_CAPABILITY_TOKEN", "").strip())
    secrets = [token for token in tokens if isinstance(token, str) and token]
    if is_deeper_than(sources.merged, DEEPEST):
        errors.add(f"The job spec is nested too deeply. Expected at most {DEEPEST} levels.", name=WHOLE_JOB)
        sources.merged, sources.readable = {}, False
    else:
        secrets += [*secrets_in(sources.merged), *secrets_in(raw or {})]
        sources.merged = _without_half_characters("", sources.merged, errors)
    sources.secrets = tuple(secrets)
    return sources


def _path_of_job(given: str | os.PathLike[str] | None, environ: Mapping[str, str], errors: ConfigErrors) -> Path | None:
    text = environ.get(JOB_VARIABLE, "").strip() if given is None else os.fspath(given)
    if not text or any(ord(character) < 32 for character in text):
        errors.add(
            f"No job file was given. Name its path as an argument or in `{JOB_VARIABLE}`.",
            code="startup.missing_job_spec_path",
        )
        return None
    return Path("/dev/stdin" if text == "-" else os.path.abspath(os.path.expanduser(text)))


def _of_job(raw: Mapping[str, Any], errors: ConfigErrors) -> dict[str, Any]:
    """`raw` without what is not for a job file to say."""
    elsewhere = {name: key for name, key in settings_keys().items() if name not in job_keys()}
    for name in raw.keys() & elsewhere.keys():
        variable = elsewhere[name].variable
        errors.warn(f"`{name}` is ignored in a job file. Set `{variable}`, or give `--set {name}=...`.")
    return {name: value for name, value in raw.items() if name not in elsewhere and name != _FOR_EDITORS}


def _override(text: str, sources: Sources, errors: ConfigErrors) -> None:
    """Apply one ``key.sub=value``. The value is JSON, else the text itself; later ones win."""
    name, separator, value = text.partition("=")
    path = tuple(part.strip() for part in name.strip().split("."))
    if not separator or not all(path):
        # Not what stands behind the sign: it may be a token.
        shown = f" {name.strip()[:LONGEST_NAME]}{separator}…" if separator else f" {text[:LONGEST_NAME]}"
        errors.add(f"Invalid `--set{shown}`. Expected key=value or key.sub=value.")
        return
    path = (canonical(path[0], settings_keys()), *path[1:])
    known: Mapping[str, Key] = settings_keys()
    for depth, part in enumerate(path):
        if not known:
            break
        if canonical(part, known) not in known:
            offered = nearest(part, known)
            errors.add(f"Unknown key `{'.'.join(path[: depth + 1])}` in `--set`.{offered}")
            return
        path = (*path[:depth], canonical(part, known), *path[depth + 1 :])
        known = keys_in(".".join(path[: depth + 1]))
    dotted, key = ".".join(path), key_at(path)
    if key is not None and path[0] not in job_keys():
        decoded = value_of(f"--set {dotted}", key, value, errors, setting=dotted)
        if decoded is None:
            return
    else:
        decoded = _decoded(value, key)
        if key is not None and key.block is not None and isinstance(decoded, dict):
            decoded = under_one_name(decoded, keys_of(key.block), errors, f"{dotted}.")
    if not sources.put(path, decoded, COMMAND_LINE):
        errors.add(f"`--set {dotted}` cannot be applied: `{path[0]}` is not an object.")


def _decoded(text: str, key: Key | None) -> Any:
    """The value of `text`. A key that is a text keeps what was typed, so that ``run_id=17`` needs no quotes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if key is not None and key.is_text and not isinstance(value, str | None) else value


def _without_half_characters(name: str, value: Any, errors: ConfigErrors) -> Any:
    """`value` with each half of a surrogate pair spelled out, which is an error: nothing can be written with it.

    Bytes of a path that are not UTF-8 stand in a text as such halves too; those the system can encode.
    """
    if isinstance(value, dict):
        return {
            _whole(name, key, errors): _without_half_characters(f"{name}.{key}".lstrip("."), inner, errors)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_without_half_characters(f"{name}[{at}]", inner, errors) for at, inner in enumerate(value)]
    return _whole(name, value, errors) if isinstance(value, str) else value


def _whole(name: str, text: str, errors: ConfigErrors) -> str:
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        spelled = text.encode("utf-8", "backslashreplace").decode()
        half = f"\\u{ord(text[error.start]):x}"
        shown = name.encode("utf-8", "backslashreplace").decode()
        where = f"Invalid `{shown}`. A string in it" if shown else "A key of the job spec"
        errors.add(f"{where} holds {half}, half of a surrogate pair. Write the complete character.", name=shown)
        return spelled
    return text


def read_job_file(path: Path, errors: ConfigErrors) -> dict[str, Any] | None:
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
    if len(content) > LARGEST_FILE_BYTES:
        errors.add(f"The job spec {str(path)!r} has more than {LARGEST_FILE_BYTES >> 20} MiB. Name a JSON file.")
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
        return file.read(LARGEST_FILE_BYTES + 1)


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
