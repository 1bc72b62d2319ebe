"""Checkpoints of the trainable part of a module, its optimizer and its scheduler, without pickle.

A checkpoint of adapter weights (such as LoRA) omits the frozen base. Its file names are fixed, because existing tools
expect them. ``checkpoint_meta.json`` is written last: if it exists, the other files are complete. Files of the older
runtime with these names, and its ``optimizer.pt``, are read as well, without unpickling.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ..contract.exceptions import BrokenCheckpointError, CheckpointError, UnstorableStateError
from ..plumbing.durable import fsync_directory, make_directory, write_bytes_durably
from ..plumbing.safe_open import open_regular, read_regular

if TYPE_CHECKING:
    import torch


WEIGHTS_FILE = "lora.safetensors"
OPTIMIZER = "optimizer"
"""Name of the checkpoint (``optimizer.json`` and a folder next to it) with the states of optimizer and scheduler."""
META_FILE = "checkpoint_meta.json"
FORMAT = "lora_safetensors_v1"
_LARGEST_META = 16 << 20
RESERVED = ("format", "primary_path", "optimizer_path")
"""Entries of the meta file that loading needs."""

OLD_OPTIMIZER_FILE = "optimizer.pt"
"""File of the older runtime with the optimizer's state, written by ``torch.save``."""
OLD_WEIGHTS = {"lora_torch_v1": "lora.pt"}
"""Weight files that are not safetensors, by the format in the meta file of the older runtime."""


def save_trainable_module_checkpoint(
    module: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    *,
    step: int,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    final: bool = False,
    model_name_or_path: str = "",
    metadata: Mapping[str, Any] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Write the trainable parameters of `module`, and the states of optimizer and scheduler, into `output_dir`.

    The files: ``lora.safetensors``; ``optimizer.json`` and a folder ``optimizer`` if there is an optimizer or a
    scheduler; ``checkpoint_meta.json``, last.

    Args:
        module: Parameters that do not require a gradient are skipped.
        output_dir: Made if it does not exist.
        step: Completed steps.
        optimizer: Its complete state is saved.
        scheduler: Anything whose ``state_dict()`` a checkpoint can hold.
        final: Whether training is over.
        model_name_or_path: Name or path of the frozen base.
        metadata: Your own facts, as JSON values; each becomes an entry of the meta file and of the result. An entry
            named ``step``, ``final`` or ``model_name_or_path`` replaces the value of that argument.
        facts: Further entries of `metadata`, as keywords.

    Returns:
        A result that a ``save_checkpoint`` hook may return: ``primary_path`` (the weights) and, with an optimizer,
        ``optimizer_path``, as paths below `output_dir`; ``format``, ``step``, ``final``, ``model_name_or_path``, and
        your facts. The meta file has file names instead of the two paths, so that the folder may be moved.

    Raises:
        CheckpointError: The module has no trainable parameter.
        UnstorableStateError: A checkpoint cannot hold a value; nothing was written.
        ValueError: An entry of `metadata` has a name that loading needs for itself.
    """
    from safetensors.torch import save as safetensors_of

    from ...callbacks.checkpoint import save
    from ...callbacks.checkpoint.codec.state_tree import encode
    from ...callbacks.checkpoint.codec.tensors import TensorTable

    directory = Path(output_dir)
    trainable = {name: value for name, value in module.named_parameters() if value.requires_grad}
    if not trainable:
        raise CheckpointError(f"{type(module).__name__} has no parameter with requires_grad: there is nothing to save")
    holders = {OPTIMIZER: optimizer, "scheduler": scheduler}
    states = {name: each.state_dict() for name, each in holders.items() if each is not None}
    own = {**(metadata or {}), **facts}
    for name in own.keys() & set(RESERVED):
        raise ValueError(f"Invalid `metadata`. {name!r} is an entry that loading needs; choose another name.")
    description = {
        "format": FORMAT,
        "step": int(step),
        "final": bool(final),
        "model_name_or_path": str(model_name_or_path),
        **own,
    }
    # Before anything is changed, refuse values that cannot be stored.
    for name, state in states.items():
        encode(state, TensorTable(), root=name)
    try:
        json.dumps(own)
    except (TypeError, ValueError) as error:
        raise UnstorableStateError("metadata", "a value", f"it must be JSON: {error}") from error
    paths = {"primary_path": WEIGHTS_FILE} | ({} if optimizer is None else {"optimizer_path": f"{OPTIMIZER}.json"})

    make_directory(directory, shared=None)
    if (directory / META_FILE).exists():  # the previous checkpoint in this folder is no longer complete
        (directory / META_FILE).unlink()
        fsync_directory(directory)
    weights = {name: value.detach().cpu().contiguous() for name, value in trainable.items()}
    write_bytes_durably(directory / WEIGHTS_FILE, safetensors_of(weights))
    if states:
        save(directory / OPTIMIZER, states)
    meta = json.dumps({**description, **paths}, sort_keys=True, indent=1)
    write_bytes_durably(directory / META_FILE, meta.encode())
    return {**description, **{name: str(directory / file) for name, file in paths.items()}}


def load_trainable_module_checkpoint(
    module: torch.nn.Module,
    checkpoint_dir: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Load a checkpoint that `save_trainable_module_checkpoint` of genlight or of the older runtime wrote.

    Returns its facts, the content of the meta file.

    Checks all files and shapes before it changes a weight.

    Raises:
        CheckpointError: A file is missing, the parameters of `module` and of the checkpoint differ in name or shape, or
            the optimizer has other groups.
        BrokenCheckpointError: A file cannot be read, or was changed.
    """
    import torch

    directory = Path(checkpoint_dir)
    facts = _read(directory / META_FILE, lambda file: json.loads(read_regular(file, limit=_LARGEST_META)))
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    old_weights = OLD_WEIGHTS.get(str(facts.get("format")))
    weights_file = directory / (old_weights or WEIGHTS_FILE)
    weights = _read(weights_file, _load_torch if old_weights else _load_safetensors)
    _check_same_parameters(parameters, weights, weights_file)
    targets = {name: each for name, each in ((OPTIMIZER, optimizer), ("scheduler", scheduler)) if each is not None}
    states = _states(directory, facts) if targets else {}
    for name in targets:
        if name not in states:
            raise CheckpointError(f"{directory} holds no {name}: it was saved without one")

    # The weights come last: if an optimizer has other groups than the saved one, it raises before it changes anything.
    for name, each in targets.items():
        try:
            each.load_state_dict(states[name])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"The {name} in {directory} does not fit this one: {error!r}") from error
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return facts


def _states(directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved states, by ``optimizer`` and ``scheduler``."""
    from ...callbacks.checkpoint import load

    if PurePath(str(facts.get("optimizer_path"))).name == OLD_OPTIMIZER_FILE:
        return {OPTIMIZER: _read(directory / OLD_OPTIMIZER_FILE, _load_torch)}
    return _read(directory / f"{OPTIMIZER}.json", lambda file: load(file.with_suffix("")))


def _check_same_parameters(
    parameters: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], file: Path
) -> None:
    """Raise one error for all differences."""
    faults = [f"{name} is missing there" for name in parameters if name not in saved]
    faults += [f"{name} is not trainable in this module" for name in saved if name not in parameters]
    for name, parameter in parameters.items():
        if name in saved and saved[name].shape != parameter.shape:
            faults.append(f"{name} has shape {tuple(saved[name].shape)} there and {tuple(parameter.shape)} here")
    if faults:
        raise CheckpointError(f"{file} does not fit this module: {'; '.join(faults)}")


def _load_torch(file: Path) -> Any:
    """Load a file that the older runtime wrote by ``torch.save``: only tensors and plain values, no code."""
    import torch

    with os.fdopen(open_regular(file), "rb") as opened:
        return torch.load(opened, map_location="cpu", weights_only=True)


def _load_safetensors(file: Path) -> Any:
    from safetensors.torch import load_file

    os.close(open_regular(file))  # refuses a pipe, because reading one would block
    return load_file(file)


def _read(file: Path, load: Callable[[Path], Any]) -> dict[str, Any]:
    """Return the dictionary in `file`."""
    from safetensors import SafetensorError

    try:
        value = load(file)
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing; expected the directory that save_trainable_module_checkpoint wrote"
        ) from None
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise BrokenCheckpointError(file.parent.name, f"{file.name} cannot be read: {reason}") from error
    if not isinstance(value, dict):
        raise BrokenCheckpointError(file.parent.name, f"{file.name} does not hold a dictionary")
    return value
