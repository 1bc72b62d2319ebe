"""Names that only the older runtime had. ``gen_worker.trainer`` exports them; genlight itself does not use them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from ..contract.exceptions import InputError, UploadError
from ..contract.types import BatchSource, StepContext, StepResult

__all__ = [
    "ArrowBatchFeeder",
    "ArtifactUploadError",
    "BatchProvider",
    "CheckpointingTrainerPlugin",
    "InputMaterializationError",
    "ModelRefDownloader",
    "PreparedBatchT",
    "RawBatchT",
    "ReporterEvent",
    "StateT",
    "TrainerEndpointContract",
    "TrainerSubprocessContractV1",
    "is_truthy",
    "read_subprocess_contract",
    "write_subprocess_contract",
]

StateT = TypeVar("StateT")
"""The result of ``configure``."""
RawBatchT = TypeVar("RawBatchT")
"""An item of the feed."""
PreparedBatchT = TypeVar("PreparedBatchT")
"""The result of ``prepare_batch``."""

BatchProvider = BatchSource
ArrowBatchFeeder = BatchSource
InputMaterializationError = InputError


class ModelRefDownloader(Protocol):
    """Fetches a model by its reference. A type for existing code: genlight fetches inputs itself."""

    def download(self, model_ref: str, dest_dir: str) -> str:
        """Bring the model to a folder below `dest_dir`, and return that folder."""
        ...


class CheckpointingTrainerPlugin(Protocol):
    """The two optional hooks for a trainer's own files."""

    def save_checkpoint(
        self, *, state: Any, step: int, output_dir: str, final: bool, ctx: StepContext
    ) -> Mapping[str, Any] | None:
        """Write into `output_dir`."""
        ...

    def load_checkpoint(self, *, state: Any, checkpoint_dir: str, payload: Mapping[str, Any], ctx: StepContext) -> None:
        """Load the files in `checkpoint_dir`."""


# The type variables are not contravariant, because classes use the same variables for their own generics.
class TrainerEndpointContract(CheckpointingTrainerPlugin, Protocol[StateT, RawBatchT, PreparedBatchT]):  # type: ignore[misc]
    """All hooks of a trainer class, generic in its state and its batches, as a base to inherit from.

    A hook that a subclass does not define counts as missing, because the hooks of this class do nothing.
    """

    def setup(self, ctx: StepContext) -> None:
        """Prepare everything that needs the context."""

    def configure(self, ctx: StepContext) -> StateT:
        """Build the state."""
        ...

    def prepare_batch(self, raw_batch: RawBatchT, state: StateT, ctx: StepContext) -> PreparedBatchT:
        """Turn a raw batch into the argument of ``train_step``."""
        ...

    def train_step(self, batch: PreparedBatchT, state: StateT, ctx: StepContext) -> StepResult:
        """One forward, backward and update."""
        ...

    def state_dict(self, state: StateT) -> dict[str, object]:
        """State for a checkpoint."""
        ...

    def load_state_dict(self, state: StateT, payload: dict[str, object], ctx: StepContext) -> None:
        """Load the result of ``state_dict``."""


class ArtifactUploadError(UploadError, RuntimeError):
    """Raised by the caller's own uploader if an artifact did not arrive."""


@dataclass(frozen=True)
class ReporterEvent:
    """The kind of an event and its step."""

    event_type: str
    step: int


@dataclass(frozen=True)
class TrainerSubprocessContractV1:
    """A job that one process hands to another as a JSON file, so that the other trains it.

    Raises:
        ValueError: The version is not ``v1``, or `trainer_plugin` or `job_spec_path` is empty.
    """

    contract_version: str = "v1"
    trainer_plugin: str = ""
    job_spec_path: str = ""
    arrow_ipc_path: str = ""
    checkpoints_dir: str = "/tmp/training/checkpoints"  # noqa: S108  # the contract's default
    samples_dir: str = "/tmp/training/samples"  # noqa: S108
    events_path: str | None = None
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.contract_version != "v1":
            raise ValueError(f"Invalid `contract_version`. Expected 'v1', but received {self.contract_version!r}.")
        for name in ("trainer_plugin", "job_spec_path"):
            if not getattr(self, name):
                raise ValueError(f"Invalid `{name}`. Expected a non-empty string.")

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return {**asdict(self), "extra_env": dict(self.extra_env)}

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> Self:
        """Build from the result of `to_json`; an empty or absent field takes its default."""
        values = {name: value for name, value in payload.items() if name in cls.__dataclass_fields__ and value}
        return cls(**values)


def write_subprocess_contract(path: str | os.PathLike[str], contract: TrainerSubprocessContractV1) -> None:
    """Write `contract` to `path`; makes the folder."""
    from ..plumbing.durable import make_directory, write_bytes_durably

    make_directory(Path(path).parent, shared=None)
    write_bytes_durably(Path(path), json.dumps(contract.to_json(), separators=(",", ":"), sort_keys=True).encode())


def read_subprocess_contract(path: str | os.PathLike[str]) -> TrainerSubprocessContractV1:
    """Read the contract that `write_subprocess_contract` wrote.

    Raises:
        ValueError: The file does not hold a JSON object, or a field cannot be used.
    """
    from ..plumbing.safe_open import read_regular

    payload = json.loads(read_regular(path, limit=1 << 20))
    if not isinstance(payload, dict):
        raise ValueError(  # noqa: TRY004  # the older runtime raised this type
            f"{os.fspath(path)} does not hold a JSON object"
        )
    return TrainerSubprocessContractV1.from_json(payload)


def is_truthy(value: object) -> bool:
    """Whether `value` is one of the words 1, true, t, yes and y."""
    from ..plumbing.settings import is_true

    return is_true(str(value or ""))
