"""Checkpoints for other tools: one safetensors file, a Lightning ``.ckpt``, or a folder for ``from_pretrained``.

Each is whole or absent, like a checkpoint; the checkpoint is proven before anything is exported.

A folder needs files besides weights. ``genlight-pretrained/PATH/`` beside the checkpoints of a run has ``config.json``
and ``generation_config.json`` of the Hugging Face model at PATH in the trained module, and the files of the tokenizer.
They are written where training starts, by the objects that the class made: an export then needs neither the class nor
transformers, and unpickles nothing. Checkpoints share them, because they follow from the class, and a tokenizer can be
larger than the weights that are trained.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ...adapter.contract.exceptions import CheckpointError
from ...adapter.plumbing.durable import (
    create_file,
    fsync_directory,
    fsync_file,
    make_directory,
    temporary_name,
    write_bytes_durably,
)
from ...adapter.plumbing.safe_open import open_regular, read_below
from .capture import CONTRACT_KEY
from .selection import find_checkpoint
from .store import Base, load, load_weights

__all__ = ["export_lightning", "export_pretrained", "export_safetensors", "keep_configurations", "read_base"]

log = logging.getLogger(__name__)

_FOLDER = "genlight-pretrained"
"""No name that a folder of the user's has, as it is replaced."""
_CONFIG_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"
_WEIGHTS_FILE = "model.safetensors"
_LARGEST_BYTES = 512 << 20
"""Of a file of the configuration, of which a tokenizer is the largest."""


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
    return _whole(target, lambda temporary: save_file(chosen, temporary, {"format": "pt"}), load_file)


def export_lightning(path: str | os.PathLike[str], target: Path, *, base: Base | None = None) -> Path:
    """A checkpoint file of stock Lightning, which ``load_from_checkpoint`` and ``ckpt_path`` take.

    Types that ``torch.load(weights_only=True)``, Lightning's default, does not know would make it refuse the whole
    file. So the export omits what only genlight restores (random states, the trainer's payload), and with a warning
    also hyperparameters and states of callbacks, data modules and loaders that hold such a type.

    Raises:
        CheckpointError: What the checkpoint leaves out is not in `base`, or torch would not load the file.
        BrokenCheckpointError: The checkpoint is not whole.
    """
    checkpoint = {name: value for name, value in load(path, base=base).items() if name != CONTRACT_KEY}
    if omitted := _omit_unknown_types(checkpoint):
        names = ", ".join(omitted)
        log.warning("%s is without %s, whose types make torch.load(weights_only=True) refuse a file", target, names)
    return _whole(target, lambda temporary: torch.save(checkpoint, temporary), _load_as_lightning)


_LOADED_WHOLE = frozenset({"state_dict", "optimizer_states", "lr_schedulers", "loops"})
"""Parts without which stock Lightning would not resume, or not as it was."""


def _omit_unknown_types(checkpoint: dict[str, Any]) -> list[str]:
    """Remove from `checkpoint` what torch would not load and Lightning can do without; return the paths."""
    loops: dict[str, Any] = checkpoint.get("loops") or {}
    holders = {f"loops.{name}.state_dict.": loop.get("state_dict") for name, loop in loops.items()}
    holders |= {f"{name}.": checkpoint.get(name) for name in ("callbacks", "hyper_parameters")}
    holders[""] = {name: value for name, value in checkpoint.items() if name not in _LOADED_WHOLE}
    omitted = []
    for path, holder in holders.items():
        for name in [name for name, value in (holder or {}).items() if not _is_known_to_torch(value)]:
            del (holder if path else checkpoint)[name]
            omitted.append(f"{path}{name}")
    return omitted


def _is_known_to_torch(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` gives `value` back."""
    memory = io.BytesIO()
    try:
        torch.save(value, memory)
        memory.seek(0)
        torch.load(memory, weights_only=True)
    except Exception:  # noqa: BLE001 - whatever pickling raises for a class
        return False
    return True


def _load_as_lightning(path: Path) -> None:
    """Load an export as torch and Lightning do by default.

    Raises:
        CheckpointError: They refuse it; says what they said.
    """
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        TorchCheckpointIO().load_checkpoint(path)
    except (pickle.UnpicklingError, RuntimeError) as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"an object of {name[1]}" if name else str(error)
        raise CheckpointError(
            f"torch.load(weights_only=True) would refuse the file, which holds {what}; export the weights alone, with "
            "--to FILE.safetensors"
        ) from error


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
    root = Path(path).absolute().parent / _FOLDER
    kept = _kept_configurations(root)
    chosen = {name: files for name, files in kept.items() if strip_prefix in ("", f"{name}.")}
    if len(chosen) != 1:
        among = ", ".join(f"--strip-prefix {name}." for name in kept)
        raise CheckpointError(
            f"choose one of the models that were trained: {among}"
            if kept
            else f"beside {path} there is no configuration of a Hugging Face model: none was trained, or the "
            f"checkpoint was moved away from its folder {_FOLDER}. Export its weights with --to FILE.safetensors"
        )
    ((name, files),) = chosen.items()
    names = sorted(files, key=lambda file: file == _CONFIG_FILE)
    for file in () if replace else (_WEIGHTS_FILE, *names):
        if os.path.lexists(target / file):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target / file))
    try:
        contents = {file: read_below(root, files[file], limit=_LARGEST_BYTES) for file in names}
    except OSError as error:
        raise CheckpointError(f"{error.filename} is not exported: {error.strerror}") from error
    export_safetensors(path, target / _WEIGHTS_FILE, strip_prefix=f"{name}." if name else "", base=base)
    for file, content in contents.items():
        make_directory((target / file).parent, shared=None)
        write_bytes_durably(target / file, content)
    return target.absolute()


def _kept_configurations(root: Path) -> dict[str, dict[str, str]]:
    """The files of each model below `root`, by the model's name: the path below its folder, and that below `root`.

    A run may come from elsewhere, so no link is followed on the way.
    """
    files = [
        Path(folder, name).relative_to(root)
        for folder, folders, names in os.walk(root if not root.is_symlink() else os.devnull)
        for name in (*names, *(name for name in folders if Path(folder, name).is_symlink()))
    ]
    models = sorted(file.parent for file in files if file.name == _CONFIG_FILE)
    return {
        ".".join(model.parts): {
            file.relative_to(model).as_posix(): file.as_posix() for file in files if file.is_relative_to(model)
        }
        for model in models
    }


def read_base(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, or the weights of a checkpoint, that another checkpoint leaves out.

    Raises:
        CheckpointError: The file is not one of safetensors, or the checkpoint leaves tensors out itself.
        BrokenCheckpointError: The checkpoint is not whole.
        FileNotFoundError: There is neither.
    """
    if Path(path).suffix != ".safetensors":
        return load_weights(find_checkpoint(path))
    os.close(open_regular(path))  # or a pipe would be waited for
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None


def _whole(target: Path, write: Callable[[Path], None], load_back: Callable[[Path], object]) -> Path:
    """Run `write` on a temporary name next to `target`, prove that others can load it, and rename the result."""
    target = target.absolute()
    make_directory(target.parent, shared=None)
    temporary = target.with_name(temporary_name(target.name))
    try:
        create_file(temporary)
        write(temporary)
        load_back(temporary)
        fsync_file(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)
    return target


def keep_configurations(directory: Path, module: nn.Module) -> None:
    """Write what the Hugging Face models in `module` need besides weights, in place of what was there; rank zero only.

    A failure is logged: training does not depend on it.

    Args:
        directory: That of the checkpoints.
        module: The trained module, which may host a trainer class.
    """
    models: dict[str, Any] = {path: each for path, each in _outermost(module) if not hasattr(each, "peft_config")}
    if not models:
        return
    temporary = directory / temporary_name(_FOLDER)
    try:
        for path, model in models.items():
            folder = temporary / path
            make_directory(folder, shared=None)
            config = json.loads(model.config.to_json_string())
            config["architectures"] = config.get("architectures") or [type(model).__name__]
            write_bytes_durably(folder / _CONFIG_FILE, json.dumps(config, indent=2).encode())
            generation: Any = getattr(model, "generation_config", None)
            if generation is not None:
                write_bytes_durably(folder / _GENERATION_FILE, generation.to_json_string().encode())
            if len(models) == 1:  # of several nothing tells whose tokenizer it is
                for tokenizer in _tokenizers(module):
                    tokenizer.save_pretrained(str(folder))
        shutil.rmtree(directory / _FOLDER, ignore_errors=True)
        os.rename(temporary, directory / _FOLDER)
        fsync_directory(directory)
    except Exception as error:  # noqa: BLE001 - it comes from classes of others
        shutil.rmtree(temporary, ignore_errors=True)
        log.warning("the configuration of the model was not kept, so that an export to a folder has none: %s", error)


def _outermost(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The models in `module` that are in no other one: a language model consists of models itself."""
    inside: tuple[str, ...] = ()
    for path, each in module.named_modules():
        is_model = hasattr(getattr(each, "config", None), "to_json_string") and hasattr(each, "save_pretrained")
        if is_model and not path.startswith(inside or "\0"):
            inside = (*inside, f"{path}.")
            yield path, each


def _tokenizers(module: nn.Module) -> list[Any]:
    """Tokenizers and processors that the module, its trainer class or what that built holds."""
    state = getattr(module, "contract_state", None)
    held = [*vars(module).values(), *vars(getattr(module, "plugin", module)).values()]
    held += state.values() if isinstance(state, Mapping) else vars(state).values() if hasattr(state, "__dict__") else ()
    found = (each for each in held if callable(each) and hasattr(each, "save_pretrained"))
    # Neither a class nor what holds weights, such as a pipeline.
    return list({id(each): each for each in found if not isinstance(each, type) and not hasattr(each, "to")}.values())
