"""Weights and buffers that appeared, vanished or changed their shape while training, on resume.

Layers that are added, vocabularies that grow, what ``torch.nn.utils.prune`` keeps in place of a weight: the model that
``configure`` builds does not have them, and the trainer's ``load_state_dict`` alone knows how to build them again. So
their values wait until then. A buffer needs no such knowledge: it gets the shape that it had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..contract.exceptions import ContractError

__all__ = ["changed_names", "load_grown", "set_aside_grown", "shapes_of"]

Shapes = Mapping[str, tuple[int, ...] | None]

_MOST_NAMED = 6


def shapes_of(module: nn.Module) -> Shapes:
    """The shapes of what the state dict of `module` holds, by name; None of what is lazy."""
    return {name: None if is_lazy(value) else tuple(value.shape) for name, value in _kept(module).items()}


def changed_names(module: nn.Module, before: Shapes) -> list[str]:
    """The names of which `module` has no tensor any more, or did not have one, or one of another shape.

    Lazy ones are left out: torch gives them the shapes of what they load.
    """
    now = shapes_of(module)
    names = dict.fromkeys([*before, *now])
    return [name for name in names if before.get(name, ()) is not None and before.get(name) != now.get(name)]


@torch.no_grad()
def set_aside_grown(weights: dict[str, Any], module: nn.Module, changed: Collection[str]) -> dict[str, Any]:
    """Make `weights` fit `module` in what had `changed` when they were saved.

    Buffers of the module get the shapes that they had. Values for which the module has no place yet are taken out, and
    those of the module itself put where none was saved.

    Returns:
        What was taken out, for `load_grown`.
    """
    for name in changed:
        if name in weights:
            _fit_buffer(module, name, weights[name])
    built = _kept(module)
    waiting = {}
    for name in changed:
        value, has = weights.get(name), built.get(name)
        if value is not None and (has is None or (not is_lazy(has) and has.shape != value.shape)):
            waiting[name] = weights.pop(name)
        if has is not None and name not in weights:
            weights[name] = has.detach()
    return waiting


def load_grown(module: nn.Module, waiting: Mapping[str, Any]) -> None:
    """Give `module` the values that waited until the trainer's ``load_state_dict`` has built a place for them.

    Raises:
        ContractError: It has not.
    """
    built = _kept(module)
    missing = [name for name, value in waiting.items() if name not in built or built[name].shape != value.shape]
    if missing:
        named = ", ".join(f"{name} {tuple(waiting[name].shape)}" for name in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise ContractError(
            f"The checkpoint holds weights that were added while training, for which the model has no place: {named}"
            f"{more}. Add their layers again in `load_state_dict`, which gets what `state_dict` returned, or build "
            "them in `configure`."
        )
    module.load_state_dict(waiting, strict=False)


def _kept(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, the tensors themselves."""
    return {name: v for name, v in module.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}


def _fit_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:  # a submodule that was added
        return
    if leaf not in owner._buffers:
        return
    buffer = owner._buffers[leaf]
    if buffer is None or (not is_lazy(buffer) and buffer.shape != value.shape):
        like = value if buffer is None else buffer
        device = next((t.device for t in (*module.parameters(), *module.buffers())), like.device)
        owner._buffers[leaf] = torch.empty(value.shape, dtype=like.dtype, device=device)
