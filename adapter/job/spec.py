"""A job, declared once: every setting with its type, default, meaning and example.

`JobSpec` is what a job file may say; `Settings` adds what only the environment and ``--set`` may say, since whoever
writes a job file does not decide about the machine. What parses a job (`parsing`), the environment, ``--set``, the JSON
Schema that editors complete from, ``genlight run --help``, ``genlight doctor`` and the reference are all made from the
annotations and the texts below, by `keys`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from typing_extensions import override

from ..contract.types import TRAINER_API_VERSION
from ..plumbing.redaction import without_secrets
from ..plumbing.text import is_storable, is_utf8
from ..plumbing.urls import origin_of, url_fault

__all__ = [
    "LARGEST",
    "UPLOAD_URLS",
    "CheckpointsSpec",
    "DatasetSpec",
    "InputsSpec",
    "JobSpec",
    "ResumeSpec",
    "Rule",
    "SampleRequest",
    "Settings",
    "UploadUrls",
    "ValidateSpec",
]

LARGEST = 2**63 - 1
"""Of an integer: what Arrow, torch and JSON readers in other languages hold."""

INVALID, TIMEOUT, PATHS = "startup.invalid_job_spec", "startup.invalid_timeout", "startup.invalid_artifact_paths"


@dataclass(frozen=True)
class Rule:
    """A condition on a value beyond its type; stands in the annotation of a key, where msgspec passes over it."""

    expected: str
    """In words, for messages."""
    holds: Callable[[Any], bool] = lambda _: True
    secret: bool = False
    """Whether no message may show the value."""
    code: str = INVALID
    """The startup code of a value that does not hold."""
    way_out: str = ""
    relative: Literal["", "path", "reference"] = ""
    """How a relative path in it is made absolute: always (a URL stays as it is), or only where it can be a path."""


def _example(value: Any) -> Meta:
    """A value that the reference shows."""
    return Meta(examples=[value])


def _variable(name: str) -> Meta:
    """The environment variable that gives the setting."""
    return Meta(extra={"variable": name})


def _alias(name: str) -> Meta:
    """Another spelling of the key in a job file."""
    return Meta(extra={"alias": name})


def _group(heading: str) -> Meta:
    """Heading of the settings from this one on, in ``genlight run --help``."""
    return Meta(extra={"group": heading})


def _is_nonblank(text: str) -> bool:
    return bool(text.strip()) and is_storable(text)


def _is_path(text: str) -> bool:
    """Whether the system can encode it, whatever its bytes are, and it has no control characters."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return all(ord(character) >= 32 for character in text)


def _is_origin(text: str) -> bool:
    try:
        return bool(origin_of(text if "://" in text else f"https://{text}"))
    except ValueError:
        return False


_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?", re.IGNORECASE)


def _is_host(text: str) -> bool:
    """Whether `text` is a host name, an address, a network, or a star for all."""
    if text == "*" or _HOST_NAME.fullmatch(text):
        return True
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


_COMPARISONS = ("=", "==", "!=", "<", ">", "<=", ">=", "in", "not in")


def _are_filters(filters: list[Any]) -> bool:
    """Whether `filters` are conditions of which all hold, or lists of such."""
    lists = [filters] if filters and all(_is_condition(condition) for condition in filters) else filters
    return bool(lists) and all(
        isinstance(conditions, list) and bool(conditions) and all(map(_is_condition, conditions))
        for conditions in lists
    )


def _is_condition(condition: Any) -> bool:
    if not isinstance(condition, list) or len(condition) != 3:
        return False
    column, comparison, value = condition
    return isinstance(column, str) and comparison in _COMPARISONS and ("in" not in comparison or type(value) is list)


Text: TypeAlias = Annotated[str, Rule("a string without control characters", is_storable)]
NonBlank: TypeAlias = Annotated[str, Rule("a non-empty string", _is_nonblank)]
Prose: TypeAlias = Annotated[str, Rule("a string", is_utf8)]
ImportPath: TypeAlias = Annotated[
    str, Rule("a string without control characters", is_storable, code="startup.missing_trainer_import")
]
DataPath: TypeAlias = Annotated[str, Rule("a non-empty string", _is_nonblank, relative="path")]
Reference: TypeAlias = Annotated[str, Rule("a string without control characters", is_storable, relative="reference")]
FilePath: TypeAlias = Annotated[Path, Rule("a string without control characters", _is_path, relative="path")]
ArtifactPath: TypeAlias = Annotated[
    Path, Rule("a string without control characters", _is_path, relative="path", code=PATHS)
]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST)]
Minutes: TypeAlias = Annotated[
    float, Meta(ge=0), Rule("a number of minutes >= 0", lambda minutes: minutes < float("inf"))
]
Seconds: TypeAlias = Annotated[
    float,
    Meta(ge=0),
    Rule(
        "a number of seconds >= 0",
        lambda seconds: seconds < float("inf"),
        code=TIMEOUT,
        way_out="0 means no limit.",
    ),
]
Token: TypeAlias = Annotated[
    str,
    Rule(
        "a string of printable ASCII characters",
        lambda token: token.isascii() and is_storable(token),
        secret=True,
        code="startup.missing_capability_token",
    ),
]
Url: TypeAlias = Annotated[str, Rule("an http:// or https:// URL", lambda url: url_fault(url) is None)]
Target: TypeAlias = Annotated[
    str,
    Rule(
        "a URL such as hf://owner/name or s3://bucket/folder",
        lambda url: re.fullmatch(r"hf://[^/@]+/[^/@]+/?(@.*)?|(?!hf:)[^:/]+://.+", url) is not None,
    ),
]
Origin: TypeAlias = Annotated[str, Rule("origins such as https://hub.example.com, separated by commas", _is_origin)]
Host: TypeAlias = Annotated[str, Rule("host names, addresses or networks, separated by commas, or *", _is_host)]
Filters: TypeAlias = Annotated[
    list[Any],
    Rule(
        "a list of [column, operator, value], or of such lists",
        _are_filters,
        way_out=f"The operators are {', '.join(_COMPARISONS)}; the value of the last two is a list.",
    ),
]
_COLLATE = r"^(torch|[^:\s]+:[^:\s]+)$"
Collate: TypeAlias = Annotated[
    str,
    Meta(pattern=_COLLATE),
    Rule('"torch" or "module:function"', lambda name: re.fullmatch(_COLLATE, name) is not None),
]
_FUNCTION = r"^[^:\s]+:[^:\s]+$"
Function: TypeAlias = Annotated[
    str, Meta(pattern=_FUNCTION), Rule('"module:function"', lambda name: re.fullmatch(_FUNCTION, name) is not None)
]
Version: TypeAlias = Annotated[
    str, Rule(f'"{TRAINER_API_VERSION}"', lambda version: version in ("", TRAINER_API_VERSION))
]


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that belong together; its ``repr`` shows no secret and no credentials of URLs."""

    @override
    def __repr__(self) -> str:
        shown = without_secrets({name: getattr(self, name) for name in self.__struct_fields__})
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class DatasetSpec(Block, frozen=True, kw_only=True):
    """The Parquet files to train on, and how their rows become batches."""

    parquet_paths: Annotated[tuple[DataPath, ...], _example(["rows.parquet"])] = ()
    """Paths, folders, patterns or URLs of Parquet files."""
    batch_size: Positive = 32
    """Rows per batch, on each rank."""
    readahead: Count = 2
    """Decoded chunks kept ready; 0 decodes in the training thread."""
    columns: Annotated[tuple[NonBlank, ...], Meta(min_length=1), _example(["image", "label"])] | None = None
    """Columns to read; all by default."""
    filters: Annotated[Filters, _example([["label", "<", 5]])] | None = None
    """Rows to keep. All conditions of a list must hold; of a list of lists, any one list."""
    shuffle: bool = False
    """A different order in each epoch."""
    seed: Count = 0
    """Seed of the order, which depends only on this and the epoch; by default the job's `seed`."""
    epochs: Annotated[Positive, _example(3)] | None = None
    """Passes over the data; by default it repeats until `max_steps`."""
    drop_last: bool = False
    """Drop the rows at the end of an epoch that do not fill a step of all ranks."""
    shard: Literal["rows", "row_groups"] = "rows"
    """How ranks share the rows: `rows` (each step is split among them) or `row_groups` (each rank decodes its own
    part)."""
    shuffle_window: Positive = 65_536
    """Size of the window, in rows, within which rows are shuffled."""
    workers: Count = 0
    """Processes that decode and collate; 0 uses the training process."""
    pin_memory: bool | None = None
    """Hand out the tensors of `collate` in pinned memory, from which `.to(device, non_blocking=True)` does not wait; by
    default where there is an accelerator."""
    copy_ahead: bool = False
    """Hand out tensors on the accelerator, copied while the step before trains; needs `collate` `torch`, or
    `workers`."""
    collate: Annotated[Collate, _example("torch")] | None = None
    """Converts record batches: `torch` gives a dictionary of tensors, lists padded with zeros and their lengths under
    `<column>_lengths`; `module:function` is yours; by default the trainer gets the record batch."""


class InputsSpec(Block, frozen=True, kw_only=True):
    """Inputs to download before training. URLs may hold credentials and are never shown.

    Each key may also end in ``_url`` instead of ``_ref``, ``_urls`` instead of ``_refs``.
    """

    base_model_ref: Annotated[Reference, _alias("base_model_url"), _example("owner/name")] | None = None
    """A model, passed to the trainer in `ctx.model_handles`."""
    dataset_parquet_refs: Annotated[
        tuple[Annotated[NonBlank, Rule("a non-empty string", _is_nonblank, relative="reference")], ...],
        _alias("dataset_parquet_urls"),
    ] = ()
    """Parquet files to train on, instead of `dataset.parquet_paths`."""
    resume_checkpoint_ref: Annotated[Reference, _alias("resume_checkpoint_url")] | None = None
    """A checkpoint record to resume from; its files lie next to it."""


class UploadUrls(Block, frozen=True, kw_only=True):
    """Where results are uploaded; None means nowhere. URLs may hold credentials and are never shown."""

    metrics_url: Annotated[Url, _variable("TRAINER_UPLOAD_METRICS_URL")] | None = None
    """Gets a POST with the metrics at each cadence."""
    checkpoint_url: Annotated[Url, _variable("TRAINER_UPLOAD_CHECKPOINT_URL")] | None = None
    """Gets a POST for each durable checkpoint."""
    sample_url: Annotated[Url, _variable("TRAINER_UPLOAD_SAMPLE_URL")] | None = None
    """Gets a POST for each sample."""
    terminal_url: Annotated[Url, _variable("TRAINER_UPLOAD_TERMINAL_URL")] | None = None
    """Gets one POST when the run has ended."""
    targets: Annotated[tuple[Target, ...], _example(["hf://owner/name", "s3://bucket/folder"])] = ()
    """Further destinations for checkpoints and samples."""


UPLOAD_URLS = tuple(name for name in UploadUrls.__struct_fields__ if name.endswith("_url"))
"""Fields of `UploadUrls` that are endpoints, which get the token."""


class ValidateSpec(Block, frozen=True, kw_only=True):
    """When to call the trainer's own ``evaluate``."""

    every_n_steps: Annotated[Count, _example(100)]
    """Steps between evaluations."""
    critical: bool = False
    """Whether a failure of `evaluate` ends the run."""
    average: bool = False
    """Whether scores are averaged over the ranks; otherwise they are those of rank 0."""


class CheckpointsSpec(Block, frozen=True, kw_only=True):
    """When checkpoints are saved, which ones are kept, and what is in them."""

    every_n_steps: Annotated[Count, _example(1000)] = 0
    """Steps between checkpoints, as `checkpoint_every`; 0 saves only the final one."""
    every_minutes: Annotated[Minutes, _example(15)] = 0
    """Minutes between checkpoints; 0 means no such cadence."""
    keep_last: Count = 2
    """How many of the newest checkpoints are kept; 0 keeps all."""
    keep_best: Annotated[Count, _example(3)] = 1
    """How many of the best by `monitor` are kept besides."""
    monitor: Annotated[NonBlank, _example("eval/accuracy")] | None = None
    """The score or metric that tells which checkpoint is best."""
    mode: Literal["min", "max"] = "min"
    """Whether a low (`min`) or a high (`max`) value of `monitor` is better."""
    weights: Literal["all", "trained"] = "all"
    """Which weights a checkpoint holds. `all`: every weight; those that training does not change are written once and
    shared. `trained`: only those that training changes; a resume takes the others from the class and verifies them."""


class ResumeSpec(Block, frozen=True, kw_only=True):
    """What a resume does not take from the checkpoint."""

    keep: Annotated[tuple[NonBlank, ...], _example(["lr"])] = ()
    """Settings that stay as `configure` builds them: of optimizers (`lr`, `weight_decay`, …), `schedule` or `scaler`;
    a new rate scales a schedule that has begun. The `--reset` of `genlight run` gives one."""


class SampleRequest(Block, frozen=True, kw_only=True):
    """A sample to generate at every sample cadence. A plain string is short for its prompt."""

    name: Text = ""
    """Name of the sample's files; by default its index in the list."""
    task: Text = "t2i"
    """Kind of sample, passed to the generator."""
    prompt: Prose = ""
    """The prompt."""
    negative_prompt: Prose = ""
    """What the sample should not show."""
    instruction: Prose = ""
    """An instruction for edits."""
    source_image: Reference | None = None
    """Path of an image to start from."""
    seed: Count | None = None
    """Seed of this sample; `sample_seed` by default."""


class JobSpec(Block, frozen=True, kw_only=True):
    """A job as its file describes it."""

    run_id: Annotated[Text, _alias("request_id"), _group("the run"), _example("digits-1")]
    """Name of the run."""
    owner: Text = ""
    """Owner of the uploaded artifacts."""
    release_ref: Text = ""
    """Release of the trainer; passed to it as `ctx.job.release_ref`."""
    tags: Annotated[tuple[Text, ...], _example(["baseline"])] = ()
    """Tags for finding the run, stored in its events and checkpoint records."""
    notes: Annotated[Prose, _example("wider layers")] = ""
    """Notes on the run, stored in its events and checkpoint records."""
    trainer: Annotated[
        ImportPath, _variable("TRAINER_PLUGIN"), _group("what is trained"), _example("my_trainer:Trainer")
    ]
    """Import path of the trainer class; modules next to the job file are found."""
    trainer_api_version: Version = TRAINER_API_VERSION
    """Version of the trainer contract."""
    base_dir: Annotated[NonBlank, _example("..")] | None = None
    """Folder where relative paths of the job file start, and where modules and `runs` are; by default that of the
    file."""
    hyperparams: Annotated[dict[str, Any], _example({"lr": 0.001})] = msgspec.field(default_factory=dict)
    """Passed to the trainer as `ctx.job.hyperparams`."""
    max_steps: Annotated[Positive, _example(1000)]
    """Steps to train."""
    seed: (
        Annotated[Annotated[int, Meta(ge=0, le=2**32 - 1), Rule("an integer from 0 to 4294967295")], _example(1)] | None
    ) = None
    """Seed of torch, NumPy, Python's `random` and the order of the data, set before the class is built; by default none
    is set."""
    on_nonfinite: Literal["warn", "stop", "skip"] = "warn"
    """What to do when a loss, gradient or weight becomes nan or infinite: `warn` logs it once, with the step; `stop`
    ends the run, with exit code 3; `skip` skips the affected updates."""
    lightning: Annotated[
        dict[str, Any], _example({"accelerator": "gpu", "devices": 8, "strategy": "ddp", "precision": "bf16-mixed"})
    ] = msgspec.field(default_factory=dict)
    """Any argument of `lightning.pytorch.Trainer`."""
    callbacks: Annotated[dict[str, Any], _example({"SystemMonitor": False, "WatchHangs": {"floor_s": 60}})] = (
        msgspec.field(default_factory=dict)
    )
    """Changes to the standard callbacks, by class name: `false` leaves one out, an object gives it other arguments, and
    so another callback of genlight is added."""
    dataset: Annotated[DatasetSpec, _group("data and inputs")] | None = None
    """The Parquet files to train on, and how their rows become batches."""
    data: Annotated[Function, _example("my_data:batches")] | None = None
    """A function that returns the data instead: a dataset, a DataLoader, an iterable of batches, or a function that
    returns the next batch. It takes `ctx`, or nothing; modules next to the job file are found."""
    mock_batches: list[Any] | None = None
    """Raw batches, written in the job itself instead of a dataset; used for one pass."""
    inputs: InputsSpec = InputsSpec()
    """Inputs to download before training."""
    metric_every: Annotated[Count, _group("cadences and checkpoints")] = 10
    """Steps between metrics; 0 turns them off."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 saves only the final one."""
    checkpoints: CheckpointsSpec = CheckpointsSpec()
    """When checkpoints are saved, which ones are kept, and what is in them."""
    validate: ValidateSpec | None = None
    """When to call the trainer's own `evaluate`."""
    sample_every: Annotated[Count, _group("samples")] = 0
    """Steps between samples; 0 turns them off."""
    sample_prompts: Annotated[tuple[SampleRequest, ...], _example(["a cat"])] = ()
    """Samples to generate at each sample cadence."""
    sample_seed: Count | None = None
    """Seed for samples without one of their own."""
    resume_from_latest: Annotated[bool, _group("resume and stop")] = False
    """Whether to resume from the newest intact checkpoint."""
    resume_checkpoint_path: FilePath | None = None
    """A checkpoint record to resume from."""
    resume: ResumeSpec = ResumeSpec()
    """What a resume does not take from the checkpoint."""
    max_runtime_seconds: Annotated[Seconds, _variable("TRAINER_MAX_RUNTIME_SECONDS"), _example(3600)] = 0
    """Time limit from process start, including downloads; 0 means none."""
    cancel_file_path: Annotated[FilePath, _variable("TRAINER_CANCEL_FILE")] | None = None
    """A file that stops the run when it appears."""
    uploads: Annotated[UploadUrls, _group("where results go")] = UploadUrls()
    """Where results are uploaded."""
    capability_token: Annotated[Token, _variable("TRAINER_CAPABILITY_TOKEN")] | None = None
    """Bearer token; prefer `TRAINER_CAPABILITY_TOKEN` to a file."""
    orchestrated: Annotated[bool, _variable("TRAINER_ORCHESTRATED")] = False
    """Strict startup: a token is required."""


class Settings(JobSpec, frozen=True, kw_only=True):
    """All settings of a run: those of a job file, and those that only the environment and ``--set`` give."""

    artifacts_dir: Annotated[ArtifactPath, _variable("TRAINER_ARTIFACTS_DIR")] = Path()
    """Folder of the run: `runs/<run_id>` beside the job file, `/tmp/training` for a start from the environment."""
    checkpoints_dir: Annotated[ArtifactPath, _variable("TRAINER_CHECKPOINTS_DIR")] = Path()
    """Folder of checkpoints, `checkpoints` by default."""
    samples_dir: Annotated[ArtifactPath, _variable("TRAINER_SAMPLES_DIR")] = Path()
    """Folder of samples, `samples` by default."""
    metrics_dir: Annotated[ArtifactPath, _variable("TRAINER_METRICS_DIR")] = Path()
    """Folder of the event log, `metrics` by default."""
    events_path: Annotated[ArtifactPath, _variable("TRAINER_EVENTS_PATH")] = Path()
    """The event log, `events.jsonl` in the metrics folder by default."""
    shared_artifacts: Annotated[bool, _variable("TRAINER_SHARED_ARTIFACTS")] = False
    """Trust everybody who may write to these folders, as in a team's folder; otherwise a folder that other users own or
    may write to is refused."""
    file_store_url: Annotated[Url, _variable("TENSORHUB_URL")] | None = None
    """Base of the store for artifact bytes and `cozy:` references."""
    stop_grace_seconds: Annotated[Seconds, _variable("TRAINER_STOP_GRACE_SECONDS")] = 0
    """Time between a scheduler's stop signal and the end of the process; 0 means that it is not known."""
    upload_deadline_seconds: Annotated[Seconds, _variable("TRAINER_UPLOAD_DEADLINE_SECONDS")] = 60.0
    """How long the end of a run waits for uploads."""
    token_origins: Annotated[frozenset[Origin], _variable("TRAINER_TOKEN_ORIGINS")] = frozenset()
    """Further origins that may be sent the token."""
    private_hosts: Annotated[tuple[Host, ...], _variable("TRAINER_PRIVATE_HOSTS")] | None = None
    """Hosts, addresses and networks that references may reach in spite of a private address, or `*`. Without it an
    orchestrated run reaches none of them, any other run all."""
    canceled: Annotated[bool, _variable("TRAINER_CANCELLED")] = False
    """Whether the run was canceled before it started."""
