"""Batches that a trainer collects by itself: a rollout, then minibatches of it, and so on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ...callbacks.checkpoint.codec.state_tree import encode
from ...callbacks.checkpoint.codec.tensors import TensorTable
from ...callbacks.hook.events import fire, run_state_of
from ..contract.exceptions import ContractError, UnstorableStateError
from ..contract.run_state import RunState
from ..feed.minibatches import Minibatches
from .plugin_loading import optional_hook
from .state import PHASE

if TYPE_CHECKING:
    from .module import ContractModule

__all__ = ["Phase", "RolloutBatches", "collected", "batches_and_stats"]

log = logging.getLogger(__name__)

ROLLOUT_CHECKPOINT_BYTES = 256 << 20
"""How much of a rollout a checkpoint holds at most; a trainer may have an attribute ``rollout_checkpoint_bytes``."""

LOST = "lost"
"""The member of a saved phase that says why its batches are not in it."""

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

    def __init__(self, module: ContractModule) -> None:
        self._module = module
        self._phase: Phase | None = None
        self._lost: str | None = None
        """Why the phase of the checkpoint is not gone on with."""
        self._has_warned_of_unequal_passes = self._has_warned_of_environments = False
        self._counted = 0
        """Environment steps of all ranks that the run state had when they were last summed."""
        self.metrics: dict[str, float] = {}
        """How long the last rollout and the last update took, and environment steps where the trainer counts them."""

    @property
    def lost_on_resume(self) -> str | None:
        """The loss of a run that is resumed within a phase, in words; None where it goes on with that phase."""
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
            saved |= self._phase.state_dict(self._number("rollout_checkpoint_bytes", ROLLOUT_CHECKPOINT_BYTES, least=0))
        save_state = optional_hook(self._module.plugin, "rollout_state")
        if save_state is not None:
            saved["rollout_state"] = save_state(self._module.contract_state)
            if not isinstance(saved["rollout_state"], dict):
                kind = type(saved["rollout_state"]).__qualname__
                raise ContractError(f"rollout_state returned a {kind}; it must be a dict")
            saved["rollout_state_on_device"] = _on_device(saved["rollout_state"])
        self._warn_of_environments(saved.get("rollout_state"))
        contract_part[PHASE] = saved

    def _warn_of_environments(self, saved: dict[str, Any] | None) -> None:
        """Say once if a resume will not restore the environments; an empty dict says that there are none."""
        plugin = self._module.plugin
        lacking = [name for name in ("rollout_state", "load_rollout_state") if optional_hook(plugin, name) is None]
        if lacking and saved != {} and not self._has_warned_of_environments and self._module.ctx.rank == 0:
            self._has_warned_of_environments = True
            log.warning(
                "%s has a `rollout` and no `%s`: the first rollout after a resume begins with new environments, unless "
                "`load_state_dict` restores them, and the run will not be bit-equal to one that was never interrupted. "
                "Return their state from `rollout_state(state)` and restore it in `load_rollout_state`; an empty dict "
                "says that there is none.",
                type(plugin).__qualname__,
                lacking[0],
            )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `save` put into a checkpoint. Collective."""
        module = self._module
        load_state = optional_hook(module.plugin, "load_rollout_state")
        if load_state is not None and "rollout_state" in saved:
            on_device = saved.get("rollout_state_on_device", [])
            payload = _to_device(saved["rollout_state"], on_device, module.ctx.device)
            load_state(module.contract_state, payload, module.ctx)
        lost, is_there = saved.get(LOST), "update_epochs" in saved
        if is_there and saved["world_size"] != module.ctx.world_size:
            lost = f"it was saved by {saved['world_size']} ranks and is resumed by {module.ctx.world_size}"
        losses = module.rank_channel.gather_everywhere(lost)
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
        if has_more and not self._has_warned_of_unequal_passes:
            self._has_warned_of_unequal_passes = True
            log.warning(
                "Rank %d has more than the %d minibatches that another rank has for an update epoch: what is left is "
                "not trained. Collect as many on each rank.",
                self._module.ctx.rank,
                phase.minibatch_index,
            )

    def _collect(self) -> Phase:
        module, run_state = self._module, run_state_of(self._module.trainer)
        update_epochs = self._number("update_epochs", default=1)
        run_state.update_epoch = run_state.minibatch_index = 0
        run_state.stop_rollout = run_state.stop_update_epoch = False
        self._counted = run_state.agent_step
        fire(module.trainer, "on_rollout_start")
        began_s = time.monotonic()
        returned = module.plugin.rollout(module.contract_state, module.ctx)  # type: ignore[attr-defined]
        batches, run_state.rollout_stats = batches_and_stats(returned)
        if isinstance(batches, Iterator) and optional_hook(module.plugin, "rollout_state") is not None:
            batches = collected(batches, run_state)
        if isinstance(batches, list | tuple) and not batches:
            raise self._empty()
        self._count_agent_steps(run_state.rollout_stats)
        self.metrics["trainer/rollout_seconds"] = time.monotonic() - began_s
        fire(module.trainer, "on_rollout_end")
        return Phase(batches, update_epochs)

    def _count_agent_steps(self, stats: Mapping[str, Any] | None) -> None:
        """Add what the ranks have collected: what a rollout says, or else what the trainer added to the run state."""
        run_state = run_state_of(self._module.trainer)
        steps = (stats or {}).get("agent_steps", run_state.agent_step - self._counted)
        if isinstance(steps, bool) or not hasattr(steps, "__index__") or (stats and steps < 0):
            raise ContractError(f"`agent_steps` in the statistics of a rollout is {steps!r}; it must be a number >= 0")
        of_ranks = self._module.rank_channel.gather_everywhere(int(steps))
        run_state.agent_step = self._counted = self._counted + sum(of_ranks)
        if run_state.agent_step:
            self.metrics["trainer/agent_step"] = float(run_state.agent_step)

    def _agreed(self, said: int) -> int:
        """The most of what any rank says."""
        channel = self._module.rank_channel
        if channel.size == 1:
            return said
        largest, work = channel.start_largest(said)
        work.wait()
        return int(largest)

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


def collected(batches: Iterator[Any], run_state: RunState) -> list[Any]:
    """The items of a generator until its end, or until the rollout is to stop."""
    found: list[Any] = []
    try:
        for batch in batches:
            found.append(batch)
            if run_state.stop_rollout:
                break
    except Exception as error:
        error.add_note(f"raised by the trainer's rollout after {len(found)} batches")
        raise
    return found


def batches_and_stats(returned: Any) -> tuple[Iterable[Any], dict[str, Any] | None]:
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


@dataclass
class Phase:
    """A training phase: batches, update epochs over them, and how far training has come."""

    batches: Iterable[Any]
    update_epochs: int = 1
    update_epoch: int = 0
    """The pass that is being trained, from 0."""
    minibatch_index: int = 0
    """The minibatch of that pass that comes next."""
    is_within_pass: bool = False
    """Whether the pass was begun by the attempt before."""
    _seen: list[Any] = field(default_factory=list)
    """Of an iterator that more passes follow: what it gave."""
    _nbytes: int | str | None = None
    """The batches' part of a checkpoint, or the reason why there can be none; None until that is asked for."""

    def rest_of_pass(self) -> Iterator[Any]:
        """The batches that this pass still has."""
        first = self.minibatch_index if self.is_within_pass else 0
        self.is_within_pass = False
        if isinstance(self.batches, Minibatches):
            yield from self.batches.rest_of_pass(first) if first else self.batches
        elif isinstance(self.batches, Iterator):
            yield from self._remembered(self.batches)
        elif isinstance(self.batches, Sequence):
            yield from (self.batches[index] for index in range(first, len(self.batches)))
        else:
            yield from self.batches

    def _remembered(self, batches: Iterator[Any]) -> Iterator[Any]:
        keeps = self.update_epochs > 1
        for batch in batches:
            if keeps:
                self._seen.append(batch)
            yield batch
        if keeps:
            self.batches, self._seen = self._seen, []

    def end_pass(self) -> None:
        """Go on with the first minibatch of the next pass."""
        if self._seen:  # the pass was ended early: the next ones have what this one had
            self.batches, self._seen = self._seen, []
        self.update_epoch += 1
        self.minibatch_index = 0

    def state_dict(self, limit: int) -> dict[str, Any]:
        """The phase as plain data, or why it cannot be had again."""
        if self._nbytes is None:
            self._nbytes = self._measured()
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
        # Those of the last pass that were trained are not needed any more.
        trained = self.minibatch_index if self.update_epoch + 1 >= self.update_epochs else 0
        batches = list(self.batches)[trained:]
        return {**place, "trained": trained, "batches": batches, "on_device": _on_device(batches)}

    def _measured(self) -> int | str:
        if isinstance(self.batches, Minibatches):
            return sum(column.nbytes for column in self.batches.columns.values())
        if not isinstance(self.batches, list | tuple):
            return (
                f"its batches come from a {type(self.batches).__qualname__}, whose place no checkpoint can hold; a "
                "rollout of which `rollout` returns a list or `Minibatches` goes on where it was, and so does a "
                "generator of a trainer with `rollout_state`"
            )
        table = TensorTable()
        try:
            tree = encode(list(self.batches), table, root="rollout")
        except UnstorableStateError as error:
            return str(error)
        return len(json.dumps(tree)) + sum(entry.nbytes for entry in table.entries)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: str) -> Phase:
        """The phase that `state_dict` described, which was not lost; what was on a device goes to `device`."""
        batches: Iterable[Any]
        if "minibatches" in state:
            kept = dict(state["minibatches"])
            kept["columns"] = _to_device(kept["columns"], state["on_device"], device)
            batches = Minibatches.from_state_dict(kept)
        else:
            # In the places of those that were trained stands nothing: they are not looked at.
            batches = [None] * state["trained"] + _to_device(state["batches"], state["on_device"], device)
        place = {name: state[name] for name in ("update_epochs", "update_epoch", "minibatch_index")}
        return cls(batches, **place, is_within_pass=True)


def _on_device(batches: Any) -> list[bool]:
    """Of each tensor, in the order of a walk, whether it is elsewhere than on the CPU; empty where none is."""
    flags: list[bool] = []
    apply_to_collection(batches, torch.Tensor, lambda tensor: flags.append(tensor.device.type != "cpu"))
    return flags if any(flags) else []


def _to_device(batches: Any, on_device: list[bool], device: str) -> Any:
    if not on_device:
        return batches
    flags = iter(on_device)
    return apply_to_collection(batches, torch.Tensor, lambda tensor: tensor.to(device) if next(flags) else tensor)
