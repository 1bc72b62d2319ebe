"""What a trainer class has reached after a step, by name: metrics, settings of optimizers, their states, weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ...callbacks.checkpoint.codec.wrapper_tensors import wrapped_tensors
from ...callbacks.optimizer_state import named_values
from ..discovery.children import uncompiled
from ..discovery.current_tensors import currently_trained
from ..discovery.discover import Discovered

__all__ = ["KINDS", "Facts", "Recording", "facts_of", "live_weights", "numbers", "whole_copy"]

Facts = Mapping[str, Mapping[str, Tensor]]
"""By one of `KINDS`, then by name: tensors on the CPU; numbers as tensors of one double."""

KINDS: Final = ("metric", "setting", "optimizer state", "weight")
"""In the order in which a step makes them, so that the first difference stands nearest to its cause."""


def facts_of(discovered: Discovered, metrics: Mapping[str, float]) -> Facts:
    """Copies of everything that is compared after a step; a collective where weights are sharded.

    Args:
        discovered: What the trainer built.
        metrics: Of the step, under their reported names.
    """
    weights = live_weights(discovered)
    names = {id(tensor): name for name, tensor in weights.items()}
    settings: dict[str, Tensor] = {}
    states: dict[str, Tensor] = {}
    for found in discovered.optimizers:
        for g, group in enumerate(found.value.param_groups):
            settings |= numbers(group, f"{found.path}.param_groups[{g}]")
            for i, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"param_groups[{g}][{i}]")
                # Not by subscript: that of a defaultdict would make a state.
                states |= numbers(found.value.state.get(parameter, {}), f"{found.path}[{name}]", tensors=True)
    return {
        "metric": {name: torch.tensor(value, dtype=torch.double, device="cpu") for name, value in metrics.items()},
        "setting": settings,
        "optimizer state": states,
        "weight": {name: whole_copy(tensor) for name, tensor in weights.items() if not is_lazy(tensor)},
    }


def live_weights(discovered: Discovered) -> dict[str, Tensor]:
    """Parameters and buffers of all modules that were found, and bare parameters, by path."""
    tensors = {
        f"{found.path}.{name}": tensor
        for found in discovered.modules
        for module in [_unwrapped(found.value)]
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    bare = list(discovered.parameters)
    if not discovered.optimizers:
        bare += currently_trained(discovered)
    return tensors | {found.path: found.value for found in bare}


def numbers(entry: Any, path: str, *, tensors: bool = False) -> dict[str, Tensor]:
    """The numbers of a mapping or of a single value, and its tensors where they are wanted, by name below `path`."""
    found: dict[str, Tensor] = {}
    for key, value in named_values(entry):
        if isinstance(value, Tensor):
            if tensors or value.numel() == 1:
                # Codes of a quantized state are no values: what rounds otherwise has other ones.
                parts = [*wrapped_tensors(f"{path}.{key}", value)]
                found |= {name: whole_copy(t) for name, t in parts if len(parts) == 1 or t.is_floating_point()}
        elif isinstance(value, bool | int | float) or _are_numbers(value):
            found[f"{path}.{key}"] = torch.tensor(value, dtype=torch.double, device="cpu")
    return found


class Recording:
    """The facts of each step of one loop, in a temporary folder: several steps of a large model fill no memory."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="genlight-compare-")
        self._count = 0

    def add(self, facts: Facts) -> None:
        """Keep the facts of the next step; those before the first step come first."""
        torch.save(facts, self._file(self._count))
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int) -> Facts:
        facts: Facts = torch.load(self._file(step), weights_only=True)
        return facts

    def __iter__(self) -> Iterator[Facts]:
        return (self[step] for step in range(self._count))

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()

    def _file(self, step: int) -> Path:
        return Path(self._folder.name) / f"{step}.pt"


def _are_numbers(value: Any) -> bool:
    """Whether `value` is a tuple of numbers, such as betas."""
    return isinstance(value, tuple) and all(isinstance(part, int | float) for part in value)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module in a DistributedDataParallel of the trainer's own, which has it on several ranks alone."""
    return uncompiled(module.module if isinstance(module, DistributedDataParallel) else module)


def whole_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, not sparse, and of a sharded tensor all of it, for which every rank has to ask."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to_dense().cpu().clone() if tensor.is_sparse else tensor.cpu().clone()
