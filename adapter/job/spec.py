"""A job, declared once: every setting with its type, default, meaning and example.

`JobSpec` is what a job file may say; `Settings` adds what only the environment and ``--set`` may say, since whoever
writes a job file does not decide about the machine. What parses a job (`parsing`), the environment, ``--set``, the JSON
Schema that editors complete from, ``genlight run --help``, ``genlight doctor`` and the reference are all made from the
annotations below, by `keys`.
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

from ...callbacks.health.faults import FaultKind
from ...callbacks.health.ladder import Rung
from ..contract.types import TRAINER_API_VERSION
from ..plumbing.redaction import without_secrets
from ..plumbing.text import is_storable, is_utf8
from ..plumbing.urls import origin_of, url_fault

__all__ = [
    "LARGEST",
    "UPLOAD_URLS",
    "About",
    "CheckpointsSpec",
    "DatasetSpec",
    "InputsSpec",
    "JobSpec",
    "RecoverSpec",
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
    """What a value must be beyond its type."""

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


@dataclass(frozen=True)
class About:
    """What a setting has besides its type and meaning."""

    variable: str = ""
    """The environment variable that gives it."""
    alias: str = ""
    """Another spelling of its name in a job file."""
    group: str = ""
    """Heading of the settings from this one on, in ``genlight run --help``."""


def _about(meaning: str, *examples: Any, variable: str = "", alias: str = "", group: str = "") -> Meta:
    return Meta(description=meaning, examples=list(examples) or None, extra={"about": About(variable, alias, group)})


def _rule(
    expected: str,
    holds: Callable[[Any], bool] = lambda _: True,
    *,
    secret: bool = False,
    code: str = INVALID,
    way_out: str = "",
    relative: Literal["", "path", "reference"] = "",
) -> Meta:
    return Meta(extra={"rule": Rule(expected, holds, secret, code, way_out, relative)})


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


Text: TypeAlias = Annotated[str, _rule("a string without control characters", is_storable)]
NonBlank: TypeAlias = Annotated[str, _rule("a non-empty string", _is_nonblank)]
Prose: TypeAlias = Annotated[str, _rule("a string", is_utf8)]
ImportPath: TypeAlias = Annotated[
    str, _rule("a string without control characters", is_storable, code="startup.missing_trainer_import")
]
DataPath: TypeAlias = Annotated[str, _rule("a non-empty string", _is_nonblank, relative="path")]
Reference: TypeAlias = Annotated[str, _rule("a string without control characters", is_storable, relative="reference")]
FilePath: TypeAlias = Annotated[Path, _rule("a string without control characters", _is_path, relative="path")]
ArtifactPath: TypeAlias = Annotated[
    Path, _rule("a string without control characters", _is_path, relative="path", code=PATHS)
]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST)]
Above: TypeAlias = Annotated[float, Meta(gt=0), _rule("a number > 0", lambda number: number < float("inf"))]
Share: TypeAlias = Annotated[float, Meta(gt=0, lt=1), _rule("a number between 0 and 1")]
Minutes: TypeAlias = Annotated[
    float, Meta(ge=0), _rule("a number of minutes >= 0", lambda minutes: minutes < float("inf"))
]
Seconds: TypeAlias = Annotated[
    float,
    Meta(ge=0),
    _rule(
        "a number of seconds >= 0",
        lambda seconds: seconds < float("inf"),
        code=TIMEOUT,
        way_out="0 means no limit.",
    ),
]
Token: TypeAlias = Annotated[
    str,
    _rule(
        "a string of printable ASCII characters",
        lambda token: token.isascii() and is_storable(token),
        secret=True,
        code="startup.missing_capability_token",
    ),
]
Url: TypeAlias = Annotated[str, _rule("an http:// or https:// URL", lambda url: url_fault(url) is None)]
Target: TypeAlias = Annotated[
    str,
    _rule(
        "a URL such as hf://owner/name or s3://bucket/folder",
        lambda url: re.fullmatch(r"hf://[^/@]+/[^/@]+/?(@.*)?|(?!hf:)[^:/]+://.+", url) is not None,
    ),
]
Origin: TypeAlias = Annotated[str, _rule("origins such as https://hub.example.com, separated by commas", _is_origin)]
Host: TypeAlias = Annotated[str, _rule("host names, addresses or networks, separated by commas, or *", _is_host)]
Filters: TypeAlias = Annotated[
    list[Any],
    _rule(
        "a list of [column, operator, value], or of such lists",
        _are_filters,
        way_out=f"The operators are {', '.join(_COMPARISONS)}; the value of the last two is a list.",
    ),
]
_COLLATE = r"^(torch|[^:\s]+:[^:\s]+)$"
Collate: TypeAlias = Annotated[
    str,
    Meta(pattern=_COLLATE),
    _rule('"torch" or "module:function"', lambda name: re.fullmatch(_COLLATE, name) is not None),
]
Version: TypeAlias = Annotated[
    str, _rule(f'"{TRAINER_API_VERSION}"', lambda version: version in ("", TRAINER_API_VERSION))
]
RungName: TypeAlias = Rung
FaultName: TypeAlias = FaultKind


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that belong together; its ``repr`` shows no secret and no credentials of URLs."""

    @override
    def __repr__(self) -> str:
        shown = without_secrets({name: getattr(self, name) for name in self.__struct_fields__})
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class DatasetSpec(Block, frozen=True, kw_only=True):
    """The Parquet files to train on, and how their rows become batches."""

    parquet_paths: Annotated[
        tuple[DataPath, ...], _about("Paths, folders, patterns or URLs of Parquet files.", ["rows.parquet"])
    ] = ()
    batch_size: Annotated[Positive, _about("Rows per batch, on each rank.")] = 32
    readahead: Annotated[Count, _about("Decoded chunks kept ready; 0 decodes in the training thread.")] = 2
    columns: (
        Annotated[
            tuple[NonBlank, ...],
            Meta(min_length=1),
            _about("Columns to read; all by default.", ["image", "label"]),
        ]
        | None
    ) = None
    filters: (
        Annotated[
            Filters,
            _about(
                "Rows to keep. All conditions of a list must hold; of a list of lists, any one list.",
                [["label", "<", 5]],
            ),
        ]
        | None
    ) = None
    shuffle: Annotated[bool, _about("A different order in each epoch.")] = False
    seed: Annotated[
        Count, _about("Seed of the order, which depends only on this and the epoch; by default the job's `seed`.")
    ] = 0
    epochs: Annotated[Positive, _about("Passes over the data; by default it repeats until `max_steps`.", 3)] | None = (
        None
    )
    drop_last: Annotated[bool, _about("Drop the rows at the end of an epoch that do not fill a step of all ranks.")] = (
        False
    )
    shard: Annotated[
        Literal["rows", "row_groups"],
        _about(
            "How ranks share the rows: `rows` (each step is split among them) or `row_groups` (each rank decodes its "
            "own part)."
        ),
    ] = "rows"
    shuffle_window: Annotated[Positive, _about("Size of the window, in rows, within which rows are shuffled.")] = 65_536
    workers: Annotated[Count, _about("Processes that decode and collate; 0 uses the training process.")] = 0
    collate: (
        Annotated[
            Collate,
            _about(
                "Converts record batches: `torch` gives a dictionary of tensors, `module:function` is yours; by "
                "default the trainer gets the record batch.",
                "torch",
            ),
        ]
        | None
    ) = None


class InputsSpec(Block, frozen=True, kw_only=True):
    """Inputs to download before training. URLs may hold credentials and are never shown.

    Each key may also end in ``_url`` instead of ``_ref``, ``_urls`` instead of ``_refs``.
    """

    base_model_ref: (
        Annotated[
            Reference,
            _about("A model, passed to the trainer in `ctx.model_handles`.", "owner/name", alias="base_model_url"),
        ]
        | None
    ) = None
    dataset_parquet_refs: Annotated[
        tuple[Annotated[NonBlank, _rule("a non-empty string", _is_nonblank, relative="reference")], ...],
        _about("Parquet files to train on, instead of `dataset.parquet_paths`.", alias="dataset_parquet_urls"),
    ] = ()
    resume_checkpoint_ref: (
        Annotated[
            Reference,
            _about("A checkpoint record to resume from; its files lie next to it.", alias="resume_checkpoint_url"),
        ]
        | None
    ) = None


class UploadUrls(Block, frozen=True, kw_only=True):
    """Where results are uploaded; None means nowhere. URLs may hold credentials and are never shown."""

    metrics_url: (
        Annotated[Url, _about("Gets a POST with the metrics at each cadence.", variable="TRAINER_UPLOAD_METRICS_URL")]
        | None
    ) = None
    checkpoint_url: (
        Annotated[Url, _about("Gets a POST for each durable checkpoint.", variable="TRAINER_UPLOAD_CHECKPOINT_URL")]
        | None
    ) = None
    sample_url: Annotated[Url, _about("Gets a POST for each sample.", variable="TRAINER_UPLOAD_SAMPLE_URL")] | None = (
        None
    )
    terminal_url: (
        Annotated[Url, _about("Gets one POST when the run has ended.", variable="TRAINER_UPLOAD_TERMINAL_URL")] | None
    ) = None
    targets: Annotated[
        tuple[Target, ...],
        _about("Further destinations for checkpoints and samples.", ["hf://owner/name", "s3://bucket/folder"]),
    ] = ()


UPLOAD_URLS = tuple(name for name in UploadUrls.__struct_fields__ if name.endswith("_url"))
"""Fields of `UploadUrls` that are endpoints, which get the token."""


class ValidateSpec(Block, frozen=True, kw_only=True):
    """When to call the trainer's own ``evaluate``."""

    every_n_steps: Annotated[Count, _about("Steps between evaluations.", 100)]
    critical: Annotated[bool, _about("Whether a failure of `evaluate` ends the run.")] = False
    average: Annotated[
        bool, _about("Whether scores are averaged over the ranks; otherwise they are those of rank 0.")
    ] = False


class CheckpointsSpec(Block, frozen=True, kw_only=True):
    """When checkpoints are saved, which ones are kept, and what is in them."""

    every_n_steps: Annotated[
        Count, _about("Steps between checkpoints, as `checkpoint_every`; 0 saves only the final one.", 1000)
    ] = 0
    every_minutes: Annotated[Minutes, _about("Minutes between checkpoints; 0 means no such cadence.", 15)] = 0
    keep_last: Annotated[Count, _about("How many of the newest checkpoints are kept; 0 keeps all.")] = 2
    keep_best: Annotated[Count, _about("How many of the best by `monitor` are kept besides.", 3)] = 1
    monitor: (
        Annotated[NonBlank, _about("The score or metric that tells which checkpoint is best.", "eval/accuracy")] | None
    ) = None
    mode: Annotated[
        Literal["min", "max"], _about("Whether a low (`min`) or a high (`max`) value of `monitor` is better.")
    ] = "min"
    weights: Annotated[
        Literal["all", "trained"],
        _about(
            "Which weights a checkpoint holds. `all`: every weight; those that training does not change are written "
            "once and shared. `trained`: only those that training changes; a resume takes the others from the class "
            "and verifies them."
        ),
    ] = "all"


class RecoverSpec(Block, frozen=True, kw_only=True):
    """How faults in training are recovered from (`Recover` in `callbacks/README.md`); without it, not at all."""

    ladder: Annotated[
        tuple[RungName, ...],
        Meta(min_length=1),
        _about("What is done, in order; the last one is repeated.", ["skip", "roll_back"]),
    ] = ("skip", "lower_lr", "roll_back")
    faults: Annotated[
        tuple[FaultName, ...],
        Meta(min_length=1),
        _about("What counts as a fault.", ["nonfinite", "loss_spike", "exploding_gradients"]),
    ] = ("nonfinite",)
    lr_factor: Annotated[Share, _about("Factor for the learning rate, of `lower_lr`.")] = 0.1
    lower_lr_steps: Annotated[Positive, _about("Number of steps with the lowered rate.")] = 100
    good_steps: Annotated[Positive, _about("Number of steps without a fault that end an incident.")] = 100
    max_attempts: Annotated[Positive, _about("Number of rungs that an incident may take before the run fails.")] = 5
    spike_deviations: Annotated[
        Above, _about("A loss is a spike this many standard deviations above the median of the last 256.")
    ] = 8.0
    gradient_max_norm: Annotated[
        Above, _about("Gradients explode above this norm, or above 100 times the usual norm.")
    ] = 1e4


class SampleRequest(Block, frozen=True, kw_only=True):
    """A sample to generate at every sample cadence. A plain string is short for its prompt."""

    name: Annotated[Text, _about("Name of the sample's files; by default its index in the list.")] = ""
    task: Annotated[Text, _about("Kind of sample, passed to the generator.")] = "t2i"
    prompt: Annotated[Prose, _about("The prompt.")] = ""
    negative_prompt: Annotated[Prose, _about("What the sample should not show.")] = ""
    instruction: Annotated[Prose, _about("An instruction for edits.")] = ""
    source_image: Annotated[Reference, _about("Path of an image to start from.")] | None = None
    seed: Annotated[Count, _about("Seed of this sample; `sample_seed` by default.")] | None = None


class JobSpec(Block, frozen=True, kw_only=True):
    """A job as its file describes it."""

    run_id: Annotated[Text, _about("Name of the run.", "digits-1", alias="request_id", group="the run")]
    owner: Annotated[Text, _about("Owner of the uploaded artifacts.")] = ""
    release_ref: Annotated[Text, _about("Release of the trainer; passed to it as `ctx.job.release_ref`.")] = ""
    tags: Annotated[
        tuple[Text, ...],
        _about("Tags for finding the run, stored in its events and checkpoint records.", ["baseline"]),
    ] = ()
    notes: Annotated[
        Prose, _about("Notes on the run, stored in its events and checkpoint records.", "wider layers")
    ] = ""
    trainer: Annotated[
        ImportPath,
        _about(
            "Import path of the trainer class; modules next to the job file are found.",
            "my_trainer:Trainer",
            variable="TRAINER_PLUGIN",
            group="what is trained",
        ),
    ]
    trainer_api_version: Annotated[Version, _about("Version of the trainer contract.")] = TRAINER_API_VERSION
    hyperparams: Annotated[dict[str, Any], _about("Passed to the trainer as `ctx.job.hyperparams`.", {"lr": 0.001})] = (
        msgspec.field(default_factory=dict)
    )
    max_steps: Annotated[Positive, _about("Steps to train.", 1000)]
    seed: (
        Annotated[
            Annotated[int, Meta(ge=0, le=2**32 - 1), _rule("an integer from 0 to 4294967295")],
            _about(
                "Seed of torch, NumPy, Python's `random` and the order of the data, set before the class is built; by "
                "default none is set.",
                1,
            ),
        ]
        | None
    ) = None
    on_nonfinite: Annotated[
        Literal["warn", "stop", "skip"],
        _about(
            "What to do when a loss, gradient or weight becomes nan or infinite: `warn` logs it once, with the step; "
            "`stop` ends the run, with exit code 3; `skip` skips the affected updates."
        ),
    ] = "warn"
    recover: Annotated[RecoverSpec, _about("How faults in training are recovered from; without it, not at all.")] | (
        None
    ) = None
    lightning: Annotated[
        dict[str, Any],
        _about(
            "Any argument of `lightning.pytorch.Trainer`.",
            {"accelerator": "gpu", "devices": 8, "strategy": "ddp", "precision": "bf16-mixed"},
        ),
    ] = msgspec.field(default_factory=dict)
    callbacks: Annotated[
        dict[str, Any],
        _about(
            "Changes to the standard callbacks, by class name: `false` leaves one out, an object gives it other "
            "arguments, and so another callback of genlight is added.",
            {"SystemMonitor": False, "WatchHangs": {"floor_s": 60}},
        ),
    ] = msgspec.field(default_factory=dict)
    dataset: (
        Annotated[
            DatasetSpec,
            _about("The Parquet files to train on, and how their rows become batches.", group="data and inputs"),
        ]
        | None
    ) = None
    mock_batches: (
        Annotated[list[Any], _about("Raw batches, written in the job itself instead of a dataset; used for one pass.")]
        | None
    ) = None
    inputs: Annotated[InputsSpec, _about("Inputs to download before training.")] = InputsSpec()
    metric_every: Annotated[
        Count, _about("Steps between metrics; 0 turns them off.", group="cadences and checkpoints")
    ] = 10
    checkpoint_every: Annotated[Count, _about("Steps between checkpoints; 0 saves only the final one.")] = 0
    checkpoints: Annotated[
        CheckpointsSpec, _about("When checkpoints are saved, which ones are kept, and what is in them.")
    ] = CheckpointsSpec()
    validate: Annotated[ValidateSpec, _about("When to call the trainer's own `evaluate`.")] | None = None
    sample_every: Annotated[Count, _about("Steps between samples; 0 turns them off.", group="samples")] = 0
    sample_prompts: Annotated[
        tuple[SampleRequest, ...], _about("Samples to generate at each sample cadence.", ["a cat"])
    ] = ()
    sample_seed: Annotated[Count, _about("Seed for samples without one of their own.")] | None = None
    resume_from_latest: Annotated[
        bool, _about("Whether to resume from the newest intact checkpoint.", group="resume and stop")
    ] = False
    resume_checkpoint_path: Annotated[FilePath, _about("A checkpoint record to resume from.")] | None = None
    max_runtime_seconds: Annotated[
        Seconds,
        _about(
            "Time limit from process start, including downloads; 0 means none.",
            3600,
            variable="TRAINER_MAX_RUNTIME_SECONDS",
        ),
    ] = 0
    cancel_file_path: (
        Annotated[FilePath, _about("A file that stops the run when it appears.", variable="TRAINER_CANCEL_FILE")] | None
    ) = None
    uploads: Annotated[UploadUrls, _about("Where results are uploaded.", group="where results go")] = UploadUrls()
    capability_token: (
        Annotated[
            Token,
            _about("Bearer token; prefer `TRAINER_CAPABILITY_TOKEN` to a file.", variable="TRAINER_CAPABILITY_TOKEN"),
        ]
        | None
    ) = None
    orchestrated: Annotated[bool, _about("Strict startup: a token is required.", variable="TRAINER_ORCHESTRATED")] = (
        False
    )


class Settings(JobSpec, frozen=True, kw_only=True):
    """All settings of a run: those of a job file, and those that only the environment and ``--set`` give."""

    artifacts_dir: Annotated[
        ArtifactPath,
        _about(
            "Folder of the run: `runs/<run_id>` beside the job file, `/tmp/training` for a start from the environment.",
            variable="TRAINER_ARTIFACTS_DIR",
        ),
    ] = Path()
    checkpoints_dir: Annotated[
        ArtifactPath, _about("Folder of checkpoints, `checkpoints` by default.", variable="TRAINER_CHECKPOINTS_DIR")
    ] = Path()
    samples_dir: Annotated[
        ArtifactPath, _about("Folder of samples, `samples` by default.", variable="TRAINER_SAMPLES_DIR")
    ] = Path()
    metrics_dir: Annotated[
        ArtifactPath, _about("Folder of the event log, `metrics` by default.", variable="TRAINER_METRICS_DIR")
    ] = Path()
    events_path: Annotated[
        ArtifactPath,
        _about("The event log, `events.jsonl` in the metrics folder by default.", variable="TRAINER_EVENTS_PATH"),
    ] = Path()
    shared_artifacts: Annotated[
        bool,
        _about(
            "Trust everybody who may write to these folders, as in a team's folder; otherwise a folder that other "
            "users own or may write to is refused.",
            variable="TRAINER_SHARED_ARTIFACTS",
        ),
    ] = False
    file_store_url: (
        Annotated[
            Url,
            _about("Base of the store for artifact bytes and `cozy:` references.", variable="TENSORHUB_URL"),
        ]
        | None
    ) = None
    stop_grace_seconds: Annotated[
        Seconds,
        _about(
            "Time between a scheduler's stop signal and the end of the process; 0 means that it is not known.",
            variable="TRAINER_STOP_GRACE_SECONDS",
        ),
    ] = 0
    upload_deadline_seconds: Annotated[
        Seconds,
        _about("How long the end of a run waits for uploads.", variable="TRAINER_UPLOAD_DEADLINE_SECONDS"),
    ] = 60.0
    token_origins: Annotated[
        frozenset[Origin],
        _about("Further origins that may be sent the token.", variable="TRAINER_TOKEN_ORIGINS"),
    ] = frozenset()
    private_hosts: (
        Annotated[
            tuple[Host, ...],
            _about(
                "Hosts, addresses and networks that references may reach in spite of a private address, or `*`. "
                "Without it an orchestrated run reaches none of them, any other run all.",
                variable="TRAINER_PRIVATE_HOSTS",
            ),
        ]
        | None
    ) = None
    canceled: Annotated[
        bool, _about("Whether the run was canceled before it started.", variable="TRAINER_CANCELLED")
    ] = False
