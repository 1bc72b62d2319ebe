"""Batches that a trainer collects by itself: a rollout, then minibatches of it, and so on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...callbacks.hook.events import fire, run_state_of
from ..contract.exceptions import ContractError
from ..loop.hosted_module import HostedModule
from .plugin_loading import optional_hook
from .rollout_phase import LOST, ROLLOUT_CHECKPOINT_BYTES, Phase

__all__ = ["PHASE", "RolloutBatches", "parted"]

log = logging.getLogger(__name__)

PHASE = "phase"
"""The member of a checkpoint's contract part that holds what `RolloutBatches.save` puts there."""

_GOES_ON, _PASS_ENDS, _PHASE_ENDS = range(3)


class RolloutBatches:
    """A loader whose every pass is a rollout of the trainer and its training phase.

    One phase, as callbacks and the run state see it::

        on_rollout_start                                # stop_rollout and stop_update_epoch are false
        batches, rollout_stats = rollout(state, ctx)
        agent_step += the sum of what the ranks collected
        on_rollout_end
        for update_epoch in range(update_epochs):       # an attribute of the trainer; without it one
            for minibatch_index, raw_batch in enumerate(batches):
                a step of the loop; on_mb_end
                stop_update_epoch on any rank?  the phase ends
        on_train_phase_end; on_epoch_end

    On several ranks each collects for itself. All ranks end a pass where the shortest one ends, since a step averages
    the gradients of all.
    """

    begins_anew = True

    def __init__(self, module: HostedModule) -> None:
        self._module = module
        self._phase: Phase | None = None
        self._lost: str | None = None
        """Why the phase of the checkpoint is not gone on with."""
        self._told_of_unequal_passes = False
        self._counted = 0
        """Environment steps of all ranks that the run state had when they were last summed."""
        self.metrics: dict[str, float] = {}
        """How long the last rollout and the last update took, and environment steps where the trainer counts them."""

    @property
    def told_on_resume(self) -> str | None:
        """What a run that is resumed within a phase loses; None where it goes on with that phase."""
        if self._phase is not None:
            return None
        why = self._lost or "the checkpoint holds none of its batches"
        return (
            f"The checkpoint was saved within the training phase of a rollout, which begins anew: {why}. The run will "
            "not be bit-equal to one that was never interrupted."
        )

    def begin_epoch(self, epoch: int) -> None:
        """Leave what may be left of an earlier phase."""
        self._phase = None

    def save(self, contract_part: dict[str, Any]) -> None:
        """Put the phase, and what the trainer gives of its environments, into a checkpoint's part.

        Raises:
            ContractError: ``rollout_state`` returned something else than a dict.
        """
        saved: dict[str, Any] = {"world_size": self._module.ctx.world_size}
        if self._phase is not None:
            # Which ranks agree on when they ask for the next minibatch.
            saved["stop_update_epoch"] = run_state_of(self._module.trainer).stop_update_epoch
            saved |= self._phase.state_dict(self._limit())
        save_state = optional_hook(self._module.plugin, "rollout_state")
        if save_state is not None:
            saved["rollout_state"] = save_state(self._module.contract_state)
            if not isinstance(saved["rollout_state"], dict):
                kind = type(saved["rollout_state"]).__qualname__
                raise ContractError(f"rollout_state returned a {kind}; it must be a dict")
        contract_part[PHASE] = saved

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `save` put into a checkpoint. Collective."""
        module = self._module
        load_state = optional_hook(module.plugin, "load_rollout_state")
        if load_state is not None and "rollout_state" in saved:
            load_state(module.contract_state, saved["rollout_state"], module.ctx)
        lost, is_there = saved.get(LOST), "update_epochs" in saved
        if is_there and saved["world_size"] != module.ctx.world_size:
            lost = f"it was saved by {saved['world_size']} ranks and is resumed by {module.ctx.world_size}"
        channel = module.rank_channel
        losses = [lost] if channel is None else channel.gather_everywhere(lost)
        self._lost = next((loss for loss in losses if loss is not None), None)
        if is_there and self._lost is None:
            self._phase = Phase.from_state_dict(saved, module.ctx.device)
            run_state = run_state_of(module.trainer)
            run_state.stop_update_epoch, self._counted = saved["stop_update_epoch"], run_state.agent_step

    def __iter__(self) -> Iterator[Any]:
        run_state, is_resumed = run_state_of(self._module.trainer), self._phase is not None
        phase = self._phase = self._phase or self._collect()
        began_s = time.monotonic()
        said = self._agreed(_PHASE_ENDS if run_state.stop_update_epoch else _GOES_ON) if is_resumed else _GOES_ON
        while said != _PHASE_ENDS and phase.update_epoch < phase.update_epochs:
            run_state.update_epoch = phase.update_epoch
            for batch in self._rest_of_pass(phase):
                run_state.minibatch_index = phase.minibatch_index
                phase.minibatch_index += 1
                yield batch
            said = _PHASE_ENDS if run_state.stop_update_epoch else _GOES_ON
            phase.end_pass()
        self._count_agent_steps(None)
        self.metrics["trainer/update_seconds"] = time.monotonic() - began_s
        self._phase = None

    def _rest_of_pass(self, phase: Phase) -> Iterator[Any]:
        run_state = run_state_of(self._module.trainer)
        is_collecting = isinstance(phase.batches, Iterator)
        batches = phase.rest_of_pass()
        nothing = object()
        while True:
            is_first = phase.update_epoch == 0 and phase.minibatch_index == 0
            stops = run_state.stop_update_epoch and not is_first
            has_ended = stops or (is_collecting and run_state.stop_rollout and not is_first)
            batch = nothing if has_ended else next(batches, nothing)
            if batch is nothing and is_first:
                raise self._empty()
            said = self._agreed(_PHASE_ENDS if stops else _PASS_ENDS if batch is nothing else _GOES_ON)
            if said != _GOES_ON:
                run_state.stop_update_epoch = said == _PHASE_ENDS
                self._tell_of_unequal_passes(phase, has_more=said == _PASS_ENDS and batch is not nothing)
                return
            yield batch

    def _tell_of_unequal_passes(self, phase: Phase, *, has_more: bool) -> None:
        if has_more and not self._told_of_unequal_passes:
            self._told_of_unequal_passes = True
            log.warning(
                "Rank %d has more than the %d minibatches that another rank has for an update epoch: what is left is "
                "not trained. Collect as many on each rank.",
                self._module.ctx.rank,
                phase.minibatch_index,
            )

    def _collect(self) -> Phase:
        module, run_state = self._module, run_state_of(self._module.trainer)
        update_epochs = self._update_epochs()
        run_state.update_epoch = run_state.minibatch_index = 0
        run_state.stop_rollout = run_state.stop_update_epoch = False
        self._counted = run_state.agent_step
        fire(module.trainer, "on_rollout_start")
        began_s = time.monotonic()
        returned = module.plugin.rollout(module.contract_state, module.ctx)  # type: ignore[attr-defined]
        batches, run_state.rollout_stats = parted(returned)
        if isinstance(batches, Iterator) and optional_hook(module.plugin, "rollout_state") is not None:
            batches = self._collected(batches)
        if isinstance(batches, list | tuple) and not batches:
            raise self._empty()
        self._count_agent_steps(run_state.rollout_stats)
        self.metrics["trainer/rollout_seconds"] = time.monotonic() - began_s
        fire(module.trainer, "on_rollout_end")
        return Phase(batches, update_epochs)

    def _collected(self, batches: Iterator[Any]) -> list[Any]:
        """What a generator gives until its end, or until the rollout is to stop."""
        run_state = run_state_of(self._module.trainer)
        collected: list[Any] = []
        try:
            for batch in batches:
                collected.append(batch)
                if run_state.stop_rollout:
                    break
        except Exception as error:
            error.add_note(f"raised by the trainer's rollout after {len(collected)} batches")
            raise
        return collected

    def _count_agent_steps(self, stats: Mapping[str, Any] | None) -> None:
        """Add what the ranks have collected: what a rollout says, or else what the trainer added to the run state."""
        run_state = run_state_of(self._module.trainer)
        steps = (stats or {}).get("agent_steps", run_state.agent_step - self._counted)
        if isinstance(steps, bool) or not hasattr(steps, "__index__") or (stats and steps < 0):
            raise ContractError(f"`agent_steps` in the statistics of a rollout is {steps!r}; it must be a number >= 0")
        channel = self._module.rank_channel
        of_ranks = [int(steps)] if channel is None else channel.gather_everywhere(int(steps))
        run_state.agent_step = self._counted = self._counted + sum(of_ranks)
        if run_state.agent_step:
            self.metrics["trainer/agent_step"] = float(run_state.agent_step)

    def _agreed(self, said: int) -> int:
        """The most of what any rank says."""
        if self._module.rank_channel is None:
            return said
        largest, work = self._module.rank_channel.start_largest(said)
        if work is not None:
            work.wait()
        return int(largest)

    def _update_epochs(self) -> int:
        return self._number("update_epochs", 1)

    def _limit(self) -> int:
        return self._number("rollout_checkpoint_bytes", ROLLOUT_CHECKPOINT_BYTES, least=0)

    def _number(self, name: str, default: int, least: int = 1) -> int:
        number = getattr(self._module.plugin, name, default)
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            owner = type(self._module.plugin).__qualname__
            raise ContractError(f"`{name}` of {owner} is {number!r}; it must be a whole number >= {least}")
        return number

    def _empty(self) -> ContractError:
        step = self._module.trainer.global_step
        return ContractError(
            f"the rollout after step {step} gave no batches: there is nothing to train. Collect until there is a "
            "batch, or end the run by `max_steps`"
        )


def parted(returned: Any) -> tuple[Iterable[Any], dict[str, Any] | None]:
    """The batches that a rollout gave, and the statistics where it gave a pair.

    Raises:
        ContractError: It gave something else.
    """
    if isinstance(returned, tuple) and len(returned) == 2 and _is_stats(returned[1]) and not _is_stats(returned[0]):
        return _checked(returned[0]), None if returned[1] is None else dict(returned[1])
    return _checked(returned), None


def _is_stats(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _checked(batches: Any) -> Iterable[Any]:
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise ContractError(
            f"rollout returned a {type(batches).__qualname__}; it must be an iterable of raw batches, or a pair of "
            "that and statistics"
        )
    return batches
