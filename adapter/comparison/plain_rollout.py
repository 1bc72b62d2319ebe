"""Rollouts and their update epochs as a plain loop has them, for a trainer class that collects its own batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..contract.exceptions import ContractError
from ..contract.run_state import RunState
from ..contract.types import StepContext
from ..module.plugin_loading import optional_hook
from ..module.rollout import Phase, collected, parted

__all__ = ["rollout_batches"]


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
