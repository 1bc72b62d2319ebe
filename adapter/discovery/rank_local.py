"""State that may differ by rank because the trainer class says so, such as a replay buffer or its own latents."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.optimizer_state import named_values, parameters_of, settings_and_counters
from ..contract.exceptions import ContractError
from .discover import Discovered, Found

_SHARDS_ITS_STATE = "ZeroRedundancyOptimizer"
"""A class of torch, by name, because importing it takes as long as importing torch itself."""


@dataclasses.dataclass(frozen=True)
class RankLocal:
    """The names in a trainer's ``rank_local``.

    A name covers a part of the state, or an attribute of the trainer, and everything below it: ``"replay"`` covers
    ``state["replay"]`` and ``state.replay.data``, ``"nets.memory"`` covers ``state["nets"].memory``.
    """

    names: tuple[str, ...] = ()

    def __contains__(self, path: str) -> bool:
        """Whether the object at `path`, as in `Found.path`, may differ by rank."""
        if not self.names:
            return False
        dotted = ".".join(re.findall(r"[^\[\]\"'.]+", path)[1:])
        return any(dotted == name or dotted.startswith(f"{name}.") for name in self.names)

    def covers_state_of(self, found: Found[Optimizer]) -> bool:
        """Whether the state of an optimizer may differ by rank.

        It may if a name covers it, if the optimizer shards its state, or if its own attribute ``rank_local`` is true.
        """
        shards = any(cls.__name__ == _SHARDS_ITS_STATE for cls in type(found.value).__mro__)
        return shards or bool(getattr(found.value, "rank_local", False)) or found.path in self

    def parameters(self, found: Found[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of a module, except those that may differ by rank, with their paths."""
        for name, parameter in found.value.named_parameters():
            if (path := f"{found.path}.{name}") not in self:
                yield path, parameter

    def bare(self, discovered: Discovered) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors outside of modules, except those that may differ by rank, with their paths."""
        found = (*discovered.parameters, *discovered.currently_trained())
        yield from ((f.path, f.value) for f in found if f.path not in self)

    def tensors(self, discovered: Discovered) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that must be equal on all ranks, except optimizer states."""
        for found in discovered.modules:
            yield from self.parameters(found)
        yield from self.bare(discovered)
        buffers = ((f"{f.path}.{name}", buffer) for f in discovered.modules for name, buffer in f.value.named_buffers())
        yield from ((path, buffer) for path, buffer in buffers if path not in self)

    def replicated(self, discovered: Discovered) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that must be equal on all ranks, by path: `tensors`, then `optimizer_states`."""
        yield from self.tensors(discovered)
        yield from self.optimizer_states(discovered)

    def replicated_values(self, discovered: Discovered) -> list[Tensor]:
        """Return the tensors of `replicated`, each once and without paths, in a quarter of the time."""
        if self.names or any(map(self.covers_state_of, discovered.optimizers)):
            return [tensor for _, tensor in self.replicated(discovered)]
        modules = [module for found in discovered.modules for module in found.value.modules()]
        values: list[Any] = [p for module in modules for p in module._parameters.values()]
        values += [buffer for module in modules if module._buffers for buffer in module._buffers.values()]
        values += [tensor for _, tensor in self.bare(discovered)]
        for found in discovered.optimizers:
            held = list(parameters_of(found.value))
            state = found.value.state
            values += held
            values += [value for p in held for _, value in named_values(state.get(p, {}))] if state else []
        return [value for value in {id(value): value for value in values}.values() if isinstance(value, Tensor)]

    def optimizer_states(self, discovered: Discovered) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that optimizers keep for parameters that are equal on all ranks, with their paths.

        Also yield parameters that belong to no module, and that only an optimizer holds.
        """
        paths = {id(p): path for found in discovered.modules for path, p in self.parameters(found)}
        paths |= {id(p): path for path, p in self.bare(discovered)}
        local = self.ids(discovered)
        for found in discovered.optimizers:
            has_own_state = self.covers_state_of(found)
            held = [p for p in parameters_of(found.value) if id(p) not in local]
            for i, parameter in enumerate(held):
                if id(parameter) not in paths:
                    paths[id(parameter)] = f"parameter {i} of {found.path}"
                    yield paths[id(parameter)], parameter
                for key, value in named_values(found.value.state.get(parameter, {})):
                    if isinstance(value, Tensor) and not has_own_state:
                        yield f"{key} of {paths[id(parameter)]} in {found.path}", value

    def settings(self, discovered: Discovered) -> Iterator[tuple[str, Any]]:
        """Yield values other than tensors that must be equal on all ranks, with their paths.

        These are the settings and counters of optimizers, and the states of schedulers.
        """
        shared = [found for found in self.shared(discovered) if not self.covers_state_of(found)]
        for found in shared:
            yield from settings_and_counters(found.path, found.value)
        others = {id(found.value) for found in discovered.optimizers} - {id(found.value) for found in shared}
        for scheduler in discovered.schedulers:
            if scheduler.path not in self and id(getattr(scheduler.value, "optimizer", None)) not in others:
                yield scheduler.path, scheduler.value.state_dict()

    def shared(self, discovered: Discovered) -> tuple[Found[Optimizer], ...]:
        """Return the optimizers that hold a parameter that is equal on all ranks."""
        local = self.ids(discovered)
        return tuple(
            found for found in discovered.optimizers if any(id(p) not in local for p in parameters_of(found.value))
        )

    def ids(self, discovered: Discovered) -> set[int]:
        """Return the ids of the parameters and tensors that differ by rank."""
        if not self.names:
            return set()
        modules = (
            (f"{found.path}.{name}", p) for found in discovered.modules for name, p in found.value.named_parameters()
        )
        others = ((found.path, found.value) for found in (*discovered.parameters, *discovered.tensors))
        return {id(tensor) for path, tensor in (*modules, *others) if path in self}


EVERYTHING_SHARED = RankLocal()


def rank_local_of(plugin: object) -> RankLocal:
    """Return the names that `plugin` declares.

    Raises:
        ContractError: ``rank_local`` is not a sequence of names.
    """
    names = getattr(plugin, "rank_local", ())
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name for name in names):
        raise ContractError(
            f'`rank_local` of {type(plugin).__name__} must be a tuple of names, such as ("replay",), but is {names!r}.'
        )
    return RankLocal(tuple(names))
