"""Loads the components of a model folder from safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract.exceptions import InputError

if TYPE_CHECKING:
    import torch


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Torch's name of each precision in `StepContext.dtype`."""

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
ROOT_COMPONENT = "model"
CANONICAL_NAMES = ("model", "diffusion_pytorch_model")


def load_components(
    directory: str | Path, device: str | torch.device = "cuda:0", dtype: str | torch.dtype = "bf16"
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of every component of a model folder, by component and tensor name.

    A component is a folder with safetensors files: one file, or shards with an index. Files in `directory` itself are
    the component ``model``. If a folder has ``model.safetensors`` or ``diffusion_pytorch_model.safetensors``, or an
    index of shards with such a name, its other files are variants and are skipped.

    Args:
        directory: The model folder.
        device: The device of the tensors; they go there one by one, without an intermediate copy of the file.
        dtype: ``fp32``, ``bf16`` or ``fp16``, or a dtype of torch; integers and booleans keep their type.

    Raises:
        InputError: There is no safetensors file, or one is broken, missing, or repeats a tensor of another file.
        ValueError: The dtype is unknown.
    """
    import torch

    root, place = Path(directory), torch.device(device)
    if not root.is_dir():
        raise InputError(f"There is no model folder {str(root)!r}.")
    target = dtype if isinstance(dtype, torch.dtype) else getattr(torch, DTYPES.get(dtype, ""), None)
    if target is None:
        raise ValueError(f"Invalid `dtype`. Expected one of {', '.join(DTYPES)}, but received {dtype!r}.")
    components = {}
    for folder in (root, *sorted(path for path in root.rglob("*") if path.is_dir())):
        if files := _files(folder):
            name = ROOT_COMPONENT if folder == root else folder.relative_to(root).as_posix()
            components[name] = _read(files, place, target)
    if not components:
        raise InputError(f"The model folder {str(root)!r} holds no {SUFFIX} file.")
    return components


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder's component."""
    for name in CANONICAL_NAMES:
        if (file := folder / f"{name}{SUFFIX}").exists():
            return [file]
        if (index := folder / f"{name}{INDEX_SUFFIX}").exists():
            return _shards(index)
    indexes = list(folder.glob(f"*{INDEX_SUFFIX}"))
    return _shards(indexes[0]) if len(indexes) == 1 else sorted(folder.glob(f"*{SUFFIX}"))


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names."""
    try:
        shards = [index.parent / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"The index {str(index)!r} is malformed: {error}.") from None
    wrong = [str(shard) for shard in shards if shard.parent != index.parent or not shard.is_file()]
    if wrong:
        raise InputError(f"The index {str(index)!r} names files that are not next to it: {', '.join(wrong)}.")
    return shards


def _read(files: list[Path], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of `files` by name."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                names = opened.keys()
                if repeated := tensors.keys() & names:
                    raise InputError(f"The tensor {min(repeated)!r} of {str(file)!r} is in another file as well.")
                for name in names:
                    tensor = opened.get_tensor(name)
                    tensors[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        except (SafetensorError, OSError) as error:
            raise InputError(f"The file {str(file)!r} cannot be read as safetensors: {error}.") from None
    return tensors
