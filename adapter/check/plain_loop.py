"""The loop that a trainer class would run in without genlight."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ...callbacks.hook.events import share_run_state
from ...callbacks.trainer_hooks import TrainerState
from ..contract.exceptions import ContractError, InputError
from ..contract.run_state import RunState
from ..contract.types import StepContext, TrainerPlugin
from ..discovery.discover import Discovered, discover
from ..job.config import RunConfig
from ..job.lightning_objects import epochs_of, make_data
from ..module.own_hooks import own_hooks
from ..module.plugin_loading import loader_of_class, make_trainer, optional_hook
from ..module.rollout import Phase, collected, parted
from ..module.step_metrics import named_scalars, validated_result
from ..plumbing.devices import isolated_random_numbers, random_states as states_of_devices, release_memory
from ..plumbing.redaction import text_of
from .batches import joined_batches, rank_feeds
from .causes import Circumstances
from .isolation import drops, turn_off_dropout
from .snapshot import KINDS, Recording, Snapshot, snapshot

__all__ = [
    "another_trainer",
    "job_batches",
    "plain_context",
    "plain_steps",
    "random_states",
    "recorded_plain_loop",
]


_NO_DATA = "The job names no data: add `dataset.parquet_paths`, `data` or `mock_batches`."


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


def plain_steps(
    trainer: TrainerPlugin,
    ctx: StepContext,
    batches: Iterable[Any] | None,
    how: Circumstances,
    *,
    steps: int,
    dropout: bool = True,
    look: Callable[[], None] = lambda: None,
    refuse_dropout: str = "",
) -> Iterator[Snapshot]:
    """Step `trainer` on its batches; a snapshot before the first step, then after each.

    Hooks of its own hear of the run's begin and of minibatches, and of phases where it collects its batches.

    Args:
        trainer: A trainer that has not been set up.
        ctx: What its hooks get.
        batches: Raw batches; None has the trainer collect its own.
        how: Filled in with what the loop shows.
        steps: How many at most.
        dropout: Whether dropout layers drop anything.
        look: Called before each step; what it raises ends the loop.
        refuse_dropout: Why a class with dropout layers cannot be compared; empty where it can.

    Raises:
        ContractError: The class has dropout layers, and these are refused.
    """
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    discovered = discover(state, trainer)
    layers = [layer for found in discovered.modules for layer in found.value.modules()]
    if refuse_dropout and drops(layers):
        raise ContractError(refuse_dropout)
    if not dropout:
        turn_off_dropout(layers)
    how.batch_statistics = any(isinstance(layer, _BatchNorm) and layer.training for layer in layers)
    yield snapshot(state, trainer, kinds=KINDS)
    optimizers = [found.value for found in discovered.optimizers]
    fire = own_events(trainer, state, ctx, discovered)
    fire("on_new_training_run")
    at_first = random_states()
    source = rollout_batches(trainer, state, ctx, fire) if batches is None else batches
    for raw in itertools.islice(source, steps):
        look()
        result = trainer.train_step(trainer.prepare_batch(raw, state, ctx), state, ctx)
        fire("on_mb_end")
        how.draws = random_states() != at_first
        metrics = named_scalars(validated_result(result), state, ctx, optimizers)
        yield snapshot(state, trainer, metrics, kinds=KINDS)


def random_states() -> list[bytes]:
    """What tells whether anything drew from a global generator."""
    of_devices = (state for states in states_of_devices().values() for state in states)
    tensors = [state.cpu().numpy().tobytes() for state in (torch.get_rng_state(), *of_devices)]
    return [*tensors, repr(random.getstate()).encode(), repr(np.random.get_state()).encode()]


@dataclass(eq=False)
class PlainTraining:
    """In place of a Lightning trainer and module: what a `TrainerState` looks at."""

    contract_state: Any
    discovered: Discovered
    optimizers: Sequence[Optimizer]


def own_events(trainer: Any, state: Any, ctx: StepContext, discovered: Discovered) -> Callable[[str], None]:
    """What tells the hooks that ``trainer_hooks`` of a trainer class returns of an event, by its name."""
    hooks = own_hooks(trainer, state, ctx)
    training: Any = PlainTraining(state, discovered, [found.value for found in discovered.optimizers])
    if isinstance(ctx.run_state, RunState):
        share_run_state(training, ctx.run_state)
    trainer_state = TrainerState(cast("pl.Trainer", training), cast("pl.LightningModule", training))

    def fire(event: str) -> None:
        for hook in hooks:
            method = getattr(hook, event, None)
            if method is not None:
                method(trainer_state)

    return fire


def rollout_batches(trainer: Any, state: Any, ctx: StepContext, fire: Callable[[str], None]) -> Iterator[Any]:
    """The minibatches of one rollout after the other, without end, on one rank.

    Args:
        trainer: A class with ``rollout``; its ``update_epochs`` says how often it trains on each.
        state: What its ``configure`` returned.
        ctx: With a run state, whose counters and wishes to stop are kept as in a run.
        fire: Tells the class's own hooks of an event.

    Raises:
        ContractError: A rollout gave no batches, or something else than batches.
    """
    run_state = ctx.run_state
    assert isinstance(run_state, RunState)
    while True:
        run_state.update_epoch = run_state.minibatch_index = 0
        run_state.stop_rollout = run_state.stop_update_epoch = False
        counted = run_state.agent_step
        fire("on_rollout_start")
        batches, run_state.rollout_stats = parted(trainer.rollout(state, ctx))
        if isinstance(batches, Iterator) and optional_hook(trainer, "rollout_state") is not None:
            batches = collected(batches, run_state)  # as a run does, so that a checkpoint can hold them
        run_state.agent_step = counted + int(
            (run_state.rollout_stats or {}).get("agent_steps", run_state.agent_step - counted)
        )
        fire("on_rollout_end")
        phase = Phase(batches, getattr(trainer, "update_epochs", 1))
        while phase.update_epoch < phase.update_epochs and not run_state.stop_update_epoch:
            run_state.update_epoch = phase.update_epoch
            yield from _pass(phase, run_state)
            phase.end_pass()
        run_state.epoch += 1
        fire("on_train_phase_end")
        fire("on_epoch_end")


def _pass(phase: Phase, run_state: RunState) -> Iterator[Any]:
    is_collecting = isinstance(phase.batches, Iterator)
    for batch in phase.rest_of_pass():
        run_state.minibatch_index = phase.minibatch_index
        phase.minibatch_index += 1
        yield batch
        if run_state.stop_update_epoch or (is_collecting and run_state.stop_rollout):
            return
    if phase.update_epoch == 0 and phase.minibatch_index == 0:
        raise ContractError("the rollout gave no batches: there is nothing to compare")


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
    dropout: bool = True,
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
        dropout: Whether dropout layers drop anything.
        refuse_dropout: Why a class with dropout layers cannot be compared; empty where it can.

    Raises:
        ContractError: The class cannot be copied, or it collects its own batches on several ranks, or theirs cannot be
            put together.
        InputError: There is no batch.
    """
    data = make_data(config, parquet_paths)
    collects = data is None and optional_hook(target, "rollout") is not None
    has_loader = data is None and optional_hook(target, "train_loader") is not None
    if data is None and not collects and not has_loader:
        raise InputError(_NO_DATA)
    if collects and how.world_size > 1:
        raise ContractError(
            "A class with `rollout` collects other batches on each rank, and one plain loop cannot have them. Compare "
            "on one device: --set lightning.devices=1"
        )
    recording = Recording()
    try:
        with isolated_random_numbers(), ExitStack() as stack:
            plugin = another_trainer(target)
            ctx = plain_context(config, trainer, model_handles)
            feeds: list[Any] = []
            if data is not None:
                feeds = rank_feeds(lambda: make_data(config, parquet_paths), ctx, how.world_size, stack)
                ctx = replace(ctx, dataset=feeds[0])
            make_feeds = partial(_loaders_of_class, plugin, ctx, how.world_size) if has_loader else partial(list, feeds)
            for reached in plain_steps(
                plugin,
                ctx,
                None if collects else joined_batches(make_feeds, epochs=epochs_of(config)),
                how,
                steps=min(steps, ctx.job.max_steps or steps),
                dropout=dropout,
                look=look,
                refuse_dropout=refuse_dropout,
            ):
                recording.add(reached)
            del plugin, ctx, make_feeds, feeds
        release_memory()  # the training that follows needs it
        if len(recording) < 2:
            raise InputError("the source of batches is empty: there is no step to compare; check `dataset`")
    except BaseException:
        recording.close()
        raise
    return recording


def job_batches(config: RunConfig, parquet_paths: Sequence[str], how: Circumstances, ctx: StepContext) -> Iterator[Any]:
    """The raw batches of a job, those of all ranks joined.

    Raises:
        InputError: The job names no data, or it cannot be read.
    """
    if make_data(config, parquet_paths) is None:
        raise InputError(_NO_DATA)
    with ExitStack() as stack:
        feeds = rank_feeds(lambda: make_data(config, parquet_paths), ctx, how.world_size, stack)
        yield from joined_batches(lambda: feeds, epochs=epochs_of(config))


def _loaders_of_class(plugin: Any, ctx: StepContext, world_size: int) -> list[Any]:
    return [loader_of_class(plugin, replace(ctx, rank=rank, world_size=world_size)) for rank in range(world_size)]


def plain_context(config: RunConfig, trainer: pl.Trainer, model_handles: Mapping[str, Any] | None) -> StepContext:
    """What a trainer class gets in a plain loop: one rank, fp32, the device of rank zero of the job."""
    job = config.job if trainer.max_steps == -1 else replace(config.job, max_steps=trainer.max_steps)
    return StepContext(
        job=job,
        model_handles=dict(model_handles or {}),
        device=str(trainer.strategy.root_device),
        dtype="fp32",
        is_canceled=lambda: False,
        run_state=RunState(run_id=config.run_id),
    )
