"""The job spec as types: every key of a job file with its type, default, meaning and an example.

This is the one list of keys. What parses a job, ``--set``, ``genlight doctor``, the JSON Schema that editors complete
from and the reference in ``adapter/README.md`` all read it from the annotations below: ``Meta`` says what a key is for,
`Rule` how an error words what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from ...callbacks.health.faults import FaultKind
from ...callbacks.health.ladder import Rung
from ..contract.types import TRAINER_API_VERSION
from ..plumbing.text import is_storable, is_utf8
from ..plumbing.urls import url_fault

__all__ = [
    "LARGEST",
    "UPLOAD_URLS",
    "DatasetSpec",
    "InputsSpec",
    "JobSpec",
    "RecoverSpec",
    "Rule",
    "SampleRequest",
    "UploadUrls",
    "ValidateSpec",
]


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words, and what its type cannot say."""

    expected: str
    holds: Callable[[Any], bool] = lambda _: True
    secret: bool = False
    """Whether no message may show the value."""
    code: str = "startup.invalid_job_spec"
    way_out: str = ""


LARGEST = 2**63 - 1
"""Of an integer: what Arrow, torch and JSON readers in other languages hold."""


def _is_target(url: str) -> bool:
    return re.fullmatch(r"hf://[^/@]+/[^/@]+/?(@.*)?|(?!hf:)[^:/]+://.+", url) is not None


_COLLATE = r"^(torch|[^:\s]+:[^:\s]+)$"
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


def _is_collate(name: str) -> bool:
    return re.fullmatch(_COLLATE, name) is not None


def _rule(expected: str, holds: Callable[[Any], bool] = lambda _: True, **more: Any) -> dict[str, Any]:
    return {"rule": Rule(expected, holds, **more)}


Text: TypeAlias = Annotated[str, Meta(extra=_rule("a string without control characters", is_storable))]
NonBlank: TypeAlias = Annotated[
    str, Meta(extra=_rule("a non-empty string", lambda text: bool(text.strip()) and is_storable(text)))
]
Prose: TypeAlias = Annotated[str, Meta(extra=_rule("a string", is_utf8))]
Flag: TypeAlias = Annotated[bool, Meta(extra=_rule("true or false"))]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST, extra=_rule("an integer >= 0"))]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST, extra=_rule("an integer >= 1"))]
Object: TypeAlias = Annotated[dict[str, Any], Meta(extra=_rule("an object"))]
Seconds: TypeAlias = Annotated[
    float,
    Meta(
        ge=0,
        extra=_rule(
            "a number of seconds >= 0",
            lambda seconds: seconds < float("inf"),
            code="startup.invalid_timeout",
            way_out="0 means no limit.",
        ),
    ),
]
Token: TypeAlias = Annotated[
    str,
    Meta(extra=_rule("a string of printable ASCII characters", lambda t: t.isascii() and is_storable(t), secret=True)),
]
Url: TypeAlias = Annotated[
    str,
    Meta(extra=_rule("an http:// or https:// URL", lambda url: not url.strip() or url_fault(url.strip()) is None)),
]
Target: TypeAlias = Annotated[str, Meta(extra=_rule("a URL such as hf://owner/name or s3://bucket/folder", _is_target))]
Shard: TypeAlias = Annotated[Literal["rows", "row_groups"], Meta(extra=_rule('"rows" or "row_groups"'))]
Weights: TypeAlias = Annotated[Literal["all", "trained"], Meta(extra=_rule('"all" or "trained"'))]
Nonfinite: TypeAlias = Annotated[Literal["warn", "stop", "skip"], Meta(extra=_rule('"warn", "stop" or "skip"'))]
RungName: TypeAlias = Annotated[Rung, Meta(extra=_rule('"skip", "lower_lr" or "roll_back"'))]
FaultName: TypeAlias = Annotated[FaultKind, Meta(extra=_rule('"nonfinite", "loss_spike" or "exploding_gradients"'))]
Share: TypeAlias = Annotated[float, Meta(gt=0, lt=1, extra=_rule("a number between 0 and 1"))]
Above: TypeAlias = Annotated[float, Meta(gt=0, extra=_rule("a number > 0", lambda number: number < float("inf")))]
Version: TypeAlias = Annotated[
    str, Meta(extra=_rule(f'"{TRAINER_API_VERSION}"', lambda version: version in ("", TRAINER_API_VERSION)))
]


@dataclass(frozen=True)
class DatasetSpec:
    """The Parquet files to train on, and how their rows become batches."""

    parquet_paths: Annotated[
        tuple[NonBlank, ...],
        Meta(description="Paths, folders, patterns or URLs of Parquet files.", examples=[["rows.parquet"]]),
    ] = ()
    batch_size: Annotated[Positive, Meta(description="Rows per batch, on each rank.")] = 32
    readahead: Annotated[Count, Meta(description="Decoded chunks kept ready; 0 decodes in the training thread.")] = 2
    columns: Annotated[
        tuple[NonBlank, ...] | None, Meta(description="Columns to read; all by default.", examples=[["image", "label"]])
    ] = None
    filters: Annotated[
        Annotated[
            list[Any],
            Meta(
                extra=_rule(
                    "a list of [column, operator, value], or of such lists",
                    _are_filters,
                    way_out=f"The operators are {', '.join(_COMPARISONS)}; the value of the last two is a list.",
                )
            ),
        ]
        | None,
        Meta(
            description="Rows to keep. All conditions of a list must hold; of a list of lists, any one list.",
            examples=[[["label", "<", 5]]],
        ),
    ] = None
    shuffle: Annotated[Flag, Meta(description="A different order in each epoch.")] = False
    seed: Annotated[Count, Meta(description="Seed of the order, which depends only on this and the epoch.")] = 0
    epochs: Annotated[
        Positive | None,
        Meta(description="Passes over the data; by default it repeats until `max_steps`.", examples=[3]),
    ] = None
    drop_last: Annotated[
        Flag, Meta(description="Drop the rows at the end of an epoch that do not fill a step of all ranks.")
    ] = False
    shard: Annotated[
        Shard | None,
        Meta(
            description="How ranks share the rows: `rows` (each step is split among them; the default) or "
            "`row_groups` (each rank decodes its own part)."
        ),
    ] = None
    shuffle_window: Annotated[
        Positive, Meta(description="Size of the window, in rows, within which rows are shuffled.")
    ] = 65_536
    readahead_bytes: Annotated[Positive, Meta(description="Decoded bytes kept ready.")] = 256 << 20
    workers: Annotated[Count, Meta(description="Processes that decode and collate; 0 uses the training process.")] = 0
    collate: Annotated[
        Annotated[str, Meta(pattern=_COLLATE, extra=_rule('"torch" or "module:function"', _is_collate))] | None,
        Meta(
            description="Converts record batches: `torch` gives a dictionary of tensors, `module:function` is yours; "
            "by default the trainer gets the record batch.",
            examples=["torch"],
        ),
    ] = None


@dataclass(frozen=True)
class InputsSpec:
    """Inputs to download before training. URLs may hold credentials and are never shown.

    Each key may also end in ``_url`` instead of ``_ref``, ``_urls`` instead of ``_refs``.
    """

    base_model_ref: Annotated[
        Text | None, Meta(description="A model, passed to the trainer in `ctx.model_handles`.", examples=["owner/name"])
    ] = field(default=None, repr=False)
    dataset_parquet_refs: Annotated[
        tuple[NonBlank, ...], Meta(description="Parquet files to train on, instead of `dataset.parquet_paths`.")
    ] = field(default=(), repr=False)
    resume_checkpoint_ref: Annotated[
        Text | None, Meta(description="A checkpoint record to resume from; its files lie next to it.")
    ] = field(default=None, repr=False)


@dataclass(frozen=True)
class UploadUrls:
    """Where results are uploaded; None means nowhere. URLs may hold credentials and are never shown."""

    metrics_url: Annotated[Url | None, Meta(description="Gets a POST with the metrics at each cadence.")] = field(
        default=None, repr=False
    )
    checkpoint_url: Annotated[Url | None, Meta(description="Gets a POST for each durable checkpoint.")] = field(
        default=None, repr=False
    )
    sample_url: Annotated[Url | None, Meta(description="Gets a POST for each sample.")] = field(
        default=None, repr=False
    )
    terminal_url: Annotated[Url | None, Meta(description="Gets one POST when the run has ended.")] = field(
        default=None, repr=False
    )
    targets: Annotated[
        tuple[Target, ...],
        Meta(
            description="Further destinations for checkpoints and samples.",
            examples=[["hf://owner/name", "s3://bucket/folder"]],
        ),
    ] = field(default=(), repr=False)


UPLOAD_URLS = ("metrics_url", "checkpoint_url", "sample_url", "terminal_url")
"""Fields of `UploadUrls` that are endpoints, which get the token."""


@dataclass(frozen=True)
class ValidateSpec:
    """When to call the trainer's own ``evaluate``."""

    every_n_steps: Annotated[Count, Meta(description="Steps between evaluations.", examples=[100])] = 0
    critical: Annotated[Flag, Meta(description="Whether a failure of `evaluate` ends the run.")] = False
    average: Annotated[
        Flag, Meta(description="Whether scores are averaged over the ranks; otherwise they are those of rank 0.")
    ] = False


@dataclass(frozen=True)
class RecoverSpec:
    """How faults in training are recovered from (`Recover` in `callbacks/README.md`); without it, not at all."""

    ladder: Annotated[
        tuple[RungName, ...],
        Meta(description="What is done, in order; the last one is repeated.", examples=[["skip", "roll_back"]]),
    ] = ("skip", "lower_lr", "roll_back")
    faults: Annotated[
        tuple[FaultName, ...],
        Meta(
            description="What counts as a fault.",
            examples=[["nonfinite", "loss_spike", "exploding_gradients"]],
        ),
    ] = ("nonfinite",)
    lr_factor: Annotated[Share, Meta(description="Factor for the learning rate, of `lower_lr`.")] = 0.1
    lower_lr_steps: Annotated[Positive, Meta(description="Number of steps with the lowered rate.")] = 100
    good_steps: Annotated[Positive, Meta(description="Number of steps without a fault that end an incident.")] = 100
    max_attempts: Annotated[
        Positive, Meta(description="Number of rungs that an incident may take before the run fails.")
    ] = 5
    spike_deviations: Annotated[
        Above, Meta(description="A loss is a spike this many standard deviations above the median of the last 256.")
    ] = 8.0
    gradient_max_norm: Annotated[
        Above, Meta(description="Gradients explode above this norm, or above 100 times the usual norm.")
    ] = 1e4


@dataclass(frozen=True)
class SampleRequest:
    """A sample to generate at every sample cadence. A plain string is short for its prompt."""

    name: Annotated[Text, Meta(description="Name of the sample's files; by default its index in the list.")]
    task: Annotated[Text, Meta(description="Kind of sample, passed to the generator.")] = "t2i"
    prompt: Annotated[Prose, Meta(description="The prompt.")] = ""
    negative_prompt: Annotated[Prose, Meta(description="What the sample should not show.")] = ""
    instruction: Annotated[Prose, Meta(description="An instruction for edits.")] = ""
    source_image: Annotated[Text | None, Meta(description="Path of an image to start from.")] = None
    seed: Annotated[Count | None, Meta(description="Seed of this sample; `sample_seed` by default.")] = None


@dataclass(frozen=True)
class JobSpec:
    """A job as its file describes it; None for what the file leaves out."""

    run_id: Annotated[
        Text | None, Meta(description="Name of the run; also accepted as `request_id`.", examples=["digits-1"])
    ] = None
    trainer: Annotated[
        Text | None,
        Meta(
            description="Import path of the trainer class; modules next to the job file are found.",
            examples=["my_trainer:Trainer"],
        ),
    ] = None
    trainer_api_version: Annotated[Version | None, Meta(description="Version of the trainer contract.")] = None
    max_steps: Annotated[Positive | None, Meta(description="Steps to train.", examples=[1000])] = None
    metric_every: Annotated[Count | None, Meta(description="Steps between metrics; 0 turns them off.")] = None
    checkpoint_every: Annotated[
        Count | None, Meta(description="Steps between checkpoints; 0 saves only the final one.")
    ] = None
    checkpoint_weights: Annotated[
        Weights | None,
        Meta(
            description="Which weights a checkpoint holds. `all`: every weight; those that training does not change "
            "are written once and shared. `trained`: only those that training changes; a resume takes the others from "
            "the class and verifies them."
        ),
    ] = None
    sample_every: Annotated[Count | None, Meta(description="Steps between samples; 0 turns them off.")] = None
    on_nonfinite: Annotated[
        Nonfinite | None,
        Meta(
            description="What to do when a loss, gradient or weight becomes nan or infinite: `warn` logs it once, "
            "with the step; `stop` ends the run; `skip` skips the affected updates."
        ),
    ] = None
    sync_each_batch: Annotated[
        Flag | None,
        Meta(
            description="Whether several ranks average gradients at the end of a step that has not updated. `false` "
            "does so once, at the update; checkpoints in between then hold the gradients of each rank. By default "
            "`false` where those are less than 2 GiB in all."
        ),
    ] = None
    owner: Annotated[Text | None, Meta(description="Owner of the uploaded artifacts.")] = None
    release_ref: Annotated[
        Text | None, Meta(description="Release of the trainer; passed to it as `ctx.job.release_ref`.")
    ] = None
    tags: Annotated[
        tuple[Text, ...],
        Meta(
            description="Tags for finding the run, stored in its events and checkpoint records.",
            examples=[["baseline"]],
        ),
    ] = ()
    notes: Annotated[
        Prose | None,
        Meta(
            description="Notes on the run, stored in its events and checkpoint records.",
            examples=["wider layers"],
        ),
    ] = None
    hyperparams: Annotated[
        Object, Meta(description="Passed to the trainer as `ctx.job.hyperparams`.", examples=[{"lr": 0.001}])
    ] = field(default_factory=dict)
    dataset: DatasetSpec | None = None
    mock_batches: Annotated[
        Annotated[list[Any], Meta(extra=_rule("a list"))] | None,
        Meta(description="Raw batches, written in the job itself instead of a dataset; used for one pass."),
    ] = None
    inputs: InputsSpec = InputsSpec()
    resume_from_latest: Annotated[
        Flag | None, Meta(description="Whether to resume from the newest intact checkpoint.")
    ] = None
    resume_checkpoint_path: Annotated[Text | None, Meta(description="A checkpoint record to resume from.")] = None
    sample_prompts: Annotated[
        tuple[SampleRequest, ...], Meta(description="Samples to generate at each sample cadence.", examples=[["a cat"]])
    ] = ()
    sample_seed: Annotated[Count | None, Meta(description="Seed for samples without one of their own.")] = None
    capability_token: Annotated[
        Token | None, Meta(description="Bearer token; prefer `TRAINER_CAPABILITY_TOKEN` to a file.")
    ] = field(default=None, repr=False)
    orchestrated: Annotated[Flag | None, Meta(description="Strict startup: a token is required.")] = None
    max_runtime_seconds: Annotated[
        Seconds | None,
        Meta(description="Time limit from process start, including downloads; 0 means none.", examples=[3600]),
    ] = None
    cancel_file_path: Annotated[Text | None, Meta(description="A file that stops the run when it appears.")] = None
    uploads: UploadUrls = UploadUrls()
    lightning: Annotated[
        Object,
        Meta(
            description="Any argument of `lightning.pytorch.Trainer`.",
            examples=[{"accelerator": "gpu", "devices": 8, "strategy": "ddp", "precision": "bf16-mixed"}],
        ),
    ] = field(default_factory=dict, repr=False)
    validate: ValidateSpec | None = None
    recover: RecoverSpec | None = None
