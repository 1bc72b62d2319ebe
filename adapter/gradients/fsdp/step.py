"""The part of a training step that handles sharded modules.

FSDP 2's own hooks gather weights in the call of a unit and reduce gradients in backward. Around them::

    a call of a unit         its parameters are its own; ranks that call other units are named
    autograd.grad with       from here on weights are gathered before each backward of the step and gradients are
    create_graph             reduced after it: the graph of gradients reads weights through no hook
    backward                 ranks that used other parameters are named; gradients that were not reduced are refused
    an update                ranks that make another are named
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ....callbacks.checkpoint.sharded.slices import Box, slice_of, within
from ....callbacks.optimizer_state import parameters_of
from ...contract.exceptions import ContractError
from ...discovery.discover import Discovered
from ..rank_check import BACKWARD, END_OF_STEP, UPDATE, USED, RankAgreement
from ..refused import explained, refusal
from ..step_part import BackwardCall, StepPart
from ..torch_internals import (
    current_graph_task_id,
    initialize_sharded,
    outside_of_graphs,
    reduce_sharded_gradients,
    take_data,
    wait_for_reduction,
    without_torch_function_of_subclasses,
)
from . import tensors
from .shard import sharding_of

__all__ = ["ShardedStep", "fsdp_modules"]

WATCHED_CALLS = 3
"""Calls of a unit after which its weights are compared with what was gathered, to find modules that write to them."""


def fsdp_modules(discovered: Discovered) -> list[FSDPModule]:
    """The modules that FSDP 2 shards, among those that the trainer built and their submodules."""
    return [m for found in discovered.modules for m in found.value.modules() if isinstance(m, FSDPModule)]


class _Unit:
    """Modules whose parameters are gathered together.

    Args:
        module: The module that was given to ``fully_shard``.
        path: As the trainer's author would write it.
        is_root: Whether no other unit is around it.
    """

    def __init__(self, module: FSDPModule, path: str, *, is_root: bool) -> None:
        assert isinstance(module, nn.Module)
        self.module, self.path, self.is_root = module, path, is_root
        self.sharding = sharding_of(module)
        self.agree: Callable[[str], None] = lambda _: None
        self.depth = 0
        """How many calls are running; a unit may call itself."""
        self.places: list[tuple[nn.Module, str]] = [
            (part, name)
            for part in _parts(module)
            for name, parameter in part._parameters.items()
            if _is_sharded(parameter)
        ]
        """Where its shards are, and in a call what is gathered; a tied one has several."""
        self.shards: list[DTensor] = []
        self.gathered: list[Tensor] = []
        """The full tensors that calls use in place of shards; always the same objects, without memory between calls."""
        self.used: set[int] = set()
        """Of which a backward call left gradients on this rank."""
        self._noted: set[int] = set()
        self._calls = 0
        self._versions: list[int] = []
        self._undo: list[Callable[[], None]] = []

    def open(self, agree: Callable[[str], None]) -> None:
        """Training begins; all ranks do it together, once."""
        self.agree = agree
        self.shards = [part._parameters[name] for part, name in self.places]  # type: ignore[misc]
        self.module.unshard()
        self.gathered = [part._parameters[name] for part, name in self.places]  # type: ignore[misc]
        self.module.reshard()
        with contextlib.suppress(AttributeError):  # torch 2.13 and later
            self.module.set_reduce_scatter_unused_params(True, recurse=False)
        begin: RemovableHandle = self.module.register_forward_pre_hook(outside_of_graphs(self._begin), prepend=True)
        end: RemovableHandle = self.module.register_forward_hook(outside_of_graphs(self._end))
        look: RemovableHandle = self.module.register_forward_hook(outside_of_graphs(self._look), prepend=True)
        self._undo = [begin.remove, end.remove, look.remove]
        for index, shard in enumerate(self.shards):
            if shard.requires_grad:
                hook = shard.register_hook(functools.partial(self._take_direct, index))  # type: ignore[no-untyped-call]
                self._undo.append(hook.remove)
        for name in self.sharding.forward_methods:
            if (method := vars(self.module).get(name)) is not None:
                setattr(self.module, name, self._as_call(method))
                self._undo.append(functools.partial(setattr, self.module, name, method))

    def note_gradients(self) -> None:
        """Begin to note which parameters a backward call leaves gradients of."""
        self.used.clear()
        for index, gathered in enumerate(self.gathered):
            if index not in self._noted and gathered.requires_grad:  # which may change between steps
                self._noted.add(index)
                note = gathered.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, index=index: self.used.add(index)
                )
                self._undo.append(note.remove)

    def _take_direct(self, index: int, gradient: DTensor | None) -> DTensor | None:
        """Return the gradient that a shard gets outside of calls, as of a penalty, sharded as those of FSDP 2 are."""
        if gradient is None:  # of a function of the trainer's own
            return None
        self.used.add(index)
        wait_for_reduction(self.module)
        return gradient.redistribute(placements=self.shards[index].placements)

    def close(self) -> None:
        """Training is over."""
        while self._undo:
            self._undo.pop()()

    def _as_call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            output = method(*args, **kwargs)
            self._end()
            return output

        return call

    def _begin(self, *_: Any) -> None:
        if current_graph_task_id() != -1:  # by a checkpoint or an adjoint, within a backward
            return
        self.depth += 1
        if self.depth > 1:
            return
        for (part, name), shard in zip(self.places, self.shards, strict=True):
            if id(part._parameters.get(name)) != id(shard):
                raise refusal("other parameters", f"{self.path} in `train_step`")
        if not self.sharding.reshard_after_forward:
            self.module.reshard()  # weights may have changed since
        self.agree(f"call {self.path}")

    def _look(self, *_: Any) -> None:
        """Refuse what a call wrote to gathered weights, where it would be lost.

        A write by ``.data`` leaves no trace, so first calls are looked at.
        """
        if self.depth != 1 or current_graph_task_id() != -1:
            return
        self._calls += 1
        versions = [gathered._version for gathered in self.gathered]
        if self._calls <= WATCHED_CALLS or versions != self._versions:
            for place, shard, gathered in zip(self.places, self.shards, self.gathered, strict=True):
                if gathered.dtype == shard.dtype and not _has_part(gathered, shard):
                    raise refusal("written in forward", f"{self.path}, its {place[1]}")
        self._versions = versions

    def _end(self, *_: Any) -> None:
        if current_graph_task_id() != -1:
            return
        self.depth -= 1
        if self.depth == 0:
            self.show_shards()

    def show_shards(self) -> None:
        """Put shards in place of the tensors that are kept for backward, so that the trainer never writes to those."""
        if not self.sharding.reshard_after_forward:
            self._put(self.shards)

    def show_kept(self) -> None:
        """Put the tensors that are kept for backward in place, as FSDP 2 has it while backward runs."""
        is_kept = any(gathered.untyped_storage().size() for gathered in self.gathered)
        if is_kept and not self.sharding.reshard_after_forward:
            self._put(self.gathered)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for (part, name), tensor in zip(self.places, tensors, strict=True):
            part._parameters[name] = tensor  # type: ignore[assignment]


@torch.no_grad()
def _has_part(gathered: Tensor, shard: DTensor) -> bool:
    """Whether a gathered weight still holds the values of a shard; nan, as a run that has diverged has it, is one."""
    if gathered.untyped_storage().size() == 0:
        return True
    part = within(slice_of(shard), gathered, of=Box((0,) * gathered.dim(), tuple(gathered.shape)))
    own = shard.to_local().to(part.device)
    return bool(((part == own) | ((part != part) & (own != own))).all())


def _is_sharded(parameter: Any) -> bool:
    return isinstance(parameter, DTensor)


def _parts(unit: nn.Module) -> list[nn.Module]:
    """The modules in `unit`, itself included, without those of units inside of it."""
    units = [part for part in unit.modules() if isinstance(part, FSDPModule)]
    inner = {id(part) for other in units if id(other) != id(unit) for part in other.modules()}
    return [part for part in unit.modules() if id(part) not in inner]


def _units_of(discovered: Discovered) -> list[_Unit]:
    found: dict[int, _Unit] = {}

    def visit(module: nn.Module, path: str, *, is_inside: bool) -> None:
        if isinstance(module, FSDPModule) and id(module) not in found:
            found[id(module)] = _Unit(module, path, is_root=not is_inside)
        for name, child in module.named_children():
            visit(child, f"{path}.{name}", is_inside=is_inside or isinstance(module, FSDPModule))

    for each in discovered.modules:
        visit(each.value, each.path, is_inside=False)
    return list(found.values())


class ShardedStep(StepPart):
    """The part of a step that only sharded modules need; false where nothing is sharded.

    Args:
        discovered: What the trainer built.
        optimizers: All optimizers, those inside of others included.
        several_ranks: Whether there are others to agree with.
        group: These ranks; None means all.
        device: Where messages between them are.
    """

    def __init__(
        self,
        discovered: Discovered,
        optimizers: Sequence[Optimizer],
        *,
        several_ranks: bool,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._units = _units_of(discovered)
        self._by_shard: dict[int, tuple[DTensor, Tensor]] = {}
        """Each shard and the tensor that calls use in its place, by the shard's id."""
        self._keeps_graph = False
        """Whether there is a graph of gradients, of which weights may be read in each call of torch's engine."""
        self._backward = contextlib.ExitStack()
        """State that ends with the backward call that runs."""
        self._had: list[bool] = []
        self._updates_shards = any(isinstance(p, DTensor) for each in optimizers for p in parameters_of(each))
        self._several_ranks, self._group, self._device = several_ranks, group, device
        self._agreement: RankAgreement | None = None
        self._has_failed = self._in_update = self._tells_all = False

    def __bool__(self) -> bool:
        return bool(self._units) or self._updates_shards

    @override
    def open(self) -> None:
        if self._several_ranks:
            self._agreement = RankAgreement(self._group, self._device)
        for unit in self._units:
            if unit.is_root:
                try:
                    initialize_sharded(unit.module)
                except AssertionError as error:
                    raise explained(error, unit.path) or error from error
        for unit in self._units:
            unit.open(self._agree)
        self._by_shard = {
            id(shard): (shard, gathered)
            for unit in self._units
            for shard, gathered in zip(unit.shards, unit.gathered, strict=True)
        }
        tensors.hold(self._take_data)

    @override
    def close(self) -> None:
        tensors.release()
        for unit in self._units:
            unit.close()
        if self._agreement is not None:
            self._agreement.close(failed=self._has_failed)

    @override
    def begin(self, step: int) -> None:
        self._keeps_graph = False
        if self._agreement is not None:
            self._agreement.begin_step(step)
        self._tells_all = self._agreement is not None and self._agreement.tells_all
        tensors.begin_step(self._agree, self._note, compares_values=self._tells_all)

    @override
    def end(self) -> None:
        tensors.end_step()
        for unit in self._units:
            if unit.depth:
                raise refusal("failed call", f"{unit.path} in `train_step`")
        self._agree(END_OF_STEP)
        if self._agreement is not None:
            self._agreement.end_step(failed=False)

    @override
    def before_save(self) -> None:
        if self._agreement is not None:
            self._agreement.read_all()

    @override
    def abandon(self) -> None:
        tensors.end_step()
        self._has_failed = True
        if self._agreement is not None:
            self._agreement.end_step(failed=True)

    @override
    def before_backward(self, call: BackwardCall) -> None:
        if call.create_graph:
            raise refusal("differentiated gradients", "`train_step`")
        self._refuse_shards(call.inputs)
        gathers = tensors.gathers_behind(call.outputs) if self._tells_all else []
        self._agree(f"{BACKWARD} with gradients for {', '.join(gathers)} of weights" if gathers else BACKWARD)
        if self._keeps_graph:
            self._backward.enter_context(self._gathered_throughout())
        self._had = [_grad(shard) is not None for unit in self._units for shard in unit.shards]
        for unit in self._units:
            unit.note_gradients()
            unit.show_kept()

    @override
    def leave_backward(self, *, failed: bool) -> None:
        self._backward.close()
        for unit in self._units:
            unit.show_shards()

    @override
    def after_backward(self) -> None:
        """The backward call has ended: gradients are those of all ranks when this returns."""
        left = any(gathered.grad is not None for unit in self._units for gathered in unit.gathered)
        if left:  # by a backward call within this one, as of a reversible layer
            self._agree("reduce gradients that backward left")
        for unit in self._units:
            if unit.is_root and (left or self._keeps_graph):
                reduce_sharded_gradients(unit.module)
            if unit.sharding.reshard_after_forward:
                unit.module.reshard()  # a call within the backward call leaves it gathered
        had = iter(self._had)
        used = []
        for unit in self._units:
            for index, (shard, gathered) in enumerate(zip(unit.shards, unit.gathered, strict=True)):
                if gathered.grad is not None:
                    raise refusal("not reduced", f"{unit.path} in `train_step`")
                if not next(had) and index not in unit.used and not unit.sharding.unused_parameters:
                    shard.grad = None  # of zeros, which ranks reduce in case that others have used it
            if not unit.sharding.unused_parameters:
                used += [f"{unit.path} {index}" for index in sorted(unit.used)]
        code = zlib.crc32(" ".join(used).encode())
        self._agree(f"{USED} {len(used)} sharded parameters ({code:08x})")

    @override
    def grad(
        self,
        run: Callable[..., Any],
        outputs: Any,
        grads: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor] = (),
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """One call of ``torch.autograd.grad``; `run` is torch's engine, the rest what it takes.

        Raises:
            ContractError: It asks for gradients by sharded parameters, or ranks part ways.
        """
        self._refuse_shards(inputs)
        self._agree("call torch.autograd.grad")
        with self._gathered_throughout() if self._keeps_graph else contextlib.nullcontext():
            self._keeps_graph |= create_graph
            return run(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)

    @override
    def within_backward(
        self,
        run: Callable[..., Any],
        outputs: Any,
        grads: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor] = (),
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a call of torch's engine inside of a backward call, with gathered parameters in place of shards.

        An adjoint calls a module within its own backward and asks for gradients by the parameters of that module. It
        returns them to autograd, which adds them to the shards.

        Raises:
            ContractError: The call adds to the gradients of shards itself, or keeps a graph of them.
        """
        places = {index: pair for index, each in enumerate(inputs) if (pair := self._shard_behind(each)) is not None}
        if not places:
            return run(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
        if create_graph or kwargs.get("accumulate_grad"):
            raise refusal("gradients by parameters", "a function of its own, in backward")
        # Calls of modules use the gathered tensors, and functions such as ``F.linear`` the shards.
        wanted = [places[index][1] if index in places else each for index, each in enumerate(inputs)]
        wanted += [inputs[index] for index in places]
        found = list(run(outputs, grads, retain_graph, create_graph, tuple(wanted), True, **kwargs))
        direct = dict(zip(places, found[len(inputs) :], strict=True))
        del found[len(inputs) :]
        used = [index for index in places if found[index] is not None]
        self._agree(f"differentiate by {len(used)} sharded parameters within backward ({used})")
        for index, (shard, _) in places.items():
            parts = [tensors.mean_over_ranks(found[index], like=shard)] if index in used else []
            if direct[index] is not None:
                parts.append(direct[index].redistribute(placements=shard.placements))
            found[index] = sum(parts[1:], parts[0]) if parts else None
        if not args[0] and any(gradient is None for gradient in found):
            raise RuntimeError("A tensor to differentiate by was not used; `allow_unused=True` gives None for it")
        return tuple(found)

    @override
    def before_update(self, optimizer: Optimizer) -> bool:
        self._agree(f"{UPDATE} {type(optimizer).__name__}")
        self._in_update = True
        return True

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        self._in_update = False

    @override
    def explained(self, error: BaseException) -> ContractError | None:
        return explained(error) if self._units else None

    def _refuse_shards(self, inputs: Sequence[Tensor]) -> None:
        if any(self._shard_behind(tensor) is not None for tensor in inputs):
            raise refusal("gradients by parameters", "`train_step`")

    def _shard_behind(self, tensor: Tensor) -> tuple[DTensor, Tensor] | None:
        """The shard, and what calls use in its place, if autograd takes `tensor` for a shard."""
        if id(tensor) not in self._by_shard and tensor.is_leaf and tensor.requires_grad:
            # A function in a checkpoint gets other tensors back than it saved, with the same accumulator of gradients.
            tensor = getattr(get_gradient_edge(tensor).node, "variable", tensor)
        return self._by_shard.get(id(tensor))

    def _take_data(self, shard: DTensor) -> None:
        for unit in self._units:
            if any(each is shard for each in unit.shards):
                take_data(unit.module, shard)

    def _agree(self, what: str) -> None:
        if self._agreement is not None:
            self._agreement(what)

    def _note(self, what: str) -> None:
        # An optimizer may be compiled on one rank before another, where what it writes comes by no other way.
        if self._agreement is not None and not self._in_update:
            self._agreement.note(what)

    @contextlib.contextmanager
    def _gathered_throughout(self) -> Iterator[None]:
        """Around a call of torch's engine that may go through the graph of gradients (a gradient penalty).

        That graph reads weights through no hook that could gather them, and FSDP's hook at the inputs of a module runs
        before all gradients of its weights are there: on a device, where backward is in a thread of its own, always.
        So all weights are whole before the call, and gradients are reduced after it.
        """
        modules = [unit.module for unit in self._units]
        for module in modules:
            module.unshard()
            module.set_reshard_after_backward(False, recurse=False)
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_reshard_after_backward(True, recurse=False)
                module.set_requires_gradient_sync(True, recurse=False)
                module.reshard()


def _grad(shard: DTensor) -> Tensor | None:
    with without_torch_function_of_subclasses():
        return shard.grad
