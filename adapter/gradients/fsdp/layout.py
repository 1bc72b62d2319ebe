"""Which of a trainer's modules are sharded together, and what follows when sharding replaces their parameters."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...discovery.discover import Discovered, Found, walk
from ...discovery.parameter_aliases import Alias, aliases

__all__ = ["Together", "copies", "ordered_hooks", "places", "sharded_together", "with_inner_optimizers"]


class _Together(nn.Module):
    """Never called: holds modules that share parameters, or a container without a forward, so that FSDP takes them."""


@dataclass(frozen=True)
class Together:
    """Modules whose parameters one outermost unit gathers."""

    root: nn.Module
    members: tuple[Found[nn.Module], ...]

    @property
    def path(self) -> str:
        """As the trainer's author would write it."""
        return " and ".join(found.path for found in self.members)

    def parameters_by_place(self) -> dict[tuple[nn.Module, str], nn.Parameter]:
        """Every place in a module that holds a parameter."""
        return {
            (module, name): parameter
            for module in self.root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def is_shared_beyond(self, unit: nn.Module) -> bool:
        """Whether a parameter of `unit`, a submodule, is also one outside of it; FSDP wants both in one unit."""
        inside, modules = {id(p) for p in unit.parameters()}, {id(m) for m in unit.modules()}
        outside = (m for m in self.root.modules() if id(m) not in modules)
        return any(id(p) in inside for module in outside for p in module._parameters.values())


def sharded_together(modules: Sequence[Found[nn.Module]]) -> Iterator[Together]:
    """`modules` in their order, those that share parameters in one piece; without those that have none."""
    owners: dict[int, int] = {}
    groups: dict[int, list[Found[nn.Module]]] = {}
    for index, found in enumerate(modules):
        ids = {id(p) for p in found.value.parameters()}
        if not ids:
            continue
        joined = sorted({owners[i] for i in ids if i in owners})
        first = joined[0] if joined else index
        groups[first] = [*itertools.chain.from_iterable(groups.pop(j) for j in joined), found]
        owners |= dict.fromkeys(ids, first)
        owners = {i: first if owner in joined else owner for i, owner in owners.items()}
    for members in groups.values():
        alone = members[0].value
        if len(members) > 1 or isinstance(alone, nn.ModuleList | nn.ModuleDict):
            alone = _Together()
            for found in members:
                alone.add_module(found.name, found.value)
        yield Together(alone, tuple(members))


def with_inner_optimizers(discovered: Discovered) -> list[Found[Optimizer]]:
    """The optimizers, and those that they wrap, as a Lookahead does."""
    found = {id(each.value): each for each in discovered.optimizers}
    for each in discovered.optimizers:
        for path, value in _inside(each):
            if isinstance(value, Optimizer):
                found.setdefault(id(value), Found(path, each.name, value))
    return list(found.values())


def places(discovered: Discovered) -> list[Alias]:
    """Where trainer and optimizers keep tensors by themselves."""
    found = [*discovered.aliases]
    for each in with_inner_optimizers(discovered):
        nodes = list(_inside(each))
        found += aliases(nodes, {id(value) for _, value in nodes if isinstance(value, Tensor)})
    return found


def copies(discovered: Discovered, kept: Sequence[Alias]) -> Iterator[tuple[Alias, Tensor]]:
    """The places among `kept` with a copy of a trained parameter, in a list or dict with one for each, and that one."""
    containers: dict[str, list[Alias]] = {}
    parameters = {id(p) for found in discovered.modules for p in found.value.parameters()}
    for alias in kept:
        if alias.path.endswith("]") and alias.value.is_floating_point() and id(alias.value) not in parameters:
            containers.setdefault(alias.path.rpartition("[")[0], []).append(alias)
    rows = [list(found.value.parameters()) for found in discovered.trained]
    rows += [[p for p in row if p.requires_grad] for row in rows]
    rows += [group["params"] for found in discovered.optimizers for group in found.value.param_groups]
    for row in rows:
        shapes = [tuple(p.shape) for p in row]
        for path, held in [*containers.items()]:
            if len(shapes) > 1 and [tuple(alias.value.shape) for alias in held] == shapes:
                yield from zip(held, row, strict=True)
                del containers[path]


def ordered_hooks(optimizer: Optimizer) -> None:
    """Give `optimizer` the dicts of hooks that torch's own have; a wrapper may have plain ones, or none."""
    for name in ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"):
        hooks = getattr(optimizer, name, None)
        if not isinstance(hooks, OrderedDict):
            setattr(optimizer, name, OrderedDict(hooks or {}))


def _inside(found: Found[Optimizer]) -> Iterator[tuple[str, Any]]:
    """What an optimizer keeps beside groups and state, which are known."""
    own = vars(found.value)
    seen: dict[int, Any] = {id(own.get(name)): own.get(name) for name in ("param_groups", "state", "defaults")}
    for path, value in walk(own, f"{found.path}.__dict__", seen=seen):
        yield path, value
        if isinstance(value, Optimizer):
            yield from walk(vars(value), f"{path}.__dict__", seen=seen)
