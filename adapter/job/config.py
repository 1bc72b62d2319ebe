"""Read one frozen `RunConfig` from the command line, the environment and the job file.

All errors of all settings are raised as one `StartupContractError`. Only `write_job` writes a file, and nothing here
uses the network.

A run's folder keeps its job: every setting from the file, the environment and ``--set``, in one file without secrets
(`job_file`). This file starts the same job again from any folder: its paths are absolute, and `base_dir` names the
folder of the original job file. Settings that a job file cannot have, such as the folders of artifacts, are not in it.
A secret appears as ``<hidden>``; a start from this file fails, and names each setting whose secret must be given again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from ...reporters.uploads.config import QUEUE_DIRECTORY, UploadConfig
from ..contract.types import TrainingJobSpec
from ..plumbing.durable import write_bytes_durably
from ..plumbing.redaction import HIDDEN, map_strings, secrets_of_environment, without_secrets
from ..plumbing.safe_open import read_regular
from ..plumbing.settings import Block, render_value, value_of
from ..plumbing.text import HUB_LOGIN, folder_name
from ..plumbing.urls import trusted_origins
from .identity import digest_of_fields, spec_fields
from .sources import COMMENT, DEFAULT, LARGEST_FILE_BYTES, ConfigErrors, Sources, read_sources
from .spec import DatasetSpec, JobSpec, Settings
from .standard_callbacks import faults_of_callbacks

ENVIRONMENT_ARTIFACTS_DIR = Path("/tmp/training")  # noqa: S108 -- the contract's own default for containers
UNKNOWN_RUN_ID = "unknown"
"""The run's id in a report about a job without `run_id`."""
JOB_NAME = "job.json"
_WRITTEN_BY = "Written by genlight"
"""Beginning of the comment by which a run recognizes a file that it may replace."""
_DIGEST = re.compile("sha256=[0-9a-fA-F]{64}")
_COMMENT = f"{_WRITTEN_BY} when the run started: its job with every setting, without secrets."


class RunConfig(Settings, frozen=True, kw_only=True):
    """All settings of a run, resolved; paths are absolute.

    References to inputs are not resolved yet. `token_origins` includes the origins of the upload URLs and of the file
    store. `private_hosts` lists private addresses that references may reach; None allows all.
    """

    spec_path: Path
    spec_dir: Path
    """Folder that relative paths of the job file start from; the trainer's module is searched there first."""
    secrets: tuple[str, ...]
    """Texts that must never be shown: the token, values under secret names in the job, credentials of its URLs."""
    spec_digest: str
    spec_fields: Mapping[str, Any]
    """The fields that `spec_digest` covers, for `identity.differing_fields`."""
    warnings: tuple[str, ...]
    as_given: Settings
    """The settings as given, without the values that follow from other settings."""
    sources: Sources
    """The source of each setting."""

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.run_id!r}, {str(self.spec_path)!r})"

    @property
    def job(self) -> TrainingJobSpec:
        """The part of the job that the trainer class sees."""
        return TrainingJobSpec(**{each.name: getattr(self, each.name) for each in dataclasses.fields(TrainingJobSpec)})

    def upload_config(self, **changes: Any) -> UploadConfig:
        """Return the configuration of uploads, with `changes` to the fields of `UploadConfig`.

        Raises:
            ValueError: `UploadConfig` refuses a value.
        """
        given: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("run_id", "owner", "file_store_url", "token_origins")},
            "queue_dir": self.artifacts_dir / QUEUE_DIRECTORY,
            "token": self.capability_token,
            "roots": (self.checkpoints_dir, self.samples_dir),
            "deadline_s": self.upload_deadline_seconds,
            **msgspec.structs.asdict(self.uploads),
        }
        return UploadConfig(**(given | changes))

    def source_of(self, name: str) -> str:
        """Return a setting's source: ``--set``, an environment variable's name, ``job spec`` or ``default``."""
        return self.sources.source_of(name)


def resolve_run_config(
    *,
    spec_path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """Resolve every setting of a run.

    Args:
        spec_path: The job file; None takes ``TRAINER_JOB_SPEC_PATH``.
        overrides: ``key.sub=value`` each, from ``--set``. Their paths are relative to the working directory.
        environ: The environment; None takes the process's own.

    Raises:
        StartupContractError: With every error; its code is the first one of `CODES` that applies.
    """
    config, errors = read_run_config(spec_path=spec_path, overrides=overrides, environ=environ)
    if (error := errors.exception(secrets=config.secrets)) is not None:
        raise error
    return config


def read_run_config(
    *,
    spec_path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    complete: bool = True,
) -> tuple[RunConfig, ConfigErrors]:
    """Return the settings of a run, and all their errors.

    A setting with an error gets its default, or an empty text or 0 if it has none; the other settings keep their
    values. Takes the arguments of `resolve_run_config`; `complete` makes the absence of a required setting an error.
    """
    errors = ConfigErrors()
    sources = read_sources(spec_path, overrides, os.environ if environ is None else environ, errors)
    given = Settings(**sources.block(Settings, sources.merged, complete=complete and sources.readable))
    settings = _fill_in(given, sources)
    _note_contradictions(settings, errors)
    _check_lightning_arguments(settings.lightning, errors)
    _warn_of_settings_without_effect(given, sources, errors)
    fields = spec_fields(settings, sources.folder)
    config = RunConfig(
        **{
            **msgspec.structs.asdict(settings),
            **_artifact_paths(settings, sources, is_from_file=spec_path is not None),
        },
        spec_path=sources.path or Path(),
        spec_dir=sources.folder,
        secrets=sources.secrets,
        spec_digest=digest_of_fields(fields),
        spec_fields=fields,
        warnings=tuple(errors.warnings),
        as_given=given,
        sources=sources,
    )
    return config, errors


def _fill_in(settings: Settings, sources: Sources) -> Settings:
    """Return `settings` with the values that follow from other settings filled in."""
    replace = msgspec.structs.replace
    has_data = settings.inputs.dataset_parquet_refs or settings.data is not None
    dataset = settings.dataset or (DatasetSpec() if has_data else None)
    if dataset is not None and settings.seed is not None and sources.source_of("dataset.seed") == DEFAULT:
        dataset = dataclasses.replace(dataset, seed=settings.seed)
    every = settings.checkpoints.every_n_steps or settings.checkpoint_every
    listed = settings.private_hosts
    if "*" in (listed or ()) or (listed is None and not settings.orchestrated):
        reachable = None
    else:
        hub = urlsplit(settings.file_store_url or "").hostname
        reachable = (*(listed or ()), *((hub,) if hub else ()))
    urls = [settings.file_store_url, *settings.uploads.urls().values()]
    return replace(
        settings,
        dataset=dataset,
        checkpoint_every=settings.checkpoint_every or every,
        checkpoints=replace(settings.checkpoints, every_n_steps=every),
        private_hosts=reachable,
        token_origins=trusted_origins(urls, settings.token_origins),
    )


def _artifact_paths(settings: Settings, sources: Sources, *, is_from_file: bool) -> dict[str, Path]:
    """Return the absolute paths of artifacts.

    By default they are next to the job file or, if the caller named none, in `ENVIRONMENT_ARTIFACTS_DIR`.
    """
    # Not relative to the working directory: a start from another one must find the same run.
    own = sources.folder / "runs" / folder_name(settings.run_id or UNKNOWN_RUN_ID)

    names = ("artifacts_dir", "checkpoints_dir", "samples_dir", "metrics_dir", "events_path")
    given = {name: path for name in names if (path := getattr(settings, name)) != Path()}
    root = given.get("artifacts_dir", own if is_from_file else ENVIRONMENT_ARTIFACTS_DIR)
    folders = {f"{name}_dir": root / name for name in ("checkpoints", "samples", "metrics")} | given
    return {"events_path": folders["metrics_dir"] / "events.jsonl", **folders, "artifacts_dir": root}


def _note_contradictions(settings: Settings, errors: ConfigErrors) -> None:
    """Note settings that exclude each other, and missing settings that another one requires."""
    inputs = settings.inputs
    sources = {
        "`mock_batches`": settings.mock_batches,
        "`data`": settings.data,
        "`dataset.parquet_paths`": settings.dataset and (settings.dataset.parquet_paths or None),
        "`inputs.dataset_parquet_refs`": inputs.dataset_parquet_refs or None,
    }
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        errors.add(f"{' and '.join(given)} are given together. Each names all the data of a run; keep one of them.")
    if settings.dataset and not given and not errors.concern("dataset") and not errors.concern("inputs"):
        errors.add("`dataset` names no files. Add `dataset.parquet_paths`, `inputs.dataset_parquet_refs` or `data`.")
    if settings.resume_checkpoint_path and inputs.resume_checkpoint_ref:
        errors.add("`resume_checkpoint_path` and `inputs.resume_checkpoint_ref` are both given. Give one of them.")
    if settings.orchestrated and not settings.capability_token and not errors.concern("capability_token"):
        errors.add(
            "An orchestrated run needs a token. Set `TRAINER_CAPABILITY_TOKEN`, or `capability_token` in the job file.",
            code="startup.missing_capability_token",
        )
    if settings.checkpoint_every != settings.checkpoints.every_n_steps:
        errors.add(
            f"`checkpoint_every` is {settings.checkpoint_every} and `checkpoints.every_n_steps` is "
            f"{settings.checkpoints.every_n_steps}. They mean the same; give one of them."
        )
    saves = settings.checkpoints
    if (saves.lose_at_most or saves.pay_at_most) and (saves.every_n_steps or saves.every_minutes):
        errors.add(
            "`checkpoints.lose_at_most` and `pay_at_most` choose the time between checkpoints. Remove `every_n_steps`, "
            "`every_minutes` and `checkpoint_every`, or these two."
        )
    for fault in faults_of_callbacks(settings.callbacks):
        errors.add(f"Invalid `callbacks`. {fault}", name="callbacks")


def _check_lightning_arguments(arguments: Mapping[str, Any], errors: ConfigErrors) -> None:
    """Note arguments that contradict the job. Lightning's own checks run later, when Lightning is loaded."""
    if "max_steps" in arguments:
        errors.add("Invalid `lightning.max_steps`. The job's own `max_steps` decides; remove this one.")
    for name in ("max_epochs", "limit_train_batches"):
        if arguments.get(name, 1) in (0, "0"):
            errors.add(f"Invalid `lightning.{name}`. With 0 nothing would be trained; remove it, or raise it.")
    logger = arguments.get("logger")
    if logger is True or (isinstance(logger, str) and "." not in logger):
        example = '{"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}'
        errors.add(
            f"Invalid `lightning.logger`. Expected the path of a class, such as {example}, or of `WandbLogger`, which "
            f"needs `pip install wandb`, but received {json.dumps(logger)}. The event log does not need it."
        )


def _warn_of_settings_without_effect(settings: Settings, sources: Sources, errors: ConfigErrors) -> None:
    """Warn of a canceled run, of settings without effect, of a missing login, and of numbers written as texts."""
    if settings.canceled:
        errors.warn(f"The run stops before its first step, since it is canceled by `{sources.source_of('canceled')}`.")
    if settings.sample_prompts and not settings.sample_every:
        errors.warn("`sample_prompts` has no effect, since `sample_every` is 0.")
    if any(target.startswith("hf://") for target in settings.uploads.targets):
        from huggingface_hub import get_token  # takes a moment

        if get_token() is None:
            errors.warn(
                f"`uploads.targets` has a repository of the Hugging Face hub, and nobody is logged in: {HUB_LOGIN}."
            )
    for name, value in settings.hyperparams.items():
        if isinstance(value, str) and type(value_of(None, value)) in (int, float):
            shown = render_value(name)[1:-1]
            errors.warn(
                f'`hyperparams.{shown}` is the text "{value}". If the class expects a number, write it without quotes.'
            )


def job_file(config: RunConfig, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the content of a job file that starts the job of `config` again.

    Args:
        config: The run.
        environ: The environment, whose secrets are not written; None takes the process's own.
    """
    # As given: a value that was filled in, such as the seed of the data, would not follow a later change of its source.
    job = _nonempty({name: getattr(config.as_given, name) for name in JobSpec.__struct_fields__})
    if "dataset" in job and config.source_of("dataset.seed") == DEFAULT and config.seed is not None:
        del job["dataset"]["seed"]
    job["base_dir"] = str(config.spec_dir)
    secrets = [*config.secrets, *secrets_of_environment(environ)]

    def marked(text: str, is_secret: bool) -> str:
        """Return `text` without secrets. A URL that lost a part is marked, so that a start refuses it.

        A digest after the ``#`` of a URL is no secret and stays.
        """
        safe = HIDDEN if is_secret else without_secrets(text, secrets=secrets)
        plain, _, fragment = text.partition("#")
        if safe == text or HIDDEN in safe:
            return safe
        return text if plain == safe and _DIGEST.fullmatch(fragment) else f"{safe}{HIDDEN}"

    return {COMMENT: _COMMENT, **map_strings(job, marked)}


def write_job(config: RunConfig, environ: Mapping[str, str] | None = None) -> bool:
    """Write `job_file` into the folder of the run; return False if a file of the user has that name.

    Raises:
        OSError: It cannot be written.
    """
    path = config.artifacts_dir / JOB_NAME
    if os.path.lexists(path) and read_job(config.artifacts_dir) is None:
        return False
    write_bytes_durably(path, json.dumps(job_file(config, environ), indent=1).encode() + b"\n")
    return True


def read_job(folder: Path) -> dict[str, Any] | None:
    """Return the job that `write_job` wrote into the folder of a run, or None."""
    try:
        job = json.loads(read_regular(folder / JOB_NAME, limit=LARGEST_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(job, dict) and str(job.get(COMMENT, "")).startswith(_WRITTEN_BY)
    return {name: value for name, value in job.items() if name != COMMENT} if is_ours else None


def _nonempty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` that are not empty, as JSON, also within blocks; `hyperparams` and the like stay complete."""
    plain: dict[str, Any] = msgspec.to_builtins(values, enc_hook=os.fspath)
    given = {name: value for name, value in plain.items() if value is not None and value not in ("", [], ())}
    blocks = {name for name, value in values.items() if dataclasses.is_dataclass(value) or isinstance(value, Block)}
    return {name: _nonempty(value) if name in blocks else value for name, value in given.items()}
