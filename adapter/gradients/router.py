"""Leads a trainer's own ``loss.backward()`` and ``optimizer.step()`` through strategy, precision and hooks.

While a ``train_step`` runs, and in its thread alone::

    backward            on_before_backward
                        scale the loss, unseen by hooks    16-mixed
                        autograd, outside of autocast      16-mixed, bf16-mixed
                        average gradients over the ranks   several ranks; put off until somebody looks
                        look for overflows                 16-mixed
                        on_after_backward
    optimizer.step      the closure, its loss averaged over the ranks
                        on_before_optimizer_step
                        skip on overflow, adapt the scale  16-mixed
                        the optimizer's own step
    a collective        average gradients first            several ranks
    end of the step     average gradients that nobody used several ranks; a rank without any says so
                        buffers of rank 0 to all ranks     several ranks

Everywhere else torch is what it was. Where none of this is needed there is no router at all, so that one device in fp32
is bit-equal to plain torch, and free.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered, check_devices
from ..discovery.rank_local import EVERYTHING_SHARED, RankLocal
from . import autograd_patch as interception
from . import shard_writes, sharded_values
from .fsdp_errors import about_sharded_update, about_sharding, without_collectives
from .gradient_sync import (
    BufferSync,
    GradientSync,
    average_scalar,
    broadcast_from_zero,
    check_same_on_all_ranks,
)
from .lazy_sync import Accumulation
from .lightning_hooks import StepHooks, step_hooks
from .precision import AutocastOff, StepPrecision, about_types, cast_inputs, step_precision
from .rank_agreement import RankAgreement
from .rank_points import Point, Why, users_line
from .shard_gradients import ShardGradients
from .shard_layout import with_inner_optimizers
from .shard_units import units_of
from .unscaling import Unscaling

__all__ = ["StepRouter", "step_router"]


def step_router(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    discovered: Discovered,
    rank_local: RankLocal = EVERYTHING_SHARED,
) -> StepRouter | None:
    """The router that this run needs, or None where plain torch does the same.

    To be called once, with the modules on their device and before a checkpoint is restored. On several ranks it also
    gives every rank the weights of rank 0.

    Raises:
        ContractError: The ranks built different things, something is on another device than this rank's, or the
            precision cannot host the trainer.
    """
    check_devices(discovered, trainer.strategy.root_device, world_size=trainer.world_size)
    precision = step_precision(trainer.precision_plugin, discovered)
    hooks = step_hooks(trainer, module)
    gradients, buffers = None, None
    if dist.is_available() and dist.is_initialized() and trainer.world_size > 1:
        group = _data_parallel_group(trainer)
        check_same_on_all_ranks(discovered, group, rank_local)
        broadcast_from_zero([tensor for _, tensor in rank_local.tensors(discovered)], group)
        gradients = GradientSync(discovered, group, rank_local)
        buffers = BufferSync(discovered, group, rank_local)
    if precision.cast_inputs_to is not None:
        cast_inputs([found.value for found in discovered.modules], precision.cast_inputs_to)
    sharded = any(isinstance(m, FSDPModule) for found in discovered.modules for m in found.value.modules())
    if precision.context is None and gradients is None and not hooks and not sharded:
        return None
    return StepRouter(
        discovered,
        trainer.strategy.root_device,
        precision=precision,
        hooks=hooks,
        gradients=gradients,
        buffers=buffers,
        completed_steps=lambda: trainer.global_step,
    )


class StepRouter:
    """A context manager around each ``train_step``; see the module's text for what happens inside.

    Args:
        discovered: What the trainer built; the optimizers in it are the managed ones.
        device: Root device of this rank.
        precision: What the precision plugin asks for.
        hooks: Hooks to call where Lightning would.
        gradients: Averages gradients over the ranks; None on a single rank.
        buffers: Gives all ranks the buffers of rank 0; None on a single rank.
        completed_steps: How many steps the run has behind it, for messages; None counts those of this object.
    """

    def __init__(
        self,
        discovered: Discovered,
        device: torch.device,
        *,
        precision: StepPrecision,
        hooks: StepHooks | None = None,
        gradients: GradientSync | None = None,
        buffers: BufferSync | None = None,
        completed_steps: Callable[[], int] | None = None,
    ) -> None:
        self._discovered = discovered
        self._device = device
        self._precision = precision
        self._scaler = precision.scaler
        self._hooks = hooks or StepHooks()
        self._gradients = gradients
        self._buffers = buffers or None
        self._optimizers = [found.value for found in with_inner_optimizers(discovered)]
        self._managed = {id(optimizer) for optimizer in self._optimizers}
        self._parameters = {id(p) for m in discovered.modules for p in m.value.parameters()}
        self._sharded = [m for f in discovered.modules for m in f.value.modules() if isinstance(m, FSDPModule)]
        self._units = units_of(found.value for found in discovered.modules)
        self._with_shards = [
            optimizer
            for optimizer in self._optimizers
            if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        ]
        self._of_shards: ShardGradients | None = None
        self._agree: RankAgreement | None = None
        self._unscaling = None if precision.scaler is None else Unscaling(precision.scaler, discovered)
        self.hooks_translator = self._unscaling
        self._has_no_optimizer = not discovered.optimizers and any(True for _ in discovered.updated())
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers that nobody found, and the step in which each was first used."""
        self._steps = 0
        self._completed_steps = completed_steps or (lambda: self._steps - 1)
        self._updates = 0
        self._last_update = ""
        self._refusal: ContractError | None = None
        self._is_open = self._is_closed = False
        self._may_be_written = False
        """Whether a gradient by a parameter was computed that the trainer may put to ``.grad`` itself."""
        self._averaged: set[int] = set()
        """Optimizers whose gradients are those of all ranks, as far as is known; each until its next update."""
        self.in_backward = False
        self._in_step = False
        self._context: AbstractContextManager[Any] | None = None
        # Making either anew in each step would cost more than entering it.
        device_type = precision.autocast_device
        self._autocast = precision.context() if precision.context is not None and device_type is not None else None
        self._outside_autocast = nullcontext() if device_type is None else AutocastOff(device_type)
        self._accumulation: Accumulation | None = None
        if gradients is not None and self._hooks.after_backward is None:
            self._accumulation = Accumulation(gradients.parameters, self._settle)
        self._was_averaged = False
        """Whether this step has averaged gradients."""
        for optimizer in self._optimizers:
            interception.wrap(optimizer, "step", self._step)
            if self._hooks.before_zero_grad is not None:
                interception.wrap(optimizer, "zero_grad", self._zero_grad)

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, as in fp16."""
        return self._scaler is not None

    @property
    def overflow_steps(self) -> int:
        """Updates skipped because gradients overflowed in fp16; reads from the device."""
        return self._scaler.overflow_steps if self._scaler is not None else 0

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over several ranks."""
        return self._gradients is not None

    def before_collective(self, name: str) -> None:
        """Average what a rank that reads a gradient would wait for, while this one waits elsewhere."""
        if self._accumulation is not None:
            self._accumulation.settle(Why.COLLECTIVE, name)

    def open(self) -> None:
        """Have torch's entries replaced until `close`, rather than for each step anew."""
        interception.hold(self)
        if self._units and self._gradients is not None:
            self._agree = RankAgreement(self._gradients.group, self._device)
            self._of_shards = ShardGradients(self._units, self._gradients.group, self._device)
        for unit in self._units:
            try:
                unit.begin_training(self._touched)
            except AssertionError as error:  # parameters of several types in one unit, for example
                raise about_sharding(error, "The trainer cannot be sharded") or error from error
            unit.scale = self._factors
            unit.agree = self._agreed
        if self._units:
            sharded_values.hold(self, self._agreed)
            sharded_values.number(p.sharded_param for unit in self._units for p in unit.parameters)
        self._is_open = True

    def close(self) -> None:
        """Training is over: from now on torch and the optimizers are used as they are."""
        self._is_closed = True
        if self._is_open:
            self._is_open = False
            interception.release(self)
            if self._units:
                sharded_values.release(self)

    def __enter__(self) -> StepRouter:
        self._steps += 1
        for unit in self._units:
            unit.begin_step()
        if self._agree is not None:
            self._agree.begin_step(self._steps)
        if self._precision.context is not None:
            self._context = self._autocast or self._precision.context()
            self._context.__enter__()
        if not self._is_open:
            interception.hold(self)
        self._was_averaged = False
        if self._accumulation is not None:
            self._accumulation.begin()
        interception.begin(self)
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        interception.end()
        if not self._is_open:
            interception.release(self)
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(exc_type, exc, traceback)
        refusal, self._refusal = self._refusal, None
        if refusal is not None and exc is not refusal:  # raised in a thread of the trainer, where nobody heard it
            raise refusal
        if self._agree is not None and exc_type is not None:
            self._agree.end_step()
        # After an exception the other ranks may not come this far: a collective would hang.
        if exc_type is None:
            if self._units:
                self._agreed("end the step")
                self._give_up_gathered()
            if self._agree is not None:
                self._agree.end_step()
            if self._gradients is not None:
                self._end_together(self._gradients)
            if self._buffers is not None:
                self._buffers()
        elif self._accumulation is not None:
            self._accumulation.abandon()
        if exc is None:
            return
        explained = (about_sharding(exc) if self._units else None) or about_types(exc, self._precision)
        if explained is not None:
            raise explained from exc

    def _end_together(self, gradients: GradientSync) -> None:
        """Average what the step has left, and find out about ranks that averaged nothing while others did."""
        if self._accumulation is not None:
            self._accumulation.end()
        if not self._was_averaged:
            gradients.take_no_part(self._point(Why.NOTHING))

    def _point(self, why: Why, ordinal: int = 0, what: Tensor | str = "") -> Point:
        """Where this rank is now."""
        where = "" if why in (Why.END_OF_STEP, Why.NOTHING) else users_line()
        step = self._completed_steps() + 1
        return Point(why, step, ordinal, self._updates, what, where, self._last_update)

    def backward(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        """Run one backward call of the trainer; `args` are those of torch's engine."""
        hooks = self._hooks
        if self._scaler is not None and self._has_no_optimizer:
            raise ContractError(
                "16-mixed needs an optimizer, in the state or on the trainer, whose update it can skip when gradients "
                "overflow; this trainer updates by hand. Use bf16-mixed or 32-true."
            )
        if self._accumulation is not None:
            self._accumulation.before_backward()
        if self._of_shards is not None:
            self._agreed("call backward")
            self._of_shards.begin()
        self.in_backward = True
        try:
            if hooks.before_backward is not None:
                hooks.before_backward(outputs[0])
            if self._unscaling is not None:
                grads = self._unscaling.begin(outputs, grads, args[2])
            with self._outside_autocast:
                interception.run_backward(outputs, grads, *args, **kwargs)
        except BaseException:
            if self._of_shards is not None:
                self._of_shards.abandon()
            raise
        finally:
            self.in_backward = False
            if self._accumulation is not None:
                self._accumulation.leave_backward()
            if self._unscaling is not None:
                self._unscaling.end()
        if self._of_shards is not None:
            self._of_shards.end()
        if self._scaler is not None:
            # Gradients of sharded parameters are those of all ranks by now; clipping would hide an overflow in them.
            for optimizer in self._with_shards:
                self._scaler.check(optimizer)
            self._scaler.adapt()
        if self._accumulation is not None:
            self._accumulation.after_backward()
        elif self._gradients is not None or self._scaler is not None:
            self._settle(0, Why.BACKWARD)
        if hooks.after_backward is not None:
            hooks.after_backward()
        if self._of_shards is not None:
            self._of_shards.call_hooks()

    def _agreed(self, what: str) -> None:
        if self._agree is not None:
            self._agree(what)

    def _touched(self, shard: DTensor) -> None:
        if self._of_shards is not None:
            self._of_shards.touch(shard)

    def _factors(self) -> tuple[Tensor, Tensor] | None:
        """What gradients are scaled by in the running backward call, and the inverse; None where they are not."""
        inverse = None if self._unscaling is None else self._unscaling.inverse_scale
        return None if inverse is None else (inverse.reciprocal(), inverse)

    def _settle(self, ordinal: int, why: Why, what: Tensor | str = "") -> None:
        """Make the gradients those of all ranks, and look at them."""
        if self._gradients is not None:
            self._gradients(self._point(why, ordinal, what))
            self._averaged = set(self._managed)
            self._was_averaged = True
            if why is Why.UPDATE:
                self._may_be_written = False
        if self._scaler is not None:
            for optimizer in self._optimizers:
                if optimizer not in self._with_shards:
                    self._scaler.check(optimizer)

    def grad(self, outputs: Any, grads: Any, retain_graph: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
        """Run one call of ``torch.autograd.grad``, which accumulates nothing.

        Where its result is differentiated again (a gradient penalty), sharded weights must stay whole until then:
        the second backward reads them through no hook that could gather them.
        """
        if self._gradients is not None and args and any(self._is_managed(tensor) for tensor in args[0]):
            self._may_be_written = True
            if self._accumulation is not None:
                self._accumulation.expect_writes()
        for module in self._sharded if create_graph else ():
            module.set_reshard_after_backward(False)
        try:
            result = interception.run_backward(outputs, grads, retain_graph, create_graph, *args, **kwargs)
        finally:
            for module in self._sharded if create_graph else ():
                module.set_reshard_after_backward(True)
            for unit in self._units:
                unit.show_shards()
        if self._gradients is not None and args and not create_graph:
            result = self._average_by_hand(args[0], result)
        return result

    def _average_by_hand(self, inputs: Any, result: Any) -> Any:
        """What ``torch.autograd.grad`` gave for tensors that no optimizer updates: nothing tells when they are used."""
        assert self._gradients is not None
        by_hand = self._gradients.by_hand
        given = {id(p): g for p, g in zip(inputs, result, strict=True) if id(p) in by_hand}
        if not given:
            return result
        new = self._gradients.average_given(given, self._point(Why.AUTOGRAD_GRAD))
        self._was_averaged = True
        return tuple(new.get(id(p), g) for p, g in zip(inputs, result, strict=True))

    def _is_managed(self, tensor: Any) -> bool:
        """Whether a gradient by `tensor` may be one of a parameter: torch.func differentiates by stand-ins of them."""
        if id(tensor) in self._parameters:
            return True
        return isinstance(tensor, Tensor) and bool(torch._C._functorch.is_gradtrackingtensor(tensor))

    def check_managed(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that was not found after ``configure``, where it trains a known module or goes on and on.

        One that lives for a single step (to invert a latent, say) is the trainer's own affair.
        """
        if id(optimizer) in self._managed or self._in_step:  # or it is wrapped by a managed one
            return
        if self._gradients is not None or self._scaler is not None:
            first_used = self._strangers.setdefault(optimizer, self._steps)
            if first_used != self._steps:
                raise ContractError(
                    f"`train_step` updates by an optimizer ({type(optimizer).__name__}) that is neither in the state "
                    "nor on the trainer, so that ranks would drift apart and overflows of fp16 would not be seen. "
                    "Build every module and optimizer in `configure`, and keep it in the state or on the trainer."
                )
        for group in optimizer.param_groups:
            if any(id(p) in self._parameters for p in group["params"]):
                raise ContractError(
                    f"`train_step` updates a module by a {type(optimizer).__name__} that was not there after "
                    "`configure`, so the strategy does not know it. Build every optimizer in `configure`, and keep it "
                    "in the state or on the trainer."
                )

    def _give_up_gathered(self) -> None:
        """Sharded weights are about to change: what is gathered of them is stale then."""
        shard_writes.settle_all()
        for unit in self._units:
            unit.give_up()

    def _zero_grad(self, optimizer: Optimizer, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if interception.is_active(self) and self._hooks.before_zero_grad is not None:
            self._hooks.before_zero_grad(optimizer)
        return inner(*args, **kwargs)

    def _step(self, optimizer: Optimizer, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._in_step or self._is_closed:
            return inner(*args, **kwargs)
        if not interception.is_active(self):
            self._check_outside(optimizer)
            return inner(*args, **kwargs)
        if self.in_backward and self._gradients is not None:
            raise ContractError(
                f"{type(optimizer).__name__}.step() is called inside backward, before the gradients of the ranks are "
                "averaged. Call it after backward, or use one device."
            )
        if args:
            kwargs["closure"] = args[0]
        closure = kwargs.pop("closure", None)
        if closure is None and self._gradients is not None:
            self._before_update(optimizer)
        if self._scaler is not None:
            return self._scaled_step(optimizer, inner, closure, kwargs)
        if closure is not None:
            return self._inside(
                optimizer, inner, closure=functools.partial(self._closure, optimizer, closure), **kwargs
            )
        if self._hooks.before_optimizer_step is not None:
            self._hooks.before_optimizer_step(optimizer)
        return self._inside(optimizer, inner, **kwargs)

    def _check_outside(self, optimizer: Optimizer) -> None:
        """Refuse an update that no other rank would hear of."""
        if self._gradients is None:
            return
        self._refusal = ContractError(
            f"{type(optimizer).__name__}.step() is called outside of `train_step` or in another thread, where the "
            "gradients of the ranks are not averaged. Call backward and step in `train_step`, in its own thread, or "
            "use one device."
        )
        raise self._refusal

    def _before_update(self, optimizer: Optimizer) -> None:
        """Average what backward calls left, and gradients that a trainer wrote itself, from torch.autograd.grad say."""
        if self._gradients is None:
            return
        if self._accumulation is not None:
            self._accumulation.before_update(_first_parameter(optimizer))
        if self._may_be_written or id(optimizer) not in self._averaged:
            self._settle(0, Why.UPDATE, _first_parameter(optimizer))
        self._may_be_written = False
        self._averaged.discard(id(optimizer))
        if id(optimizer) in self._gradients.shared:
            self._updates += 1
            self._last_update = users_line()

    def _scaled_step(
        self, optimizer: Optimizer, inner: Callable[..., Any], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
    ) -> Any:
        assert self._scaler is not None
        if self.in_backward:  # called by a hook of a parameter whose gradient is there
            self._scaler.check(optimizer)
        loss = None
        if closure is not None and not type(optimizer).__module__.startswith("torch.optim"):
            raise ContractError(
                f"16-mixed cannot host {type(optimizer).__name__}.step(closure): an optimizer of your own may evaluate "
                "the closure at other weights, where an overflow could not be skipped. Call backward and its steps in "
                "`train_step` yourself, or use bf16-mixed or 32-true."
            )
        if closure is not None:
            with torch.enable_grad():
                loss = self._closure(optimizer, closure)
        elif self._hooks.before_optimizer_step is not None:
            self._hooks.before_optimizer_step(optimizer)
        # The scaler calls optimizer.step, which leads back to `_step` and from there to `inner`.
        inner = functools.partial(inner, **kwargs)
        result = self._inside(optimizer, self._scaler.step_checked, optimizer, inner, adapt=not self.in_backward)
        return loss if closure is not None else result

    def _closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """One evaluation of a closure: in the step's precision, and with one loss for all ranks.

        A line search decides by the loss; ranks that decided differently would part ways.
        """
        was, self._in_step = self._in_step, False
        if self._accumulation is not None:
            self._accumulation.resume()
        try:
            with self._precision.context() if self._precision.context is not None else nullcontext():
                loss = closure()
        finally:
            self._in_step = was
        self._before_update(optimizer)
        if self._gradients is not None:
            loss = average_scalar(loss, self._device, self._gradients.group)
        if self._hooks.before_optimizer_step is not None:
            self._hooks.before_optimizer_step(optimizer)
        return loss

    def _update_of_shards(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """All ranks are about to update by `optimizer`, after which what is gathered is stale."""
        self._agreed(f"update by {type(optimizer).__name__}")
        self._give_up_gathered()
        if optimizer not in self._with_shards:
            return nullcontext()
        return without_collectives(f"{type(optimizer).__name__}.step()", self._agreed)

    def _inside(self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        of_shards = self._update_of_shards(optimizer) if self._units else None
        self._in_step = True
        try:
            with self._outside_autocast:
                if of_shards is None:
                    return step(*args, **kwargs)
                with of_shards:
                    return step(*args, **kwargs)
        except Exception as error:
            explained = about_sharded_update(error, optimizer)
            if explained is None:
                raise
            raise explained from error
        finally:
            self._in_step = False
            if self._accumulation is not None:
                self._accumulation.resume()


def _first_parameter(optimizer: Optimizer) -> Tensor | str:
    return next((p for group in optimizer.param_groups for p in group["params"]), "nothing")


def _data_parallel_group(trainer: pl.Trainer) -> dist.ProcessGroup | None:
    if isinstance(trainer.strategy, ModelParallelStrategy):
        return trainer.strategy.device_mesh["data_parallel"].get_group()
    return None
