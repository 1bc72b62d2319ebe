"""A plain training loop for a trainer class, as without genlight: for ``genlight compare`` and ``doctor --step``."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from ...callbacks.hook.events import share_run_state
from ...callbacks.trainer_hooks import TrainerState
from ..contract.exceptions import ContractError, InputError
from ..contract.types import RunState, StepContext, TrainerPlugin
from ..discovery.discover import discover
from ..job.config import RunConfig
from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path, optional_hook, own_hooks
from ..module.rollout import RolloutBatches
from ..module.step_metrics import named_scalars, validate_result
from ..plumbing.devices import accelerator, isolated_random_numbers
from ..plumbing.redaction import safe_str
from ..plumbing.text import list_first
from .batches import NO_DATA, check_columns, describe_batch, job_batches
from .finding import Finding, Level
from .isolation import describe_error, quiet
from .snapshot import KINDS, Snapshot, live_weights, snapshot


class PlainLoop:
    """A trainer class in a plain loop: sets it up, configures it, trains steps and calls its own hooks (`own_hooks`).

    A `TrainerState` and `RolloutBatches` get this object in place of the Lightning trainer, the module and its
    `HostedTrainer`.

    Args:
        plugin: A trainer that has not been set up.
        ctx: Passed to the hooks of the class.
    """

    global_step = 0

    def __init__(self, plugin: TrainerPlugin, ctx: StepContext) -> None:
        this = weakref.proxy(self)  # a class may keep its context, and discovery would find this loop there
        ctx = replace(ctx, count_steps=lambda: this.global_step)
        self.plugin, self.ctx = plugin, ctx
        plugin.setup(ctx)
        self.contract_state = plugin.configure(ctx)
        self.discovered = discover(self.contract_state, plugin)
        self.optimizers = [found.value for found in self.discovered.optimizers]
        stand_in: Any = self
        self.trainer = self.lightning_module = self.hosted_trainer = stand_in
        self.callbacks = [self]
        self._hooks = own_hooks(plugin, self.contract_state, ctx)
        self.step_result: Any = None
        if isinstance(ctx.run_state, RunState):
            share_run_state(stand_in, ctx.run_state)
        self._trainer_state = TrainerState(stand_in, stand_in)

    def call_hooks(self, event: str) -> None:
        """Call the method `event` of the class's own hooks."""
        for hook in self._hooks:
            getattr(hook, event, lambda _: None)(self._trainer_state)

    def on_rollout_start(self, *_: Any) -> None:
        """Pass the event on to the class's own hooks; `RolloutBatches` fires it on `callbacks`."""
        self.call_hooks("on_rollout_start")

    def on_rollout_end(self, *_: Any) -> None:
        """Pass the event on, as `on_rollout_start` does."""
        self.call_hooks("on_rollout_end")

    def begin(self, batches: Iterable[Any] | None) -> Iterator[Any]:
        """Begin the run; return an iterator over `batches`, or an endless one over batches that the class collects."""
        if batches is None and optional_hook(self.plugin, "rollout") is None:
            raise InputError(NO_DATA)
        self.call_hooks("on_new_training_run")
        return self._rollouts() if batches is None else iter(batches)

    def _rollouts(self) -> Iterator[Any]:
        """Yield the batches that the class collects, phase after phase, without end."""
        run_state, batches = self._trainer_state.run_state, RolloutBatches(self.plugin, self.trainer)
        batches.state, batches.ctx = self.contract_state, self.ctx
        while True:
            yield from batches
            self.call_hooks("on_train_phase_end")
            run_state.epoch += 1
            self.call_hooks("on_epoch_end")

    def step(self, raw_batch: Any) -> dict[str, float]:
        """Train one step; return its metrics."""
        state, ctx = self.contract_state, self.ctx
        self.step_result = self.plugin.train_step(self.plugin.prepare_batch(raw_batch, state, ctx), state, ctx)
        validate_result(self.step_result)
        self.global_step += 1
        self.call_hooks("on_mb_end")
        return self.metrics()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last step by their reported names."""
        return named_scalars(self.step_result, self.contract_state, self.ctx, self.optimizers)


def plain_steps(
    trainer: TrainerPlugin, ctx: StepContext, batches: Iterable[Any] | None, *, steps: int
) -> Iterator[Snapshot]:
    """Train `trainer` on its batches; yield a snapshot before the first step and after each step.

    Args:
        trainer: A trainer that has not been set up.
        ctx: Passed to its hooks.
        batches: Raw batches; with None the trainer collects its own.
        steps: Maximum number of steps.
    """
    loop = PlainLoop(trainer, ctx)
    yield snapshot(loop.contract_state, trainer, kinds=KINDS)
    for raw in itertools.islice(loop.begin(batches), steps):
        metrics = loop.step(raw)
        yield snapshot(loop.contract_state, trainer, metrics, kinds=KINDS)


def new_trainer(target: Any) -> TrainerPlugin:
    """Return a trainer for the plain loop: a new instance of a class, or a copy of an instance.

    Raises:
        ContractError: The instance cannot be copied.
    """
    if inspect.isclass(target):
        return make_trainer(target)
    try:
        copied: TrainerPlugin = copy.deepcopy(target)
    except Exception as error:
        raise ContractError(
            f"The trainer is an instance of {type(target).__qualname__} and cannot be copied for a second loop "
            f"({type(error).__name__}: {safe_str(error)}). Name its class instead, or give it a `__deepcopy__`."
        ) from error
    return copied


def plain_context(
    config: RunConfig, trainer: pl.Trainer | None = None, model_handles: Mapping[str, Any] | None = None
) -> StepContext:
    """Return the context of a trainer class in a plain loop: one rank, fp32.

    Args:
        config: The job.
        trainer: The Lightning trainer that runs the job, for its device and its step limit. None takes the first device
            that the job may use.
        model_handles: The local models that the job's inputs provide.
    """
    job = config.job
    if trainer is None:
        kind = None if config.lightning.get("accelerator") == "cpu" else accelerator()
        device = "cpu" if kind is None else f"{kind.type}:0"
    else:
        device = str(trainer.strategy.root_device)
        job = job if trainer.max_steps == -1 else replace(job, max_steps=trainer.max_steps)
    return StepContext(
        job=job,
        model_handles=dict(model_handles or {}),
        device=device,
        dtype="fp32",
        is_canceled=lambda: False,
        run_state=RunState(run_id=config.run_id),
    )


def diagnose_first_step(config: RunConfig) -> Iterator[Finding]:
    """Yield the findings of a job's first step: its batch, errors and their places, gradients, metrics.

    Writes nothing, and restores the random numbers.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_sys_path([config.spec_dir, Path.cwd()]))
        stack.enter_context(quiet())
        stack.enter_context(isolated_random_numbers())
        try:
            yield from _first_step(config, stack)
        except Exception as error:  # noqa: BLE001  # whatever the class or its data raises is the finding
            yield Finding("step", "fail", describe_error(error))


def _first_step(config: RunConfig, stack: contextlib.ExitStack) -> Iterator[Finding]:
    """Yield the findings of `diagnose_first_step`; `stack` closes the data."""
    plugin = make_trainer(find_trainer(config.trainer))
    ctx, batches = job_batches(config, plugin, plain_context(config), stack)
    loop = PlainLoop(plugin, ctx)
    if (raw := next(loop.begin(batches), None)) is None:
        raise InputError("the source of batches is empty; check `dataset`")
    yield Finding("batch", "pass", describe_batch(raw))
    yield from check_columns(raw)
    optimized = {id(tensor) for tensor in loop.discovered.optimized() if tensor.requires_grad}
    trained = {name: value for name, value in live_weights(loop.discovered).items() if id(value) in optimized}
    before = {name: value.detach().clone() for name, value in trained.items()}
    metrics = loop.step(raw)
    untouched = [name for name, value in trained.items() if value.grad is None and torch.equal(value, before[name])]
    if not trained:
        yield Finding("gradients", "warn", "neither the state of `configure` nor the trainer has an optimizer")
    elif untouched:
        hint = ": does `train_step` call `backward()` on the loss?" if len(untouched) == len(trained) else ""
        text = f"{len(untouched)} of {len(trained)} weights have no gradient and no change: {list_first(untouched)}"
        yield Finding("gradients", "warn", text + hint)
    else:
        yield Finding("gradients", "pass", f"{len(trained)} weights have gradients or have changed")
    shown = list_first([f"{name} {value:.4g}" for name, value in metrics.items()])
    level: Level = "pass" if all(map(math.isfinite, metrics.values())) else "warn"
    yield Finding("step", level, f"took one step on {ctx.device}: {shown or 'it returns no metrics'}")
