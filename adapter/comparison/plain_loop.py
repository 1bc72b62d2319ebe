"""The loop that a trainer class would run in without genlight."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ..contract.exceptions import ContractError
from ..contract.types import StepContext, TrainerPlugin
from ..discovery.discover import discover
from ..module.plugin_loading import make_trainer
from ..module.step_metrics import named_scalars, validated_result
from ..plumbing.devices import random_states as states_of_devices
from ..plumbing.redaction import text_of
from .causes import Circumstances
from .facts import Facts, facts_of
from .isolation import drops, turn_off_dropout
from .plain_events import own_events
from .plain_rollout import rollout_batches

__all__ = ["another_trainer", "plain_steps", "random_states"]


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
) -> Iterator[Facts]:
    """Step `trainer` on its batches; the facts before the first step, then after each.

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
    yield facts_of(discovered, {})
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
        yield facts_of(discovered, named_scalars(validated_result(result), state, ctx, optimizers))


def random_states() -> list[bytes]:
    """What tells whether anything drew from a global generator."""
    of_devices = (state for states in states_of_devices().values() for state in states)
    tensors = [state.cpu().numpy().tobytes() for state in (torch.get_rng_state(), *of_devices)]
    return [*tensors, repr(random.getstate()).encode(), repr(np.random.get_state()).encode()]
