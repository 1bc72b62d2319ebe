"""Batches that a trainer class collects itself: a rollout, minibatches of it, then the next rollout."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ...callbacks.checkpoint.codec.state_tree import encode
from ...callbacks.checkpoint.codec.tensors import TensorTable
from ...callbacks.hook.events import fire, run_state_of, timed
from ...callbacks.rank_channel import ALONE, Channel
from ..contract.exceptions import ContractError, UnstorableStateError
from ..contract.types import RunState, StepContext, TrainerPlugin
from ..feed.experience import Minibatches
from .plugin_loading import optional_hook
from .state import PHASE

log = logging.getLogger(__name__)

ROLLOUT_CHECKPOINT_BYTES = 256 << 20
"""Maximum size of the batches in a checkpoint; a trainer's attribute ``rollout_checkpoint_bytes`` replaces it."""

LOST = "lost"
"""The member of a saved phase that has the reason if its batches were not saved."""

_CONTINUE, _END_PASS, _END_PHASE = range(3)
"""Decisions about the next minibatch. All ranks take the largest decision of any rank."""


class RolloutBatches:
    """A loader; each of its passes is a rollout of the trainer and then the training phase on its batches.

    One pass, as callbacks and the run state see it::

        on_rollout_start                                # stop_rollout and stop_update_epoch are false
        batches, rollout_stats = rollout(state, ctx)
        agent_step += the environment steps of all ranks
        on_rollout_end
        for update_epoch in range(update_epochs):       # an attribute of the trainer, 1 if it has none
            for minibatch_index, raw_batch in enumerate(batches):
                a step of the loop; on_mb_end
                stop_update_epoch on any rank?  the phase ends
        on_train_phase_end; on_epoch_end

    On several ranks each rank collects its own rollout. All ranks end an update epoch when the rank with the fewest
    minibatches does, since a step averages the gradients of all ranks.

    Args:
        plugin: The trainer.
        module: The LightningModule that is trained.

    Attributes:
        state: The result of ``configure``.
        ctx: The context that ``rollout`` gets.
        channel: The channel by which the ranks of the training agree.
    """

    begins_anew = True  # each pass is a new rollout, so `warn_of_lost_positions` warns only of `lost_on_resume`
    state: Any
    ctx: StepContext

    def __init__(self, plugin: TrainerPlugin, module: pl.LightningModule) -> None:
        self.channel: Channel = ALONE
        self._plugin, self._module = plugin, module
        self._phase: Phase | None = None
        self._lost: str | None = None
        """Why the phase of the checkpoint cannot be continued; None if it can, or if there is none."""
        self._has_warned_of_unequal_passes = self._has_warned_of_environments = False
        self._counted = 0
        """``agent_step`` of the run state after the ranks last added up their environment steps."""
        self.metrics: dict[str, float] = {}
        """Seconds of the last rollout and of the last update, and environment steps if the trainer counts them."""

    @property
    def lost_on_resume(self) -> str | None:
        """Why a run that is resumed within a phase starts a new one; None if it continues that phase."""
        if self._phase is not None:
            return None
        why = self._lost or "the checkpoint holds none of its batches"
        return (
            f"The checkpoint was saved within the training phase of a rollout, and the run starts with a new rollout: "
            f"{why}. The run will not be bit-equal to one that was never interrupted."
        )

    def begin_epoch(self, epoch: int) -> None:
        """Drop the rest of an earlier phase, if there is any."""
        self._phase = None

    def save(self, contract_part: dict[str, Any]) -> None:
        """Put the phase, and the result of the trainer's ``rollout_state``, into the contract's part of a checkpoint.

        Raises:
            ContractError: ``rollout_state`` did not return a dict.
        """
        saved: dict[str, Any] = {"world_size": self.ctx.world_size}
        if self._phase is not None:
            # This rank's request to stop; ranks agree on it when they fetch the next minibatch.
            saved["stop_update_epoch"] = run_state_of(self._module.trainer).stop_update_epoch
            saved |= self._phase.state_dict(
                self._integer_attribute("rollout_checkpoint_bytes", ROLLOUT_CHECKPOINT_BYTES, least=0)
            )
        save_state = optional_hook(self._plugin, "rollout_state")
        if save_state is not None:
            saved["rollout_state"] = save_state(self.state)
            if not isinstance(saved["rollout_state"], dict):
                kind = type(saved["rollout_state"]).__qualname__
                raise ContractError(f"rollout_state returned a {kind}; it must be a dict")
            saved["rollout_state_on_device"] = _on_device(saved["rollout_state"])
        self._warn_of_environments(saved.get("rollout_state"))
        contract_part[PHASE] = saved

    def _warn_of_environments(self, saved: dict[str, Any] | None) -> None:
        """Warn once if a resume will not restore the environments; an empty dict means that there are none."""
        hooks = ("rollout_state", "load_rollout_state")
        lacking = [name for name in hooks if optional_hook(self._plugin, name) is None]
        if lacking and saved != {} and not self._has_warned_of_environments and self.ctx.rank == 0:
            self._has_warned_of_environments = True
            log.warning(
                "%s has a `rollout` and no `%s`: the first rollout after a resume begins with new environments, unless "
                "`load_state_dict` restores them, and the run will not be bit-equal to one that was never interrupted. "
                "Return their state from `rollout_state(state)` and restore it in `load_rollout_state`; return an "
                "empty dict if there is none.",
                type(self._plugin).__qualname__,
                lacking[0],
            )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Pass the saved ``rollout_state`` to the trainer, and continue the saved phase if possible. Collective."""
        load_state = optional_hook(self._plugin, "load_rollout_state")
        if load_state is not None and "rollout_state" in saved:
            on_device = saved.get("rollout_state_on_device", [])
            payload = _to_device(saved["rollout_state"], on_device, self.ctx.device)
            load_state(self.state, payload, self.ctx)
        lost, has_phase = saved.get(LOST), "update_epochs" in saved
        if has_phase and saved["world_size"] != self.ctx.world_size:
            lost = f"it was saved by {saved['world_size']} ranks and is resumed by {self.ctx.world_size}"
        reasons = self.channel.gather_everywhere(lost)
        self._lost = next((reason for reason in reasons if reason is not None), None)
        if has_phase and self._lost is None:
            self._phase = Phase.from_state_dict(saved, self.ctx.device)
            run_state = run_state_of(self._module.trainer)
            run_state.stop_update_epoch, self._counted = saved["stop_update_epoch"], run_state.agent_step

    def __iter__(self) -> Iterator[Any]:
        run_state, is_resumed = run_state_of(self._module.trainer), self._phase is not None
        phase = self._phase = self._phase or self._collect()
        began_s = time.monotonic()
        decision = self._agree(_END_PHASE if run_state.stop_update_epoch else _CONTINUE) if is_resumed else _CONTINUE
        while decision != _END_PHASE and phase.update_epoch < phase.update_epochs:
            run_state.update_epoch = phase.update_epoch
            for batch in self._rest_of_pass(phase):
                run_state.minibatch_index = phase.minibatch_index
                phase.minibatch_index += 1
                yield batch
            decision = _END_PHASE if run_state.stop_update_epoch else _CONTINUE
            phase.end_pass()
        self._count_agent_steps(None)
        self.metrics["trainer/update_seconds"] = time.monotonic() - began_s
        self._phase = None

    def _rest_of_pass(self, phase: Phase) -> Iterator[Any]:
        """Yield the remaining minibatches of this update epoch, until one rank has no more."""
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
                raise self._empty_rollout()
            decision = self._agree(_END_PHASE if stops else _END_PASS if batch is nothing else _CONTINUE)
            if decision != _CONTINUE:
                run_state.stop_update_epoch = decision == _END_PHASE
                self._warn_of_unequal_passes(phase, has_more=decision == _END_PASS and batch is not nothing)
                return
            yield batch

    def _warn_of_unequal_passes(self, phase: Phase, *, has_more: bool) -> None:
        if has_more and not self._has_warned_of_unequal_passes:
            self._has_warned_of_unequal_passes = True
            log.warning(
                "Rank %d has more than the %d minibatches that another rank has for an update epoch; the rest is not "
                "trained. Collect the same number on each rank.",
                self.ctx.rank,
                phase.minibatch_index,
            )

    def _collect(self) -> Phase:
        """Call the trainer's ``rollout``, and return the phase for its batches."""
        trainer, run_state = self._module.trainer, run_state_of(self._module.trainer)
        update_epochs = self._integer_attribute("update_epochs", default=1)
        run_state.update_epoch = run_state.minibatch_index = 0
        run_state.stop_rollout = run_state.stop_update_epoch = False
        self._counted = run_state.agent_step
        fire(trainer, "on_rollout_start")
        began_s = time.monotonic()
        with timed(trainer, "rollout"):
            returned = self._plugin.rollout(self.state, self.ctx)  # type: ignore[attr-defined]
            batches, run_state.rollout_stats = batches_and_stats(returned)
            if isinstance(batches, Iterator) and optional_hook(self._plugin, "rollout_state") is not None:
                batches = collect(batches, run_state)
            if isinstance(batches, list | tuple) and not batches:
                raise self._empty_rollout()
            self._count_agent_steps(run_state.rollout_stats)
        self.metrics["trainer/rollout_seconds"] = time.monotonic() - began_s
        fire(trainer, "on_rollout_end")
        return Phase(batches, update_epochs)

    def _count_agent_steps(self, stats: Mapping[str, Any] | None) -> None:
        """Add up the environment steps of all ranks, from the statistics or from the trainer's own count of them.

        A trainer may count steps in ``agent_step`` of the run state instead of returning ``agent_steps`` in `stats`.
        """
        run_state = run_state_of(self._module.trainer)
        steps = (stats or {}).get("agent_steps", run_state.agent_step - self._counted)
        if isinstance(steps, bool) or not hasattr(steps, "__index__") or (stats and steps < 0):
            raise ContractError(f"`agent_steps` in the statistics of a rollout is {steps!r}; it must be a number >= 0")
        of_ranks = self.channel.gather_everywhere(int(steps))
        run_state.agent_step = self._counted = self._counted + sum(of_ranks)
        if run_state.agent_step:
            self.metrics["trainer/agent_step"] = float(run_state.agent_step)

    def _agree(self, decision: int) -> int:
        """Return the largest decision of any rank."""
        if self.channel.size == 1:
            return decision
        largest, work = self.channel.start_largest(decision)
        work.wait()
        return int(largest)

    def _integer_attribute(self, name: str, default: int, least: int = 1) -> int:
        number = getattr(self._plugin, name, default)
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            owner = type(self._plugin).__qualname__
            raise ContractError(f"`{name}` of {owner} is {number!r}; it must be an integer >= {least}")
        return number

    def _empty_rollout(self) -> ContractError:
        step = self._module.trainer.global_step
        return ContractError(
            f"the rollout after step {step} returned no batches, so there is nothing to train. Collect until there is "
            "a batch, or end the run with `max_steps`"
        )


def collect(batches: Iterator[Any], run_state: RunState) -> list[Any]:
    """Return the items of a generator until its end, or until ``stop_rollout`` is set."""
    items: list[Any] = []
    try:
        for batch in batches:
            items.append(batch)
            if run_state.stop_rollout:
                break
    except Exception as error:
        error.add_note(f"raised by the trainer's rollout after {len(items)} batches")
        raise
    return items


def batches_and_stats(returned: Any) -> tuple[Iterable[Any], dict[str, Any] | None]:
    """Return the batches of a rollout, and its statistics; these are None if it `returned` only batches.

    Raises:
        ContractError: It returned neither an iterable of batches nor a pair of these and statistics.
    """
    if isinstance(returned, tuple) and len(returned) == 2 and _is_stats(returned[1]) and not _is_stats(returned[0]):
        return _check_batches(returned[0]), None if returned[1] is None else dict(returned[1])
    return _check_batches(returned), None


def _is_stats(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _check_batches(batches: Any) -> Iterable[Any]:
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise ContractError(
            f"rollout returned a {type(batches).__qualname__}; it must be an iterable of raw batches, or a pair of "
            "such an iterable and statistics"
        )
    return batches


@dataclass
class Phase:
    """A training phase: the batches of a rollout, and the position of training in the passes over them."""

    batches: Iterable[Any]
    update_epochs: int = 1
    """Number of passes."""
    update_epoch: int = 0
    """The current pass, from 0."""
    minibatch_index: int = 0
    """The next minibatch of that pass."""
    is_within_pass: bool = False
    """Whether the previous attempt began this pass."""
    _seen: list[Any] = field(default_factory=list)
    """Batches that an iterator has returned so far, kept for later passes."""
    _nbytes: int | str | None = None
    """Size of the batches in a checkpoint, or the reason why they cannot be stored; None until it is measured."""

    def rest_of_pass(self) -> Iterator[Any]:
        """Yield the remaining batches of this pass."""
        first = self.minibatch_index if self.is_within_pass else 0
        self.is_within_pass = False
        if isinstance(self.batches, Minibatches):
            yield from self.batches.rest_of_pass(first) if first else self.batches
        elif isinstance(self.batches, Iterator):
            yield from self._remember(self.batches)
        elif isinstance(self.batches, Sequence):
            yield from (self.batches[index] for index in range(first, len(self.batches)))
        else:
            yield from self.batches

    def _remember(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches`, and keep them if there are further passes."""
        keeps = self.update_epochs > 1
        for batch in batches:
            if keeps:
                self._seen.append(batch)
            yield batch
        if keeps:
            self.batches, self._seen = self._seen, []

    def end_pass(self) -> None:
        """Continue with the first minibatch of the next pass."""
        if self._seen:  # the pass ended early: later passes use only the batches so far
            self.batches, self._seen = self._seen, []
        self.update_epoch += 1
        self.minibatch_index = 0

    def state_dict(self, limit: int) -> dict[str, Any]:
        """Return the phase as plain data, or the reason why it cannot be stored."""
        if self._nbytes is None:
            self._nbytes = self._measure()
        lost = self._nbytes if isinstance(self._nbytes, str) else None
        if lost is None and isinstance(self._nbytes, int) and self._nbytes > limit:
            lost = f"its batches take {self._nbytes} bytes, and `rollout_checkpoint_bytes` is {limit}"
        if lost is not None:
            return {LOST: lost}
        place = {
            "update_epochs": self.update_epochs,
            "update_epoch": self.update_epoch,
            "minibatch_index": self.minibatch_index,
        }
        if isinstance(self.batches, Minibatches):
            return {**place, "minibatches": self.batches.state_dict(), "on_device": _on_device(self.batches.columns)}
        # No pass follows the last one, so its trained batches are not stored.
        trained = self.minibatch_index if self.update_epoch + 1 >= self.update_epochs else 0
        batches = list(self.batches)[trained:]
        return {**place, "trained": trained, "batches": batches, "on_device": _on_device(batches)}

    def _measure(self) -> int | str:
        """Return the size of the batches in bytes, or the reason why a checkpoint cannot hold them."""
        if isinstance(self.batches, Minibatches):
            return sum(column.nbytes for column in self.batches.columns.values())
        if not isinstance(self.batches, list | tuple):
            return (
                f"its batches come from a {type(self.batches).__qualname__}, whose position no checkpoint can hold; a "
                "rollout continues at its position if `rollout` returns a list or `Minibatches`, or if it returns a "
                "generator and the trainer has `rollout_state`"
            )
        table = TensorTable()
        try:
            tree = encode(list(self.batches), table, root="rollout")
        except UnstorableStateError as error:
            return str(error)
        return len(json.dumps(tree)) + sum(entry.nbytes for entry in table.entries)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: str) -> Phase:
        """Return the phase that `state_dict` stored; tensors that were on a device go to `device`."""
        batches: Iterable[Any]
        if "minibatches" in state:
            kept = dict(state["minibatches"])
            kept["columns"] = _to_device(kept["columns"], state["on_device"], device)
            batches = Minibatches.from_state_dict(kept)
        else:
            # None takes the places of trained batches that were not stored; nothing reads them.
            batches = [None] * state["trained"] + _to_device(state["batches"], state["on_device"], device)
        place = {name: state[name] for name in ("update_epochs", "update_epoch", "minibatch_index")}
        return cls(batches, **place, is_within_pass=True)


def _on_device(batches: Any) -> list[bool]:
    """Return for each tensor, in the order of `apply_to_collection`, whether it is on a device; empty if none is."""
    flags: list[bool] = []
    apply_to_collection(batches, torch.Tensor, lambda tensor: flags.append(tensor.device.type != "cpu"))
    return flags if any(flags) else []


def _to_device(batches: Any, on_device: list[bool], device: str) -> Any:
    if not on_device:
        return batches
    flags = iter(on_device)
    return apply_to_collection(batches, torch.Tensor, lambda tensor: tensor.to(device) if next(flags) else tensor)
