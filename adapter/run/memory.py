"""Explain a step that ran out of memory: the size of each part, and the settings that make the largest smaller."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..contract.exceptions import GenlightError
from ..job.config import JOB_NAME
from ..plumbing.devices import memory_in_use
from ..plumbing.failures import place_in_users_code
from ..plumbing.redaction import safe_str
from ..plumbing.text import size_text
from .report import shown_path

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_STATES = (
    "Several devices can share it: `lightning.strategy` genlight.adapter.FSDP2Strategy. On one, train fewer weights "
    "(LoRA, `requires_grad_(False)`), or use an optimizer with smaller states."
)
_ACTIVATIONS = (
    "Use smaller batches and accumulate gradients in `train_step`, `torch.utils.checkpoint` for the largest modules, "
    "or `lightning.precision` bf16-mixed."
)


def explain_memory(
    error: Exception, trainer: pl.Trainer, module: pl.LightningModule, run: Path | None
) -> GenlightError | None:
    """Return an error with the sizes of parameters, gradients, optimizer states and the rest; None for other errors.

    The rest is the peak that the device has counted, minus the other parts. The CPU counts no peak, so there it is
    unknown. Counting the memory that each module keeps for its backward would slow down every step. So the error names
    the command that trains the step once more and counts it.
    """
    text = safe_str(error)
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, GenlightError)
    if not is_torchs or not (isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(text)):
        return None
    parameters = [*module.parameters(), *module.buffers()]
    parts = {
        "parameters": _nbytes(parameters),
        "gradients": _nbytes(each.grad for each in parameters if each.grad is not None),
        "optimizer states": _nbytes(tree_leaves([dict(each.state) for each in trainer.optimizers])),
    }
    device = trainer.strategy.root_device
    if (counted := memory_in_use(device)) is not None:
        parts["activations and temporary tensors"] = max(counted[1] - sum(parts.values()), 0)
    largest = max(parts, key=lambda name: parts[name])
    held = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    replay = ""
    if run is not None and (run / JOB_NAME).is_file() and (step := getattr(module, "failed_step", 0)):
        replay = f" What each module keeps: `genlight replay {shown_path(run)} --step {step} --memory`."
    states = largest in ("parameters", "gradients", "optimizer states") and device.type != "cpu"
    return GenlightError(
        f"{type(error).__name__}: {text.partition(chr(10))[0].rstrip('.')}{place_in_users_code(error)}. "
        f"Held on {device}: {held}. {_STATES if states else _ACTIVATIONS}{replay}"
    )


def _nbytes(tensors: Iterable[Any]) -> int:
    """Return the bytes that tensors occupy on this rank; views of one storage count once, and shards as their part."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors if isinstance(each, Tensor))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}
    return sum(storages.values())
