"""Routes a trainer's own ``loss.backward()`` and ``optimizer.step()`` through strategy, precision and hooks.

While a ``train_step`` runs, and in its thread alone::

    backward            on_before_backward
                        scale the loss, unseen by hooks    16-mixed
                        autograd, outside of autocast      16-mixed, bf16-mixed
                        average gradients over the ranks   several ranks; they travel while autograd runs, and are
                                                           there when they are read
                        look for overflows                 16-mixed
                        on_after_backward
    optimizer.step      the closure, its loss averaged over the ranks
                        on_before_optimizer_step
                        skip what is not finite            on_nonfinite: skip, Recover
                        skip on overflow, adapt the scale  16-mixed
                        the optimizer's own step
    a collective        average gradients first            several ranks
    end of the step     average what is left, or let it    several ranks; a rank without any says so
                        wait for an update
                        send buffers of rank 0             several ranks; they are there when other code may look

Everywhere else torch is what it was. Where none of this is needed there is no router: fp32 on a device is plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered
from . import autograd_patch as interception, update_errors
from .averaging import Averaging
from .buffer_sync import BufferSync
from .fsdp.errors import about_sharded_update
from .fsdp.layout import with_inner_optimizers
from .fsdp.step import ShardedStep
from .gradient_sync import GradientSync
from .lightning_hooks import StepHooks
from .precision import AutocastOff, StepPrecision, about_types
from .unknown_optimizers import UnknownOptimizers
from .unscaling import Unscaling
from .update_guard import UpdateGuard

__all__ = ["StepRouter"]
_Closure = Callable[[], Any] | None


class StepRouter:
    """A context manager around each ``train_step``; see the module's text for what happens inside.

    Args:
        discovered: What the trainer built; the optimizers in it are the managed ones.
        device: Root device of this rank.
        precision: What the precision plugin asks for.
        hooks: Hooks to call where Lightning would.
        gradients: Averages gradients over the ranks; None on a single rank.
        buffers: Sends all ranks the buffers of rank 0; None on a single rank.
        guard: Leaves out updates; None takes them as they are.
        completed_steps: How many steps the run has behind it, for messages; None counts those of this object.
        is_last_step: Whether the step that runs is the last one, on all ranks.

    Attributes:
        averaging: Averages gradients when they are wanted; None on a single rank.
        buffers: Sends the buffers of rank 0; None where there are none, and on a single rank.
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
        guard: UpdateGuard | None = None,
        completed_steps: Callable[[], int] | None = None,
        is_last_step: Callable[[], bool] = lambda: False,
    ) -> None:
        self._discovered = discovered
        self._device = device
        self._precision = precision
        self._scaler, self._guard, self.buffers = precision.scaler, guard, buffers or None
        self._hooks = hooks or StepHooks()
        self._optimizers = [found.value for found in with_inner_optimizers(discovered)]
        self._managed = {id(optimizer) for optimizer in self._optimizers}
        parameters = {id(p) for m in discovered.modules for p in m.value.parameters()}
        must_know = gradients is not None or precision.scaler is not None or guard is not None
        self._unknown = UnknownOptimizers(parameters, refuse_lasting=must_know)
        self._unscaling = None if precision.scaler is None else Unscaling(precision.scaler, discovered)
        self.hooks_translator = self._unscaling
        self._by_hand = [] if precision.scaler is None else discovered.not_optimized()
        self._has_no_optimizer = not discovered.optimizers and any(True for _ in discovered.updated())
        self._steps = 0
        self._refusal: ContractError | None = None
        self._is_open = self._is_closed = self.in_backward = self._in_step = False
        self._context: AbstractContextManager[Any] | None = None
        # Making either anew in each step would cost more than entering it.
        device_type = precision.autocast_device
        self._autocast = precision.context() if precision.context is not None and device_type is not None else None
        self._outside_autocast = nullcontext() if device_type is None else AutocastOff(device_type)
        sharded = ShardedStep(discovered, self._optimizers, self._factors)
        self._sharded = sharded or None
        self._checked_at_once = sharded.optimizers
        self._checked_when_averaged = [each for each in self._optimizers if each not in sharded.optimizers]
        self.averaging: Averaging | None = None
        if gradients is not None:
            self.averaging = Averaging(
                gradients,
                buffers,
                optimizers=self._managed,
                parameters=parameters,
                at_once=self._hooks.after_backward is not None,
                averaged=self._check_overflow,
                completed_steps=completed_steps or (lambda: self._steps - 1),
                is_last_step=is_last_step,
            )
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
        return self.averaging is not None

    def before_collective(self, name: str) -> None:
        """Average first what other ranks may wait for."""
        if self.averaging is not None:
            self.averaging.before_collective(name)

    def open(self) -> None:
        """Have torch's entries replaced until `close`, rather than in each step."""
        interception.hold(self)
        if self._sharded is not None:
            group = None if self.averaging is None else self.averaging.group
            self._sharded.open(several_ranks=self.averaging is not None, group=group, device=self._device)
        self._is_open = True

    def close(self) -> None:
        """Training is over: from now on torch and the optimizers are used as they are."""
        self._is_closed = True
        if self.averaging is not None:
            self.averaging.close()
        if self._is_open:
            self._is_open = False
            interception.release(self)
            if self._sharded is not None:
                self._sharded.close()

    def ended(self) -> None:
        """Training ended as planned, on all ranks."""
        if self.averaging is not None:
            self.averaging.ended()

    def __enter__(self) -> StepRouter:
        self._steps += 1
        if self._sharded is not None:
            self._sharded.begin(self._steps)
        if self._precision.context is not None:
            self._context = self._autocast or self._precision.context()
            self._context.__enter__()
        if not self._is_open:
            interception.hold(self)
        if self.averaging is not None:
            self.averaging.begin()
        if self._guard is not None:
            self._guard.begin()
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
        if refusal is not None and exc is not refusal:  # raised in a thread, where the loop does not see it
            raise refusal
        if self._sharded is not None:
            self._sharded.end(failed=exc_type is not None)
        if self._guard is not None and exc_type is None:  # before other ranks get the buffers of rank 0
            self._guard.end(scales=self.scales)
        if self.averaging is not None:
            if exc_type is None:
                self.averaging.end()
            else:
                self.averaging.abandon()
        if exc is None:
            return
        explained = (self._sharded.explained(exc) if self._sharded else None) or about_types(exc, self._precision)
        if explained is not None:
            raise explained from exc

    def backward(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        """Run one backward call of the trainer; `args` are those of torch's engine."""
        hooks = self._hooks
        if self._scaler is not None and self._has_no_optimizer:
            raise update_errors.without_optimizer()
        if self.averaging is not None:
            self.averaging.before_backward()
        if self._sharded is not None:
            self._sharded.before_backward(create_graph=args[1])
        self.in_backward = True
        try:
            if hooks.before_backward is not None:
                hooks.before_backward(outputs[0])
            if self._guard is not None:
                grads = self._guard.root_gradients(outputs, grads)
            if self._unscaling is not None:
                grads = self._unscaling.begin(outputs, grads, args[2])
            if self._sharded is not None:
                args = (*args[:2], self._sharded.inputs_of(args[2]), *args[3:])
            with self._outside_autocast:
                interception.run_backward(outputs, grads, *args, **kwargs)
        except BaseException:
            if self._sharded is not None:
                self._sharded.abandon_backward()
            raise
        finally:
            self.in_backward = False
            if self.averaging is not None:
                self.averaging.leave_backward()
            if self._unscaling is not None:
                self._unscaling.end()
        if self._sharded is not None:
            self._sharded.after_backward()
        if self._scaler is not None:
            # Gradients of sharded parameters are those of all ranks by now; clipping would hide an overflow in them.
            self._check(self._checked_at_once, sharded=True)
            self._scaler.adapt()
        if self.averaging is not None:
            self.averaging.after_backward()
        elif self._scaler is not None:
            self._check_overflow()
        if hooks.after_backward is not None:
            hooks.after_backward()
        if self._sharded is not None:
            self._sharded.call_hooks()

    def _check_overflow(self) -> None:
        """Look at the gradients that were averaged, which are those of all ranks now."""
        self._check(self._checked_when_averaged, sharded=False)

    def _check(self, optimizers: Sequence[Optimizer], *, sharded: bool) -> None:
        if self._scaler is not None:
            self._scaler.check_by_hand(p for p in self._by_hand if isinstance(p, DTensor) == sharded)
            for optimizer in optimizers:
                self._scaler.check(optimizer)

    def _factors(self) -> tuple[Tensor, Tensor] | None:
        """What gradients are scaled by in the running backward call, and the inverse; None where they are not."""
        inverse = None if self._unscaling is None else self._unscaling.inverse_scale
        return None if inverse is None else (inverse.reciprocal(), inverse)

    def grad(self, outputs: Any, grads: Any, retain_graph: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
        """Run one call of ``torch.autograd.grad``, which accumulates nothing."""
        if self.averaging is not None and args:
            self.averaging.before_grad(args[0])
        run_backward = interception.run_backward
        if self._sharded is not None:
            run_backward = functools.partial(self._sharded.grad, run_backward)
        result = run_backward(outputs, grads, retain_graph, create_graph, *args, **kwargs)
        if self.averaging is not None and args and not create_graph:
            result = self.averaging.after_grad(args[0], result, in_update=self._in_step)
        return result

    def check_managed(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that was not found after ``configure``, as `UnknownOptimizers` does.

        A managed one that is stepped by a method that was taken before it was routed (kept in ``configure``, or
        compiled there) gets the gradients of all ranks, but no update of it could be left out.
        """
        if self._in_step:  # a managed one, or one that it wraps
            return
        if id(optimizer) not in self._managed:
            self._unknown.check(optimizer, self._steps)
            return
        if self._scaler is not None or self._guard is not None:
            raise update_errors.taken_before(optimizer, self._guard.name if self._guard else "16-mixed")
        if self.averaging is not None and not self.in_backward:
            self.averaging.before_update(optimizer)
        if self._hooks.before_optimizer_step is not None:
            self._hooks.before_optimizer_step(optimizer)

    def _zero_grad(self, optimizer: Optimizer, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if interception.is_active(self) and self._hooks.before_zero_grad is not None:
            self._hooks.before_zero_grad(optimizer)
        return inner(*args, **kwargs)

    def _step(self, optimizer: Optimizer, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._in_step or self._is_closed:
            return inner(*args, **kwargs)
        if not interception.is_active(self):
            if self.averaging is not None:  # no other rank would hear of this update
                self._refusal = update_errors.outside_of_step(optimizer)
                raise self._refusal
            return inner(*args, **kwargs)
        if args:
            kwargs["closure"] = args[0]
        closure = kwargs.pop("closure", None)
        if self.in_backward and self.averaging is not None:
            self.averaging.before_update_inside_of_backward(optimizer)
        elif closure is None and self.averaging is not None:
            self.averaging.before_update(optimizer)
        if self._scaler is not None:
            return self._scaled_step(optimizer, inner, closure, kwargs)
        if self._guard is not None:
            loss = self._loss_before_update(optimizer, closure, self._guard.name, "use on_nonfinite: stop")
            result = self._guard.update(optimizer, functools.partial(self._inside, optimizer, inner, **kwargs))
            return loss if closure is not None else result
        if closure is not None:
            return self._inside(
                optimizer, inner, closure=functools.partial(self._closure, optimizer, closure), **kwargs
            )
        if self._hooks.before_optimizer_step is not None:
            self._hooks.before_optimizer_step(optimizer)
        return self._inside(optimizer, inner, **kwargs)

    def _scaled_step(
        self, optimizer: Optimizer, inner: Callable[..., Any], closure: _Closure, kwargs: dict[str, Any]
    ) -> Any:
        assert self._scaler is not None
        if self.in_backward:  # called by a hook of a parameter whose gradient is there
            self._scaler.check(optimizer)
        loss = self._loss_before_update(optimizer, closure, "16-mixed", "use bf16-mixed or 32-true")
        # The scaler calls optimizer.step, which comes back to `_step` and from there to `inner`.
        inner = functools.partial(inner, **kwargs)
        step = self._scaler.step_checked
        step = step if self._guard is None else self._guard.at_rate(optimizer, step)
        result = self._inside(optimizer, step, optimizer, inner, adapt=not self.in_backward)
        return loss if closure is not None else result

    def _loss_before_update(self, optimizer: Optimizer, closure: _Closure, what: str, instead: str) -> Any:
        """Evaluate a closure before an update that may be left out; what it returned."""
        if closure is None:
            if self._hooks.before_optimizer_step is not None:
                self._hooks.before_optimizer_step(optimizer)
            return None
        if not type(optimizer).__module__.startswith("torch.optim"):
            raise update_errors.own_closure(optimizer, what, instead)
        with torch.enable_grad():
            return self._closure(optimizer, closure)

    def _closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """One evaluation of a closure: in the step's precision, and with one loss for all ranks."""
        was, self._in_step = self._in_step, False
        if self.averaging is not None:
            self.averaging.resume()
        try:
            with self._precision.context() if self._precision.context is not None else nullcontext():
                loss = closure()
        finally:
            self._in_step = was
        if self.averaging is not None:
            self.averaging.before_update(optimizer)
            loss = self.averaging.of_loss(loss, self._device)
        if self._hooks.before_optimizer_step is not None:
            self._hooks.before_optimizer_step(optimizer)
        return loss

    def _inside(self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sharded = None if self._sharded is None else self._sharded.updating(optimizer)
        self._in_step = True
        try:
            with self._outside_autocast:
                if sharded is None:
                    return step(*args, **kwargs)
                with sharded:
                    return step(*args, **kwargs)
        except Exception as error:
            explained = about_sharded_update(error, optimizer)
            if explained is None:
                raise
            raise explained from error
        finally:
            self._in_step = False
            if self.averaging is not None:
                self.averaging.resume()
