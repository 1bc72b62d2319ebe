"""Checkpoints for other tools: one safetensors file, a Lightning ``.ckpt``, or a folder for ``from_pretrained``.

Each is whole or absent, like a checkpoint; the checkpoint is proven before anything is exported.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...adapter.contract.exceptions import CheckpointError
from ...adapter.plumbing.durable import fsync_directory, fsync_file, temporary_name, write_bytes_durably
from .capture import CONTRACT_KEY
from .loading import Base, load, load_weights
from .pretrained import CONFIG_FILE, kept_configurations
from .selection import find_checkpoint

__all__ = ["export_lightning", "export_pretrained", "export_safetensors", "read_base"]


_PRETRAINED_WEIGHTS = "model.safetensors"


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


def export_pretrained(
    path: str | os.PathLike[str],
    target: Path,
    *,
    strip_prefix: str = "",
    base: Base | None = None,
    replace: bool = False,
) -> Path:
    """A Hugging Face model as the folder that ``from_pretrained`` loads: weights, configuration, tokenizer.

    Each file is whole or absent, and ``config.json`` comes last.

    Args:
        path: The checkpoint, beside which `keep_configurations` has left what it needs.
        target: The folder, which may have other files.
        strip_prefix: Where the model hangs, as names of weights have it: ``model.``; empty where there is one model.
        base: As of `export_safetensors`.
        replace: Whether files that are there are replaced.

    Raises:
        CheckpointError: No configuration was kept, or that of several models; or as of `export_safetensors`.
        BrokenCheckpointError: The checkpoint is not whole.
        FileExistsError: One of the files is there, and `replace` is false.
    """
    kept = kept_configurations(Path(path).absolute().parent)
    chosen = {name: folder for name, folder in kept.items() if strip_prefix in ("", f"{name}.")}
    if len(chosen) != 1:
        among = ", ".join(f"--strip-prefix {name}." for name in kept)
        raise CheckpointError(
            f"choose one of the models that were trained: {among}"
            if kept
            else f"beside {path} there is no configuration of a Hugging Face model: none was trained, or the "
            "checkpoint was moved away from its folder `pretrained`. Export its weights with --to FILE.safetensors"
        )
    ((name, folder),) = chosen.items()
    files = sorted(folder.iterdir(), key=lambda file: file.name == CONFIG_FILE)
    for file in () if replace else (_PRETRAINED_WEIGHTS, *(each.name for each in files)):
        if os.path.lexists(target / file):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target / file))
    export_safetensors(path, target / _PRETRAINED_WEIGHTS, strip_prefix=f"{name}." if name else "", base=base)
    for each in files:
        write_bytes_durably(target / each.name, each.read_bytes())
    return target.absolute()


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
