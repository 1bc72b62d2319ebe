"""The callback that reacts to faults: it skips updates, lowers the learning rate, rolls back, and finally fails."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
import msgspec
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils._pytree import tree_map
from typing_extensions import override

from ...adapter.contract.exceptions import RecoveryError
from ...adapter.plumbing.text import require
from ...reporters.events.event import ROLLED_BACK_METRIC
from ..checkpoint.capture import CONTRACT_KEY
from ..checkpoint.codec.state_tree import format_path
from ..checkpoint.format.record import CheckpointRecord
from ..checkpoint.memory_tier import list_tiers
from ..checkpoint.policy import Checkpoint, savers_of
from ..checkpoint.rank_state import digests_of, gradients_of_rank, restore_gradients, restore_rng_of_rank
from ..checkpoint.selection import WRITER, newest_valid, own_records
from ..checkpoint.storage import delete_checkpoint
from ..checkpoint.writing import require_shared_directory
from ..hook.cadence import rewind
from ..hook.events import FIGURES_FIELD, callbacks_of, fire, log_to_loggers, publish_figures, run_id_of, run_state_of
from ..hook.hook import Hook, ending_the_run
from ..lightning_internals import checkpoint_connector
from .diagnosis import WatchNonfinite
from .readings import scaled_by
from .rules import Case, Fault, History, Reading, find_faults

log = logging.getLogger(__name__)

Rung = Literal["skip", "lower_lr", "roll_back"]

RULES_OF_FAULTS = {"nonfinite": ("nonfinite_loss", "nonfinite_gradients"), "loss_spike": ("loss_spike",)}
"""The faults that a run can recover from, with the rules that find them."""
ALL_PARAMETERS = "all parameters"
"""Name in messages for all gradients of an update together."""

_OF_THE_DATA = ("run_id", "epoch", "minibatch_index", "latest_checkpoint_uri")
"""Fields of the run state that a roll-back does not restore."""


@dataclass
class _Progress:
    """The state of `Recover`, saved in checkpoints.

    An incident begins with a fault. It ends once `good_steps` steps have been trained beyond the furthest step with a
    fault; after a roll-back, the run must first come that far again. So a run that meets the same fault again and again
    climbs the ladder, and cannot go in circles.
    """

    attempts: list[tuple[Rung, int]] = field(default_factory=list)
    """The rungs of the current incident, each with the step of its fault."""
    taken: dict[str, int] = field(default_factory=dict)
    """How often each rung was taken, in all incidents."""
    began_at: int = 0
    """The earliest step whose gradients were part of a faulty update of this incident."""
    ends_at: int = 0
    """The step after which the incident ends, if no other fault comes."""
    window_began_at: int = 1
    """The first step whose gradients are in the next update."""
    rate_factor: float = 1.0
    lowered_until: int = 0
    history: History = field(default_factory=History)


class Recover(Hook):
    """Recovers from faults in training: skips updates, lowers the learning rate, rolls back to a checkpoint.

    Every update is checked before it is made, and an update with a fault is never made, on any rank. Buffers, such as
    running statistics, are reset to their values before that step. Then the next rung of the ladder is taken:

    - ``skip``: nothing else is done. The step counts, and training continues with the next batch.
    - ``lower_lr``: the learning rate is multiplied by `lr_factor` for the next `lower_lr_steps` steps. Schedulers are
      not affected. If the rung is taken again during these steps, the rate is lowered further.
    - ``roll_back``: model, optimizers, schedulers, scalers, the state of the class, random states, callbacks and the
      step counter are restored from the newest checkpoint that was saved before the incident, is intact and has finite
      weights. The data is not rewound: all batches since that checkpoint are skipped, because it is not known which of
      them led to the fault. So an epoch has fewer steps, and a run limited by `max_steps` uses more data. Checkpoints
      saved in between are removed, and the restored state is saved again under its step, with the new position in the
      data. Before the first checkpoint this rung does the same as ``skip``.

    Each fault takes the next rung; the last rung is repeated. An incident ends, and the ladder starts again at the
    first rung, when `good_steps` steps beyond the last fault were trained without a fault and the learning rate is back
    to normal. After `max_attempts` rungs in one incident the run fails with an error that lists what was tried.

    A warning names each rung with its fault. Loggers receive ``recover/attempt`` (0 when the incident has ended),
    ``recover/lr_factor``, the number of times each rung was taken (``recover/skip`` and so on) and, for a roll-back,
    ``trainer/rolled_back_to_step``; the steps after it are then logged a second time. The state is part of every
    checkpoint: a resumed run continues on the same rung and gives the same weights as an uninterrupted one.

    It works with a trainer class in a `ContractModule`. With accumulated gradients a fault is found in the step of
    their update, and the update of the whole window is skipped. Costs: the device is synchronized at each update,
    buffers are copied in each step, and with ``loss_spike`` several ranks reduce a number at each update. With
    16-mixed, an overflow handled by the scaler is not a fault; a loss that is not finite is.

    Args:
        ladder: The rungs in order: ``skip``, ``lower_lr`` and ``roll_back``. A rung may be repeated or absent.
        faults: Kinds of faults: ``nonfinite`` (a loss or gradient is nan or infinite), and ``loss_spike`` by the
            rule of `Diagnosis`. A spike can also occur in a healthy run.
        lr_factor: Factor for the learning rate.
        lower_lr_steps: Number of steps with the lowered rate.
        good_steps: Number of steps without a fault that end an incident.
        max_attempts: Number of rungs that an incident may take.

    Raises:
        ValueError: Arguments are invalid; the message lists all of them.
        RecoveryError: Before the first step: the run cannot be recovered this way; the message lists all reasons.
    """

    critical = True
    ranks: Literal["zero", "all"] = "all"
    writes = ("rolls_back", FIGURES_FIELD)
    _of_this_process = frozenset({"_trainer", "_saver"})
    _trainer: pl.Trainer | None = None
    _saver: Checkpoint | None = None
    """The callback whose checkpoints a roll-back goes to."""

    def __init__(
        self,
        ladder: Sequence[str] = ("skip", "lower_lr", "roll_back"),
        faults: Sequence[str] = ("nonfinite",),
        *,
        lr_factor: float = 0.1,
        lower_lr_steps: int = 100,
        good_steps: int = 100,
        max_attempts: int = 5,
    ) -> None:
        counts = {"lower_lr_steps": lower_lr_steps, "good_steps": good_steps, "max_attempts": max_attempts}
        require(
            (_are_known(ladder, get_args(Rung)), "ladder", "a list of skip, lower_lr and roll_back", ladder),
            (_are_known(faults, RULES_OF_FAULTS), "faults", "a list of nonfinite and loss_spike", faults),
            *((value >= 1, name, "a number >= 1", value) for name, value in counts.items()),
            (max_attempts >= len(ladder), "max_attempts", "at least the number of rungs in `ladder`", max_attempts),
            (0 < lr_factor < 1, "lr_factor", "a number between 0 and 1", lr_factor),
        )
        self.ladder = cast("tuple[Rung, ...]", tuple(ladder))
        self.faults = tuple(faults)
        self.lr_factor = lr_factor
        self.lower_lr_steps = lower_lr_steps
        self.good_steps = good_steps
        self.max_attempts = max_attempts
        self._rules = [rule for kind in faults for rule in RULES_OF_FAULTS[kind]]
        self._begin()

    def _begin(self) -> None:
        """Begin a run, without a fault so far."""
        self._progress = _Progress()
        self._found: Fault | None = None
        """The current step's fault."""
        self._reading: Reading | None = None
        """The update of this step, made or prevented, with its loss; None if the step has no update."""
        self._target: CheckpointRecord | None = None

    @property
    def judges_losses(self) -> bool:
        """Whether a loss that is finite can be a fault."""
        return "loss_spike" in self.faults

    @property
    def rate_factor(self) -> float:
        """Factor for the learning rate of each update."""
        return self._progress.rate_factor

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":  # a resume restores the state after this
            self._begin()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wrong = list(self._misfits(trainer, pl_module))
        if wrong:
            raise RecoveryError(f"Recover cannot be used here: {'; '.join(wrong)}")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._trainer = trainer
        self._train_began_at = time.monotonic()
        run_state_of(trainer).rolls_back = False
        run_id_of(trainer)  # makes an id if there is none, to recognize this run's checkpoints
        self._saver = _saver_of(trainer)
        channel = pl_module.hosted_trainer.rank_channel
        if "roll_back" in self.ladder and self._saver is not None and channel.size > 1:
            require_shared_directory(channel, self._saver.directory)  # every rank reads from it

    def may_update(self, *, is_finite: bool, loss: float | None) -> bool:
        """Whether an update is made; the update guard calls this within a step, with the same figures on all ranks.

        Args:
            is_finite: Whether all gradients of the update are finite.
            loss: The largest loss that led to it, ``nan`` if one is not finite; None if no loss was read.
        """
        assert self._trainer is not None
        step = self._trainer.global_step + 1
        losses = [] if loss is None else [(step, loss)]
        self._reading = Reading(step, {} if is_finite else {ALL_PARAMETERS: math.nan}, losses)
        found = find_faults(Case(self._reading, self._progress.history), self._rules)
        self._found = self._found or next(iter(found), None)
        return not found

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        progress, step = self._progress, trainer.global_step
        fault, self._found = self._found, None
        reading, self._reading = self._reading, None
        if fault is not None:
            self._climb(trainer, fault)
        elif progress.attempts and step >= progress.ends_at:
            publish_figures(trainer, {"recover/attempt": 0.0})
            if trainer.is_global_zero:
                log.info("recovered at step %d, after: %s", step, _describe_attempts(progress))
            progress.attempts = []
        if reading is not None:
            progress.window_began_at = step + 1
            if fault is None:
                progress.history.add(reading)
        if progress.lowered_until and step >= progress.lowered_until:
            progress.rate_factor, progress.lowered_until = 1.0, 0
            publish_figures(trainer, {"recover/lr_factor": 1.0})

    def _climb(self, trainer: pl.Trainer, fault: Fault) -> None:
        """Take the next rung for `fault`, or end the run after too many."""
        progress, step, attempt = self._progress, trainer.global_step, len(self._progress.attempts) + 1
        if attempt > self.max_attempts:
            raise ending_the_run(
                RecoveryError(
                    f"training could not be recovered: {fault.text}, at step {step}, after {attempt - 1} attempts "
                    f"since step {progress.attempts[0][1]}: {_describe_attempts(progress)}. Mend the cause, such as a "
                    "learning rate that is too high or broken data, and resume from a checkpoint"
                )
            )
        rung = self.ladder[min(attempt, len(self.ladder)) - 1]
        began_at = progress.window_began_at
        progress.began_at = min(progress.began_at, began_at) if progress.attempts else began_at
        progress.ends_at = max(progress.ends_at, step + self.good_steps)
        progress.attempts.append((rung, step))
        progress.taken[rung] = progress.taken.get(rung, 0) + 1
        figures = {"recover/attempt": float(attempt), f"recover/{rung}": progress.taken[rung]}
        what = "The update is skipped"
        if rung == "lower_lr":
            progress.rate_factor *= self.lr_factor
            progress.lowered_until = until = step + self.lower_lr_steps
            progress.ends_at = max(progress.ends_at, until + self.good_steps)
            figures["recover/lr_factor"] = progress.rate_factor
            what += f", and the learning rate is multiplied by {progress.rate_factor:.4g} until step {until}"
        if rung == "roll_back":
            assert self._saver is not None
            self._target = _last_good_checkpoint(trainer, self._saver, progress.began_at)
            run_state_of(trainer).rolls_back = self._target is not None
            if self._target is None:
                what += ", because there is no good checkpoint from before the incident"
            else:
                what = f"Training rolls back to step {self._target.step} and skips the batches since then"
        publish_figures(trainer, figures)
        if trainer.is_global_zero:
            log.warning("step %d: %s. %s (attempt %d)", step, fault.text, what, attempt)

    @override
    def on_roll_back_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        target, self._target, saver = self._target, None, self._saver
        run_state_of(trainer).rolls_back = False
        assert target is not None
        assert saver is not None
        step, saved_at = trainer.global_step, target.path.stat().st_mtime
        log_to_loggers(trainer, {ROLLED_BACK_METRIC: float(target.step)}, step)
        _restore(trainer, pl_module, target, keeps=self)
        self._progress.window_began_at = min(self._progress.window_began_at, target.step + 1)
        for callback in callbacks_of(trainer):
            if isinstance(callback, Hook):
                rewind(callback, trainer.global_step)
        fire(trainer, "on_roll_back")
        if trainer.is_global_zero:
            for record in own_records(list_tiers(saver.directory)):  # a start must not resume from an undone step
                if record.step > target.step and _is_of_run(record, trainer, saver):
                    delete_checkpoint(record.path)
            log.warning(
                "rolled back from step %d to step %d; the batches of these %d steps are skipped",
                *(step, target.step, step - target.step),
            )
        lost_s = min(time.time() - saved_at, time.monotonic() - self._train_began_at)
        fire(trainer, "on_time_spent", "lost", max(lost_s, 0.0))
        saver.save(trainer, pl_module, wait=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        return cast("dict[str, Any]", msgspec.to_builtins(self._progress))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._progress = msgspec.convert(state_dict, _Progress)

    def _misfits(self, trainer: pl.Trainer, pl_module: Any) -> Iterator[str]:
        """Yield the reasons why this run cannot be recovered, each with the way out."""
        if getattr(pl_module, "discovered", None) is None:
            yield f"it needs a trainer class in a ContractModule, and {type(pl_module).__name__} is not one"
            return
        if sum(isinstance(callback, Recover) for callback in callbacks_of(trainer)) > 1:
            yield "there is more than one Recover callback; keep one of them"
        if any(isinstance(each, WatchNonfinite) and each.policy == "stop" for each in callbacks_of(trainer)):
            yield "`on_nonfinite: stop` (WatchNonfinite) conflicts with it; use `warn`"
        scaled = scaled_by(trainer, pl_module)
        if scaled and self.judges_losses:
            yield f"loss_spike cannot be detected with {scaled}; use bf16-mixed, or `faults: [nonfinite]`"
        for found in pl_module.discovered.optimizers if "lower_lr" in self.ladder else ():
            if any(group.get("lr") is None for group in found.value.param_groups):
                yield f"'lower_lr' needs a learning rate, and {found.path} has none in a group; leave that rung out"
        if "roll_back" not in self.ladder:
            return
        if _saver_of(trainer) is None:
            yield (
                "'roll_back' needs checkpoints, and no `Checkpoint` callback saves any during training; give it a "
                "cadence (`checkpoint_every` of a job), or leave that rung out"
            )
        if isinstance(trainer.strategy, ModelParallelStrategy):
            yield "'roll_back' does not support sharded parameters (ModelParallelStrategy); leave that rung out"
        if callable(getattr(pl_module.plugin, "rollout", None)):
            yield "'roll_back' does not support trainers with a `rollout`: environments cannot go back; leave it out"


def _describe_attempts(progress: _Progress) -> str:
    return ", ".join(f"{rung} at step {step}" for rung, step in progress.attempts)


def _are_known(names: Sequence[str], known: Collection[str]) -> bool:
    return bool(names) and not isinstance(names, str) and all(name in known for name in names)


def _saver_of(trainer: pl.Trainer) -> Checkpoint | None:
    """Return the callback whose checkpoints a roll-back goes to: the first that saves while training."""
    return next((each for each in savers_of(trainer) if each.saves_while_training), None)


def _last_good_checkpoint(trainer: pl.Trainer, saver: Checkpoint, before: int) -> CheckpointRecord | None:
    """Return the newest intact checkpoint of this run before step `before` with finite weights. Collective."""
    saver.wait(trainer)
    target: CheckpointRecord | None = None
    if trainer.is_global_zero:

        def is_good(record: CheckpointRecord) -> bool:
            return _is_of_run(record, trainer, saver) and record.finite_weights is not False and record.step < before

        target, warnings = newest_valid(saver.directory, accept=is_good, knows_types=True)
        for warning in warnings:
            log.warning("%s", warning)
    shared: CheckpointRecord | None = trainer.strategy.broadcast(target)
    return shared


def _is_of_run(record: CheckpointRecord, trainer: pl.Trainer, saver: Checkpoint) -> bool:
    return record.writer == WRITER and record.run_id == (saver.run.run_id or run_state_of(trainer).run_id)


def _restore(trainer: pl.Trainer, pl_module: Any, target: CheckpointRecord, *, keeps: pl.Callback) -> None:
    """Restore the state of a checkpoint, without rewinding the data. Collective.

    Weights, optimizers, schedulers, scalers, the state of the trainer class, random states, gradients of an open
    accumulation window, callbacks and the step counter are restored as by a resume. Loaders keep their position, with
    the counters of batches and epochs: the batches since the checkpoint are skipped.

    Args:
        trainer: The trainer, between two steps of genlight's loop.
        pl_module: The module that hosts a trainer class.
        target: The checkpoint.
        keeps: The callback whose state stays as it is.

    Raises:
        BrokenCheckpointError: The checkpoint is no longer intact.
        RecoveryError: The restored state differs from the checkpoint; the message names the value.
    """
    connector, given = checkpoint_connector(trainer), trainer.ckpt_path
    data = {name: getattr(run_state_of(trainer), name) for name in _OF_THE_DATA}
    connector.resume_start(target.path)
    checkpoint = connector._loaded_checkpoint
    try:
        connector.restore_model()
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
        _restore_callbacks(trainer, pl_module, checkpoint, keeps)
        pl_module.hosted_trainer.restore()
    finally:
        connector._loaded_checkpoint, connector._ckpt_path = {}, given
    for name, fact in data.items():
        setattr(run_state_of(trainer), name, fact)
    pl_module.hosted_trainer.step_result = None
    loop: Any = trainer.fit_loop.epoch_loop
    loop.roll_back_to(target.step)
    trainer.should_stop = False  # the request was based on steps that are undone
    parts = checkpoint[CONTRACT_KEY]
    _require_equal(pl_module, parts.get("state", {}), target.name)
    gradients = gradients_of_rank(parts.get("gradients", []), trainer.global_rank, trainer.world_size)
    restore_gradients(pl_module, gradients, clears_others=True)
    restore_rng_of_rank(parts["rng"], trainer.global_rank)
    pl_module.hosted_trainer.feed_callback_metrics()


def _restore_callbacks(
    trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any], keeps: pl.Callback
) -> None:
    """Restore the states of all callbacks except `keeps`."""
    states: Mapping[str, Any] = checkpoint.get("callbacks", {})
    for callback in callbacks_of(trainer):
        if callback is keeps:
            continue
        if not isinstance(callback, Checkpoint):  # `_restore` puts back the parts of a `Checkpoint` itself
            callback.on_load_checkpoint(trainer, pl_module, checkpoint)
        if state := states.get(callback.state_key):
            callback.load_state_dict(copy.deepcopy(state))


def _require_equal(pl_module: Any, expected: Any, name: str) -> None:
    """Refuse a restored state that differs from the checkpoint: a class may load states only before the first step."""
    payload = pl_module.hosted_trainer.state.payload()
    on_host = tree_map(lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, payload)
    saved, now = digests_of(expected), digests_of(on_host)
    where = next((path for path in {**saved, **now} if saved.get(path) != now.get(path)), None)
    if where is not None:
        raise RecoveryError(
            f"the roll-back to {name} is not exact: {format_path(('state', *where))} differs from the checkpoint, "
            f"after `load_state_dict` of {type(pl_module.plugin).__name__} was called within a run. Restore the whole "
            "payload there, or remove 'roll_back' from the ladder; the run can be resumed from that checkpoint"
        )
