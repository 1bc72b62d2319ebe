"""The trainable part of a module, and what trains it, in three kinds of file without pickle.

A checkpoint of adapter weights (LoRA and the like) leaves the frozen base out. The names of the files are those that
existing tools look for; ``checkpoint_meta.json`` is written last, so that where it lies the others are whole. What the
older runtime wrote under these names, an ``optimizer.pt`` among them, is read as well, without unpickling.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ..contract.exceptions import BrokenCheckpointError, CheckpointError, UnstorableStateError
from ..plumbing.durable import fsync_directory, write_bytes_durably

if TYPE_CHECKING:
    import torch

__all__ = ["load_trainable_module_checkpoint", "save_trainable_module_checkpoint"]

WEIGHTS_FILE = "lora.safetensors"
OPTIMIZER_TENSORS_FILE = "optimizer.safetensors"
OPTIMIZER_FILE = "optimizer.json"
META_FILE = "checkpoint_meta.json"
FORMAT = "lora_safetensors_v1"
RESERVED = ("format", "files", "primary_path", "optimizer_path", "trainable")
"""Entries of the meta file by which a checkpoint is read."""

OLD_OPTIMIZER_FILE = "optimizer.pt"
"""Where the older runtime kept the optimizer's state, by ``torch.save``."""
OLD_WEIGHTS = {"lora_torch_v1": "lora.pt"}
"""File of the weights by the format that an older meta file names, where that is not safetensors."""


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
    """Write the trainable parameters of `module`, and what trains them, into `output_dir`.

    The files: ``lora.safetensors``; ``optimizer.safetensors`` and ``optimizer.json`` where there is an optimizer or
    a scheduler; ``checkpoint_meta.json``, last.

    Args:
        module: Parameters that do not require a gradient are left out.
        output_dir: Made if it is not there.
        step: Completed steps.
        optimizer: Its whole state is saved.
        scheduler: Anything whose ``state_dict()`` holds JSON values and tensors.
        final: Whether training is over.
        model_name_or_path: What the frozen base is.
        metadata: Facts of your own, as JSON values; each becomes an entry of the meta file and of the result, in place
            of ``step``, ``final`` or ``model_name_or_path`` where it has that name.
        facts: The same, as keywords.

    Returns:
        What a ``save_checkpoint`` hook may return as it is: ``primary_path`` (the weights) and, with an optimizer,
        ``optimizer_path``, as files below `output_dir` as it was given; ``format``, ``step``, ``final``,
        ``model_name_or_path``, ``files``, and your facts. In the meta file the two paths are names, so that the folder
        may be moved.

    Raises:
        CheckpointError: The module has no trainable parameter.
        UnstorableStateError: A value is neither a JSON value nor a tensor.
        ValueError: One of your facts has the name of an entry by which a checkpoint is read.
    """
    from safetensors.torch import save

    from ...callbacks.checkpoint.codec.state_tree import encode

    directory = Path(output_dir)
    weights = {name: _storable(value) for name, value in module.named_parameters() if value.requires_grad}
    if not weights:
        raise CheckpointError(f"{type(module).__name__} has no parameter with requires_grad: there is nothing to save")
    beside = _Tensors({})
    holders = {"optimizer": optimizer, "scheduler": scheduler}
    tree = {
        name: encode(holder.state_dict(), beside, root=name) for name, holder in holders.items() if holder is not None
    }

    contents = {WEIGHTS_FILE: save(weights)}
    if tree:
        contents |= {OPTIMIZER_TENSORS_FILE: save(beside.tensors), OPTIMIZER_FILE: _json_bytes(tree)}
    paths = {"primary_path": WEIGHTS_FILE}
    if optimizer is not None:
        paths["optimizer_path"] = OPTIMIZER_TENSORS_FILE
    description = {
        "format": FORMAT,
        "files": [*contents, META_FILE],
        "step": int(step),
        "final": bool(final),
        "model_name_or_path": str(model_name_or_path),
        **_checked_facts({**(metadata or {}), **facts}),
    }
    meta = {**description, **paths, "trainable": sorted(weights)}
    _write_all({**contents, META_FILE: _json_bytes(meta)}, directory)
    return {**description, **{name: str(directory / file) for name, file in paths.items()}}


def load_trainable_module_checkpoint(
    module: torch.nn.Module,
    checkpoint_dir: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Take over what `save_trainable_module_checkpoint` wrote, this one or the older runtime's; returns its facts.

    Nothing is changed before everything that is asked for was found and fits.

    Raises:
        CheckpointError: A file is missing, or the parameters of `module` and of the checkpoint differ in name or shape.
        BrokenCheckpointError: A file cannot be read, or lacks an entry that another one refers to.
    """
    import torch

    directory = Path(checkpoint_dir)
    facts = _read(directory / META_FILE)
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    old_weights = OLD_WEIGHTS.get(str(facts.get("format")))
    weights_file = directory / (old_weights or WEIGHTS_FILE)
    weights = _read_torch(weights_file) if old_weights else _read_tensors(weights_file)
    _check_same_parameters(parameters, weights, weights_file)
    wanted = {
        name: holder for name, holder in (("optimizer", optimizer), ("scheduler", scheduler)) if holder is not None
    }
    file, states = _read_states(directory, facts, list(wanted))
    if optimizer is not None:
        _check_same_groups(optimizer, states["optimizer"], file)

    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    for name, holder in wanted.items():
        holder.load_state_dict(states[name])
    return facts


def _checked_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in facts.items():
        if name in RESERVED:
            raise ValueError(f"Invalid `metadata`. {name!r} is an entry by which it is read; choose another name.")
        try:
            json.dumps({name: value})
        except (TypeError, ValueError) as error:
            raise UnstorableStateError(name, type(value).__qualname__, f"it must be JSON: {error}") from error
    return dict(facts)


def _write_all(contents: Mapping[str, bytes], directory: Path) -> None:
    """Write the files in order, after taking back the word that what the directory held before is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / META_FILE).exists():
        (directory / META_FILE).unlink()
        fsync_directory(directory)
    for name, data in contents.items():
        write_bytes_durably(directory / name, data)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


@dataclass(frozen=True)
class _Tensors:
    """The tensors and arrays of a tree, as the codec of checkpoints puts them apart and asks for them."""

    tensors: dict[str, torch.Tensor]
    """By their paths."""

    def add_tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        from ...callbacks.checkpoint.codec.state_tree import format_path

        name = format_path(path)
        self.tensors[name] = _storable(tensor)
        return {"name": name}

    def add_array(self, array: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        import torch

        return self.add_tensor(torch.from_numpy(array), path)

    def tensor(self, reference: dict[str, Any]) -> torch.Tensor:
        return self.tensors[reference["name"]]

    def array(self, reference: dict[str, Any]) -> Any:
        return self.tensor(reference).numpy()


def _read_states(directory: Path, facts: Mapping[str, Any], names: list[str]) -> tuple[Path, dict[str, Any]]:
    """The file that describes what trained the weights, and the state of each of `names`."""
    from ...callbacks.checkpoint.codec.state_tree import decode

    if not names:
        return directory / OPTIMIZER_FILE, {}
    is_old = PurePath(str(facts.get("optimizer_path"))).name == OLD_OPTIMIZER_FILE
    file = directory / (OLD_OPTIMIZER_FILE if is_old else OPTIMIZER_FILE)
    tree = {"optimizer": _read_torch(file)} if is_old else _read(file)
    for name in names:
        if name not in tree:
            raise CheckpointError(f"{file} holds no {name}: it was saved without one")
    if is_old:
        return file, tree
    tensors = _Tensors(_read_tensors(directory / OPTIMIZER_TENSORS_FILE))
    try:
        return file, {name: decode(tree[name], tensors) for name in names}
    except KeyError as error:
        raise BrokenCheckpointError(directory.name, f"{OPTIMIZER_TENSORS_FILE} lacks {error.args[0]!r}") from None


def _check_same_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], file: Path) -> None:
    try:
        groups = state["param_groups"]
        saved, own = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    except (KeyError, TypeError):
        raise BrokenCheckpointError(file.parent.name, f"{file.name} does not hold an optimizer's state") from None
    if saved != own:
        raise CheckpointError(f"{file} is of an optimizer with {saved} parameters in its groups; this one has {own}")


def _check_same_parameters(
    parameters: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], file: Path
) -> None:
    """Every difference in one error."""
    faults = [f"{name} is missing there" for name in parameters if name not in saved]
    faults += [f"{name} is not trainable in this module" for name in saved if name not in parameters]
    for name, parameter in parameters.items():
        if name in saved and saved[name].shape != parameter.shape:
            faults.append(f"{name} has shape {tuple(saved[name].shape)} there and {tuple(parameter.shape)} here")
    if faults:
        raise CheckpointError(f"{file} does not fit this module: {'; '.join(faults)}")


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode()


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return _read(file, load)


def _read_torch(file: Path) -> dict[str, Any]:
    """What the older runtime wrote by ``torch.save``: tensors and plain values, and no code to run."""
    import torch

    return _read(file, lambda data: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def _read(file: Path, parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    """The dictionary in `file`."""
    from safetensors import SafetensorError

    try:
        value = parse(file.read_bytes())
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
