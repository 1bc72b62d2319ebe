"""``state_dict`` and ``load_state_dict`` of sharded modules and optimizers.

Within a training step, a state dict has the weights themselves, as in torch: a write to it changes the weights, and
another sharded module can load it. Outside of a step it has full tensors, for files and for code without support for
sharding, and full tensors can be loaded into shards. All ranks must call it together then. For a checkpoint, tensors
stay sharded and nothing is gathered; when a checkpoint is loaded, each rank reads only the values of its shards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ....callbacks.checkpoint.sharded.optimizer_placements import place_state, with_placements
from ....callbacks.checkpoint.sharded.slices import WholeTensor, sharded_like, whole
from ....callbacks.optimizer_state import parameters_of
from .tensors import is_in_step


def whole_metrics(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `metrics` with full tensors in place of sharded ones, such as a norm from clipping. Collective.

    If only one rank read such a value, for a log, it would wait forever.
    """
    if not any(isinstance(value, DTensor) for value in metrics.values()):
        return metrics
    return {name: whole(value) for name, value in metrics.items()}


def whole_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a trainer's ``state_dict`` with full tensors in place of sharded ones."""
    gathered: dict[str, Any] = tree_map(whole, payload)
    return gathered


def like(value: Any, parameter: Tensor) -> Any:
    """Return `value` sharded like `parameter` if it is a tensor of the same shape, such as a moment."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    if isinstance(value, WholeTensor):
        return sharded_like(value, parameter)
    value = value.detach().to(device=parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def whole_state_dicts(module: nn.Module) -> None:
    """Make state dicts of `module` and its parts return full tensors outside of a step."""
    for part in module.modules():
        part.register_state_dict_post_hook(_whole_module_state)  # type: ignore[no-untyped-call]
        part.register_load_state_dict_pre_hook(_sharded_module_state)  # type: ignore[no-untyped-call]


def whole_optimizer_states(optimizer: Optimizer) -> None:
    """Make state dicts of `optimizer` return full tensors outside of a step."""
    # A wrapper around another optimizer may keep its hooks in plain dicts, or have none.
    for name in ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"):
        hooks = getattr(optimizer, name, None)
        if not isinstance(hooks, OrderedDict):
            setattr(optimizer, name, OrderedDict(hooks or {}))
    optimizer.register_state_dict_post_hook(_whole_optimizer_state)
    optimizer.register_load_state_dict_pre_hook(_sharded_optimizer_state)


def _whole_module_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module._parameters if not is_in_step() else ():
        if prefix + name in state_dict:
            state_dict[prefix + name] = whole(state_dict[prefix + name])


def _sharded_module_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        if prefix + name in state_dict and parameter is not None:
            state_dict[prefix + name] = like(state_dict[prefix + name], parameter)


def _whole_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    if is_in_step():
        return state_dict
    # The inner dicts belong to the optimizer and must not be changed.
    state = {i: tree_map(whole, entry) for i, entry in state_dict["state"].items()}
    return {**with_placements(list(parameters_of(optimizer)), state_dict), "state": state}


def _sharded_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return place_state(list(parameters_of(optimizer)), state_dict)
