"""Memory for snapshots, made ready before the first save: touching fresh pages costs more than the copy."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

from ..optimizer_state import named_values
from .checkpoint_io import DurableCheckpointIO
from .sharded.boxes import is_sharded
from .storage.host_buffer import ALIGNMENT

__all__ = ["reserve_memory"]


def reserve_memory(io: DurableCheckpointIO, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Reserve what a snapshot will take, in the background, where no step waits for it.

    Called after a first step, when the optimizers have their state.
    """
    if not io.writer.is_busy:
        nbytes = _size_of_snapshot(trainer, pl_module)
        pinned = trainer.strategy.root_device.type != "cpu"
        io.writer.start(lambda: io.buffer.reserve(nbytes, pinned=pinned))


def _size_of_snapshot(trainer: pl.Trainer, module: pl.LightningModule) -> int:
    """Bytes that this rank will copy, rounded up as in the snapshot: its slices, on rank zero also what is whole.

    What is frozen is copied once, elsewhere, and shared by all checkpoints.
    """
    moments = (t for o in trainer.optimizers for entry in o.state.values() for _, t in named_values(entry))
    trained = (p for p in module.parameters() if p.requires_grad)
    tensors = (t for t in (*trained, *module.buffers(), *moments) if isinstance(t, torch.Tensor))
    own = (t.to_local() if isinstance(t, DTensor) else t for t in tensors if is_sharded(t) or trainer.is_global_zero)
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in own)
