"""The part of a training step that handles sharded modules.

The hooks of FSDP 2 gather weights in the call of a unit (a module that ``fully_shard`` was called with) and reduce
gradients in backward. `ShardedStep` adds::

    a call of a unit         refuses foreign parameters, and ranks that call different units
    autograd.grad with       from then on, gathers weights before each backward call of the step and reduces gradients
    create_graph             after it, because the graph of gradients reads weights without running a hook
    backward                 refuses ranks that used different parameters, and gradients that were not reduced
    an update                refuses ranks that make different updates
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

from ....callbacks.checkpoint.format.slice_index import Box
from ....callbacks.checkpoint.sharded.slices import slice_of, view_of_part
from ....callbacks.optimizer_state import parameters_of
from ...contract.exceptions import ContractError
from ...discovery.discover import Discovered
from ..rank_agreement import BACKWARD, END_OF_STEP, UPDATE, USED, RankAgreement
from ..refused import explain, refusal
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

WATCHED_CALLS = 3
"""Number of first calls of a unit after which its gathered weights are compared with its shards, to find lost writes.

Later calls compare them only if torch counted a write.
"""


def fsdp_modules(discovered: Discovered) -> list[FSDPModule]:
    """Return the modules that FSDP 2 shards, among the trainer's modules and their parts."""
    return [m for found in discovered.modules for m in found.value.modules() if isinstance(m, FSDPModule)]


class _Unit:
    """Modules whose parameters are gathered together.

    Args:
        module: The argument of ``fully_shard``.
        path: Path from the state or the trainer, for messages.
        is_root: Whether no other unit contains it.
    """

    def __init__(self, module: FSDPModule, path: str, *, is_root: bool) -> None:
        assert isinstance(module, nn.Module)
        self.module, self.path, self.is_root = module, path, is_root
        self.sharding = sharding_of(module)
        reshards = self.sharding.reshard_after_forward
        self.keeps = is_root if reshards is None else not reshards
        """Whether gathered weights are kept after a forward until backward has used them."""
        self.agree: Callable[[str], None] = lambda _: None
        self.depth = 0
        """Number of running calls; a unit may call itself."""
        self.places: list[tuple[nn.Module, str]] = [
            (part, name)
            for part in _parts(module)
            for name, parameter in part._parameters.items()
            if isinstance(parameter, DTensor)  # type: ignore[redundant-expr]  # torch: always a Parameter
        ]
        """Places of the shards. Gathered tensors replace the shards during a call. A tied shard has several places."""
        self.shards: list[DTensor] = []
        self.gathered: list[Tensor] = []
        """The full tensors that replace the shards during calls; the same objects each time, empty in between."""
        self.used: set[int] = set()
        """Indices of the parameters that the last backward call gave gradients on this rank."""
        self._noted: set[int] = set()
        self._calls = 0
        self._versions: list[int] = []
        self._undo: list[Callable[[], None]] = []

    def open(self, agree: Callable[[str], None]) -> None:
        """Register the hooks of a training; collective."""
        self.agree = agree
        self.shards = [part._parameters[name] for part, name in self.places]  # type: ignore[misc]
        self.module.unshard()
        self.gathered = [part._parameters[name] for part, name in self.places]  # type: ignore[misc]
        self.module.reshard()
        self.module.set_reshard_after_forward(not self.keeps, recurse=False)
        with contextlib.suppress(AttributeError):  # torch before 2.13 lacks it
            self.module.set_reduce_scatter_unused_params(True, recurse=False)
        begin: RemovableHandle = self.module.register_forward_pre_hook(outside_of_graphs(self._begin), prepend=True)
        end: RemovableHandle = self.module.register_forward_hook(outside_of_graphs(self._end))
        check: RemovableHandle = self.module.register_forward_hook(outside_of_graphs(self._check), prepend=True)
        self._undo = [begin.remove, end.remove, check.remove]
        for index, shard in enumerate(self.shards):
            if shard.requires_grad:
                hook = shard.register_hook(functools.partial(self._take_direct, index))  # type: ignore[no-untyped-call]
                self._undo.append(hook.remove)
        for name in self.sharding.forward_methods:
            if (method := vars(self.module).get(name)) is not None:
                setattr(self.module, name, self._as_call(method))
                self._undo.append(functools.partial(setattr, self.module, name, method))

    def note_gradients(self) -> None:
        """Begin to note in `used` the parameters that get gradients from a backward call."""
        self.used.clear()
        for index, gathered in enumerate(self.gathered):
            if index not in self._noted and gathered.requires_grad:  # a trainer may unfreeze it between steps
                self._noted.add(index)
                note = gathered.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, index=index: self.used.add(index)
                )
                self._undo.append(note.remove)

    def _take_direct(self, index: int, gradient: DTensor | None) -> DTensor | None:
        """Return a gradient that reached a shard directly (from a penalty on weights), with the shard's placement."""
        if gradient is None:  # an autograd function of the trainer may return None
            return None
        self.used.add(index)
        wait_for_reduction(self.module)
        return gradient.redistribute(placements=self.shards[index].placements)

    def close(self) -> None:
        """Remove the hooks; from now on gathered weights are not kept for backward."""
        self.module.reshard()
        self.module.set_reshard_after_forward(True, recurse=False)
        while self._undo:
            self._undo.pop()()

    def _as_call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `method`, one of `forward_methods`, so that it counts as a call of the unit."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            output = method(*args, **kwargs)
            self._end()
            return output

        return call

    def _begin(self, *_: Any) -> None:
        """Begin a call of the unit: refuse foreign parameters, and ranks that call another unit."""
        if current_graph_task_id() != -1:  # within backward, where checkpointed segments and adjoints call modules
            return
        self.depth += 1
        if self.depth > 1:
            return
        for (part, name), shard in zip(self.places, self.shards, strict=True):
            if id(part._parameters.get(name)) != id(shard):
                raise refusal("other parameters", f"{self.path} in `train_step`")
        if self.keeps:
            self.module.reshard()  # weights may have changed since they were gathered
        self.agree(f"call {self.path}")

    def _check(self, *_: Any) -> None:
        """Refuse writes of a call to gathered weights, since they would be lost.

        Torch does not count a write by ``.data``, so the first calls compare values.
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
        """End a call of the unit: keep gathered weights for backward, or free them."""
        if current_graph_task_id() != -1:
            return
        self.depth -= 1
        if self.depth == 0 and torch.is_grad_enabled():
            self.show_shards()
        elif self.depth == 0:  # no backward needs the gathered weights
            self.module.reshard()

    def show_shards(self) -> None:
        """Put the shards in the place of the tensors kept for backward, so that the trainer writes only to shards."""
        if self.keeps:
            self._put(self.shards)

    def show_kept(self) -> None:
        """Put the tensors kept for backward in the place of the shards, as FSDP 2 needs it during backward."""
        is_kept = any(gathered.untyped_storage().size() for gathered in self.gathered)
        if is_kept and self.keeps:
            self._put(self.gathered)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for (part, name), tensor in zip(self.places, tensors, strict=True):
            part._parameters[name] = tensor  # type: ignore[assignment]


@torch.no_grad()
def _has_part(gathered: Tensor, shard: DTensor) -> bool:
    """Whether a gathered weight still has the values of its shard; nan equals nan, since training may have diverged."""
    if gathered.untyped_storage().size() == 0:
        return True
    part = view_of_part(slice_of(shard), gathered, of=Box((0,) * gathered.dim(), tuple(gathered.shape)))
    own = shard.to_local().to(part.device)
    return bool(((part == own) | ((part != part) & (own != own))).all())


def _parts(unit: nn.Module) -> list[nn.Module]:
    """Return the modules in `unit`, including itself, without the modules of inner units."""
    units = [part for part in unit.modules() if isinstance(part, FSDPModule)]
    inner = {id(part) for other in units if id(other) != id(unit) for part in other.modules()}
    return [part for part in unit.modules() if id(part) not in inner]


def _units_of(discovered: Discovered) -> list[_Unit]:
    """Return the units among the trainer's modules, outer ones first."""
    units: dict[int, _Unit] = {}

    def visit(module: nn.Module, path: str, *, is_inside: bool) -> None:
        if isinstance(module, FSDPModule) and id(module) not in units:
            units[id(module)] = _Unit(module, path, is_root=not is_inside)
        for name, child in module.named_children():
            visit(child, f"{path}.{name}", is_inside=is_inside or isinstance(module, FSDPModule))

    for each in discovered.modules:
        visit(each.value, each.path, is_inside=False)
    return list(units.values())


class ShardedStep(StepPart):
    """The part of a step that only sharded modules need; its truth value is False if nothing is sharded.

    Args:
        discovered: The trainer's objects.
        optimizers: All optimizers, including the ones that others wrap.
        several_ranks: Whether there are other ranks.
        group: The ranks; None means all.
        device: Device of the messages between ranks.
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
        """Each shard and the tensor that replaces it during calls, by the shard's id."""
        self._keeps_graph = False
        """Whether this step has called ``torch.autograd.grad(create_graph=True)``.

        Each later call of torch's engine may read weights through that graph of gradients.
        """
        self._backward = contextlib.ExitStack()
        """Contexts that end with the running backward call."""
        self._had_gradients: list[bool] = []
        """Whether each shard had a gradient before the running backward call."""
        self._updates_shards = any(isinstance(p, DTensor) for each in optimizers for p in parameters_of(each))
        self._agree = RankAgreement(group, device, several_ranks=several_ranks)
        self._has_failed = False

    def __bool__(self) -> bool:
        return bool(self._units) or self._updates_shards

    @override
    def open(self) -> None:
        for unit in self._units:
            if unit.is_root:
                try:
                    initialize_sharded(unit.module)
                except AssertionError as error:
                    raise explain(error, unit.path) or error from error
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
        self._agree.close(failed=self._has_failed)

    @override
    def begin(self, step: int) -> None:
        self._keeps_graph = False
        self._agree.begin_step(step)
        tensors.begin_step(self._agree)

    @override
    def end(self) -> None:
        tensors.end_step()
        for unit in self._units:
            if unit.depth:
                raise refusal("failed call", f"{unit.path} in `train_step`")
            unit.module.reshard()  # a unit is still gathered after a forward without a backward
        self._agree(END_OF_STEP)
        self._agree.end_step(failed=False)

    @override
    def before_save(self) -> None:
        self._agree.read_all()

    @override
    def abandon(self) -> None:
        tensors.end_step()
        self._has_failed = True
        self._agree.end_step(failed=True)

    @override
    def before_backward(self, call: BackwardCall) -> None:
        if call.create_graph:
            raise refusal("differentiated gradients", "`train_step`")
        self._refuse_shards(call.inputs)
        gathers = tensors.gathers_behind(call.outputs) if self._agree.compares_each else []
        self._agree(f"{BACKWARD} with gradients for {', '.join(gathers)} of weights" if gathers else BACKWARD)
        if self._keeps_graph:
            self._backward.enter_context(self._keep_gathered())
        self._had_gradients = [_gradient_of(shard) is not None for unit in self._units for shard in unit.shards]
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
        """Finish a backward call: when this returns, gradients are averaged over all ranks."""
        is_unreduced = any(gathered.grad is not None for unit in self._units for gathered in unit.gathered)
        if is_unreduced:  # a backward call within this one, as of a reversible layer, leaves gradients unreduced
            self._agree("reduce gradients that backward left")
        for unit in self._units:
            if unit.is_root and (is_unreduced or self._keeps_graph):
                reduce_sharded_gradients(unit.module)
            if not unit.keeps:
                unit.module.reshard()  # a unit that was called within the backward call is still gathered
        had_gradient = iter(self._had_gradients)
        used = []
        for unit in self._units:
            for index, (shard, gathered) in enumerate(zip(unit.shards, unit.gathered, strict=True)):
                if gathered.grad is not None:
                    raise refusal("not reduced", f"{unit.path} in `train_step`")
                if not next(had_gradient) and index not in unit.used and not unit.sharding.unused_parameters:
                    shard.grad = None  # FSDP 2 left zeros, in case another rank has used the parameter
            if not unit.sharding.unused_parameters:
                used += [f"{unit.path} {index}" for index in sorted(unit.used)]
        self._agree(f"{USED} {len(used)} sharded parameters ({zlib.crc32(' '.join(used).encode()):08x})")

    @override
    def grad(self, run: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call of ``torch.autograd.grad``.

        Raises:
            ContractError: The call computes gradients of sharded parameters, or ranks diverged.
        """
        _, create_graph, inputs = (*args, ())[:3]
        self._refuse_shards(inputs)
        self._agree("call torch.autograd.grad")
        with self._keep_gathered() if self._keeps_graph else contextlib.nullcontext():
            self._keeps_graph |= create_graph
            return run(outputs, grads, *args, **kwargs)

    @override
    def within_backward(self, run: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call of torch's engine within a backward call, with gathered parameters in place of shards.

        An adjoint method (of an ODE solver, for example) is an autograd function whose backward calls a module and
        computes gradients of that module's parameters. It returns them to autograd, which adds them to the shards.

        Raises:
            ContractError: The call adds to the gradients of shards itself, or keeps a graph of them.
        """
        retain_graph, create_graph, inputs = (*args, ())[:3]
        places = {index: pair for index, each in enumerate(inputs) if (pair := self._shard_behind(each)) is not None}
        if not places:
            return run(outputs, grads, *args, **kwargs)
        if create_graph or kwargs.get("accumulate_grad"):
            raise refusal("gradients by parameters", "an autograd function of the class, in backward")
        # A call of the module uses the gathered tensor, a function such as ``F.linear`` uses the shard: the gradients
        # of both are requested, and added below.
        sources = [places[index][1] if index in places else each for index, each in enumerate(inputs)]
        sources += [inputs[index] for index in places]
        gradients = list(run(outputs, grads, retain_graph, create_graph, tuple(sources), True, **kwargs))
        direct = dict(zip(places, gradients[len(inputs) :], strict=True))
        del gradients[len(inputs) :]
        used = [index for index in places if gradients[index] is not None]
        self._agree(f"differentiate by {len(used)} sharded parameters within backward ({used})")
        for index, (shard, _) in places.items():
            parts = [tensors.mean_over_ranks(gradients[index], like=shard)] if index in used else []
            if direct[index] is not None:
                parts.append(direct[index].redistribute(placements=shard.placements))
            gradients[index] = sum(parts[1:], parts[0]) if parts else None
        if not args[3] and any(gradient is None for gradient in gradients):
            raise RuntimeError("An input of torch.autograd.grad was not used; `allow_unused=True` returns None for it")
        return tuple(gradients)

    @override
    def before_update(self, optimizer: Optimizer) -> bool:
        self._agree(f"{UPDATE} {type(optimizer).__name__}")
        self._agree.in_update = True
        return True

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        self._agree.in_update = False

    @override
    def explain(self, error: BaseException) -> ContractError | None:
        return explain(error) if self._units else None

    def _refuse_shards(self, inputs: Sequence[Tensor]) -> None:
        if any(self._shard_behind(tensor) is not None for tensor in inputs):
            raise refusal("gradients by parameters", "`train_step`")

    def _shard_behind(self, tensor: Tensor) -> tuple[DTensor, Tensor] | None:
        """Return the shard that `tensor` stands for in autograd, and its gathered tensor; None if it is no shard."""
        if id(tensor) not in self._by_shard and tensor.is_leaf and tensor.requires_grad:
            # Within a checkpoint, autograd returns saved tensors as new objects with the same node.
            tensor = getattr(get_gradient_edge(tensor).node, "variable", tensor)
        return self._by_shard.get(id(tensor))

    def _take_data(self, shard: DTensor) -> None:
        for unit in self._units:
            if any(each is shard for each in unit.shards):
                take_data(unit.module, shard)

    @contextlib.contextmanager
    def _keep_gathered(self) -> Iterator[None]:
        """Keep all weights gathered during a call of torch's engine that may use a graph of gradients (a penalty).

        That graph reads weights without running a hook that could gather them. Besides, FSDP's hook at the inputs of a
        module may run before all gradients of its weights exist; on a device, where backward runs in another thread, it
        always does. So all weights are gathered before the call, and gradients are reduced after it.
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


def _gradient_of(shard: DTensor) -> Tensor | None:
    with without_torch_function_of_subclasses():
        return shard.grad
