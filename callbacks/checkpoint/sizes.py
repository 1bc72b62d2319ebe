"""How many bytes a checkpoint will take, before it is written."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

from .sharded.boxes import is_sharded
from .storage.host_buffer import ALIGNMENT

__all__ = ["size_of_first_checkpoint", "size_of_snapshot"]

_ADAM_STATES = 2
"""Copies of the parameters that the usual optimizer adds; for the estimate before it exists."""


def size_of_first_checkpoint(module: pl.LightningModule) -> int:
    """About how many bytes: the weights, and what the usual optimizer keeps for each that is trained."""
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return int(weights + _ADAM_STATES * trained)


def size_of_snapshot(trainer: pl.Trainer, module: pl.LightningModule) -> int:
    """Bytes that this rank will copy, rounded up as in the snapshot: its slices, on rank zero also what is whole."""
    moments = (t for o in trainer.optimizers for entry in o.state.values() for t in entry.values())
    tensors = (t for t in (*module.parameters(), *module.buffers(), *moments) if isinstance(t, torch.Tensor))
    own = (t.to_local() if isinstance(t, DTensor) else t for t in tensors if is_sharded(t) or trainer.is_global_zero)
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in own)
