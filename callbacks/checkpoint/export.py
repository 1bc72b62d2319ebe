"""Checkpoints for other tools: one safetensors file, a Lightning ``.ckpt``, or a folder for ``from_pretrained``.

Each export is complete or absent, like a checkpoint. The checkpoint is proven before anything is exported.

A folder needs more files than the weights. ``genlight-pretrained/PATH/`` next to the checkpoints of a run has
``config.json`` and ``generation_config.json`` of the Hugging Face model at PATH in the trained module, and the files of
the tokenizer. They are written at the start of training, by the objects that the class made. So an export needs
neither the class nor transformers, and unpickles nothing. All checkpoints share them, because they depend only on the
class, and a tokenizer can be larger than the trained weights.

A model of PEFT has the configuration of its adapter as well, in ``peft/NAME/``. To merge the adapter, an export builds
the model again from the two configurations, with transformers and peft, and loads the proven weights into it.
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
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from ...adapter.contract.exceptions import CheckpointError
from ...adapter.plumbing.durable import (
    fsync_directory,
    make_directory,
    temporary_name,
    write_bytes_durably,
    write_proven,
)
from ...adapter.plumbing.redaction import safe_str
from ...adapter.plumbing.safe_open import open_regular, read_below
from .capture import CONTRACT_KEY
from .loading import Base, load, load_weights
from .selection import find_checkpoint

log = logging.getLogger(__name__)

_FOLDER = "genlight-pretrained"
"""Name of the folder next to the checkpoints. Each training replaces it, so a user's own must not have this name."""
_CONFIG_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"
_WEIGHTS_FILE = "model.safetensors"
_ADAPTERS = "peft"
"""Folder of a model's adapters, each in a folder of its name."""
_ADAPTER_OVERRIDES = {"init_lora_weights": True, "megatron_config": None, "megatron_core": None}
"""Replacements for settings of an adapter that would compute weights again, or import a module by its name."""
_LARGEST_BYTES = 512 << 20
"""Limit on the size of a configuration file; a tokenizer is the largest."""


def export_safetensors(
    path: str | os.PathLike[str], target: Path, *, strip_prefix: str = "", base: Base | None = None
) -> Path:
    """Write the model's weights as one file.

    Args:
        path: The checkpoint.
        target: The file to make; an existing one is replaced.
        strip_prefix: Export only tensors whose name starts with this, and remove it: ``model.`` for a submodule.
        base: The model's tensors; those that the checkpoint omits are taken from here.

    Raises:
        CheckpointError: No tensor has such a name, or `base` lacks a tensor that the checkpoint omits.
        BrokenCheckpointError: The checkpoint is not intact.
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
    return write_proven(target, lambda temporary: save_file(chosen, temporary, {"format": "pt"}), load_file)


def export_lightning(path: str | os.PathLike[str], target: Path, *, base: Base | None = None) -> Path:
    """Write a checkpoint file of stock Lightning, for ``load_from_checkpoint`` and ``ckpt_path``.

    ``torch.load(weights_only=True)``, Lightning's default, refuses a file that holds a type unknown to torch. So the
    export omits the state that only genlight restores (random states, the trainer's payload), and with a warning also
    hyperparameters and states of callbacks, data modules and loaders that hold such a type.

    Raises:
        CheckpointError: `base` lacks a tensor that the checkpoint omits, or torch would not load the file.
        BrokenCheckpointError: The checkpoint is not intact.
    """
    checkpoint = {name: value for name, value in load(path, base=base).items() if name != CONTRACT_KEY}
    if omitted := _omit_unknown_types(checkpoint):
        names = ", ".join(omitted)
        log.warning("%s omits %s, whose types make torch.load(weights_only=True) refuse a file", target, names)
    return write_proven(target, lambda temporary: torch.save(checkpoint, temporary), _load_as_lightning)


_NEVER_OMITTED = frozenset({"state_dict", "optimizer_states", "lr_schedulers", "loops"})
"""Parts without which stock Lightning would not resume, or not in the same state."""


def _omit_unknown_types(checkpoint: dict[str, Any]) -> list[str]:
    """Remove the values from `checkpoint` that torch would not load and Lightning does not need; return their paths."""
    loops: dict[str, Any] = checkpoint.get("loops") or {}
    holders = {f"loops.{name}.state_dict.": loop.get("state_dict") for name, loop in loops.items()}
    holders |= {f"{name}.": checkpoint.get(name) for name in ("callbacks", "hyper_parameters")}
    holders[""] = {name: value for name, value in checkpoint.items() if name not in _NEVER_OMITTED}
    omitted = []
    for path, holder in holders.items():
        for name in [name for name, value in (holder or {}).items() if not _is_known_to_torch(value)]:
            del (holder if path else checkpoint)[name]
            omitted.append(f"{path}{name}")
    return omitted


def _is_known_to_torch(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` can load `value`."""
    memory = io.BytesIO()
    try:
        torch.save(value, memory)
        memory.seek(0)
        torch.load(memory, weights_only=True)
    except Exception:  # noqa: BLE001 - a class may raise anything in pickling
        return False
    return True


def _load_as_lightning(path: Path) -> None:
    """Load an export with the defaults of torch and Lightning.

    Raises:
        CheckpointError: They refuse it; the message has their reason.
    """
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        TorchCheckpointIO().load_checkpoint(path)
    except (pickle.UnpicklingError, RuntimeError) as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"an object of {name[1]}" if name else str(error)
        raise CheckpointError(
            f"torch.load(weights_only=True) would refuse the file, which holds {what}; export only the weights, with "
            "--to FILE.safetensors"
        ) from error


def export_pretrained(
    path: str | os.PathLike[str],
    target: Path,
    *,
    strip_prefix: str = "",
    base: Base | None = None,
    merge: bool = False,
    replace: bool = False,
) -> Path:
    """Write a Hugging Face model as a folder for ``from_pretrained``: weights, configuration, tokenizer.

    Each file is complete or absent, and ``config.json`` comes last.

    Args:
        path: The checkpoint, next to the files of `keep_configurations`.
        target: The folder; it may contain other files.
        strip_prefix: Prefix of the model in names of weights, such as ``model.``; empty if there is only one model.
        base: The same as in `export_safetensors`.
        merge: Whether to merge the adapter of a PEFT model into its weights; needs transformers and peft.
        replace: Whether to replace existing files.

    Raises:
        CheckpointError: No configuration was kept, or several were; the model has an adapter and `merge` is false, or
            the reverse; the adapter cannot be merged; or see `export_safetensors`.
        BrokenCheckpointError: The checkpoint is not intact.
        FileExistsError: One of the files exists, and `replace` is false.
    """
    root = Path(path).absolute().parent / _FOLDER
    kept = _list_configurations(root)
    chosen = {name: files for name, files in kept.items() if strip_prefix in ("", f"{name}.")}
    if len(chosen) != 1:
        among = ", ".join(f"--strip-prefix {name}." for name in kept)
        raise CheckpointError(
            f"choose one of the trained models: {among}"
            if kept
            else f"there is no configuration of a Hugging Face model next to {path}: no such model was trained, or the "
            f"checkpoint was moved away from its folder {_FOLDER}. Export its weights with --to FILE.safetensors"
        )
    ((name, files),) = chosen.items()
    adapters = [file for file in files if Path(file).parts[0] == _ADAPTERS]
    if merge != bool(adapters):
        raise CheckpointError(
            f"the model {name!r} has no adapter of PEFT to merge; leave out --merge"
            if merge
            else f"the model {name!r} has an adapter of PEFT; add --merge to write a plain model with the adapter in "
            "its weights. For the adapter itself, call `save_pretrained` in the class's `save_checkpoint`"
        )
    names = sorted((file for file in files if file not in adapters), key=lambda file: file == _CONFIG_FILE)
    for file in () if replace else (_WEIGHTS_FILE, *names):
        if os.path.lexists(target / file):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target / file))
    try:
        contents = {file: read_below(root, files[file], limit=_LARGEST_BYTES) for file in names}
        settings = {Path(file).parts[1]: read_below(root, files[file], limit=_LARGEST_BYTES) for file in adapters}
    except OSError as error:
        raise CheckpointError(f"{error.filename} is not exported: {error.strerror}") from error
    prefix = f"{name}." if name else ""
    if merge:
        weights = load_weights(path, base=base)
        inside = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
        merged = _merge_adapter(inside, contents[_CONFIG_FILE], settings)
        write_proven(target / _WEIGHTS_FILE, lambda file: save_model(merged, str(file), {"format": "pt"}), load_file)
    else:
        export_safetensors(path, target / _WEIGHTS_FILE, strip_prefix=prefix, base=base)
    for file, content in contents.items():
        make_directory((target / file).parent, shared=None)
        write_bytes_durably(target / file, content)
    return target.absolute()


def _merge_adapter(weights: dict[str, torch.Tensor], config: bytes, adapters: dict[str, bytes]) -> Any:
    """Build the model of the two configurations around `weights`, and return it with its adapter merged.

    Args:
        weights: All weights of the PEFT model, by the names that they have in it.
        config: JSON configuration of the base model, which names a class of transformers.
        adapters: JSON configurations of the adapters by name.

    Raises:
        CheckpointError: A package is missing, there are several adapters, or peft cannot merge this kind.
    """
    if len(adapters) != 1:
        raise CheckpointError(f"the model has the adapters {', '.join(sorted(adapters))}; only one can be merged")
    ((name, adapter),) = adapters.items()
    try:
        import peft
        import transformers
    except ImportError as error:
        raise CheckpointError(f"merging needs transformers and peft, and {error.name} is not installed") from error
    try:
        settings, overridden = json.loads(config, object_hook=_without_kernels), json.loads(adapter)
        overridden |= {key: value for key, value in _ADAPTER_OVERRIDES.items() if key in overridden}
        kind: Any = getattr(transformers, settings["architectures"][0])
        if not issubclass(kind, transformers.PreTrainedModel):
            raise TypeError(f"{settings['architectures'][0]} is not a model of transformers")
        with warnings.catch_warnings(action="ignore"), torch.device("meta"):
            built = kind(kind.config_class.from_dict(settings))
            model: Any = peft.get_peft_model(built, peft.PeftConfig.from_peft_type(**overridden), adapter_name=name)
            is_tied = built.config.tie_word_embeddings
            model.load_state_dict(weights, assign=True)
            merged = model.merge_and_unload()
        # A checkpoint holds tied weights twice, so peft takes them for untied ones. Tie them again.
        untied, merged.config.tie_word_embeddings = merged.state_dict(), is_tied
        merged.tie_weights()
    except Exception as error:
        raise CheckpointError(f"this adapter cannot be merged: {type(error).__name__}: {safe_str(error)}") from error
    changed = [key for key, tensor in merged.state_dict().items() if not torch.equal(tensor, untied[key])]
    if changed:
        raise CheckpointError(
            f"the adapter changed one of two weights that are tied in the base model ({changed[0]}), so that a plain "
            "model cannot hold it; set `tie_word_embeddings` to false before training"
        )
    return merged


def _without_kernels(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` without the keys by which a configuration can name kernels that would be downloaded."""
    return {key: value for key, value in settings.items() if "_implementation" not in key}


def _list_configurations(root: Path) -> dict[str, dict[str, str]]:
    """Return the files of each model below `root`, by its name: for each path in the model's folder, that in `root`.

    A run may come from elsewhere, so no link on the way is followed.
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
    """Return the tensors of a safetensors file or the weights of a checkpoint, as a base for another checkpoint.

    Raises:
        CheckpointError: The file is not a safetensors file, or the checkpoint itself omits tensors.
        BrokenCheckpointError: The checkpoint is not intact.
        FileNotFoundError: There is neither a file nor a checkpoint.
    """
    if Path(path).suffix != ".safetensors":
        return load_weights(find_checkpoint(path))
    os.close(open_regular(path))  # otherwise a pipe would block
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None


def keep_configurations(directory: Path, module: nn.Module) -> None:
    """Write configurations and tokenizer of the Hugging Face models in `module`, replacing older ones; on rank zero.

    A failure is only logged: training does not depend on it.

    Args:
        directory: The folder of the checkpoints.
        module: The trained module; it may host a trainer class.
    """
    # Skip a model with adapters that is no PeftModel: `_merge_adapter` could not load its weights by their names.
    models: dict[str, Any] = {
        path: each
        for path, each in _outermost_models(module)
        if hasattr(each, "get_base_model") or not hasattr(each, "peft_config")
    }
    if not models:
        return
    temporary = directory / temporary_name(_FOLDER)
    try:
        for path, model in models.items():
            folder = temporary / path
            make_directory(folder, shared=None)
            config = json.loads(model.config.to_json_string())
            adapters = getattr(model, "peft_config", {})
            base = model.get_base_model() if adapters else model
            config["architectures"] = config.get("architectures") or [type(base).__name__]
            for name, adapter in adapters.items():
                adapter.save_pretrained(str(folder / _ADAPTERS / name))
            write_bytes_durably(folder / _CONFIG_FILE, json.dumps(config, indent=2).encode())
            generation: Any = getattr(model, "generation_config", None)
            if generation is not None:
                write_bytes_durably(folder / _GENERATION_FILE, generation.to_json_string().encode())
            if len(models) == 1:  # with several models, the owner of a tokenizer is unknown
                for tokenizer in _tokenizers(module):
                    tokenizer.save_pretrained(str(folder))
        shutil.rmtree(directory / _FOLDER, ignore_errors=True)
        os.rename(temporary, directory / _FOLDER)
        fsync_directory(directory)
    except Exception as error:  # noqa: BLE001 - raised by classes of other packages
        shutil.rmtree(temporary, ignore_errors=True)
        log.warning("the configuration of the model was not kept, so an export to a folder is not possible: %s", error)


def _outermost_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the models in `module` that are inside no other model: a language model itself consists of models."""
    inside: tuple[str, ...] = ()
    for path, each in module.named_modules():
        is_model = hasattr(getattr(each, "config", None), "to_json_string") and hasattr(each, "save_pretrained")
        if is_model and not path.startswith(inside or "\0"):
            inside = (*inside, f"{path}.")
            yield path, each


def _tokenizers(module: nn.Module) -> list[Any]:
    """Return tokenizers and processors that the module, its trainer class or the class's state holds."""
    state = getattr(module, "contract_state", None)
    held = [*vars(module).values(), *vars(getattr(module, "plugin", module)).values()]
    held += state.values() if isinstance(state, Mapping) else vars(state).values() if hasattr(state, "__dict__") else ()
    savable = (each for each in held if callable(each) and hasattr(each, "save_pretrained"))
    # Exclude classes, and holders of weights such as a pipeline.
    return list({id(each): each for each in savable if not isinstance(each, type) and not hasattr(each, "to")}.values())
