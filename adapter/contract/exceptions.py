"""Every exception that genlight raises on purpose.

    GenlightError
    ├── StartupContractError      a setting, spec or environment fault; exit code 2
    ├── UsageError                a command cannot do what the user requested; exit code 2
    ├── ContractError (TypeError) a trainer class, or a result of its hooks, breaks the contract
    │   └── TrainerPathError (ValueError)  an import path that does not lead to one trainer
    ├── InputError                a column, file or reference that cannot be read
    │   └── AuthError             a server refused our credentials (401, 403)
    ├── CheckpointError           a checkpoint could not be written or used
    │   ├── BrokenCheckpointError     its content contradicts its record
    │   │   └── UnloadableCheckpointError  its files are intact, but a type is missing or different
    │   ├── UnstorableStateError (TypeError)  a value that the format cannot hold
    │   └── UnwrittenCheckpointError (OSError)  the disk did not take it
    ├── HookOrderError (ValueError)  a field is read that no hook writes, or hooks wait for each other
    ├── MonitorError (ValueError)  a monitored metric is missing, or not finite
    ├── EvaluationError           an evaluation gave no scores
    ├── EventLogError             the event log is locked, or breaks its own rules
    ├── UploadError               a required artifact could not be delivered
    ├── ReplayWriterError (RuntimeError)  a second writer of a replay buffer
    ├── ThreadLimitError (RuntimeError)  the system has no room for another thread
    ├── ReplicaDriftError         replicas that must be equal are not
    ├── ResumeDifferenceError     a step that was repeated after a restart is not the same
    ├── NonfiniteError            a loss, gradients or weights are nan or infinite
    ├── RecoveryError             a training could not be recovered from its faults
    ├── RankFailedError           another rank failed or died
    ├── TrainingHungError         no step was finished for far longer than steps take
    └── TrainingCanceled          the run stopped on request; exit code 75

Where a caller needs facts beyond the type, they are attributes, so that it need not parse the message. This module
imports nothing of genlight; every package may import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

FailureCategory = Literal["startup", "input", "auth", "model-load", "train-step", "upload"]
"""The source of a failure, for the operator. The exception's type and origin decide it, never its text."""

StopReason = Literal["canceled", "timeout", "preempted"]
"""The reason for a stop."""


class GenlightError(Exception):
    """Base of all exceptions that genlight raises on purpose."""


class StartupContractError(GenlightError):
    """The run cannot start as it was described.

    Args:
        code: A documented code such as ``startup.invalid_job_spec``.
        message: Every fault found, and the way out.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class UsageError(GenlightError):
    """A command cannot do what the user requested; the message has the reason and the way out."""


class ContractError(GenlightError, TypeError):
    """A trainer class, or the result of one of its hooks, does not follow the trainer contract."""


class TrainerPathError(ContractError, ValueError):
    """An import path leads to no trainer, or to several."""


class InputError(GenlightError):
    """An input of the run is missing, malformed or cannot be read."""


class AuthError(InputError):
    """A server refused the credentials of the run."""


class NonfiniteError(GenlightError):
    """A loss, gradients or weights became nan or infinite, and the job says that the run ends then."""


class RecoveryError(GenlightError):
    """A training could not recover from its faults, or `Recover` does not fit the job and ends the run at its start.

    The message lists the measures tried (skip, lower the rate, roll back), if there were any.
    """


class CheckpointError(GenlightError):
    """A checkpoint could not be written or used."""


class BrokenCheckpointError(CheckpointError):
    """The files of a checkpoint contradict its record.

    Args:
        checkpoint: Name of the checkpoint, such as ``step-00000200``.
        reason: The file, the expected value and the actual one.
    """

    def __init__(self, checkpoint: str, reason: str) -> None:
        super().__init__(checkpoint, reason)
        self.checkpoint = checkpoint
        self.reason = reason

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} is broken: {self.reason}"


class UnloadableCheckpointError(BrokenCheckpointError):
    """The files of a checkpoint are intact, but it needs a type that this process lacks or defines differently.

    A subclass of `BrokenCheckpointError`, because a resume skips such a checkpoint like a broken one.
    """

    @override
    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} is intact, but cannot be loaded here: {self.reason}"


class UnstorableStateError(CheckpointError, TypeError):
    """A value in the state has no representation in the checkpoint format.

    Args:
        path: The place of the value, such as ``state["cache"][3]``.
        type_name: The qualified name of the value's type.
        hint: The way out; may be empty.
    """

    def __init__(self, path: str, type_name: str, hint: str = "") -> None:
        super().__init__(path, type_name, hint)
        self.path = path
        self.type_name = type_name
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.path}: {self.type_name} cannot be stored in a checkpoint" + (
            f"; {self.hint}" if self.hint else ""
        )


class UnwrittenCheckpointError(CheckpointError, OSError):
    """The system refused to write a checkpoint. The previous checkpoint is unchanged.

    Args:
        checkpoint: Name of the checkpoint, such as ``step-00000200``.
        directory: Its folder.
        nbytes: Its approximate size; None if that is not known yet.
        code: The system's number of the error (`errno`), if it has one.
        reason: The error in words.
        filename: The file that could not be written, if it is known.
    """

    def __init__(
        self, checkpoint: str, directory: str, nbytes: int | None, code: int | None, reason: str, filename: str | None
    ) -> None:
        super().__init__(code, reason)
        self.filename = filename
        self.checkpoint = checkpoint
        self.directory = directory
        self.nbytes = nbytes

    def __str__(self) -> str:
        size = "" if self.nbytes is None else f" ({self.nbytes / 1e6:,.1f} MB)"
        file = "" if self.filename is None else f" ({Path(self.filename).name})"
        return (
            f"checkpoint {self.checkpoint}{size} could not be written to {self.directory}: {self.strerror}{file}; "
            "free some space, keep fewer checkpoints, let this user write there, or choose another directory"
        )

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self.checkpoint, self.directory, self.nbytes, self.errno, self.strerror, self.filename)
        return type(self), facts


class HookOrderError(GenlightError, ValueError):
    """A hook reads a field of the run state that no hook writes, or hooks wait for each other in a circle."""


class MonitorError(GenlightError, ValueError):
    """A metric that a callback monitors is missing, or is not finite."""


class EvaluationError(GenlightError):
    """An evaluation failed on another rank, or its command gave no scores."""


class EventLogError(GenlightError):
    """The event log cannot be opened, or its content breaks the rules of ``trainer_event.v1``."""


class UploadError(GenlightError):
    """An artifact that must reach its destination did not.

    Args:
        message: The artifact, its destination, and what the user can do.
        auth: Whether the server refused our credentials.
    """

    def __init__(self, message: str, *, auth: bool = False) -> None:
        super().__init__(message)
        self.auth = auth


class ReplayWriterError(GenlightError, RuntimeError):
    """A thread or process other than the writer of a replay buffer tried to write; nothing was changed."""


class ThreadLimitError(GenlightError, RuntimeError):
    """The system has no room for another thread."""


class ReplicaDriftError(GenlightError):
    """Replicas that data parallelism keeps equal have different parameters."""


class ResumeDifferenceError(GenlightError):
    """A step that was repeated after a restart differs from its first execution, and the job says that the run ends."""


class RankFailedError(GenlightError):
    """Another rank failed or died."""


class TrainingHungError(GenlightError):
    """No step was finished for far longer than steps take.

    Args:
        rank: The rank that hangs.
        seconds: Seconds since its last step.
        *stacks: Files with the stacks of all threads: this rank's first, then the other ranks'.
        silent: Other ranks that wrote no stacks.
    """

    def __init__(self, rank: int, seconds: float, *stacks: Path, silent: Sequence[int] = ()) -> None:
        super().__init__(rank, seconds, *stacks)
        self.rank = rank
        self.seconds = seconds
        self.stacks = stacks
        self.silent = tuple(silent)

    def __str__(self) -> str:
        files = ", ".join(map(str, self.stacks))
        text = f"no step was finished on rank {self.rank} for {self.seconds:.0f} s; stacks of all threads: {files}"
        if not self.silent:
            return text
        names = f"rank {self.silent[0]}" if len(self.silent) == 1 else f"ranks {', '.join(map(str, self.silent))}"
        return f"{text}; no stacks from {names}, which may be lost, paused, or not hanging"


class TrainingCanceled(GenlightError):
    """The run stopped on request.

    Args:
        reason: ``canceled``, ``timeout`` or ``preempted``; or, in the loop of `adapter/training_loop.py`, the
            `cancel_reason` of the reporter that was passed to it.
    """

    def __init__(self, reason: str = "canceled") -> None:
        super().__init__(reason)
        self.reason = reason
