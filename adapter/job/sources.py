"""Merge the job file, the environment and ``--set`` into one object, and convert it to values.

Each setting is resolved by itself: ``--set`` first, then the environment, then the job file, then the default. All
errors are collected. An unknown key that resembles a known one is an error, at every depth; any other unknown key is a
warning, because a newer orchestrator may write one. A key that is null or a blank text counts as absent.

Here each setting is checked against its own declaration; `config` checks how settings depend on each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..cluster.job_context import rank_errors
from ..contract.exceptions import StartupContractError
from ..plumbing.redaction import HIDDEN, redact, secrets_in
from ..plumbing.settings import Key, Rule, keys_of, refusal, value_of
from ..plumbing.text import closest, nearest, parse_json
from ..plumbing.urls import has_scheme, looks_like_path
from .identity import leaves
from .spec import JobSpec, SampleRequest, Settings, all_keys, key_at, keys_at

JOB_FILE, COMMAND_LINE, DEFAULT = "job spec", "--set", "default"
"""Names of the sources of a setting; if it comes from the environment, its source is the variable's name."""

JOB_VARIABLE = "TRAINER_JOB_SPEC_PATH"
"""The variable that names the job file; it is not a setting of a job."""
VARIABLES = {key.variable: name for name, key in all_keys() if key.variable}
"""Settings by their environment variables; huggingface_hub itself reads its ``HF_TOKEN`` and ``HF_HOME``."""

LARGEST_FILE_BYTES = 128 << 20
"""Maximum size of a job file, so that a device or a data file passed by mistake does not fill memory."""

COMMENT = "$comment"
_FOR_READERS = ("$schema", COMMENT)
"""Keys for an editor and for people; they are not settings."""
_BASE_DIR = "base_dir"
_YAML = (".yaml", ".yml")

CODES = (
    "startup.missing_job_spec_path",
    "startup.invalid_job_spec",
    "startup.missing_trainer_import",
    "startup.invalid_artifact_paths",
    "startup.invalid_timeout",
    "startup.missing_capability_token",
)
"""Startup codes of settings. If several apply, the exception carries the first one in this order."""


@dataclass(frozen=True)
class ConfigError:
    """One error, and the way out."""

    code: str
    text: str
    name: str = ""
    """The setting, if the error is about one."""


@dataclass
class ConfigErrors:
    """Collects errors and warnings while settings are read."""

    found: list[ConfigError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, text: str, *, name: str = "", code: str = "startup.invalid_job_spec") -> None:
        """Note an error."""
        self.found.append(ConfigError(code, text, name))

    def concern(self, name: str) -> bool:
        """Return whether an error of the setting `name`, or of an element or key of it, was noted."""
        return any(error.name == name or error.name.startswith((f"{name}[", f"{name}.")) for error in self.found)

    def warn(self, text: str) -> None:
        """Note a setting that has no effect or looks like a mistake."""
        self.warnings.append(text)

    def exception(self, *, secrets: Sequence[str | None] = ()) -> StartupContractError | None:
        """Return all errors as one exception that holds none of `secrets`; None if there is no error."""
        if not self.found:
            return None
        code = min((error.code for error in self.found), key=CODES.index)
        lines = [error.text if error.code == code else f"{error.code}: {error.text}" for error in self.found]
        message = (
            lines[0] if len(lines) == 1 else "\n".join([f"{len(self.found)} errors", *(f"  - {x}" for x in lines)])
        )
        # With the warnings, because an unknown key may explain why another key is missing.
        notes = [f"note: {warning}" for warning in self.warnings]
        return StartupContractError(code, redact("\n  ".join([message, *notes]), tuple(secrets)))


@dataclass
class Sources:
    """The settings that the user gave, and the source of each."""

    errors: ConfigErrors = field(repr=False)
    """Collects errors and warnings. Faulty keys are skipped."""
    path: Path | None = None
    """The job file; None without one."""
    merged: dict[str, Any] = field(default_factory=dict, repr=False)
    """Settings as in the job file, overridden by the environment and ``--set``."""
    of: dict[str, str] = field(default_factory=dict)
    """The source of each given setting, by dotted name; the keys of a block have their own sources."""
    readable: bool = False
    """Whether there is a job file that holds a JSON object."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """The token, values under secret names in the job, and credentials of its URLs."""

    @property
    def folder(self) -> Path:
        """The `base_dir` of the job, or the folder of its file; the working directory for a job from a pipe."""
        is_piped = self.path is None or self.path.parts[1:2] in (("dev",), ("proc",))
        own = Path.cwd() if is_piped or self.path is None else self.path.parent
        given = self.merged.get(_BASE_DIR)
        if not isinstance(given, str) or not given.strip():
            return own
        start = own if self.source_of(_BASE_DIR) == JOB_FILE else Path.cwd()
        return Path(os.path.abspath(start / os.path.expanduser(given)))

    def source_of(self, name: str) -> str:
        """Return the source of a setting, by dotted name; entries of a list have the list's source."""
        path = name.partition("[")[0].split(".")
        value: Any = self.merged
        source = DEFAULT
        for depth, part in enumerate(path, start=1):
            if not isinstance(value, dict) or part not in value:
                return DEFAULT
            value, source = value[part], self.of.get(".".join(path[:depth]), source)
        return source

    def put(self, path: tuple[str, ...], value: Any, source: str) -> bool:
        """Set the value at `path`, copying the objects on the way; return False if one of them is not an object."""
        target = self.merged
        for name in path[:-1]:
            inner = target.get(name)
            if inner is not None and not isinstance(inner, dict):
                return False
            target[name] = dict(inner or {})
            target = target[name]
        target[path[-1]] = value
        # The source is noted for the innermost declared key on the path, and replaces the sources of its parts.
        depth = max((depth for depth in range(len(path) + 1) if key_at(path[:depth])), default=1)
        name = ".".join(path[:depth])
        self.of = {each: of for each, of in self.of.items() if not f"{each}.".startswith(f"{name}.")} | {name: source}
        return True

    def block(self, struct: Any, raw: Mapping[str, Any], prefix: str = "", *, complete: bool = True) -> dict[str, Any]:
        """Return the valid values of an object, as keywords of `struct`.

        A required key without a valid value gets an empty text or 0.

        Args:
            struct: The block.
            raw: The decoded object.
            prefix: Text before its keys in messages, such as ``"dataset."``.
            complete: Whether a required key that is missing is an error.
        """
        keys = keys_of(struct)
        values, misspelled = {}, set[str | None]()
        for name, value in raw.items():
            if name not in keys:
                misspelled.add(self._unknown(prefix, name, keys))
            elif not _is_absent(value):
                converted = self._convert(f"{prefix}{name}", value, keys[name])
                if converted is not None:
                    values[name] = converted
        for name, key in keys.items():
            if key.is_required and name not in values:
                if complete and name not in misspelled and not self.errors.concern(f"{prefix}{name}"):
                    self._missing(prefix, key)
                values[name] = "" if key.type_is(str) else 0
        return values

    def _unknown(self, prefix: str, name: str, keys: Mapping[str, Key]) -> str | None:
        """Note an unknown key; return the key that was probably meant."""
        shown, meant = f"{prefix}{name}", closest(name, keys)
        if meant is None:
            self.errors.warn(f"Unknown key `{shown}` is ignored.{'' if prefix else _offer_within_blocks(name)}")
        else:
            self.errors.add(f"Unknown key `{shown}`. Did you mean `{meant}`?", name=shown)
        return meant

    def _missing(self, prefix: str, key: Key) -> None:
        """Note that a required key is missing."""
        addition = f'"{key.name}": {json.dumps(key.examples[0])}'
        if prefix:
            way_out = f"Add {addition}, or remove `{prefix.rstrip('.')}`."
        else:
            or_set = f", or set `{key.variable}`" if key.variable else ""
            way_out = f"Add {addition} to the job file{or_set}."
        name = f"{prefix}{key.name}"
        self.errors.add(f"`{name}` is missing. {way_out}", name=name, code=key.rule.code)

    def _convert(self, name: str, value: Any, key: Key) -> Any:
        """Return `value` as the key's type, or None after noting an error."""
        rule = key.rule
        if key.block is not None:
            given = {"prompt": value} if key.block is SampleRequest and isinstance(value, str) else value
            if not isinstance(given, dict):
                return self._refuse(name, rule, value)
            return key.block(**self.block(key.block, given, f"{name}."))
        if key.item is not None:
            if not isinstance(value, list) or not rule.holds(value):
                return self._refuse(name, rule, value)
            entries = [self._convert(f"{name}[{index}]", entry, key.item) for index, entry in enumerate(value)]
            return key.type(entry for entry in entries if entry is not None)
        value = value.strip() if isinstance(value, str) and rule.expected.endswith(" URL") else value
        if broken := key.fault(value):
            return self._refuse(name, broken, value)
        if rule.relative:
            text = self._absolute(name, value, is_reference=rule.relative == "reference")
            return Path(text) if key.is_path else text
        return msgspec.convert(value, key.type)

    def _refuse(self, name: str, rule: Rule, value: Any) -> Any:
        """Note a value that breaks `rule`, under the name of its environment variable or its setting; return None."""
        if self.errors.concern(name):  # one mistake is one fault
            return None
        source = self.source_of(name)
        shown = source if source in VARIABLES else name
        self.errors.add(refusal(shown, rule, value, may_be_secret=shown != name), name=name, code=rule.code)

    def _absolute(self, name: str, text: str, *, is_reference: bool) -> str:
        """Return `text` as an absolute path; a URL, or a reference that is no path, is returned unchanged."""
        if has_scheme(text):
            return text
        start = self.folder if self.source_of(name) == JOB_FILE else Path.cwd()
        path = os.path.abspath(start / os.path.expanduser(text))
        return path if not is_reference or os.path.exists(path) or looks_like_path(text) else text


def read_sources(
    job_file: str | os.PathLike[str] | None, overrides: Sequence[str], environ: Mapping[str, str], errors: ConfigErrors
) -> Sources:
    """Read all sources and note their errors. Invalid content raises no exception."""
    sources = Sources(errors, _path_of_job(job_file, environ, errors))
    raw = None if sources.path is None else read_job_file(sources.path, errors)
    sources.readable, raw = raw is not None, raw or {}
    for name, value in _resolve_aliases(_settings_of_job_file(raw, errors), keys_of(Settings), errors).items():
        sources.put((name,), value, JOB_FILE)
    _read_environment(sources, environ, errors)
    for text in overrides:
        _override(text, sources, errors)
    tokens = (raw.get("capability_token"), environ.get("TRAINER_CAPABILITY_TOKEN", "").strip())
    secrets = [token for token in tokens if isinstance(token, str) and token]
    sources.secrets = (*secrets, *secrets_in(sources.merged), *secrets_in(raw))
    for name, text in leaves(sources.merged):
        if HIDDEN in json.dumps(text):
            errors.add(
                f"`{name}` holds {HIDDEN}, which stands for a secret that was not written. Give it with "
                f"`--set {name}=...`, or remove it with `--set {name}=null`."
            )
    return sources


def _path_of_job(given: str | os.PathLike[str] | None, environ: Mapping[str, str], errors: ConfigErrors) -> Path | None:
    """Return the path of the job file; without one, note an error and return None."""
    text = environ.get(JOB_VARIABLE, "").strip() if given is None else os.fspath(given)
    if not text:
        errors.add(
            f"No job file was given. Name its path as an argument or in `{JOB_VARIABLE}`.",
            code="startup.missing_job_spec_path",
        )
        return None
    return Path("/dev/stdin" if text == "-" else os.path.abspath(os.path.expanduser(text)))


def _settings_of_job_file(raw: Mapping[str, Any], errors: ConfigErrors) -> dict[str, Any]:
    """Return `raw` without the settings that a job file cannot give."""
    elsewhere = {name: key for name, key in keys_of(Settings).items() if name not in keys_of(JobSpec)}
    for name in raw.keys() & elsewhere.keys():
        variable = elsewhere[name].variable
        errors.warn(f"`{name}` is ignored in a job file. Set `{variable}`, or give `--set {name}=...`.")
    return {name: value for name, value in raw.items() if name not in elsewhere and name not in _FOR_READERS}


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _canonical(name: str, keys: Mapping[str, Key]) -> str:
    """Return the key that `name` is an alias of, or `name`."""
    return next((key.name for key in keys.values() if key.alias == name), name)


def _resolve_aliases(raw: Mapping[str, Any], keys: Mapping[str, Key], errors: ConfigErrors, prefix: str = "") -> Any:
    """Return an object with its aliases replaced by their keys, in its blocks too; a key beats its alias."""
    found: dict[str, Any] = {}
    for spelled in sorted(raw, key=lambda spelled: _canonical(spelled, keys) != spelled):
        name, value = _canonical(spelled, keys), raw[spelled]
        block = keys[name].block if name in keys else None
        if block is not None and isinstance(value, dict):
            value = _resolve_aliases(value, keys_of(block), errors, f"{prefix}{name}.")
        if _is_absent(found.get(name)):
            found[name] = value
        elif value != found[name] and not _is_absent(value):
            text = f"`{prefix}{name}` and `{prefix}{spelled}` are one setting with two values"
            if prefix:
                errors.add(f"{text}. Give one of them.")
            else:  # an orchestrator may write both
                errors.warn(f"{text}; `{name}` is used.")
    return found


def _read_environment(sources: Sources, environ: Mapping[str, str], errors: ConfigErrors) -> None:
    """Apply the settings that the environment gives; a blank variable gives none."""
    for name, key in all_keys():
        if not (text := environ.get(key.variable, "").strip()):
            continue
        value = text if key.type_is(str) else value_of(key, text)
        if key.type_is(bool) and not isinstance(value, bool):
            errors.warn(f"`{key.variable}` is none of the true words 1 true t yes y, so it counts as false.")
            value = False
        # This does nothing if the block of the setting is not an object: `_convert` notes that error.
        sources.put(tuple(name.split(".")), value, key.variable)
    for error in rank_errors(environ):
        errors.add(error)
    known = [JOB_VARIABLE, *VARIABLES]
    for name in environ:
        if name.startswith("TRAINER_") and name not in known and nearest(name, known):
            errors.warn(f"Unknown environment variable `{name}` is ignored.{nearest(name, known)}")


def _override(text: str, sources: Sources, errors: ConfigErrors) -> None:
    """Apply one ``key.sub=value``. The value is JSON, or otherwise the text itself; later ones win."""
    name, separator, value = text.partition("=")
    path = tuple(part.strip() for part in name.strip().split("."))
    if not separator or not all(path):
        # The text after the sign is not shown: it may be a token.
        shown = f" {name.strip()}{separator}…" if separator else f" {text}"
        errors.add(f"Invalid `--set{shown}`. Expected key=value or key.sub=value.")
        return
    for depth in range(len(path)):
        known = keys_at(path[:depth])
        path = (*path[:depth], _canonical(path[depth], known), *path[depth + 1 :])
        if known and path[depth] not in known:
            offer = nearest(path[depth], known) or ("" if depth else _offer_within_blocks(path[0]))
            errors.add(f"Unknown key `{'.'.join(path[: depth + 1])}` in `--set`.{offer}")
            return
    given = {path[-1]: value_of(key_at(path), value)}
    (decoded,) = _resolve_aliases(given, keys_at(path[:-1]), errors, "".join(f"{part}." for part in path[:-1])).values()
    if not sources.put(path, decoded, COMMAND_LINE):
        errors.add(f"`--set {'.'.join(path)}` cannot be applied: `{path[0]}` is not an object.")


def _offer_within_blocks(name: str) -> str:
    """Return a sentence that offers keys of blocks (`dataset.batch_size` for ``batchsize``); empty without a match."""
    dotted = [known for known, _ in all_keys() if "." in known]
    if (inner := closest(name, [known.partition(".")[2] for known in dotted], alike=0.85)) is None:
        return ""
    return f" Did you mean {' or '.join(f'`{known}`' for known in dotted if known.partition('.')[2] == inner)}?"


def read_job_file(path: Path, errors: ConfigErrors) -> dict[str, Any] | None:
    """Return the JSON object in the file at `path`, or None after noting an error."""
    job = f"The job spec {str(path)!r}"
    try:
        with path.open("rb") as file:
            return _object_in(file.read(LARGEST_FILE_BYTES + 1), path)
    except FileNotFoundError:
        errors.add(
            f"There is no job spec at {str(path)!r}. Name an existing JSON file.", code="startup.missing_job_spec_path"
        )
    except OSError as error:
        errors.add(f"{job} cannot be read: {error.strerror}. Name a readable JSON file.")
    except ValueError as error:
        errors.add(f"{job} {error}")
    return None


def _object_in(content: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in the content of a job file.

    Raises:
        ValueError: There is none. The message continues a sentence that starts with the file.
    """
    if len(content) > LARGEST_FILE_BYTES:
        raise ValueError(f"has more than {LARGEST_FILE_BYTES >> 20} MiB. Name a JSON file.")
    if not content.strip():
        pipe = "" if path.is_file() else "; a pipe can be read once, and each process of a run reads its job spec"
        raise ValueError(f"is empty{pipe}. Expected a JSON object, {{...}}.")
    try:
        decoded = parse_json(content)
    except RecursionError:
        raise ValueError("is nested too deeply.") from None
    except UnicodeDecodeError as error:  # its own message would quote the bytes
        raise ValueError(f"is not JSON: byte {error.start} is not {error.encoding}.") from None
    except ValueError as error:
        way_out = " A LightningCLI configuration is for `genlight fit --config`." if path.suffix in _YAML else ""
        raise ValueError(f"is not JSON: {str(error).rstrip('.')}.{way_out}") from None
    if not isinstance(decoded, dict):
        raise ValueError("holds no JSON object, {...}.")  # noqa: TRY004 - the file's fault
    return decoded
