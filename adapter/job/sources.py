"""What each source says about a run, and which of them wins.

Each setting is resolved on its own: ``--set`` first, then the environment, then the job spec, then the default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plumbing.folder_name import folder_name
from ..plumbing.redaction import secrets_in
from ..plumbing.text import nearest
from .environment import BY_SETTING, read_environment
from .errors import ConfigErrors
from .overrides import Overrides, apply_overrides, parse_overrides
from .spec import JobSpec
from .spec_file import read_job_spec
from .spec_keys import ALIASES, inner_keys
from .spec_parsing import DEEPEST, WHOLE_SPEC, parse_job_spec
from .trainer_arguments import ENDS_WITH_ITS_PROCESSES, launches_by_copy, trainer_arguments

__all__ = ["Settings", "artifact_paths", "artifacts_template", "folder_name", "read_settings", "require_settings"]

ENVIRONMENT_ARTIFACTS_DIR = "/tmp/training"  # noqa: S108 -- the contract's own default for containers
FILE_ARTIFACTS_DIR = "runs/{run_id}"


@dataclass(frozen=True)
class Settings:
    """What each source says, before one of them wins."""

    spec: JobSpec
    environment: Mapping[str, Any] = field(repr=False)
    overrides: Overrides
    spec_path: Path | None
    readable: bool
    """Whether the file of the job spec held a JSON object."""
    given: frozenset[str]
    """Dotted names, two levels deep, that the job spec and the command line give."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """The token, what stands under secret names in the job, and credentials of its URLs."""
    sources: dict[str, str] = field(default_factory=dict)

    def pick(self, name: str, default: Any = None) -> Any:
        """The value of a setting from the first source that gives one; notes which that was."""
        value, source = self._find(name)
        self.sources[name] = source if value is not None else "default"
        return default if value is None else value

    def _find(self, name: str) -> tuple[Any, str]:
        if name in self.overrides.settings:
            return self.overrides.settings[name], "--set"
        in_spec = _field(self.spec, name)
        if in_spec is not None and self.overrides.covers(name):
            return in_spec, "--set"
        if name in self.environment:
            return self.environment[name], BY_SETTING[name].name
        return in_spec, "job spec" if name in self.given else "default"

    def path(self, name: str, default: Path | None = None) -> Path | None:
        """A path setting, absolute: from the spec's folder if the spec gives it, else from the working directory."""
        text = self.pick(name)
        return default if text is None else self.absolute(name, text)

    def absolute(self, name: str, text: str) -> Path:
        """`text`, which is the setting `name` or a part of it, as an absolute path."""
        path = os.path.expanduser(text)
        if self.sources.get(name) == "job spec":
            path = os.path.join(self.spec_dir, path)
        return Path(os.path.abspath(path))

    @property
    def spec_dir(self) -> Path:
        """The folder of the job spec; the working directory for one that came through a pipe."""
        if self.spec_path is None or self.spec_path.parts[1:2] in (("dev",), ("proc",)):
            return Path.cwd()
        return self.spec_path.parent


def read_settings(
    spec_path: str | os.PathLike[str] | None, overrides: Sequence[str], environ: Mapping[str, str], errors: ConfigErrors
) -> Settings:
    """Read all sources and note their errors; never raises because of what they hold."""
    environment = read_environment(environ, errors)
    path = _spec_path(spec_path, environment, errors)
    raw = None if path is None else read_job_spec(path, errors)
    set_by_hand = parse_overrides(overrides, errors)
    merged = _without_half_characters("", apply_overrides(raw or {}, set_by_hand, errors), errors)
    spec = parse_job_spec(merged, errors)
    tokens = (
        merged.get("capability_token"),
        (raw or {}).get("capability_token"),
        environ.get("TRAINER_CAPABILITY_TOKEN", "").strip(),
    )
    secrets = [token for token in tokens if isinstance(token, str) and token]
    if not errors.concern(WHOLE_SPEC):  # else it may be nested too deeply to be looked through
        secrets += [*secrets_in(merged), *secrets_in(raw or {})]
    readable = raw is not None and not errors.concern(WHOLE_SPEC)
    return Settings(spec, environment, set_by_hand, path, readable, frozenset(_names(merged)), tuple(secrets))


def _without_half_characters(name: str, value: Any, errors: ConfigErrors, levels: int = DEEPEST) -> Any:
    """`value` with each half of a surrogate pair spelled out, which is an error: nothing can be written with it.

    Bytes of a path that are not UTF-8 stand in a text as such halves too; those the system can encode.
    """
    if levels < 0:
        return value  # an error of its own
    if isinstance(value, dict):
        return {
            _whole(name, key, errors): _without_half_characters(f"{name}.{key}".lstrip("."), inner, errors, levels - 1)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_without_half_characters(f"{name}[{at}]", inner, errors, levels - 1) for at, inner in enumerate(value)]
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


def _names(raw: Mapping[str, Any]) -> Iterator[str]:
    for name, value in raw.items():
        yield ALIASES[""].get(name, name)
        if inner_keys(name) and isinstance(value, Mapping):
            yield from (f"{name}.{ALIASES.get(name, {}).get(inner, inner)}" for inner in value)


def _spec_path(
    given: str | os.PathLike[str] | None, environment: Mapping[str, Any], errors: ConfigErrors
) -> Path | None:
    text = environment.get("job_spec_path") if given is None else os.fspath(given)
    if not text:
        errors.add(
            "No job spec was given. Name its path as an argument or in `TRAINER_JOB_SPEC_PATH`.",
            code="startup.missing_job_spec_path",
        )
        return None
    return Path("/dev/stdin" if text == "-" else os.path.abspath(os.path.expanduser(text)))


def _field(spec: JobSpec, name: str) -> Any:
    """The field of the spec behind a dotted setting name; empty containers count as not given."""
    value: Any = spec
    for part in name.split("."):
        value = getattr(value, part, None)
    return None if value in ((), {}) else value


def require_settings(reading: Settings, errors: ConfigErrors) -> None:
    """Note what must be there and is not, and settings that exclude each other."""
    if reading.readable:
        for name, example in (("run_id", '"run_id": "my-run"'), ("max_steps", '"max_steps": 1000')):
            if getattr(reading.spec, name) is None and not errors.concern(name):
                errors.add(f"`{name}` is missing. Add {example} to the job spec.", name=name)
        if reading.pick("trainer") is None and not errors.concern("trainer"):
            errors.add(
                'No trainer is named. Add "trainer": "module:Class" to the job spec, or set `TRAINER_PLUGIN`.',
                code="startup.missing_trainer_import",
            )
    if reading.pick("orchestrated") and not reading.pick("capability_token") and not errors.concern("capability_token"):
        errors.add(
            "An orchestrated run needs a token. Set `TRAINER_CAPABILITY_TOKEN`, or `capability_token` in the job spec.",
            code="startup.missing_capability_token",
        )
    _refuse_contradictions(reading.spec, errors)
    _refuse_unrecoverable(reading, errors)
    _refuse_lightning_arguments(reading.spec.lightning, errors)
    _warn_of_no_effect(reading, errors)


def _refuse_contradictions(spec: JobSpec, errors: ConfigErrors) -> None:
    paths = bool(spec.dataset and spec.dataset.parquet_paths)
    refs = bool(spec.inputs.dataset_parquet_refs)
    if paths and refs:
        errors.add("`dataset.parquet_paths` and `inputs.dataset_parquet_refs` both name the data. Give one of them.")
    if spec.mock_batches is not None and (paths or refs):
        errors.add("`mock_batches` and Parquet files are both given. Leave one of them out.")
    has_errors = errors.concern_part("dataset.parquet_paths") or errors.concern_part("inputs")
    if spec.dataset and not paths and not refs and spec.mock_batches is None and not has_errors:
        errors.add("`dataset` names no files. Add `dataset.parquet_paths` or `inputs.dataset_parquet_refs`.")
    if spec.resume_checkpoint_path and spec.inputs.resume_checkpoint_ref:
        errors.add("`resume_checkpoint_path` and `inputs.resume_checkpoint_ref` are both given. Give one of them.")


def _refuse_unrecoverable(reading: Settings, errors: ConfigErrors) -> None:
    """Note what keeps `recover` from doing what it says."""
    recover = reading.spec.recover
    if recover is None:
        return
    policy = reading.pick("on_nonfinite", "warn")
    if policy != "warn":
        errors.add(f"`recover` and `on_nonfinite: {policy}` cannot be combined. Remove one of them.")
    if (
        "roll_back" in recover.ladder
        and not reading.pick("checkpoint_every")
        and not errors.concern("checkpoint_every")
    ):
        errors.add(
            "`recover.ladder` has 'roll_back', which needs checkpoints, and `checkpoint_every` is 0. Set it, or leave "
            "that rung out."
        )


def _refuse_lightning_arguments(arguments: Mapping[str, Any], errors: ConfigErrors) -> None:
    """Note what contradicts a job, and what ``lightning.pytorch.Trainer`` would refuse much later as unknown."""
    if "max_steps" in arguments:
        errors.add("Invalid `lightning.max_steps`. The job's own `max_steps` decides; remove this one.")
    for name in ("max_epochs", "limit_train_batches"):
        if arguments.get(name, 1) in (0, "0"):
            errors.add(f"Invalid `lightning.{name}`. With 0 nothing would be trained; remove it, or raise it.")
    if arguments.get("enable_checkpointing") is False:
        errors.add(
            "Invalid `lightning.enable_checkpointing`. A job saves its final checkpoint; remove this one, and leave "
            "`checkpoint_every` at 0 to save no other."
        )
    if arguments.get("logger") is True:
        errors.add(
            "Invalid `lightning.logger`. A job has its event log already, and `true` would add none. Name a logger, "
            'such as {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "x"}}, or leave '
            "it out."
        )
    if launches_by_copy(arguments.get("strategy")):
        errors.add(f"Invalid `lightning.strategy`. With {arguments['strategy']!r} {ENDS_WITH_ITS_PROCESSES}.")
    known = trainer_arguments() if arguments else ()
    for name in arguments if known else ():
        if name not in known:
            errors.add(
                f"Invalid `lightning.{name}`. `lightning.pytorch.Trainer` has no such argument.{nearest(name, known)}"
            )


def _warn_of_no_effect(reading: Settings, errors: ConfigErrors) -> None:
    """Note settings that another one makes pointless."""
    spec = reading.spec
    if spec.sample_prompts and not spec.sample_every:
        errors.warn("`sample_prompts` has no effect, since `sample_every` is 0.")
    if reading.pick("uploads.sample_url") and not spec.sample_every:
        errors.warn("`uploads.sample_url` has no effect, since `sample_every` is 0.")
    if reading.pick("token_origins") and not reading.pick("capability_token"):
        errors.warn("`token_origins` has no effect, since there is no token.")


def artifacts_template(spec_path: object, default: str | os.PathLike[str] | None) -> str:
    """Where artifacts go if no setting says so, with ``{run_id}`` for the run's folder name."""
    if default is not None:
        return os.fspath(default)
    return ENVIRONMENT_ARTIFACTS_DIR if spec_path is None else FILE_ARTIFACTS_DIR


def artifact_paths(reading: Settings, template: str, run_id: str) -> dict[str, Path]:
    """Where artifacts go, by the name of the `RunConfig` field."""
    # As every relative path of a job: else the same job, started from another folder, would begin anew there.
    base = reading.spec_dir if template == FILE_ARTIFACTS_DIR else Path.cwd()
    default = Path(os.path.abspath(base / template.replace("{run_id}", folder_name(run_id))))
    root = reading.path("artifacts_dir") or default
    paths = {"artifacts_dir": root}
    for name in ("checkpoints", "samples", "metrics"):
        paths[f"{name}_dir"] = reading.path(f"{name}_dir") or root / name
    paths["events_path"] = reading.path("events_path") or paths["metrics_dir"] / "events.jsonl"
    return paths
