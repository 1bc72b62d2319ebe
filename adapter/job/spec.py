"""A job, declared once: every setting with its type, default, meaning and example.

`JobSpec` has the keys of a job file. `Settings` adds those that only the environment and ``--set`` may give, because
the author of a job file does not decide about the machine. The reader of a job (`sources`), the JSON Schema for
editors, ``genlight doctor`` and the reference are all derived from the annotations and texts below, by `keys_of`.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ...callbacks.checkpoint.budget import DURATION
from ...reporters.uploads.config import CapabilityToken, Deadline, FileStore, TokenOrigins, UploadUrls
from ..contract.types import TRAINER_API_VERSION
from ..feed.options import FeedOptions
from ..plumbing.settings import (
    LINE,
    NONBLANK,
    Block,
    Count,
    Key,
    NonBlank,
    Positive,
    Rule,
    Seconds,
    alias,
    example,
    is_read,
    keys_of,
    shown,
    variable,
)
from ..plumbing.text import is_storable, is_utf8

_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?", re.IGNORECASE)


def _is_path(text: str) -> bool:
    """Whether the file system can encode `text` as a path, and it has no control characters."""
    return is_read(os.fsencode, text) and all(ord(character) >= 32 for character in text)


def _is_host(text: str) -> bool:
    """Whether `text` is a host name, an address, a network, or a star for all."""
    is_name = text == "*" or _HOST_NAME.fullmatch(text) is not None
    return is_name or is_read(partial(ipaddress.ip_network, strict=False), text)


_PATH = Rule("a string without control characters", _is_path, relative="path")

Text: TypeAlias = Annotated[str, LINE]
Prose: TypeAlias = Annotated[str, Rule("a string", is_utf8)]
ImportPath: TypeAlias = Annotated[str, replace(LINE, code="startup.missing_trainer_import")]
DataPath: TypeAlias = Annotated[str, replace(NONBLANK, relative="path")]
Reference: TypeAlias = Annotated[str, replace(LINE, relative="reference")]
NonBlankReference: TypeAlias = Annotated[str, replace(NONBLANK, relative="reference")]
FilePath: TypeAlias = Annotated[Path, _PATH]
ArtifactPath: TypeAlias = Annotated[Path, replace(_PATH, code="startup.invalid_artifact_paths")]
Minutes: TypeAlias = Annotated[float, Meta(ge=0), Rule("a number of minutes >= 0", math.isfinite)]
Price: TypeAlias = Annotated[float, Meta(ge=0), Rule("a number >= 0", math.isfinite)]
Duration: TypeAlias = Annotated[str, Meta(pattern=rf"^{DURATION}$"), Rule('a time such as "60s", "5min" or "1h"')]
Share: TypeAlias = Annotated[float, Meta(gt=0, lt=1), Rule("a share of the time between 0 and 1")]
Host: TypeAlias = Annotated[str, Rule("host names, addresses or networks, separated by commas, or *", _is_host)]
Collate: TypeAlias = Annotated[
    str, Meta(pattern=r"^(torch|[^:\s]+:[^:\s]+)$"), Rule('"torch" or "module:function"', is_storable)
]
Function: TypeAlias = Annotated[str, Meta(pattern=r"^[^:\s]+:[^:\s]+$"), Rule('"module:function"', is_storable)]
Version: TypeAlias = Annotated[
    str, Rule(f'"{TRAINER_API_VERSION}"', lambda version: version in ("", TRAINER_API_VERSION))
]


@dataclass(kw_only=True, repr=False)
class DatasetSpec(FeedOptions):
    """The Parquet files to train on, and how their rows become batches."""

    parquet_paths: Annotated[tuple[DataPath, ...], example(["rows.parquet"])] = ()
    """Paths, folders, patterns or URLs of Parquet files."""
    collate: Annotated[Collate, example("torch")] | None = None  # a job file can only name a function
    __repr__ = shown


class InputsSpec(Block, frozen=True, kw_only=True):
    """Inputs to download before training. URLs may hold credentials and are never shown.

    Each key may also end in ``_url`` instead of ``_ref``, ``_urls`` instead of ``_refs``.
    """

    base_model_ref: Annotated[Reference, alias("base_model_url"), example("owner/name")] | None = None
    """A model, passed to the trainer in `ctx.model_handles`."""
    dataset_parquet_refs: Annotated[tuple[NonBlankReference, ...], alias("dataset_parquet_urls")] = ()
    """Parquet files to train on, instead of `dataset.parquet_paths`."""
    resume_checkpoint_ref: Annotated[Reference, alias("resume_checkpoint_url")] | None = None
    """A checkpoint record to resume from; its files lie next to it."""


class ValidateSpec(Block, frozen=True, kw_only=True):
    """When to call the trainer's own ``evaluate``."""

    every_n_steps: Annotated[Count, example(100)]
    """Steps between evaluations."""
    critical: bool = False
    """Whether a failure of `evaluate` ends the run."""
    average: bool = False
    """Whether scores are averaged over the ranks; otherwise rank 0's scores are used."""


class CheckpointsSpec(Block, frozen=True, kw_only=True):
    """Cadence, retention and content of checkpoints."""

    every_n_steps: Annotated[Count, example(1000)] = 0
    """Steps between checkpoints; 0 saves only the final one."""
    every_minutes: Annotated[Minutes, example(15)] = 0
    """Minutes between checkpoints; 0 means no such cadence."""
    memory_every_n_steps: Annotated[Count, example(10)] = 0
    """Steps between checkpoints in `/dev/shm`, the memory of the node, of which only the newest is kept; 0 saves none
    there. They outlive a killed process, but not the node, and are not uploaded."""
    peer_copies: bool = False
    """Whether, on several nodes, each checkpoint in memory is also sent from node to node, so that it outlives the loss
    of all nodes but one."""
    lose_at_most: Annotated[Duration, example("60s")] | None = None
    """Instead of a cadence: how much training a crash may cost. The time between checkpoints follows from how long they
    stall training and how long they take until they are durable."""
    pay_at_most: Annotated[Share, example(0.02)] | None = None
    """With `lose_at_most` or instead of it: the largest share of the time in which saves stall training."""
    keep_last: Count = 2
    """How many of the newest checkpoints are kept; 0 keeps all."""
    keep_best: Annotated[Count, example(3)] = 1
    """How many of the best checkpoints, by `monitor`, are kept in addition."""
    monitor: Annotated[NonBlank, example("eval/accuracy")] | None = None
    """The score or metric that decides which checkpoint is best."""
    mode: Literal["min", "max"] = "min"
    """Whether a low (`min`) or a high (`max`) value of `monitor` is better."""
    copy_while_training: bool = False
    """Whether a save copies large tensors that lie in host memory while the next forward and backward pass run; the
    next update of an optimizer waits for the copy. Code must then not write to a tensor by other means than torch, for
    example through its `data_ptr()`."""
    weights: Literal["all", "trained"] = "all"
    """The weights that a checkpoint holds. `all`: every weight; weights that training does not change are written once
    and shared. `trained`: only weights that training changes; a resume takes the others from the class and verifies
    them."""


class ResumeSpec(Block, frozen=True, kw_only=True):
    """How a run resumes: what it does not take from the checkpoint, and how it proves that it repeats its steps."""

    keep: Annotated[tuple[NonBlank, ...], example(["lr"])] = ()
    """Settings that a resume takes from `configure` instead of the checkpoint: those of optimizers (`lr`,
    `weight_decay`, …), `schedule` or `scaler`. A new rate also scales a schedule that has begun. `genlight run --reset`
    replaces this list."""
    on_difference: Literal["warn", "stop"] = "warn"
    """The action when a step that was repeated after a restart differs from its first time: `warn` logs what differs;
    `stop` also ends the run, with exit code 1."""
    overlap: bool = False
    """Start from the checkpoint before the newest one, repeat the steps up to it, compare weights, optimizers, random
    states and positions with it, and continue."""


class SampleRequest(Block, frozen=True, kw_only=True):
    """A sample to generate at every sample cadence. A plain string is short for its prompt.

    Absent fields have the defaults of `WriteSamples`.
    """

    name: Text | None = None
    """Name of the sample's files; by default its index in the list."""
    task: Text | None = None
    """Kind of sample, passed to the generator; `t2i` by default."""
    prompt: Prose | None = None
    """The prompt."""
    negative_prompt: Prose | None = None
    """The negative prompt: content that the sample should not show."""
    instruction: Prose | None = None
    """An instruction for edits."""
    source_image: Reference | None = None
    """Path of an image to start from."""
    seed: Count | None = None
    """Seed of this sample; `sample_seed` by default."""


class JobSpec(Block, frozen=True, kw_only=True):
    """A job as its file describes it."""

    run_id: Annotated[Text, alias("request_id"), example("digits-1")]
    """Name of the run."""
    owner: Text = ""
    """Owner of the uploaded artifacts."""
    release_ref: Text = ""
    """Release of the trainer; passed to it as `ctx.job.release_ref`."""
    tags: Annotated[tuple[Text, ...], example(["baseline"])] = ()
    """Tags for finding the run, stored in its events and checkpoint records."""
    notes: Annotated[Prose, example("wider layers")] = ""
    """Notes on the run, stored in its events and checkpoint records."""
    price_per_device_hour: Annotated[Price, example(2.5)] | None = None
    """Price of one device for one hour, in any currency; listings and pages then show what the run has cost."""
    trainer: Annotated[ImportPath, variable("TRAINER_PLUGIN"), example("my_trainer:Trainer")]
    """Import path of the trainer class; modules next to the job file are found."""
    trainer_api_version: Version = TRAINER_API_VERSION
    """Version of the trainer contract."""
    base_dir: Annotated[NonBlank, example("..")] | None = None
    """Folder that relative paths of the job file start from and that holds modules and `runs`; by default the folder
    of the file."""
    hyperparams: Annotated[dict[str, Any], example({"lr": 0.001})] = msgspec.field(default_factory=dict)
    """Passed to the trainer as `ctx.job.hyperparams`."""
    max_steps: Annotated[Positive, example(1000)]
    """Steps to train."""
    seed: (
        Annotated[Annotated[int, Meta(ge=0, le=2**32 - 1), Rule("an integer from 0 to 4294967295")], example(1)] | None
    ) = None
    """Seed of torch, NumPy, Python's `random` and the order of the data, set before the class is built; by default none
    is set."""
    on_nonfinite: Literal["warn", "stop", "skip"] = "warn"
    """The action when a loss, gradient or weight becomes nan or infinite: `warn` logs it once, with the step; `stop`
    ends the run, with exit code 3; `skip` skips the affected updates."""
    lightning: Annotated[
        dict[str, Any], example({"accelerator": "gpu", "devices": 8, "strategy": "ddp", "precision": "bf16-mixed"})
    ] = msgspec.field(default_factory=dict)
    """Any argument of `lightning.pytorch.Trainer`."""
    callbacks: Annotated[dict[str, Any], example({"SystemMonitor": False, "WatchHangs": {"floor_s": 60}})] = (
        msgspec.field(default_factory=dict)
    )
    """Changes to the standard callbacks, by class name: `false` removes one; an object sets its arguments, or adds
    another callback of genlight."""
    dataset: DatasetSpec | None = None
    """The Parquet files to train on, and how their rows become batches."""
    data: Annotated[Function, example("my_data:batches")] | None = None
    """A function that returns the data instead: a dataset, a DataLoader, an iterable of batches, or a function that
    returns the next batch. It takes `ctx`, or nothing; modules next to the job file are found."""
    mock_batches: list[Any] | None = None
    """Raw batches, written in the job itself instead of a dataset; used for one pass."""
    inputs: InputsSpec = InputsSpec()
    """Inputs to download before training."""
    metric_every: Count = 10
    """Steps between metrics; 0 turns them off."""
    checkpoint_every: Count = 0
    """Name of `checkpoints.every_n_steps` in the older contract; give one of the two."""
    checkpoints: CheckpointsSpec = CheckpointsSpec()
    """Cadence, retention and content of checkpoints."""
    validate: ValidateSpec | None = None
    """When to call the trainer's own `evaluate`."""
    sample_every: Count = 0
    """Steps between samples; 0 turns them off."""
    sample_prompts: Annotated[
        tuple[Annotated[SampleRequest, Rule("a string or an object")], ...], example(["a cat"])
    ] = ()
    """Samples to generate at each sample cadence."""
    sample_seed: Count | None = None
    """Seed for samples that have none."""
    resume_from_latest: bool = False
    """Whether to resume from the newest intact checkpoint."""
    resume_checkpoint_path: FilePath | None = None
    """A checkpoint record to resume from."""
    resume: ResumeSpec = ResumeSpec()
    """How a run resumes: what it does not take from the checkpoint, and how it proves that it repeats its steps."""
    max_runtime_seconds: Annotated[Seconds, variable("TRAINER_MAX_RUNTIME_SECONDS"), example(3600)] = 0
    """Time limit from process start, including downloads; 0 means none."""
    cancel_file_path: Annotated[FilePath, variable("TRAINER_CANCEL_FILE")] | None = None
    """A file that stops the run once it exists, unless it holds a word that means no (0 false f no n off)."""
    uploads: UploadUrls = UploadUrls()
    """Destinations of results."""
    capability_token: CapabilityToken | None = None
    """Bearer token; prefer `TRAINER_CAPABILITY_TOKEN` to a file."""
    orchestrated: Annotated[bool, variable("TRAINER_ORCHESTRATED")] = False
    """Whether an orchestrator starts the run: then a token is required, `private_hosts` allows none by default, and a
    completed run that is started again succeeds."""


class Settings(JobSpec, frozen=True, kw_only=True):
    """All settings of a run: the keys of a job file, and those that only the environment and ``--set`` can give."""

    artifacts_dir: Annotated[ArtifactPath, variable("TRAINER_ARTIFACTS_DIR")] = Path()
    """Folder of the run: `runs/<run_id>` next to the job file, `/tmp/training` for a start from the environment."""
    checkpoints_dir: Annotated[ArtifactPath, variable("TRAINER_CHECKPOINTS_DIR")] = Path()
    """Folder of checkpoints, `checkpoints` by default."""
    samples_dir: Annotated[ArtifactPath, variable("TRAINER_SAMPLES_DIR")] = Path()
    """Folder of samples, `samples` by default."""
    metrics_dir: Annotated[ArtifactPath, variable("TRAINER_METRICS_DIR")] = Path()
    """Folder of the event log, `metrics` by default."""
    events_path: Annotated[ArtifactPath, variable("TRAINER_EVENTS_PATH")] = Path()
    """The event log, `events.jsonl` in the metrics folder by default."""
    shared_artifacts: Annotated[bool, variable("TRAINER_SHARED_ARTIFACTS")] = False
    """Trust everybody who may write to these folders, as in a team's folder; otherwise a folder that other users own or
    may write to is refused."""
    file_store_url: FileStore | None = None
    """Base of the store for artifact bytes and `cozy:` references."""
    stop_grace_seconds: Annotated[Seconds, variable("TRAINER_STOP_GRACE_SECONDS")] = 0
    """Time between a scheduler's stop signal and the end of the process; 0 means that it is not known."""
    upload_deadline_seconds: Deadline = 60.0
    """How long the end of a run waits for uploads."""
    token_origins: TokenOrigins = frozenset()
    """Further origins to which the token may be sent."""
    private_hosts: Annotated[tuple[Host, ...], variable("TRAINER_PRIVATE_HOSTS")] | None = None
    """Hosts, addresses and networks that references may reach in spite of a private address, or `*` for all. By default
    an orchestrated run reaches none, any other run all."""
    canceled: Annotated[bool, variable("TRAINER_CANCELLED")] = False
    """Whether the run was canceled before it started."""


def key_at(path: tuple[str, ...]) -> Key | None:
    """Return the key at `path`, whose first part is a setting, or None if there is none."""
    return keys_at(path[:-1]).get(path[-1]) if path else None


def keys_at(path: tuple[str, ...]) -> Mapping[str, Key]:
    """Return the keys of the block at `path`; the root holds all settings, and a key that is no block has none."""
    if not path:
        return keys_of(Settings)
    key = key_at(path)
    return keys_of(key.block) if key is not None and key.block is not None else {}


def all_keys() -> Iterator[tuple[str, Key]]:
    """Yield every setting with its dotted name; a block is followed by its keys."""
    for name, key in keys_of(Settings).items():
        yield name, key
        if key.block is not None:
            yield from ((f"{name}.{inner}", each) for inner, each in keys_of(key.block).items())
