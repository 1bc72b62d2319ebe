"""One frozen `RunConfig` from the command line, the environment and the job spec.

Each setting is resolved on its own: ``--set`` first, then the environment, then the job spec, then the default. All
faults of all settings are raised as one `StartupContractError`. Nothing is created and nothing on the network is
asked here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .contract import TrainingJobSpec
from .environment import BY_SETTING, read_environment
from .faults import FaultList
from .job_spec import (
    NESTED_FIELDS,
    DatasetSpec,
    InputsSpec,
    JobSpec,
    SampleRequest,
    UploadUrls,
    parse_job_spec,
    read_job_spec,
)
from .overrides import Overrides, apply_overrides, parse_overrides
from .spec_digest import digest_of_fields, spec_fields
from .urls import origin_of

__all__ = ["DEFAULT_UPLOAD_DEADLINE_S", "RunConfig", "folder_name", "resolve_run_config"]

DEFAULT_UPLOAD_DEADLINE_S = 60.0
ENVIRONMENT_ARTIFACTS_DIR = "/tmp/training"  # noqa: S108 -- the contract's own default for containers
FILE_ARTIFACTS_DIR = "runs/{run_id}"
LONGEST_FOLDER_NAME = 120


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
    mock_batches: tuple[Any, ...] | None
    inputs: InputsSpec = field(repr=False)
    resume_from_latest: bool
    resume_checkpoint_path: Path | None
    sample_prompts: tuple[SampleRequest, ...]
    sample_seed: int | None
    token: str | None = field(repr=False)
    orchestrated: bool
    max_runtime_s: float | None
    """From process start, inputs included; None means no limit."""
    cancel_file: Path | None
    canceled: bool
    """Whether the run was cancelled before it started."""
    uploads: UploadUrls = field(repr=False)
    file_store_url: str | None = field(repr=False)
    """Base of the store for artifact bytes, and of the resolver of ``cozy:`` references."""
    upload_deadline_s: float
    token_origins: frozenset[str]
    """Origins that may be sent the token, such as ``https://hub.example.com:443``."""
    lightning: Mapping[str, Any] = field(repr=False)
    """Arguments of ``lightning.pytorch.Trainer``; their names are checked where Lightning is imported."""
    validate: Mapping[str, Any] | None
    artifacts_dir: Path
    checkpoints_dir: Path
    samples_dir: Path
    metrics_dir: Path
    events_path: Path
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
            name. None means ``runs/{run_id}`` for a spec given by path and ``/tmp/training`` for a pure environment.

    Raises:
        StartupContractError: With every fault, under the code of the first documented one.
    """
    faults = FaultList()
    reading = read_settings(spec_path, overrides, os.environ if environ is None else environ, faults)
    _require(reading, faults)
    template = artifacts_template(spec_path, default_artifacts_dir)
    config = _assemble(reading, template, faults) if not faults.faults else None
    error = faults.error(secrets=reading.secrets)
    if error is not None:
        raise error
    assert config is not None
    return config


def artifacts_template(spec_path: object, default: str | os.PathLike[str] | None) -> str:
    """Where artifacts go if no setting says so, with ``{run_id}`` for the run's folder name."""
    if default is not None:
        return os.fspath(default)
    return ENVIRONMENT_ARTIFACTS_DIR if spec_path is None else FILE_ARTIFACTS_DIR


@dataclass(frozen=True)
class Settings:
    """What each source says, before one of them wins."""

    spec: JobSpec
    environment: Mapping[str, Any]
    overrides: Overrides
    spec_path: Path | None
    readable: bool
    """Whether the file of the job spec held a JSON object."""
    given: frozenset[str]
    """Dotted names, two levels deep, that the job spec and the command line give."""
    secrets: tuple[str | None, ...] = field(default=(), repr=False)
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
        base = self.spec_dir if self.sources.get(name) == "job spec" else Path.cwd()
        return Path(os.path.normpath(base / os.path.expanduser(text)))

    @property
    def spec_dir(self) -> Path:
        """The folder of the job spec."""
        return Path.cwd() if self.spec_path is None else self.spec_path.parent


def read_settings(
    spec_path: str | os.PathLike[str] | None, overrides: Sequence[str], environ: Mapping[str, str], faults: FaultList
) -> Settings:
    """Read all sources and note their faults; never raises because of what they hold."""
    environment = read_environment(environ, faults)
    path = _spec_path(spec_path, environment, faults)
    raw = None if path is None else read_job_spec(path, faults)
    set_by_hand = parse_overrides(overrides, faults)
    merged = apply_overrides(raw or {}, set_by_hand, faults)
    spec = parse_job_spec(merged, faults)
    tokens = (merged.get("capability_token"), environ.get("TRAINER_CAPABILITY_TOKEN", "").strip())
    secrets = tuple(token for token in tokens if isinstance(token, str) and token)
    return Settings(spec, environment, set_by_hand, path, raw is not None, frozenset(_names(merged)), secrets)


def _names(raw: Mapping[str, Any]) -> Iterator[str]:
    for name, value in raw.items():
        yield {"request_id": "run_id"}.get(name, name)
        if name in NESTED_FIELDS and isinstance(value, Mapping):
            yield from (f"{name}.{inner.replace('_url', '_ref') if name == 'inputs' else inner}" for inner in value)


def _spec_path(given: str | os.PathLike[str] | None, environment: Mapping[str, Any], faults: FaultList) -> Path | None:
    text = environment.get("job_spec_path") if given is None else os.fspath(given)
    if not text:
        faults.add(
            "No job spec was given. Name its path as an argument or in `TRAINER_JOB_SPEC_PATH`.",
            code="startup.missing_job_spec_path",
        )
        return None
    return Path(os.path.abspath(os.path.expanduser(text)))


def _field(spec: JobSpec, name: str) -> Any:
    """The field of the spec behind a dotted setting name; empty containers count as not given."""
    value: Any = spec
    for part in name.split("."):
        value = getattr(value, part, None)
    return None if value in ((), {}) else value


def _require(reading: Settings, faults: FaultList) -> None:
    """Note what must be there and is not, and settings that exclude each other."""
    if reading.readable:
        for name, example in (("run_id", '"run_id": "my-run"'), ("max_steps", '"max_steps": 1000')):
            if getattr(reading.spec, name) is None and not faults.concern(name):
                faults.add(f"`{name}` is missing. Add {example} to the job spec.", name=name)
        if reading.pick("trainer") is None and not faults.concern("trainer"):
            faults.add(
                'No trainer is named. Add "trainer": "module:Class" to the job spec, or set `TRAINER_PLUGIN`.',
                code="startup.missing_trainer_import",
            )
    if reading.pick("orchestrated") and not reading.pick("capability_token") and not faults.concern("capability_token"):
        faults.add(
            "An orchestrated run needs a token. Set `TRAINER_CAPABILITY_TOKEN`, or `capability_token` in the job spec.",
            code="startup.missing_capability_token",
        )
    _refuse_contradictions(reading.spec, faults)


def _refuse_contradictions(spec: JobSpec, faults: FaultList) -> None:
    paths = bool(spec.dataset and spec.dataset.parquet_paths)
    refs = bool(spec.inputs.dataset_parquet_refs)
    if paths and refs:
        faults.add("`dataset.parquet_paths` and `inputs.dataset_parquet_refs` both name the data. Give one of them.")
    if spec.mock_batches is not None and (paths or refs):
        faults.add("`mock_batches` and Parquet files are both given. Leave one of them out.")
    if spec.dataset and not paths and not refs and spec.mock_batches is None:
        faults.add("`dataset` names no files. Add `dataset.parquet_paths` or `inputs.dataset_parquet_refs`.")
    if spec.resume_checkpoint_path and spec.inputs.resume_checkpoint_ref:
        faults.add("`resume_checkpoint_path` and `inputs.resume_checkpoint_ref` are both given. Give one of them.")


def _assemble(reading: Settings, artifacts_template: str, faults: FaultList) -> RunConfig:
    spec = reading.spec
    job = _job(reading)
    artifacts = artifact_paths(reading, artifacts_template, job.run_id)
    dataset, inputs = _dataset(reading), _inputs(reading)
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
    uploads = UploadUrls(**{f.name: reading.pick(f"uploads.{f.name}") for f in dataclasses.fields(UploadUrls)})
    file_store_url = reading.pick("file_store_url")
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
        orchestrated=reading.pick("orchestrated", False),
        max_runtime_s=reading.pick("max_runtime_seconds") or None,
        cancel_file=reading.path("cancel_file_path"),
        canceled=reading.pick("canceled", False),
        uploads=uploads,
        file_store_url=file_store_url,
        upload_deadline_s=reading.pick("upload_deadline_seconds", DEFAULT_UPLOAD_DEADLINE_S),
        token_origins=_token_origins(uploads, file_store_url, reading.pick("token_origins", ())),
        lightning=reading.pick("lightning", {}),
        validate=reading.pick("validate", spec.validate),
        **artifacts,
        spec_digest=digest_of_fields(fields),
        spec_fields=fields,
        warnings=tuple(faults.warnings),
        sources=dict(reading.sources),
    )


def _job(reading: Settings) -> TrainingJobSpec:
    """The part of the configuration that the trainer sees; absent fields keep the type's own defaults."""
    given = {f.name: reading.pick(f.name) for f in dataclasses.fields(TrainingJobSpec)}
    return TrainingJobSpec(**{name: value for name, value in given.items() if value is not None})


def _dataset(reading: Settings) -> DatasetSpec | None:
    dataset = reading.pick("dataset")
    if dataset is None and not reading.spec.inputs.dataset_parquet_refs:
        return None
    for name in (f.name for f in dataclasses.fields(DatasetSpec)):
        reading.pick(f"dataset.{name}")
    dataset = dataset or DatasetSpec()
    paths = tuple(str(reading.absolute("dataset.parquet_paths", path)) for path in dataset.parquet_paths)
    return dataclasses.replace(dataset, parquet_paths=paths)


def _inputs(reading: Settings) -> InputsSpec:
    """The references; one that is a relative path of an existing file or folder becomes absolute."""
    for name in (f.name for f in dataclasses.fields(InputsSpec)):
        reading.pick(f"inputs.{name}")
    inputs = reading.spec.inputs
    return InputsSpec(
        base_model_ref=_local_or_same(reading, "inputs.base_model_ref", inputs.base_model_ref),
        dataset_parquet_refs=tuple(
            _local_or_same(reading, "inputs.dataset_parquet_refs", ref) or ref for ref in inputs.dataset_parquet_refs
        ),
        resume_checkpoint_ref=_local_or_same(reading, "inputs.resume_checkpoint_ref", inputs.resume_checkpoint_ref),
    )


def _local_or_same(reading: Settings, name: str, reference: str | None) -> str | None:
    if reference is None or "://" in reference:
        return reference
    path = reading.absolute(name, reference)
    return str(path) if os.path.exists(path) else reference


def _sample_prompts(reading: Settings) -> tuple[SampleRequest, ...]:
    """The sample requests with their seeds; a request without one uses ``sample_seed``."""
    seed = reading.pick("sample_seed")
    requests = reading.pick("sample_prompts", ())
    return tuple(
        dataclasses.replace(
            request,
            seed=seed if request.seed is None else request.seed,
            source_image=_local_or_same(reading, "sample_prompts", request.source_image),
        )
        for request in requests
    )


def _token_origins(uploads: UploadUrls, file_store_url: str | None, further: Sequence[str]) -> frozenset[str]:
    urls = [*dataclasses.astuple(uploads), file_store_url]
    return frozenset([*(origin_of(url) for url in urls if url), *further])


def folder_name(run_id: str) -> str:
    """A run's id as the name of one folder: what a path would interpret is percent-encoded."""
    name = quote(run_id, safe="")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    if len(name) <= LONGEST_FOLDER_NAME:
        return name
    return f"{name[:LONGEST_FOLDER_NAME]}~{hashlib.sha256(run_id.encode()).hexdigest()[:12]}"


def artifact_paths(reading: Settings, template: str, run_id: str) -> dict[str, Path]:
    """Where artifacts go, by the name of the `RunConfig` field."""
    default = Path(os.path.abspath(template.replace("{run_id}", folder_name(run_id))))
    root = reading.path("artifacts_dir") or default
    paths = {"artifacts_dir": root}
    for name in ("checkpoints", "samples", "metrics"):
        paths[f"{name}_dir"] = reading.path(f"{name}_dir") or root / name
    paths["events_path"] = reading.path("events_path") or paths["metrics_dir"] / "events.jsonl"
    return paths
