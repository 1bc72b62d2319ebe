"""What a training step does beside the trainer's own code, where modules are sharded.

Ranks agree on each call that talks to the others, weights that were gathered are given up before they change, and
parameters that only some ranks used get their gradients from all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from ...contract.exceptions import ContractError
from ...discovery.discover import Discovered
from ..step_part import BackwardCall, StepPart
from . import values as sharded_values, writes as shard_writes
from .errors import about_sharding, without_collectives
from .gradients import ShardGradients
from .rank_agreement import BACKWARD, END_OF_STEP, UPDATE, RankAgreement
from .units import units_of

__all__ = ["AccumulationHooks", "ShardedStep", "fsdp_modules"]

_DIFFERENTIATED_AGAIN = (
    "`train_step` does what sharded modules cannot: it differentiates gradients by sharded parameters once more "
    "(torch.autograd.grad or backward with create_graph, as MAML does), which are whole within the calls of their "
    "modules alone. Use ddp, or leave out create_graph, as first-order MAML does."
)
_HAS_NO_GRAPH = "does not require grad and does not have a grad_fn"
"""What torch says of a tensor that is to be differentiated."""


def fsdp_modules(discovered: Discovered) -> list[FSDPModule]:
    """The modules that FSDP 2 shards, among those that the trainer built and their submodules."""
    return [m for found in discovered.modules for m in found.value.modules() if isinstance(m, FSDPModule)]


class ShardedStep(StepPart):
    """The part of a step that only sharded modules need; false where nothing is sharded.

    Args:
        discovered: What the trainer built.
        optimizers: All optimizers, those inside of others included.
        scale_factors: What gradients are scaled by in the running backward call, and the inverse; None where they are
            not scaled.
        several_ranks: Whether there are others to agree with.
        group: These ranks; None means all.
        device: Where messages between them are.
    """

    def __init__(
        self,
        discovered: Discovered,
        optimizers: Sequence[Optimizer],
        scale_factors: Callable[[], tuple[Tensor, Tensor] | None],
        *,
        several_ranks: bool,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._several_ranks, self._group, self._device = several_ranks, group, device
        self._updating: contextlib.AbstractContextManager[None] | None = None
        self._modules = fsdp_modules(discovered)
        self._units = units_of(found.value for found in discovered.modules)
        self._is_to_differentiate_again = False
        """Whether a backward call of the step was told to keep the graph of gradients."""
        self._keeps_graph = False
        """Whether there is a graph of gradients, of which weights may be read in each call of the engine."""
        self._kept: contextlib.ExitStack | None = None
        self._scale_factors = scale_factors
        self.optimizers = [
            optimizer
            for optimizer in optimizers
            if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        ]
        """The optimizers that update sharded parameters."""
        self._agreement: RankAgreement | None = None
        self._gradients: ShardGradients | None = None

    def __bool__(self) -> bool:
        return bool(self._modules or self._units or self.optimizers)

    def agree(self, what: str) -> None:
        """Go on together with the other ranks, which are about to do `what` too.

        Raises:
            ContractError: They are not; says which rank does what.
        """
        if self._agreement is not None:
            self._agreement(what)

    @override
    def open(self) -> None:
        if self._units and self._several_ranks:
            self._agreement = RankAgreement(self._group, self._device)
            self._gradients = ShardGradients(self._units, self._group, self._device)
        for unit in self._units:
            try:
                unit.begin_training(self._touched)
            except AssertionError as error:  # parameters of several types in one unit, for example
                raise about_sharding(error, "The trainer cannot be sharded") or error from error
            unit.scale = self._scale_factors
            unit.agree = self.agree
        if self._units:
            sharded_values.hold(self, self.agree)
            sharded_values.number(p.sharded_param for unit in self._units for p in unit.parameters)

    @override
    def close(self) -> None:
        """Training is over; operations on sharded tensors are torch's own again."""
        if self._units:
            sharded_values.release(self)

    @override
    def begin(self, step: int) -> None:
        self._is_to_differentiate_again = self._keeps_graph = False
        for unit in self._units:
            unit.begin_step()
        if self._agreement is not None:
            self._agreement.begin_step(step)

    @override
    def end(self) -> None:
        if self._units:
            self.agree(END_OF_STEP)
            self.give_up_gathered()
        self.abandon()

    @override
    def abandon(self) -> None:
        if self._agreement is not None:
            self._agreement.end_step()

    @override
    def before_backward(self, call: BackwardCall) -> None:
        self._is_to_differentiate_again |= call.create_graph
        if self._gradients is not None:
            self.agree(BACKWARD)
            self._gradients.begin()
            if call.inputs:
                call.inputs = self._gradients.with_gathered(call.inputs)
        if self._keeps_graph:
            self._kept = contextlib.ExitStack()
            self._kept.enter_context(self._gathered_throughout())

    @override
    def leave_backward(self, *, failed: bool) -> None:
        if not failed:
            return
        self._end_keeping()
        if self._gradients is not None:
            self._gradients.abandon()

    @override
    def after_backward(self) -> None:
        """The backward call has ended: gradients are those of all ranks when this returns."""
        if self._end_keeping():
            for root in dict.fromkeys(unit.root for unit in self._units):
                root._root_post_backward_final_callback()
        if self._gradients is not None:
            self._gradients.end()

    def _end_keeping(self) -> bool:
        """Weights need not stay gathered from here on; whether they were to."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
        return kept is not None

    def call_hooks(self) -> None:
        """Call what the trainer registered for after the accumulation of a gradient."""
        if self._gradients is not None:
            self._gradients.call_hooks()

    @override
    def before_update(self, optimizer: Optimizer, *, in_backward: bool) -> bool:
        self._updating = self._around_update(optimizer)
        self._updating.__enter__()
        return True

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        updating, self._updating = self._updating, None
        if updating is not None:
            updating.__exit__(None, None, None)

    @override
    def grad(
        self,
        run: Callable[..., Any],
        outputs: Any,
        grads: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor] = (),
        allow_unused: bool = False,
        **kwargs: Any,
    ) -> Any:
        """One call of ``torch.autograd.grad``; `run` is torch's engine, the rest what it takes.

        Raises:
            ContractError: Gradients by sharded parameters are to be differentiated again, or ranks part ways.
        """

        def differentiate(by: Sequence[Tensor], allow: bool = True) -> Any:
            with self._differentiating(again=create_graph):
                return run(outputs, grads, retain_graph, create_graph, by, allow, **kwargs)

        if self._gradients is None or not any(map(self._gradients.has, inputs)):
            return differentiate(inputs, allow_unused)
        if create_graph:
            raise ContractError(_DIFFERENTIATED_AGAIN)
        self.agree("call torch.autograd.grad")
        return self._gradients.grad(differentiate, inputs, allow_unused=allow_unused)

    @contextlib.contextmanager
    def _differentiating(self, *, again: bool) -> Iterator[None]:
        """Around a call of ``torch.autograd.grad``; `again` says whether its result is to be differentiated again."""
        self._keeps_graph |= again
        try:
            with self._gathered_throughout() if self._keeps_graph else contextlib.nullcontext():
                yield
        finally:
            for unit in self._units:
                unit.show_shards()

    @contextlib.contextmanager
    def _gathered_throughout(self) -> Iterator[None]:
        """Around a call of torch's engine that may go through the graph of gradients (a gradient penalty).

        That graph reads weights through no hook that could gather them, and FSDP's hook at the inputs of a module runs
        before all gradients of its weights are there: on a device, where backward is in a thread of its own, always.
        So all weights are whole before the call, and their gradients are reduced after it.
        """
        for module in self._modules:
            module.unshard()
            module.set_reshard_after_backward(False, recurse=False)
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in self._modules:
                module.set_reshard_after_backward(True, recurse=False)
                module.set_requires_gradient_sync(True, recurse=False)

    def _around_update(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """Around an update by `optimizer`, which all ranks make, and after which what is gathered is stale."""
        if not self._units:
            return contextlib.nullcontext()
        self.agree(f"{UPDATE} {type(optimizer).__name__}")
        self.give_up_gathered()
        if optimizer not in self.optimizers:
            return contextlib.nullcontext()
        return without_collectives(f"{type(optimizer).__name__}.step()", self.agree)

    def give_up_gathered(self) -> None:
        """Sharded weights are about to change: what is gathered of them is stale then."""
        shard_writes.settle_all()
        for unit in self._units:
            unit.give_up()

    @override
    def explained(self, error: BaseException) -> ContractError | None:
        if self._is_to_differentiate_again and _HAS_NO_GRAPH in str(error):
            return ContractError(_DIFFERENTIATED_AGAIN)
        return about_sharding(error) if self._units else None

    def _touched(self, shard: DTensor) -> None:
        if self._gradients is not None:
            self._gradients.touch(shard)


class AccumulationHooks(StepPart):
    """Calls what the trainer registered on sharded parameters, once all other parts are done with a backward call."""

    def __init__(self, sharded: ShardedStep) -> None:
        self._sharded = sharded

    @override
    def after_backward(self) -> None:
        self._sharded.call_hooks()
