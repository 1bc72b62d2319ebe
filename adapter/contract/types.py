"""The vocabulary of the trainer contract, between a trainer class, an orchestrator and genlight.

The module has only types and protocols. It imports nothing of genlight, and neither torch nor Lightning, so that every
module may import it. A trainer class can be written and tested without these types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

TRAINER_API_VERSION = "v1"
"""The only version of the trainer contract that exists."""

REQUIRED_HOOKS = ("setup", "configure", "prepare_batch", "train_step", "state_dict", "load_state_dict")
"""The hooks that every trainer class must have."""

OPTIONAL_HOOKS = (
    *("save_checkpoint", "load_checkpoint", "rollout", "rollout_state", "load_rollout_state", "evaluate"),
    *("trainer_hooks", "train_loader"),
)
"""Further hooks that the loop calls if a trainer class has them."""


@dataclass(frozen=True)
class TrainingJobSpec:
    """Identity and cadences of one training run; a cadence of 0 is off.

    Raises:
        ValueError: `run_id` or `trainer_api_version` is empty, the version is not ``v1``, or a number is negative.
        TypeError: A number is not an integer, or `hyperparams` is not a mapping.
    """

    run_id: str
    max_steps: int
    trainer_api_version: str = TRAINER_API_VERSION
    metric_every: int = 10
    checkpoint_every: int = 0
    sample_every: int = 0
    owner: str = ""
    release_ref: str = ""
    hyperparams: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("run_id", "trainer_api_version"):
            if not str(getattr(self, name) or "").strip():
                raise ValueError(
                    f"Invalid `{name}`. Expected a non-empty string, but received {getattr(self, name)!r}."
                )
        if self.trainer_api_version != TRAINER_API_VERSION:
            raise ValueError(
                f"Invalid `trainer_api_version`. Expected {TRAINER_API_VERSION!r}, "
                f"but received {self.trainer_api_version!r}."
            )
        for name in ("max_steps", "metric_every", "checkpoint_every", "sample_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Invalid `{name}`. Expected an integer >= 0, but received {value!r}.")
            if value < 0:
                raise ValueError(f"Invalid `{name}`. Expected an integer >= 0, but received {value}.")
        if not isinstance(self.hyperparams, Mapping):
            raise TypeError(f"Invalid `hyperparams`. Expected a mapping, but received {self.hyperparams!r}.")

    @property
    def request_id(self) -> str:
        """`run_id`, under the name that some releases of the older runtime used."""
        return self.run_id


@dataclass(slots=True)
class RunState:
    """Facts that hooks read and write; one object per run, saved in every checkpoint.

    A hook names the fields that it ``reads`` and ``writes``, and the order of hooks follows from that. A hook puts its
    own facts into `extra`, under names that it declares the same way.
    """

    run_id: str = ""
    attempt: int = 1
    agent_step: int = 0
    """Environment steps of all ranks: the sum of ``agent_steps`` in the statistics of rollouts, or of the steps that
    the ``rollout`` of each rank adds here."""
    epoch: int = 0
    """Completed epochs: passes over the data, or rollouts with their phases. Set after ``on_train_phase_end``."""
    update_epoch: int = 0
    """Pass over the current rollout, from 0."""
    minibatch_index: int = 0
    """Minibatch within the current update epoch, from 0; without a ``rollout``, batch within the epoch."""
    stop_rollout: bool = False
    """Set by a trainer or a hook: take no further batches from the current rollout."""
    stop_update_epoch: bool = False
    """Set by a trainer or a hook, on any rank: train no further minibatch of the current rollout."""
    rollout_stats: dict[str, Any] | None = None
    loss_stats: dict[str, float] | None = None
    """The last metrics that a cadence read from the device."""
    eval_scores: Any = None
    """The latest scores: a mapping of names to numbers, or any object; checkpoints store its numbers only."""
    latest_checkpoint_uri: str | None = None
    """The path of the record of the newest durable checkpoint, or of the checkpoint that the run resumed from."""
    latest_wandb_uri: str | None = None
    """The newest checkpoint that is an artifact of Weights & Biases."""
    latest_sample_uris: list[str] | None = None
    stop_reason: str | None = None
    """Why the run ends early; None until that is decided."""
    rolls_back: bool = False
    """Whether the run returns to an earlier checkpoint after all callbacks have seen this step."""
    extra: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the facts as a plain dictionary."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved facts.

        Unknown fields, of an older or newer version, are kept in `extra`.
        """
        known = {f.name for f in fields(self)}
        for name, value in state.items():
            if name in known:
                setattr(self, name, value)
            else:
                self.extra[name] = value


@dataclass(frozen=True)
class StepContext:
    """The context that every hook of a trainer gets."""

    job: TrainingJobSpec
    model_handles: Mapping[str, Any] = field(default_factory=dict)
    """Inputs on this machine: ``base_model_dir``, ``base_model_ref`` and entries of the caller."""
    dataset: Any = None
    """The source of batches: the feed of this rank, the loader passed to ``fit``, or the caller's own source."""
    optimizer: Any = None
    scheduler: Any = None
    device: str = "cuda:0"
    """Root device of this rank, as the strategy sees it."""
    dtype: str = "bf16"
    """Precision of the forward pass: ``fp32``, ``bf16`` or ``fp16``."""
    is_canceled: Callable[[], bool] | None = None
    """Whether the run should stop; cheap enough for an inner loop."""
    rank: int = 0
    world_size: int = 1
    run_state: RunState | None = None
    job_context: Any = None
    """The ``JobContext`` of this process, or None outside of a scheduler's job."""
    count_steps: Callable[[], int] | None = None
    """Returns `step`. A test of a trainer class passes its own, such as ``lambda: 7``."""

    @property
    def step(self) -> int:
        """Completed steps of the run, including those before a resume: 0 in the first ``train_step``, 1 in the second.

        A step is one call of ``train_step``, whether it updates the weights or only accumulates gradients. ``setup``
        and ``configure`` come before a checkpoint is loaded and always see 0.
        """
        return 0 if self.count_steps is None else self.count_steps()


@dataclass(frozen=True)
class StepControlHints:
    """Requests of a step to the runtime."""

    skip_cadence_emit: bool = False
    """Suppress metrics, checkpoint and samples of this one step."""
    backoff_seconds: float | None = None
    """Pause after this step; ends at once on a stop request."""


@dataclass(frozen=True)
class StepResult:
    """The result of ``train_step``: scalars by name, as numbers or 0-d tensors on any device."""

    metrics: Mapping[str, Any] = field(default_factory=dict)
    debug: Mapping[str, Any] = field(default_factory=dict)
    control: StepControlHints | None = None


@runtime_checkable
class TrainerPlugin(Protocol):
    """A trainer class; ``adapter/README.md`` documents each hook.

    The optional hooks (`OPTIONAL_HOOKS`) and the optional attribute ``rank_local`` (names of parts of the state that
    differ by rank) are not part of the protocol, because a class without them conforms.
    """

    def setup(self, ctx: StepContext) -> None:
        """Prepare everything that needs the context; called once, first."""

    def configure(self, ctx: StepContext) -> Any:
        """Build modules, optimizers and schedulers; every other hook gets the result."""

    def prepare_batch(self, raw_batch: Any, state: Any, ctx: StepContext) -> Any:
        """Turn a raw batch of the feed into the argument of ``train_step``."""

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
        """One forward, backward and update."""
        ...

    def state_dict(self, state: Any) -> dict[str, object]:
        """State for a checkpoint beyond the modules and optimizers that genlight finds itself."""
        ...

    def load_state_dict(self, state: Any, payload: dict[str, object], ctx: StepContext) -> None:
        """Load the result of ``state_dict``; called on resume, after ``configure``."""


class TrainingReporter(Protocol):
    """Receives the events of a run, each as it happens, from the training thread.

    An optional attribute ``cancel_reason`` names the reason once ``is_canceled()`` is true.
    """

    def started(self, *, run_id: str) -> None:
        """Training begins."""

    def metric(self, *, name: str, value: float, step: int) -> None:
        """One scalar at a metric cadence."""

    def checkpoint(self, *, path: str, step: int) -> None:
        """A checkpoint was written."""

    def sample(self, *, path: str, step: int) -> None:
        """A sample was written."""

    def completed(self, *, step: int, final_checkpoint: str | None) -> None:
        """Training ended as planned."""

    def failed(self, *, step: int, error: str) -> None:
        """Training ended by an exception or a stop."""

    def is_canceled(self) -> bool:
        """Whether the run should stop."""
        ...


class ArtifactWriter(Protocol):
    """Writes checkpoints and samples to a place of the caller's choice."""

    def write_checkpoint(
        self, *, step: int, state_payload: dict[str, object], trainer: Any, state: Any, ctx: StepContext
    ) -> str:
        """Write a checkpoint and return its path."""
        ...

    def write_samples(self, *, step: int, state: Any, ctx: StepContext) -> Sequence[str]:
        """Write samples and return their paths."""
        ...

    def finalize(self, *, state_payload: dict[str, object], trainer: Any, state: Any, ctx: StepContext) -> str | None:
        """Write the final artifact and return its path."""
        ...


class ArtifactUploader(Protocol):
    """Sends metrics and written files elsewhere; called in the step, so a slow uploader slows training."""

    def upload_metrics(self, *, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step."""

    def upload_checkpoint(self, *, local_path: str, step: int) -> None:
        """Send a checkpoint."""

    def upload_sample(self, *, local_path: str, step: int) -> None:
        """Send a sample."""


@dataclass(frozen=True)
class TrainerAuthContext:
    """The owner for whom a run acts. ``repr`` omits the token."""

    owner: str
    token: str = field(default="", repr=False)
    scope: str = ""


@dataclass(frozen=True)
class LifecycleLease:
    """The claim of one worker on one run."""

    run_id: str
    lease_id: str


class JobLifecycleClient(Protocol):
    """The control plane of an orchestrator, as a run sees it."""

    def claim(self, *, run_id: str) -> LifecycleLease:
        """Take the run; raises if another worker holds it."""
        ...

    def heartbeat(self, *, lease: LifecycleLease) -> bool:
        """Renew the lease; False if it is lost. That stops the run as ``canceled``."""
        ...

    def request_cancel(self, *, lease: LifecycleLease) -> bool:
        """Whether the orchestrator wants the run to stop."""
        ...

    def mark_completed(self, *, lease: LifecycleLease, step: int, final_checkpoint: str | None) -> None:
        """Report the end as planned."""

    def mark_failed(self, *, lease: LifecycleLease, step: int, error: str) -> None:
        """Report the end by an error or a stop."""


@dataclass(frozen=True)
class ResolvedRef:
    """A repository reference with its digest."""

    owner: str
    repo: str
    digest: str


class ResolveClient(Protocol):
    """Resolves ``owner/repo[:tag]`` to a digest."""

    def resolve(self, *, ref: str) -> ResolvedRef:
        """Return the digest of a reference; raise `InputError` if there is none."""
        ...


@dataclass(frozen=True)
class DownloadedInputs:
    """Paths of a run's inputs on this node; None for inputs that the job does not name."""

    model_dir: Path | None = None
    dataset_dir: Path | None = None
    resume_checkpoint: Path | None = None


class InputDownloader(Protocol):
    """Brings the inputs of a job to this node. A type for existing code: genlight fetches inputs itself."""

    def download(self, *, inputs: Mapping[str, Any], directory: Path) -> DownloadedInputs:
        """Bring `inputs`, the block of that name in the job spec, into `directory`."""
        ...


@dataclass(frozen=True)
class ModelRuntimeConfig:
    """Device and precision of model components."""

    device: str = "cuda:0"
    dtype: str = "bf16"


class ModelRuntimeLoader(Protocol):
    """Loads the components of a model directory. A type for existing code: a class calls `load_components` itself."""

    def load_components(self, *, model_dir: Path, config: ModelRuntimeConfig) -> Mapping[str, Any]:
        """Return the tensors of each component by its name, on `config.device` in `config.dtype`."""
        ...


@dataclass(frozen=True)
class ArrowFeedConfig:
    """How Parquet becomes batches.

    Raises:
        ValueError: `batch_size` is below 1 or `readahead` below 0.
    """

    batch_size: int = 32
    """Rows per batch and rank."""
    readahead: int = 2
    """Decoded chunks of up to 32 MiB kept ready by a thread; 0 decodes in the training thread."""
    columns: Sequence[str] | None = None
    """Columns to read; None means all."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"Invalid `batch_size`. Expected an integer >= 1, but received {self.batch_size}.")
        if self.readahead < 0:
            raise ValueError(f"Invalid `readahead`. Expected an integer >= 0, but received {self.readahead}.")


class BatchSource(Protocol):
    """Any source of raw batches with an ``iter_batches()``; a plain iterable works, too."""

    def iter_batches(self) -> Iterator[Any] | Iterable[Any]:
        """Start a new pass over the raw batches."""
        ...
