"""What the loop asks of the LightningModule that it steps.

A Protocol, so that the loop, the evaluation and the rollout of a hosted trainer need not import the module that uses
them; and these methods only, so that a reader sees in one place what passes between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
from torch import Tensor

from ...callbacks.checkpoint.sharded.rank_channel import Channel
from ..contract.types import StepContext, TrainerPlugin
from ..gradients.buffer_sync import BufferSync

__all__ = ["HostedModule"]


class HostedModule(Protocol):
    """A LightningModule that hosts a trainer class."""

    plugin: TrainerPlugin
    """The trainer."""
    ctx: StepContext
    contract_state: Any
    """What the trainer's ``configure`` returned."""
    step_result: Any
    """What the last ``train_step`` returned; None before the first."""
    published: dict[str, float]
    """What was last sent to loggers, by name."""

    rank_channel: Channel | None
    """How the ranks of this training speak with each other; None on a single one."""

    @property
    def buffer_sync(self) -> BufferSync | None:
        """What sends the buffers of rank 0 at the end of a step; None where there are none, and on a single rank."""
        ...

    @property
    def trainer(self) -> pl.Trainer:
        """The Lightning trainer that the module is attached to."""
        ...

    @property
    def restored_step(self) -> int:
        """Steps behind what the module holds now: those trained here, else those of the checkpoint it was given."""
        ...

    def train_raw_batch(self, raw: Any) -> Mapping[str, Any]:
        """One step of the trainer on a raw batch; its metrics as they are."""
        ...

    def metrics_on_device(self) -> dict[str, Tensor]:
        """The last step's metrics and what was last sent to loggers, as 0-d tensors; waits for no device."""
        ...

    def feed_callback_metrics(self) -> None:
        """Leave the last metrics where Lightning's monitors and progress bars find them."""

    def restore_trainer(self) -> None:
        """Hand the trainer what a checkpoint holds for it; does nothing the second time."""

    def restore_rng(self) -> None:
        """Put back the random states of the checkpoint, as the last thing before the first batch is asked for."""

    def check_unchanged(self) -> None:
        """Refuse modules and optimizers that appeared in the first step.

        Raises:
            ContractError: Names them.
        """

    def is_canceled(self) -> bool:
        """Whether a stop was asked for."""
        ...

    def training_ended(self) -> None:
        """The loop has ended as planned."""

    def close_router(self) -> None:
        """Give back what was patched for the time of the fit."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Lightning's hook; -1 ends the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Lightning's hook."""
