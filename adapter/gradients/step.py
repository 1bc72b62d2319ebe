"""Routes a trainer's own ``loss.backward()`` and ``optimizer.step()`` through strategy, precision and hooks.

A step is an ordered list of parts. While a ``train_step`` runs, and only in its thread, each call goes through the
parts that a run needs, in this order::

                backward                    after it                optimizer.step          end of the step

    averaging   send gradients while        average them            average new gradients,  average new gradients, or
                autograd runs                                       and the closure's loss  compare only the ranks
    sharding    compare the ranks           reduce new gradients    compare the ranks       compare the ranks
    fp16        scale the loss; unscale     check for overflows     skip on overflow,
                before accumulation                                 adapt the scale
    hooks       on_before_backward          on_after_backward       on_before_optimizer_step
    guard       make gradients nan if                               skip updates that are   restore the buffers of a
                the loss is not finite                              not finite              skipped step
    buffers                                                                                 send the buffers of rank 0

Backward and update run outside of autocast, a closure inside of it. Outside of a step, torch is unchanged. If a run
needs no part, it has no router: fp32 on one device is plain torch.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ...callbacks.hook.events import callbacks_of
from ...callbacks.lightning_internals import ddp_settings
from ...callbacks.optimizer_state import parameters_of
from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered, check_devices
from ..discovery.rank_local import EVERYTHING_SHARED, RankLocal
from ..discovery.wrapped_optimizers import with_inner_optimizers
from . import torch_hooks
from .ddp.averaging import Averaging
from .ddp.buckets import BUCKET_BYTES, wire_type
from .ddp.buffers import BufferSync, start_equal
from .fp16 import Fp16
from .fsdp.step import ShardedStep, fsdp_modules
from .precision import StepPrecision, cast_inputs, explain_dtype_error, step_precision
from .refused import explain_sharded_update_error, refused_on_ranks, refused_update
from .step_part import BackwardCall, StepPart
from .torch_internals import outside_of_graphs, warn_of_untested_torch
from .update_guard import UpdateGuard, update_guard


def step_router(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    discovered: Discovered,
    rank_local: RankLocal = EVERYTHING_SHARED,
    before: StepRouter | None = None,
) -> StepRouter | None:
    """Return the router that this run needs, or None if plain torch does the same.

    Call this once, when the modules are on their device and before a checkpoint is restored. On several ranks it also
    gives every rank the weights of rank 0. `before` is the router of an earlier training of the same module, if any;
    the new router takes over its counts of backward calls.

    Raises:
        ContractError: The ranks built different things, a tensor is not on this rank's device, or the precision cannot
            host the trainer.
    """
    warn_of_untested_torch()
    check_devices(discovered, trainer.strategy.root_device, world_size=trainer.world_size)
    precision = step_precision(trainer.precision_plugin, discovered)
    hooks = step_hooks(trainer, module)
    averaging, buffers, group, local = None, None, None, frozenset[int]()
    if dist.is_available() and dist.is_initialized() and trainer.world_size > 1:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            group = trainer.strategy.device_mesh["data_parallel"].get_group()
        start_equal(discovered, group, rank_local)
        ddp = ddp_settings(trainer.strategy).ddp_arguments if isinstance(trainer.strategy, DDPStrategy) else {}
        megabytes = ddp.get("bucket_cap_mb")
        averaging = Averaging(
            discovered,
            trainer.strategy.root_device,
            group,
            rank_local,
            bucket_bytes=BUCKET_BYTES if megabytes is None else int(megabytes * 2**20),  # DDP means MiB
            wire=wire_type(trainer.strategy),
            is_last_step=lambda: trainer.global_step + 1 == trainer.max_steps,
        )
        buffers = BufferSync(discovered, group, rank_local)
        local = frozenset(rank_local.ids(discovered))
    if precision.cast_inputs_to is not None:
        cast_inputs([found.value for found in discovered.modules], precision.cast_inputs_to)
    shared = () if averaging is None else averaging.shared
    guard = update_guard(
        trainer, discovered, group=group, shared=shared, rank_local=local, scales=precision.scaler is not None
    )
    needs_router = bool(precision.context or averaging or guard or hooks or fsdp_modules(discovered))
    if not needs_router:
        return None
    router = StepRouter(
        discovered,
        trainer.strategy.root_device,
        precision=precision,
        hooks=hooks,
        averaging=averaging,
        buffers=buffers,
        guard=guard,
        completed_steps=lambda: trainer.global_step,
    )
    if averaging is not None and before is not None and before.averaging is not None:
        averaging.load_state_dict(before.averaging.state_dict())
    return router


class StepRouter:
    """A context manager around each ``train_step``; the docstring of the module describes the parts inside.

    Args:
        discovered: The trainer's objects; its optimizers are the managed ones.
        device: Root device of this rank.
        precision: Actions of the precision plugin.
        hooks: Hooks to call that Lightning would call in a step.
        averaging: Averages gradients over the ranks; None on a single rank.
        buffers: Sends all ranks the buffers of rank 0; None on a single rank.
        guard: Skips updates; None makes all of them.
        completed_steps: Returns the number of completed steps of the run; it numbers the steps that ranks compare and
            messages name. None counts the steps of this object.

    Attributes:
        parts: The parts that each call of the trainer goes through, in order.
        averaging: The argument.
        in_backward: Whether one of the trainer's backward calls is running.
    """

    def __init__(
        self,
        discovered: Discovered,
        device: torch.device,
        *,
        precision: StepPrecision,
        hooks: StepHooks | None = None,
        averaging: Averaging | None = None,
        buffers: BufferSync | None = None,
        guard: UpdateGuard | None = None,
        completed_steps: Callable[[], int] | None = None,
    ) -> None:
        self._precision = precision
        hooks = hooks or StepHooks()
        optimizers = [found.value for found in with_inner_optimizers(discovered)]
        self._managed = {id(optimizer) for optimizer in optimizers}
        self._parameters = {id(p) for m in discovered.modules for p in m.value.parameters()}
        self._refuses_lasting = averaging is not None or precision.scaler is not None or guard is not None
        self._first_used: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """The step that used an unmanaged optimizer first, by optimizer."""
        self._steps = 0
        self._completed_steps = completed_steps or (lambda: self._steps - 1)
        self._refusal: ContractError | None = None
        self._is_open = self._is_closed = self.in_backward = self._in_update = False
        self._context: AbstractContextManager[Any] | None = None
        # Creating the context in each step would cost more than entering it.
        device_type = precision.autocast_device
        self._autocast = precision.context() if precision.context is not None and device_type is not None else None

        several = averaging is not None
        scaler = precision.scaler
        fp16 = None if scaler is None else Fp16(scaler, discovered, optimizers, averages=several)
        sharded = ShardedStep(
            discovered,
            optimizers,
            several_ranks=several,
            group=None if averaging is None else averaging.group,
            device=device,
        )
        if sharded:  # a compiled function that calls backward would otherwise include the work on shards in its graph
            self.backward = outside_of_graphs(self.backward)  # type: ignore[method-assign]
        self.averaging = averaging
        if averaging is not None:
            averaging.after_each = "on_after_backward" in hooks
            averaging.after_average += [] if fp16 is None else [fp16.check_averaged]
        self.parts: list[StepPart] = [each for each in (averaging, sharded, fp16, hooks, guard, buffers) if each]
        self._skipper = next((part.may_skip for part in reversed(self.parts) if part.may_skip), "")
        for optimizer in optimizers:
            torch_hooks.wrap(optimizer, "step", self._step)
            if averaging is not None or "on_before_zero_grad" in hooks:
                torch_hooks.wrap(optimizer, "zero_grad", functools.partial(self._zero_grad, hooks))

    @property
    def overflow_steps(self) -> int | None:
        """Updates skipped because gradients overflowed in fp16; None if the loss is not scaled."""
        return None if self._precision.scaler is None else self._precision.scaler.overflow_steps

    def open(self) -> None:
        """Open the parts, and replace torch's entries until `close`, since doing so in each step would cost time."""
        torch_hooks.hold(self)
        self._is_open = True
        for part in self.parts:
            part.open()

    def close(self) -> None:
        """End the training; from now on calls reach torch and the optimizers directly."""
        self._is_closed = True
        if self._is_open:
            self._is_open = False
            torch_hooks.release(self)
        _call_each(part.close for part in self.parts)

    def before_save(self) -> None:
        """Refuse to save a checkpoint if ranks have diverged; waits for pending comparisons on the device. Collective.

        Raises:
            ContractError: Ranks diverged in an earlier step.
        """
        for part in self.parts if self._is_open else ():
            part.before_save()

    def release_group(self) -> None:
        """Release the process group of the averaging. Collective; call it after a training that ended as planned."""
        if self.averaging is not None:
            self.averaging.release_group()

    def __enter__(self) -> StepRouter:
        self._steps += 1
        if not self._is_open:
            torch_hooks.hold(self)
        try:
            if self._precision.context is not None:
                context = self._autocast or self._precision.context()
                context.__enter__()
                self._context = context
            step = self._completed_steps() + 1
            for part in self.parts:
                part.begin(step)
            torch_hooks.begin(self)
        except BaseException as error:  # after a failed `__enter__` Python does not call `__exit__`
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        replaced = torch_hooks.end()
        if not self._is_open:
            torch_hooks.release(self)
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(exc_type, exc, traceback)
        refusal, self._refusal = self._refusal, None
        if refusal is exc:
            refusal = None  # `train_step` has raised it; a refusal that was raised in another thread is raised below
        if exc is None and refusal is None and replaced is None:
            try:
                for part in self.parts:
                    part.end()
            except BaseException:
                _call_each(part.abandon for part in self.parts)
                raise
            return
        _call_each(part.abandon for part in self.parts)
        if refusal is not None:
            raise refusal
        if exc is None:
            assert replaced is not None
            raise replaced
        if replaced is not None:
            exc.add_note(str(replaced))
        explained = next(filter(None, (part.explain(exc) for part in self.parts)), None)
        explained = explained or explain_dtype_error(exc, self._precision)
        if explained is not None:
            raise explained from exc

    def backward(
        self,
        outputs: Any,
        grads: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Any = (),
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run one backward call of the trainer; takes what torch's engine takes."""
        call = BackwardCall(outputs, grads, create_graph, inputs)
        failed = True
        self.in_backward = True
        try:
            for part in self.parts:
                part.before_backward(call)
            self._outside_autocast(
                torch_hooks.run_backward,
                call.outputs,
                call.gradients,
                retain_graph,
                create_graph,
                call.inputs,
                *args,
                **kwargs,
            )
            failed = False
        finally:
            self.in_backward = False
            for part in self.parts:
                part.leave_backward(failed=failed)
        for part in self.parts:
            part.after_backward()

    def grad(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one call of ``torch.autograd.grad``; it accumulates nothing."""
        run: Callable[..., Any] = torch_hooks.run_backward
        for part in reversed(self.parts):
            run = functools.partial(part.grad, run)
        return run(outputs, grads, *args, **kwargs)

    def within_backward(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call of torch's engine that one of the trainer's backward calls makes."""
        run: Callable[..., Any] = torch_hooks.run_backward
        for part in reversed(self.parts):
            run = functools.partial(part.within_backward, run)
        return run(outputs, grads, *args, **kwargs)

    def check_managed(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that did not exist after ``configure``, unless it lives for a single step.

        It also handles managed optimizers whose `step` method ``configure`` kept or compiled before `StepRouter`
        replaced it. Such an update gets averaged gradients, but it cannot be skipped.

        Raises:
            ContractError: The optimizer is refused.
        """
        if self._in_update:  # this is the update of a managed optimizer, or of the optimizer that it wraps
            return
        if id(optimizer) not in self._managed:
            self._check_unknown(optimizer)
            for part in self.parts:
                part.before_foreign_update(optimizer)
            return
        self._refuse_in_backward(optimizer)
        if self._skipper:
            raise refused_update("kept", optimizer, setting=self._skipper)
        for part in self.parts:
            part.before_update(optimizer)

    def _check_unknown(self, optimizer: Optimizer) -> None:
        """Refuse an unmanaged optimizer that trains a known module, or that lives for several steps.

        An optimizer that lives for a single step is allowed, for example to invert a latent. One that lives longer is
        allowed if gradients are plain: not averaged, not scaled and not guarded.
        """
        if self._refuses_lasting and self._first_used.setdefault(optimizer, self._steps) != self._steps:
            raise refused_update("lasting", optimizer)
        if any(id(p) in self._parameters for p in parameters_of(optimizer)):
            raise refused_update("late", optimizer)

    def _zero_grad(
        self, hooks: StepHooks, optimizer: Optimizer, inner: Callable[..., Any], /, *args: Any, **kw: Any
    ) -> Any:
        """Replace ``optimizer.zero_grad`` of a managed optimizer."""
        if not torch_hooks.is_active(self):
            return inner(*args, **kw)
        hooks.call("on_before_zero_grad", optimizer)
        # Only torch's `zero_grad` is known to write gradients and nothing else.
        is_torchs = getattr(inner, "__func__", None) is Optimizer.zero_grad
        with self.averaging.zeroing() if self.averaging is not None and is_torchs else nullcontext():
            return inner(*args, **kw)

    def _step(self, optimizer: Optimizer, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Replace ``optimizer.step``: make the update with the same arguments, except for a closure.

        If a part may skip the update, the closure is evaluated before it and replaced by None; otherwise it is wrapped.
        """
        if self._in_update or self._is_closed:
            return inner(*args, **kwargs)
        # This comes before `is_active`, because a tensor's hook may call `step`: on a device, such a hook runs in a
        # thread of torch's engine, for which `is_active` is False.
        self._refuse_in_backward(optimizer)
        if not torch_hooks.is_active(self):
            if self.averaging is not None:  # the other ranks would not take part in this update
                self._refusal = refused_update("elsewhere", optimizer)
                raise self._refusal
            return inner(*args, **kwargs)
        name = None if args else next((name for name, value in kwargs.items() if _is_closure(inner, name, value)), None)
        closure = args[0] if args and _is_closure(inner, "", args[0]) else kwargs.get(name or "")
        try:
            if closure is None:
                return self._update(optimizer, inner, *args, **kwargs) if self._may_update(optimizer) else None
            evaluate, loss = None, None
            if self._skipper:
                loss = self._loss_before_update(optimizer, closure)
                if not self._may_update(optimizer):
                    return loss
            else:  # no part skips; after each evaluation, `before_update` of the parts averages its gradients
                evaluate = functools.partial(self._evaluate, optimizer, closure)
            args, kwargs = ((evaluate, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: evaluate})
            result = self._update(optimizer, inner, *args, **kwargs)
            return result if evaluate is not None else loss
        finally:
            for part in self.parts:
                part.after_update(optimizer)

    def _refuse_in_backward(self, optimizer: Optimizer) -> None:
        """Refuse an update in the middle of a backward call, when gradients are neither averaged nor checked."""
        if not self.in_backward:
            return
        if self.averaging is not None:
            raise refused_on_ranks("update in backward", type(optimizer).__name__)
        if self._skipper:
            raise refused_update("in backward", optimizer, setting=self._skipper)

    def _loss_before_update(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure before an update that may be skipped; return its loss."""
        if not type(optimizer).__module__.startswith("torch.optim"):
            instead = "use bf16-mixed or 32-true" if self._precision.scaler is not None else "use on_nonfinite: stop"
            raise refused_update("closure", optimizer, setting=self._skipper, instead=instead)
        with torch.enable_grad(), self._in_step_precision():
            loss = closure()
        for part in self.parts:
            loss = part.map_loss(loss)
        return loss

    def _evaluate(self, optimizer: Optimizer, closure: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a closure during an update: in the step's precision, with one loss for all ranks."""
        self._in_update = False
        for part in self.parts:
            part.after_update(optimizer)
        try:
            with self._in_step_precision():
                loss = closure(*args, **kwargs)
        finally:
            self._in_update = True
        self._may_update(optimizer)
        for part in self.parts:
            loss = part.map_loss(loss)
        return loss

    def _outside_autocast(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        device = self._precision.autocast_device
        if device is None:
            return call(*args, **kwargs)
        was_enabled = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, False)  # a context of ``torch.autocast`` takes a dozen calls
        try:
            return call(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, was_enabled)

    def _in_step_precision(self) -> AbstractContextManager[None]:
        return self._precision.context() if self._precision.context is not None else nullcontext()

    def _may_update(self, optimizer: Optimizer) -> bool:
        """Whether all parts let `optimizer` update; calls every part, even after one has refused."""
        answers = [part.before_update(optimizer) for part in self.parts]
        return all(answers)

    def _update(self, optimizer: Optimizer, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's own ``step``; if it fails on shards, explain the error."""
        self._in_update = True
        try:
            return self._outside_autocast(step, *args, **kwargs)
        except Exception as error:
            explained = explain_sharded_update_error(error, optimizer)
            if explained is None:
                raise
            raise explained from error
        finally:
            self._in_update = False


class StepHooks(StepPart):
    """Calls the hooks that Lightning has within a step, if callbacks or the module override them.

    Hooks around a backward call see the loss and the gradients unscaled, and gradients averaged over the ranks.

    Args:
        hooks: The functions to call for each hook, in order, by the hook's name; empty if nothing overrides it.
    """

    def __init__(self, **hooks: Sequence[Callable[..., None]]) -> None:
        self._hooks = {name: called for name, called in hooks.items() if called}

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def __contains__(self, name: str) -> bool:
        """Whether the hook `name` is overridden."""
        return name in self._hooks

    def call(self, name: str, *args: Any) -> None:
        """Call the hook `name`, if it is overridden."""
        for hook in self._hooks.get(name, ()):
            hook(*args)

    @override
    def before_backward(self, call: BackwardCall) -> None:
        self.call("on_before_backward", call.outputs[0])

    @override
    def after_backward(self) -> None:
        self.call("on_after_backward")

    @override
    def before_update(self, optimizer: Optimizer) -> bool:
        self.call("on_before_optimizer_step", optimizer)
        return True


def step_hooks(trainer: pl.Trainer, module: pl.LightningModule) -> StepHooks:
    """Return the hooks within a step that callbacks or `module` override; callbacks come first, as in Lightning."""
    names = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
    hooks: dict[str, list[Callable[..., None]]] = {}
    for name in names:
        callbacks = [callback for callback in callbacks_of(trainer) if _overrides(callback, name, pl.Callback)]
        hooks[name] = [functools.partial(getattr(callback, name), trainer, module) for callback in callbacks]
        hooks[name] += [getattr(module, name)] if _overrides(module, name, pl.LightningModule) else []
    return StepHooks(**hooks)


def _is_closure(step: Callable[..., Any], name: str, argument: object) -> bool:
    """Whether an argument of `step` is its closure: its first parameter or ``closure``, if callable and not a module.

    Args:
        step: The method of the optimizer.
        name: Keyword of the argument; empty if it is positional.
        argument: Its value.
    """
    if not callable(argument) or isinstance(argument, nn.Module):
        return False
    return name in ("", "closure") or name == next(iter(inspect.signature(step).parameters), "")


def _call_each(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls in order, also those after a call that raises."""
    with ExitStack() as stack:
        for call in reversed([*calls]):
            stack.callback(call)


def _overrides(owner: object, name: str, base: type) -> bool:
    return getattr(getattr(owner, name), "__code__", None) is not getattr(base, name).__code__
