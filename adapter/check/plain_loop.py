"""A plain training loop for a trainer class, as without genlight."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl

from ...callbacks.hook.events import share_run_state
from ...callbacks.rank_channel import ALONE
from ...callbacks.trainer_hooks import TrainerState
from ..contract.exceptions import ContractError, InputError
from ..contract.run_state import RunState
from ..contract.types import StepContext, TrainerPlugin
from ..discovery.discover import discover
from ..job.config import RunConfig
from ..module.own_hooks import own_hooks
from ..module.plugin_loading import make_trainer, optional_hook
from ..module.rollout import RolloutBatches
from ..module.step_metrics import named_scalars, validate_result
from ..plumbing.devices import accelerator
from ..plumbing.redaction import safe_str
from .batches import NO_DATA
from .snapshot import KINDS, Snapshot, snapshot


class PlainLoop:
    """A trainer class in a plain loop: sets it up, configures it, and calls its own hooks.

    To a `TrainerState` and to `RolloutBatches` it is the Lightning trainer and the module.

    Args:
        plugin: A trainer that has not been set up.
        ctx: Passed to the hooks of the class.
    """

    rank_channel = ALONE
    global_step = 0

    def __init__(self, plugin: TrainerPlugin, ctx: StepContext) -> None:
        self.plugin, self.ctx = plugin, ctx
        plugin.setup(ctx)
        self.contract_state = plugin.configure(ctx)
        self.discovered = discover(self.contract_state, plugin)
        self.optimizers = [found.value for found in self.discovered.optimizers]
        stand_in: Any = self
        self.trainer = self.lightning_module = stand_in
        self.callbacks = [self]
        self._hooks = own_hooks(plugin, self.contract_state, ctx)
        self._result: Any = None
        if isinstance(ctx.run_state, RunState):
            share_run_state(stand_in, ctx.run_state)
        self._trainer_state = TrainerState(stand_in, stand_in)

    def call_hooks(self, event: str) -> None:
        """Call the method `event` of the class's own hooks."""
        for hook in self._hooks:
            getattr(hook, event, lambda _: None)(self._trainer_state)

    def on_rollout_start(self, *_: Any) -> None:
        """Pass on the event; this object is its own only callback."""
        self.call_hooks("on_rollout_start")

    def on_rollout_end(self, *_: Any) -> None:
        """Pass on the event."""
        self.call_hooks("on_rollout_end")

    def begin(self, batches: Iterable[Any] | None) -> Iterator[Any]:
        """Begin the run; return its `batches`, or if None an endless iterator over batches that the class collects."""
        if batches is None and optional_hook(self.plugin, "rollout") is None:
            raise InputError(NO_DATA)
        self.call_hooks("on_new_training_run")
        return self._rollouts() if batches is None else iter(batches)

    def _rollouts(self) -> Iterator[Any]:
        run_state, batches = self._trainer_state.run_state, RolloutBatches(self.trainer)
        while True:
            yield from batches
            self.call_hooks("on_train_phase_end")
            run_state.epoch += 1
            self.call_hooks("on_epoch_end")

    def step(self, raw_batch: Any) -> dict[str, float]:
        """Train one step; return its metrics."""
        state, ctx = self.contract_state, self.ctx
        self._result = validate_result(
            self.plugin.train_step(self.plugin.prepare_batch(raw_batch, state, ctx), state, ctx)
        )
        self.global_step += 1
        self.call_hooks("on_mb_end")
        return self.callback_metrics

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The metrics of the last step, for hooks ``loss_stats``; empty before the first step."""
        if self._result is None:
            return {}
        return named_scalars(self._result, self.contract_state, self.ctx, self.optimizers)


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
