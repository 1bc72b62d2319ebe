"""Components of a model folder, read from safetensors straight to their device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract.exceptions import InputError

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "load_components"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names of precisions, as `StepContext.dtype` has them, and torch's own."""

READ_DIRECTLY = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that safetensors reads to; tensors for others pass through memory one by one."""

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
ROOT_COMPONENT = "model"
CANONICAL_NAMES = ("model", "diffusion_pytorch_model")


def load_components(
    directory: str | Path, device: str | torch.device = "cuda:0", dtype: str | torch.dtype = "bf16"
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of every component of a model folder, by component and tensor name.

    A component is a folder that holds safetensors files, whole or in shards with an index; files in `directory` itself
    are the component ``model``. Where a folder holds variants of ``model.safetensors`` or
    ``diffusion_pytorch_model.safetensors``, these are left out.

    Args:
        directory: The model folder.
        device: Where the tensors go; each is read there without a copy of the whole file in between.
        dtype: ``fp32``, ``bf16`` or ``fp16``, or torch's own; integers and booleans keep their type.

    Raises:
        InputError: There is no safetensors file, or one is broken, missing, or repeats a tensor of another.
        ValueError: The dtype is none of ours.
    """
    root = Path(directory)
    if not root.is_dir():
        raise InputError(f"There is no model folder {str(root)!r}.")
    import torch

    target = _torch_dtype(dtype)
    folders = [root, *sorted(path for path in root.rglob("*") if path.is_dir())]
    components = {_component_name(root, folder): files for folder in folders if (files := _files(folder))}
    if not components:
        raise InputError(f"The model folder {str(root)!r} holds no {SUFFIX} file.")
    place = torch.device(device)
    return {name: _read(files, place, target) for name, files in components.items()}


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"Invalid `dtype`. Expected one of {', '.join(DTYPES)}, but received {dtype!r}.")
    found: torch.dtype = getattr(torch, DTYPES[dtype])
    return found


def _component_name(root: Path, folder: Path) -> str:
    return ROOT_COMPONENT if folder == root else folder.relative_to(root).as_posix()


def _files(folder: Path) -> list[Path]:
    """The files that make up a folder's component."""
    whole = {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}
    indexes = {path.name.removesuffix(INDEX_SUFFIX): path for path in sorted(folder.glob(f"*{INDEX_SUFFIX}"))}
    for name in CANONICAL_NAMES:
        if name in whole:
            return [whole[name]]
        if name in indexes:
            return _shards(indexes[name])
    if len(indexes) == 1:
        return _shards(next(iter(indexes.values())))
    return list(whole.values())


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        shards = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"The index {str(index)!r} is malformed: {error}.") from None
    outside = [name for name, shard in zip(names, shards, strict=True) if shard.parent != index.parent]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if outside or missing:
        raise InputError(
            f"The index {str(index)!r} names files that are not next to it: {', '.join(outside + missing)}."
        )
    return shards


def _read(files: list[Path], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    direct = device.type in READ_DIRECTLY
    for file in files:
        for name, tensor in _tensors(file, str(device) if direct else "cpu"):
            if name in tensors:
                raise InputError(f"The tensor {name!r} of {str(file)!r} is in another file of its folder as well.")
            tensors[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
    return tensors


def _tensors(file: Path, device: str) -> Iterator[tuple[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device=device) as opened:
            for name in opened.keys():  # noqa: SIM118 -- no mapping: it has keys() and get_tensor()
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"The file {str(file)!r} cannot be read as safetensors: {error}.") from None
