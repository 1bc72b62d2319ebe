"""The loop that a trainer class would run in without genlight."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ...callbacks.checkpoint.sharded.rank_channel import ALONE
from ...callbacks.hook.events import share_run_state
from ...callbacks.trainer_hooks import TrainerState
from ..contract.exceptions import ContractError, InputError
from ..contract.run_state import RunState
from ..contract.types import StepContext, TrainerPlugin
from ..discovery.discover import discover
from ..job.config import RunConfig
from ..module.own_hooks import own_hooks
from ..module.plugin_loading import make_trainer
from ..module.rollout import RolloutBatches
from ..module.step_metrics import named_scalars, validated_result
from ..plumbing.devices import accelerator, isolated_random_numbers, random_states as states_of_devices, release_memory
from ..plumbing.redaction import text_of
from .batches import job_batches
from .causes import Circumstances
from .isolation import drops, turn_off_dropout
from .snapshot import KINDS, Recording, Snapshot, snapshot

__all__ = ["PlainLoop", "another_trainer", "plain_context", "plain_steps", "random_states", "recorded_plain_loop"]


class PlainLoop:
    """A trainer class in a plain loop, set up and configured; its own hooks hear of the events of a run.

    It stands in for the Lightning trainer and module that a `TrainerState` and `RolloutBatches` look at.

    Args:
        plugin: A trainer that has not been set up.
        ctx: What its hooks get.
    """

    rank_channel = ALONE
    global_step = 0

    def __init__(self, plugin: TrainerPlugin, ctx: StepContext) -> None:
        self.plugin, self.ctx = plugin, ctx
        plugin.setup(ctx)
        self.contract_state = plugin.configure(ctx)
        self.discovered = discover(self.contract_state, plugin)
        self.layers = [layer for found in self.discovered.modules for layer in found.value.modules()]
        self.optimizers = [found.value for found in self.discovered.optimizers]
        stand_in: Any = self
        self.trainer = self.lightning_module = stand_in
        self.callbacks = [self]
        self._hooks = own_hooks(plugin, self.contract_state, ctx)
        if isinstance(ctx.run_state, RunState):
            share_run_state(stand_in, ctx.run_state)
        self._trainer_state = TrainerState(stand_in, stand_in)

    def hear(self, event: str) -> None:
        """Tell the class's own hooks of an event."""
        for hook in self._hooks:
            getattr(hook, event, lambda _: None)(self._trainer_state)

    def on_rollout_start(self, *_: Any) -> None:
        """As a callback of itself: a rollout begins."""
        self.hear("on_rollout_start")

    def on_rollout_end(self, *_: Any) -> None:
        """As a callback of itself: a rollout was collected."""
        self.hear("on_rollout_end")

    def begin(self, batches: Iterable[Any] | None) -> Iterator[Any]:
        """Begin the run; its `batches`, or where there are none those that the class collects, without end."""
        self.hear("on_new_training_run")
        return self._rollouts() if batches is None else iter(batches)

    def _rollouts(self) -> Iterator[Any]:
        run_state, batches = self._trainer_state.run_state, RolloutBatches(self.trainer)
        while True:
            yield from batches
            run_state.epoch += 1
            self.hear("on_train_phase_end")
            self.hear("on_epoch_end")

    def step(self, raw_batch: Any) -> dict[str, float]:
        """Train one step; its metrics."""
        state, ctx = self.contract_state, self.ctx
        result = self.plugin.train_step(self.plugin.prepare_batch(raw_batch, state, ctx), state, ctx)
        self.global_step += 1
        self.hear("on_mb_end")
        return named_scalars(validated_result(result), state, ctx, self.optimizers)


def plain_steps(
    trainer: TrainerPlugin,
    ctx: StepContext,
    batches: Iterable[Any] | None,
    how: Circumstances,
    *,
    steps: int,
    refuse_dropout: str = "",
) -> Iterator[Snapshot]:
    """Step `trainer` on its batches; a snapshot before the first step, then after each.

    For a job of several ranks, which each draw numbers of their own, dropout layers drop nothing.

    Args:
        trainer: A trainer that has not been set up.
        ctx: What its hooks get.
        batches: Raw batches; None has the trainer collect its own.
        how: Filled in with what the loop shows.
        steps: How many at most.
        refuse_dropout: Why a class with dropout layers cannot be compared on several ranks; empty where it can.

    Raises:
        ContractError: The class has dropout layers, and these are refused.
    """
    loop = PlainLoop(trainer, ctx)
    if how.world_size > 1:
        if refuse_dropout and drops(loop.layers):
            raise ContractError(refuse_dropout)
        turn_off_dropout(loop.layers)
    how.batch_statistics = any(isinstance(layer, _BatchNorm) and layer.training for layer in loop.layers)
    yield snapshot(loop.contract_state, trainer, kinds=KINDS)
    source, at_first = loop.begin(batches), random_states()
    for raw in itertools.islice(source, steps):
        metrics = loop.step(raw)
        how.draws = random_states() != at_first
        yield snapshot(loop.contract_state, trainer, metrics, kinds=KINDS)


def random_states() -> list[bytes]:
    """What tells whether anything drew from a global generator."""
    of_devices = (state for states in states_of_devices().values() for state in states)
    tensors = [state.cpu().numpy().tobytes() for state in (torch.get_rng_state(), *of_devices)]
    return [*tensors, repr(random.getstate()).encode(), repr(np.random.get_state()).encode()]


def another_trainer(target: Any) -> TrainerPlugin:
    """A trainer for the plain loop: a new one of a class, a copy of an instance.

    Raises:
        ContractError: The instance cannot be copied.
    """
    if inspect.isclass(target):
        return make_trainer(target)
    try:
        copied: TrainerPlugin = copy.deepcopy(target)
    except Exception as error:
        raise ContractError(
            f"The trainer is one instance of {type(target).__qualname__} and cannot be copied for a second loop "
            f"({type(error).__name__}: {text_of(error)}). Name its class instead, or give it a `__deepcopy__`."
        ) from error
    return copied


def recorded_plain_loop(
    config: RunConfig,
    target: Any,
    trainer: pl.Trainer,
    how: Circumstances,
    *,
    steps: int,
    parquet_paths: Sequence[str] = (),
    model_handles: Mapping[str, Any] | None = None,
    look: Callable[[], None] = lambda: None,
    refuse_dropout: str = "",
) -> Recording:
    """Step the trainer class of a job in a plain loop; random numbers are afterwards as they were before.

    Args:
        config: The job.
        target: Its trainer class, or an instance of it, which is copied.
        trainer: The Lightning trainer that runs the job, for its device and number of ranks.
        how: Filled in with what the loop shows.
        steps: How many; fewer where the job has fewer steps or batches.
        parquet_paths: Data files that its inputs brought here; otherwise those that it names.
        model_handles: What its inputs brought here for the class.
        look: Called before each step; what it raises ends the loop.
        refuse_dropout: Why a class with dropout layers cannot be compared on several ranks; empty where it can.

    Raises:
        ContractError: The class cannot be copied, or it collects its own batches on several ranks, or theirs cannot be
            put together.
        InputError: There is no batch.
    """
    recording = Recording()
    try:
        with isolated_random_numbers(), ExitStack() as stack:
            plugin, ctx = another_trainer(target), plain_context(config, trainer, model_handles)
            ctx, batches = job_batches(
                config, plugin, ctx, stack, world_size=how.world_size, parquet_paths=parquet_paths
            )
            steps = min(steps, ctx.job.max_steps or steps)
            for reached in plain_steps(plugin, ctx, batches, how, steps=steps, refuse_dropout=refuse_dropout):
                recording.add(reached)
                look()
            del plugin, ctx, batches
        release_memory()  # the training that follows needs it
        if len(recording) < 2:
            raise InputError("the source of batches is empty: there is no step to compare; check `dataset`")
    except BaseException:
        recording.close()
        raise
    return recording


def plain_context(
    config: RunConfig, trainer: pl.Trainer | None = None, model_handles: Mapping[str, Any] | None = None
) -> StepContext:
    """What a trainer class gets in a plain loop: one rank, fp32.

    Args:
        config: The job.
        trainer: The Lightning trainer that runs it, whose device of rank zero and limit of steps count; else there is
            the first device that the job may use.
        model_handles: What the job's inputs brought here for the class.
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
