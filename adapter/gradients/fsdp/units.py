"""When the weights of sharded modules are gathered, and when what was gathered is given up.

FSDP 2 gathers in the call of a unit and gives up after its backward. Here a call of any part of a unit gathers it too,
weights that changed since are gathered again, and outside of a call the trainer sees its shards alone::

    a call begins     give up what is stale, gather, show the whole weights to the modules
    a call ends       show the shards again; what was gathered is kept for a backward
    an update, a write, the end of a step            what is gathered is stale from now on

So a change of the weights between a forward and its backward, or a forward without backward, is not a special case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ....callbacks.checkpoint.sharded.boxes import Box, slice_of
from ...contract.exceptions import ContractError
from ..torch_internals import (
    disable_dynamo,
    fsdp_training_state,
    set_requires_grad_if_needed,
    without_torch_function_of_subclasses,
)
from . import hooks as shard_hooks, writes as shard_writes

__all__ = ["ShardUnit", "govern", "units_of"]

WATCHED_CALLS = 3
"""Calls of a unit after which its weights are compared with what was gathered, to find modules that write to them."""


_UNIT = "genlight_shard_unit"
"""Where a hook has its unit: a search for what the trainer built does not look there."""


class ShardUnit:
    """One unit of FSDP: modules whose parameters are gathered together.

    Args:
        root: The outermost unit around it, or itself.
        module: The module that was given to ``fully_shard``.
        path: As the trainer's author would write it.
    """

    def __init__(self, root: FSDPModule, module: FSDPModule, path: str) -> None:
        self.path = path
        self._root_state = root._get_fsdp_state()
        self._state = module._get_fsdp_state()
        self._depth = 0
        self._gathered_at = -1
        self.gathered: list[str] = []
        """Paths, one for each gathering since the last backward, to be compared with those of other ranks."""
        self.agree: Callable[[str], None] = lambda _: None
        """Called with what all ranks are about to do."""
        self.scale: Callable[[], tuple[Tensor, Tensor] | None] = lambda: None
        """What gradients are scaled by in a backward call, and the inverse."""
        self._calls = 0
        self._writes = False
        self._versions: list[int] = []

    @property
    def groups(self) -> list[Any]:
        """FSDP's groups of parameters; one, or none where all parameters belong to inner units."""
        groups: list[Any] = self._state._fsdp_param_groups
        return groups

    @property
    def parameters(self) -> list[Any]:
        """FSDP's records of the parameters."""
        return [parameter for group in self.groups for parameter in group.fsdp_params]

    @property
    def root(self) -> Any:
        """FSDP's state of the outermost unit around it."""
        return self._root_state

    @property
    def has_unreduced(self) -> bool:
        """Whether a backward has left gradients that FSDP did not notice.

        It looks out for the tensors that a call returns. Where it returns an object that torch does not look into, or
        the trainer takes what a hook or an attribute has kept, there are none.
        """
        return any(
            parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None
            for parameter in self.parameters
            if hasattr(parameter, "_unsharded_param")
        )

    def begin(self, module: nn.Module, args: Any, kwargs: Any, *, is_part: bool) -> Any:
        """A call of `module` begins: of the unit itself, where FSDP's own hooks do the rest, or of a part of it."""
        self._depth += 1
        if self._depth > 1:
            return None
        self._root_state._lazy_init()
        self._refuse_other_parameters()
        if self._is_recomputed:
            for group in self.groups:
                group.unshard()
                group.wait_for_unshard()
                # Its gradients may have been reduced already, of what was called after this part; more will follow.
                group._training_state = fsdp_training_state.PRE_BACKWARD
            self._show_gathered()
            return None
        shard_writes.settle_all()
        self.give_up(only_if_stale=True)
        if not all(group.is_unsharded for group in self.groups):
            self.agree(f"call {self.path}")
            self.gathered.append(self.path)
        self._gathered_at = shard_writes.changes()
        self._show_gathered()
        if not is_part:
            return None
        # Without the inputs, on which FSDP would have each part reduce the gradients of all: ranks may call some only.
        self._state._pre_forward(module, (), {})
        return None

    def written(self) -> None:
        """The call is about to end: what it wrote to the weights goes to the shards.

        A codebook does so in its forward. A write through ``.data`` leaves no trace, so first calls are looked at.
        """
        if self._depth > 1 or self._is_recomputed:
            return
        self._calls += 1
        parameters = [p for p in self.parameters if hasattr(p, "_unsharded_param")]
        for parameter in parameters if self._calls <= WATCHED_CALLS else ():
            shard_hooks.watch(parameter.sharded_param, parameter._unsharded_param, self._scales)
        versions = [p._unsharded_param._version for p in parameters]
        if self._writes or self._calls <= WATCHED_CALLS or versions != self._versions:
            self._write_back(parameters)
        self._versions = versions

    def end(self, module: nn.Module, args: Any, output: Any, *, is_part: bool) -> Any:
        """The call has ended."""
        self._depth -= 1
        if self._depth > 0:
            return None
        if is_part and not self._is_recomputed:
            output = self._state._post_forward(module, args, output)
        self._show_shards()
        return output

    def give_up(self, *, only_if_stale: bool = False) -> None:
        """Have the weights gathered again in the next call, unless one is running."""
        if self._depth > 1 or (only_if_stale and self._gathered_at == shard_writes.changes()):
            return
        if self._state._training_state == fsdp_training_state.IDLE:
            for group in self.groups:
                group._to_sharded()

    def show_shards(self) -> None:
        """Outside of calls the trainer sees its shards, also where weights stay gathered for a second backward."""
        if self._depth == 0:
            self._show_shards()

    def begin_training(self, touched: Callable[[Any], None]) -> None:
        """Training begins, with the modules where they will be.

        Args:
            touched: Called with a shard that gets a gradient past FSDP.
        """
        self._root_state._lazy_init()
        for parameter in self.parameters:
            shard_hooks.resolve(parameter._module_info.module, parameter._module_info.param_name)
        with without_torch_function_of_subclasses():
            for parameter in self.parameters:
                if parameter.sharded_param.requires_grad:
                    parameter.sharded_param.register_hook(functools.partial(_placed, parameter.sharded_param, touched))

    def begin_step(self) -> None:
        """A step begins; a call that failed in the one before left nothing behind that matters."""
        if self._depth:
            self._depth = 0
            if self._root_state._is_root:
                self._root_state._reset_iter_state()
        self.give_up()

    def _scales(self) -> tuple[Tensor, Tensor] | None:
        return self.scale()

    @property
    def _is_recomputed(self) -> bool:
        """Whether a checkpointed segment is computed again within a backward."""
        return bool(self._state._training_state == fsdp_training_state.PRE_BACKWARD)

    def _refuse_other_parameters(self) -> None:
        for parameter in self.parameters:
            info = parameter._module_info
            now = info.module._parameters.get(info.param_name)
            if now is not parameter.sharded_param and now is not getattr(parameter, "_unsharded_param", None):
                raise ContractError(
                    f"`train_step` does what sharded modules cannot: it calls {self.path} with other parameters than "
                    "its own, as torch.func does. Use backward and the module's own parameters, or use ddp."
                )

    def _show_gathered(self) -> None:
        for group in self.groups:
            for parameter in group.fsdp_params if group.is_unsharded else ():
                set_requires_grad_if_needed(parameter.sharded_param, parameter._unsharded_param)
                parameter._setattr_on_modules(parameter._unsharded_param)

    def _show_shards(self) -> None:
        for group in self.groups:
            for parameter in group.fsdp_params if group.is_unsharded else ():
                parameter._setattr_on_modules(parameter.sharded_param)

    @torch.no_grad()
    def _write_back(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            sharded, gathered = parameter.sharded_param, parameter._unsharded_param
            if gathered.untyped_storage().size() == 0 or gathered.dtype != sharded.dtype:
                continue
            part = slice_of(sharded).within(gathered, of=Box((0,) * gathered.dim(), tuple(gathered.shape)))
            if not torch.equal(part, sharded._local_tensor):
                self._writes = True
                sharded._local_tensor.copy_(part)


def govern(root: nn.Module, path: str) -> None:
    """Have the calls of all units in `root`, which is one, and of their parts gather as this module's text says."""
    assert isinstance(root, FSDPModule)
    hooked: set[int] = set()

    def visit(module: nn.Module, where: str, unit: ShardUnit) -> None:
        if id(module) in hooked:
            return
        hooked.add(id(module))
        is_part = not isinstance(module, FSDPModule)
        if not is_part:
            unit = ShardUnit(root, module, where)  # type: ignore[arg-type]
        if next(module.parameters(), None) is not None:
            _hook(module, unit, is_part=is_part)
        for name, child in module.named_children():
            visit(child, f"{where}.{name}", unit)

    visit(root, path, ShardUnit(root, root, path))


def _placed(shard: Any, touched: Callable[[Any], None], gradient: Any) -> Any:
    """A gradient that came to a shard itself, from a penalty on weights say, sharded as FSDP's are."""
    touched(shard)
    return gradient.redistribute(placements=shard.placements) if isinstance(gradient, DTensor) else gradient


def units_of(modules: Iterable[nn.Module]) -> list[ShardUnit]:
    """The units among `modules` and their submodules, outer ones first, each once."""
    hooks = (hook for module in modules for sub in module.modules() for hook in sub._forward_pre_hooks.values())
    found = (getattr(hook, _UNIT, None) for hook in hooks)
    return list({id(unit): unit for unit in found if isinstance(unit, ShardUnit)}.values())


def _hook(module: nn.Module, unit: ShardUnit, *, is_part: bool) -> None:
    def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return unit.begin(module, args, kwargs, is_part=is_part)

    def written(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001  # torch's signature
        unit.written()

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        return unit.end(module, args, output, is_part=is_part)

    hooks: list[Callable[..., Any]] = [begin, written, end]
    # Parts run inside of what torch.compile makes of their unit, the unit around it.
    before, late, after = [_unless_compiling(h) if is_part else disable_dynamo(h) for h in hooks]
    setattr(before, _UNIT, unit)
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(late, prepend=True)
    module.register_forward_hook(after)


def _unless_compiling(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(*args)

    return call
