"""Checkpoints for other tools: one safetensors file, or a Lightning ``.ckpt``.

Each is whole or absent, like a checkpoint; the checkpoint is proven before anything is exported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...adapter.contract.exceptions import CheckpointError
from ...adapter.plumbing.durable import fsync_directory, fsync_file, temporary_name
from .capture import CONTRACT_KEY
from .selection import find_checkpoint
from .store import Base, load, load_weights

__all__ = ["export_lightning", "export_safetensors", "read_base"]


def export_safetensors(
    path: str | os.PathLike[str], target: Path, *, strip_prefix: str = "", base: Base | None = None
) -> Path:
    """The model's weights as one file.

    Args:
        path: The checkpoint.
        target: The file to make; an existing one is replaced.
        strip_prefix: Only tensors whose name starts with this, and without it: ``model.`` for what hangs there.
        base: The model's tensors, of which those are taken that the checkpoint leaves out.

    Raises:
        CheckpointError: No tensor has such a name, or what the checkpoint leaves out is not in `base`.
        BrokenCheckpointError: The checkpoint is not whole.
    """
    weights = load_weights(path, base=base)
    chosen = {
        name.removeprefix(strip_prefix): tensor for name, tensor in weights.items() if name.startswith(strip_prefix)
    }
    if not chosen:
        names = ", ".join(sorted(weights)[:5]) or "none"
        raise CheckpointError(
            f"the checkpoint at {path} has no weights named {strip_prefix}…; its first names are: {names}"
        )
    return _whole(target, lambda temporary: save_file(chosen, temporary, {"format": "pt"}))


def export_lightning(path: str | os.PathLike[str], target: Path, *, base: Base | None = None) -> Path:
    """A checkpoint file of stock Lightning, which ``load_from_checkpoint`` and ``ckpt_path`` take.

    What only this project restores (random states, the trainer's payload) is left out: its types would make
    ``torch.load(weights_only=True)``, Lightning's default, refuse the whole file.

    Raises:
        CheckpointError: What the checkpoint leaves out is not in `base`.
        BrokenCheckpointError: The checkpoint is not whole.
    """
    checkpoint = {name: value for name, value in load(path, base=base).items() if name != CONTRACT_KEY}
    return _whole(target, lambda temporary: torch.save(checkpoint, temporary))


def read_base(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, or the weights of a checkpoint, that another checkpoint leaves out.

    Raises:
        CheckpointError: The file is not one of safetensors, or the checkpoint leaves tensors out itself.
        BrokenCheckpointError: The checkpoint is not whole.
        FileNotFoundError: There is neither.
    """
    if Path(path).suffix != ".safetensors":
        return load_weights(find_checkpoint(path))
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None


def _whole(target: Path, write: Callable[[Path], None]) -> Path:
    """Run `write` on a temporary name beside `target`, and rename the result."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(temporary_name(target.name))
    try:
        write(temporary)
        fsync_file(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)
    return target
