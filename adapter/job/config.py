"""One frozen `RunConfig` from the command line, the environment and the job spec.

Each setting is resolved on its own: ``--set`` first, then the environment, then the job spec, then the default. All
errors of all settings are raised as one `StartupContractError`. Nothing is created and nothing on the network is
asked here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ..contract.types import TrainingJobSpec
from ..plumbing.urls import has_scheme, trusted_origins
from .errors import ConfigErrors
from .identity import digest_of_fields, spec_fields
from .refs import looks_like_path
from .sources import Settings, artifact_paths, artifacts_template, read_settings, require_settings
from .spec import UPLOAD_URLS, DatasetSpec, InputsSpec, RecoverSpec, SampleRequest, UploadUrls, ValidateSpec

__all__ = ["DEFAULT_UPLOAD_DEADLINE_S", "RunConfig", "resolve_run_config", "run_config_of"]

DEFAULT_UPLOAD_DEADLINE_S = 60.0


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run was told, resolved; paths are absolute.

    References to inputs stay references until they are materialised.
    """

    run_id: str
    trainer: str
    """Import path of the trainer class."""
    job: TrainingJobSpec
    spec_path: Path
    spec_dir: Path
    """Where relative paths of the job spec start, and where the trainer's module is looked for first."""
    dataset: DatasetSpec | None
    mock_batches: Sequence[Any] | None
    inputs: InputsSpec = field(repr=False)
    resume_from_latest: bool
    resume_checkpoint_path: Path | None
    sample_prompts: tuple[SampleRequest, ...]
    sample_seed: int | None
    token: str | None = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    """What no text may show: the token, values of secret names in the job, credentials of its URLs."""
    orchestrated: bool
    max_runtime_s: float | None
    """From process start, inputs included; None means no limit."""
    cancel_file: Path | None
    canceled: bool
    """Whether the run was cancelled before it started."""
    uploads: UploadUrls = field(repr=False)
    file_store_url: str | None = field(repr=False)
    """Base of the store for artifact bytes, and of the resolver of ``cozy:`` references."""
    stop_grace_s: float | None
    """How long after its stop signal a scheduler ends the process; None where that is not known."""
    upload_deadline_s: float
    token_origins: frozenset[str]
    """Origins that may be sent the token, such as ``https://hub.example.com:443``."""
    private_hosts: tuple[str, ...] | None
    """What references may reach in spite of a private address; None lets them reach everything."""
    lightning: Mapping[str, Any] = field(repr=False)
    """Arguments of ``lightning.pytorch.Trainer``; their names are checked where Lightning is imported."""
    validate: ValidateSpec | None
    recover: RecoverSpec | None
    on_nonfinite: Literal["warn", "stop", "skip"]
    sync_each_batch: bool | None
    checkpoint_weights: Literal["all", "trained"]
    tags: tuple[str, ...]
    notes: str
    artifacts_dir: Path
    checkpoints_dir: Path
    samples_dir: Path
    metrics_dir: Path
    events_path: Path
    shared_artifacts: bool
    """Whether everybody who may write the artifact directories is trusted; the job spec cannot say so."""
    spec_digest: str
    spec_fields: Mapping[str, str] = field(repr=False)
    """What `spec_digest` covers: a digest for each field, for `spec_digest.differing_fields`."""
    warnings: tuple[str, ...]
    sources: Mapping[str, str] = field(repr=False)

    def source_of(self, name: str) -> str:
        """Where a setting came from: ``--set``, an environment variable's name, ``job spec`` or ``default``.

        Raises:
            KeyError: There is no setting of that name.
        """
        return self.sources[name]


def resolve_run_config(
    *,
    spec_path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    default_artifacts_dir: str | os.PathLike[str] | None = None,
) -> RunConfig:
    """Resolve every setting of a run.

    Args:
        spec_path: The job spec; None takes ``TRAINER_JOB_SPEC_PATH``.
        overrides: ``key.sub=value`` each, as ``--set`` gives them. Their paths are relative to the working directory.
        environ: The environment; None takes the process's own.
        default_artifacts_dir: Where artifacts go if nothing else says so; ``{run_id}`` stands for the run's folder
            name. None means ``runs/{run_id}`` beside a spec given by path, ``/tmp/training`` for a pure environment.

    Raises:
        StartupContractError: With every error, under the code of the first documented one.
    """
    errors = ConfigErrors()
    reading = read_settings(spec_path, overrides, os.environ if environ is None else environ, errors)
    require_settings(reading, errors)
    template = artifacts_template(spec_path, default_artifacts_dir)
    config = run_config_of(reading, template, errors) if not errors.found else None
    error = errors.exception(secrets=reading.secrets)
    if error is not None:
        raise error
    assert config is not None
    return config


def run_config_of(reading: Settings, artifacts_template: str, errors: ConfigErrors) -> RunConfig:
    """The configuration that sound settings stand for.

    Args:
        reading: What the sources say, without an error.
        artifacts_template: Where artifacts go by default.
        errors: Holds the warnings about the settings.
    """
    spec = reading.spec
    job = _job(reading)
    artifacts = artifact_paths(reading, artifacts_template, job.run_id)
    dataset, inputs = dataset_of(reading), inputs_of(reading)
    trainer = reading.pick("trainer")
    mock_batches = reading.pick("mock_batches", spec.mock_batches)
    fields = spec_fields(
        trainer=trainer,
        hyperparams=job.hyperparams,
        dataset=dataset,
        mock_batches=mock_batches,
        inputs=inputs,
        spec_dir=reading.spec_dir,
    )
    uploads = UploadUrls(
        **{name: reading.pick(f"uploads.{name}") for name in UPLOAD_URLS}, targets=reading.pick("uploads.targets", ())
    )
    return RunConfig(
        run_id=job.run_id,
        trainer=trainer,
        job=job,
        spec_path=reading.spec_path or Path(),
        spec_dir=reading.spec_dir,
        dataset=dataset,
        mock_batches=mock_batches,
        inputs=inputs,
        resume_from_latest=reading.pick("resume_from_latest", False),
        resume_checkpoint_path=reading.path("resume_checkpoint_path"),
        sample_prompts=_sample_prompts(reading),
        sample_seed=reading.pick("sample_seed"),
        token=reading.pick("capability_token"),
        secrets=reading.secrets,
        orchestrated=reading.pick("orchestrated", False),
        max_runtime_s=reading.pick("max_runtime_seconds") or None,
        cancel_file=reading.path("cancel_file_path"),
        canceled=reading.pick("canceled", False),
        uploads=uploads,
        file_store_url=reading.pick("file_store_url"),
        stop_grace_s=reading.pick("stop_grace_seconds") or None,
        upload_deadline_s=reading.pick("upload_deadline_seconds", DEFAULT_UPLOAD_DEADLINE_S),
        token_origins=token_origins_of(reading),
        private_hosts=private_hosts_of(reading),
        lightning=reading.pick("lightning", {}),
        validate=reading.pick("validate", spec.validate),
        recover=reading.pick("recover", spec.recover),
        on_nonfinite=reading.pick("on_nonfinite", "warn"),
        sync_each_batch=reading.pick("sync_each_batch"),
        checkpoint_weights=reading.pick("checkpoint_weights", "all"),
        tags=reading.pick("tags", ()),
        notes=reading.pick("notes", ""),
        **artifacts,
        shared_artifacts=reading.pick("shared_artifacts", False),
        spec_digest=digest_of_fields(fields),
        spec_fields=fields,
        warnings=tuple(errors.warnings),
        sources=dict(reading.sources),
    )


def _job(reading: Settings) -> TrainingJobSpec:
    """The part of the configuration that the trainer sees; absent fields keep the type's own defaults."""
    given = {f.name: reading.pick(f.name) for f in dataclasses.fields(TrainingJobSpec)}
    return TrainingJobSpec(**{name: value for name, value in given.items() if value is not None})


def dataset_of(reading: Settings) -> DatasetSpec | None:
    """The dataset with absolute paths; None where the job names no Parquet files."""
    dataset = reading.pick("dataset")
    if dataset is None and not reading.spec.inputs.dataset_parquet_refs:
        return None
    for name in (f.name for f in dataclasses.fields(DatasetSpec)):
        reading.pick(f"dataset.{name}")
    dataset = dataset or DatasetSpec()
    paths = tuple(
        path if has_scheme(path) else str(reading.absolute("dataset.parquet_paths", path))
        for path in dataset.parquet_paths
    )
    return dataclasses.replace(dataset, parquet_paths=paths)


def inputs_of(reading: Settings) -> InputsSpec:
    """The references to inputs; those that are paths are absolute."""
    inputs = reading.spec.inputs
    for name in (f.name for f in dataclasses.fields(InputsSpec)):
        reading.pick(f"inputs.{name}")

    def reference(name: str, text: str | None) -> str | None:
        return None if text is None else _reference(reading, f"inputs.{name}", text)

    return InputsSpec(
        base_model_ref=reference("base_model_ref", inputs.base_model_ref),
        dataset_parquet_refs=tuple(
            _reference(reading, "inputs.dataset_parquet_refs", text) for text in inputs.dataset_parquet_refs
        ),
        resume_checkpoint_ref=reference("resume_checkpoint_ref", inputs.resume_checkpoint_ref),
    )


def _reference(reading: Settings, name: str, text: str) -> str:
    """`text` as an absolute path if it is one, else as it is."""
    if "://" in text:
        return text
    path = reading.absolute(name, text)
    return str(path) if os.path.exists(path) or looks_like_path(text) else text


def _sample_prompts(reading: Settings) -> tuple[SampleRequest, ...]:
    """The sample requests with their seeds; a request without one uses ``sample_seed``."""
    seed = reading.pick("sample_seed")
    requests = reading.pick("sample_prompts", ())
    return tuple(
        dataclasses.replace(
            request,
            seed=seed if request.seed is None else request.seed,
            source_image=request.source_image and _reference(reading, "sample_prompts", request.source_image),
        )
        for request in requests
    )


def token_origins_of(reading: Settings) -> frozenset[str]:
    """Origins that may be sent the token: those of the upload URLs, of the file store, and those that were listed."""
    names = [*(f"uploads.{name}" for name in UPLOAD_URLS), "file_store_url"]
    return trusted_origins((reading.pick(name) for name in names), reading.pick("token_origins", ()))


def private_hosts_of(reading: Settings) -> tuple[str, ...] | None:
    """What the references of a job may reach in spite of a private address; None for everything.

    They are kept from private addresses where the run is orchestrated, or a list says which they may reach.
    """
    listed = reading.pick("private_hosts")
    if "*" in (listed or ()) or (listed is None and not reading.pick("orchestrated")):
        return None
    hub = urlsplit(reading.pick("file_store_url") or "").hostname
    return (*(listed or ()), *((hub,) if hub else ()))
