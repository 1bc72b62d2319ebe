"""The callback that reacts to faults: it skips updates, lowers the learning rate, rolls back, and finally fails."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from ...adapter.contract.exceptions import RecoveryError
from ...reporters.events.event import ROLLED_BACK_METRIC
from ..checkpoint.policy import Checkpoint, savers_of
from ..checkpoint.store import require_shared_directory
from ..hook.cadence import rewind
from ..hook.events import FIGURES_FIELD, callbacks_of, fire, log_to_loggers, publish_figures, run_state_of
from ..hook.hook import Hook, ending_the_run
from ..telemetry.run_events import run_id_of
from .faults import (
    FAULT_KINDS,
    RUNGS,
    Fault,
    History,
    Rung,
    as_maximum,
    from_maximum,
)
from .readings import scaled_by
from .roll_back import Target, abandon_later, last_good_checkpoint, restore
from .rules import faults_of_update, reading_of_update
from .watch_nonfinite import WatchNonfinite

__all__ = ["Attempt", "Ladder", "Recover"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """One rung that was taken."""

    number: int
    """From 1, within its incident."""
    rung: Rung
    step: int
    """The step in which the fault was found."""
    fault: str
    """The finding, in words."""


class Ladder:
    """Climbs a rung with each fault, and begins again at the bottom when an incident is over.

    An incident begins with a fault and is over once `good_steps` steps have been trained beyond the furthest step in
    which it showed; a roll-back has to come that far again first. So a run that meets the same fault again and again
    climbs, and cannot go in circles.

    Args:
        rungs: From the bottom; the last one is taken again where attempts are left.
        max_attempts: How many rungs an incident may take.
        good_steps: How many steps without a fault end it.
    """

    def __init__(self, rungs: Sequence[Rung], max_attempts: int, good_steps: int) -> None:
        self.rungs = tuple(rungs)
        self.max_attempts = max_attempts
        self.good_steps = good_steps
        self.attempts: list[Attempt] = []
        """Of the incident that is not over."""
        self.taken: Counter[str] = Counter()
        """How often each rung was taken, in all incidents."""
        self.first_step = 0
        """The earliest step in which the incident showed."""
        self.ends_at = 0
        """The step after which the incident is over, if no fault comes."""

    def climb(self, step: int, fault: str) -> Attempt | None:
        """The rung for a fault, in words, of `step`; None once all attempts are used up."""
        if len(self.attempts) >= self.max_attempts:
            return None
        self.first_step = min(self.first_step, step) if self.attempts else step
        self.ends_at = max(step + self.good_steps, self.ends_at if self.attempts else 0)
        number = len(self.attempts) + 1
        attempt = Attempt(number, self.rungs[min(number, len(self.rungs)) - 1], step, fault)
        self.attempts.append(attempt)
        self.taken[attempt.rung] += 1
        return attempt

    def hold_until(self, step: int) -> None:
        """Have the incident last for `good_steps` beyond `step` at least."""
        self.ends_at = max(self.ends_at, step + self.good_steps)

    def good_step(self, step: int) -> tuple[Attempt, ...]:
        """Count a step without a fault; the attempts of the incident that it ends, if it ends one."""
        if not self.attempts or step < self.ends_at:
            return ()
        over, self.attempts = tuple(self.attempts), []
        return over

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`: plain data."""
        return {
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "taken": dict(self.taken),
            "first_step": self.first_step,
            "ends_at": self.ends_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint holds."""
        self.attempts = [Attempt(**saved) for saved in state["attempts"]]
        self.taken = Counter(cast("Mapping[str, int]", state["taken"]))
        self.first_step, self.ends_at = state["first_step"], state["ends_at"]


class Recover(Hook):
    """Recovers from faults in training: skips updates, lowers the learning rate, rolls back to a checkpoint.

    Every update is checked before it is made, and an update with a fault is never made, on any rank. Buffers, such as
    running statistics, are reset to their values before that step. Then the next rung of the ladder is taken:

    - ``skip``: nothing more. The step counts, and training continues with the next batch.
    - ``lower_lr``: the learning rate is multiplied by `lr_factor` for the next `lower_lr_steps` steps. Schedulers are
      not affected. If the rung is taken again while it holds, the rate is lowered again.
    - ``roll_back``: model, optimizers, schedulers, scalers, the state of the class, random states, callbacks and the
      step counter are restored from the newest checkpoint that was saved before the incident, is whole and has finite
      weights. The data is not rewound: all batches since that checkpoint are skipped, because it is not known which of
      them led to the fault. So an epoch has fewer steps, and a run limited by `max_steps` uses more data. Checkpoints
      saved in between are removed, and the restored state is saved again under its step, with the new position in the
      data. Before the first checkpoint this rung does the same as ``skip``.

    Each fault takes the next rung; the last rung is repeated. An incident ends, and the ladder starts again at the
    first rung, when `good_steps` steps beyond the last fault were trained without a fault and the learning rate is back
    to normal. After `max_attempts` rungs in one incident the run fails with an error that lists what was tried.

    A warning names each rung with its fault. Loggers receive ``recover/attempt`` (0 when the incident has ended),
    ``recover/lr_factor``, the number of times each rung was taken (``recover/skip`` and so on) and, for a roll-back,
    ``trainer/rolled_back_to_step``, after which later steps are logged again. The state is part of every checkpoint: a
    resumed run continues on the same rung and gives the same weights as an uninterrupted one.

    It works with a trainer class in a `ContractModule`. Costs: the device is synchronized at each update, buffers are
    copied in each step, and several ranks reduce a number in each step. With 16-mixed, an overflow handled by the
    scaler is not a fault; a loss that is not finite is.

    Args:
        ladder: The rungs in order: ``skip``, ``lower_lr`` and ``roll_back``. A rung may be repeated or left out.
        faults: What counts as a fault: ``nonfinite`` (a loss or gradient is nan or infinite), ``loss_spike`` and
            ``exploding_gradients``, with the rules of `Diagnosis`. The last two can also occur in a healthy run.
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
    _of_this_process = frozenset({"_trainer"})
    _trainer: pl.Trainer | None = None
    called_by = "Recover"

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
        wrong = _argument_faults(
            ladder,
            faults,
            counts={"lower_lr_steps": lower_lr_steps, "good_steps": good_steps, "max_attempts": max_attempts},
            lr_factor=lr_factor,
        )
        if wrong:
            raise ValueError(f"Invalid arguments of Recover: {', '.join(wrong)}.")
        self.faults = tuple(faults)
        self.lr_factor = lr_factor
        self.lower_lr_steps = lower_lr_steps
        self._arguments = (cast("Sequence[Rung]", ladder), max_attempts, good_steps)
        self.judges_losses = "loss_spike" in faults
        self.judges_norms = "exploding_gradients" in faults
        self._train_began_at = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        """Begin a run, without a fault so far."""
        self.ladder = Ladder(*self._arguments)
        self.history = History()
        self.rate_factor = 1.0
        """By what learning rates are multiplied now."""
        self._lowered_until = 0
        self._leaves_out_next = False
        """Whether the next update has a gradient of a step in which a fault was found and no update was due."""
        self._target: Target | None = None
        self._forget_step()

    def _forget_step(self) -> None:
        self._found: list[Fault] = []
        self._loss: float | None = None
        self._norm: float | None = None
        self._has_left_out = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":  # a resume restores the state after this
            self._begin()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        alike = [callback for callback in callbacks_of(trainer) if isinstance(callback, Recover)]
        wrong = _start_faults(trainer, pl_module, self.ladder.rungs, self.faults, is_alone=len(alike) == 1)
        if wrong:
            raise RecoveryError(f"Recover cannot be used here: {'; '.join(wrong)}")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._train_began_at = time.monotonic()
        run_state_of(trainer).rolls_back = False
        run_id_of(trainer)  # by which checkpoints are distinguished from those of other runs
        saver, channel = _saver_of(trainer), getattr(pl_module, "rank_channel", None)
        if "roll_back" in self.ladder.rungs and saver is not None and channel is not None and channel.size > 1:
            require_shared_directory(channel, saver.directory)  # every rank reads what it goes back to

    # What the guard of updates asks, within a step.

    def may_update(self, loss: float | None, gradient_norm: float | None) -> bool:
        """Whether an update is made; asked with the same figures on all ranks."""
        assert self._trainer is not None
        if self._leaves_out_next:
            self._leaves_out_next, self._has_left_out = False, True
            return False
        found = self._faults_of(self._trainer.global_step + 1, loss, gradient_norm)
        self._found += found
        self._norm = gradient_norm if self._norm is None else max(self._norm, gradient_norm or 0.0)
        self._has_left_out = self._has_left_out or bool(found)
        return not found

    def _faults_of(self, step: int, loss: float | None, gradient_norm: float | None) -> list[Fault]:
        reading = reading_of_update(step, loss, gradient_norm)
        return faults_of_update(reading, self.history, self.faults)

    def note_loss(self, loss: float | None, *, is_scaled: bool) -> None:
        """A step has ended, of which this is the largest loss on this rank; ``nan`` where one is not finite."""
        self._loss = loss

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        loss = self._loss if trainer.world_size == 1 else _of_all_ranks(trainer, self._loss)
        found = {fault.kind: fault for fault in (*self._faults_of(step, loss, None), *self._found)}
        if found and not self._has_left_out:
            # Gradients that wait for the end of a window; a scaler leaves out its updates by itself.
            self._leaves_out_next = not scaled_by(trainer, pl_module)
        if not self._has_left_out and not found:
            self.history.add(reading_of_update(step, loss if self.judges_losses else None, self._norm))
        self._forget_step()
        if found:
            self._climb(trainer, next(iter(found.values())))  # a loss that is not finite has such gradients
        elif over := self.ladder.good_step(step):
            publish_figures(trainer, {"recover/attempt": 0.0})
            if trainer.is_global_zero:
                log.info("recovered at step %d, after: %s", step, _tried(over))
        if self._lowered_until and step >= self._lowered_until:
            self._raise_rate(trainer)

    def _climb(self, trainer: pl.Trainer, fault: Fault) -> None:
        step = trainer.global_step
        attempt = self.ladder.climb(step, fault.text)
        if attempt is None:
            raise ending_the_run(RecoveryError(_given_up(self.ladder, step, fault.text)))
        figures = {"recover/attempt": float(attempt.number), f"recover/{attempt.rung}": self.ladder.taken[attempt.rung]}
        what = "The update is skipped"
        if attempt.rung == "lower_lr":
            self.rate_factor *= self.lr_factor
            self._lowered_until = step + self.lower_lr_steps
            self.ladder.hold_until(self._lowered_until)
            figures["recover/lr_factor"] = self.rate_factor
            what += f", and the learning rate is multiplied by {self.rate_factor:.4g} until step {self._lowered_until}"
        if attempt.rung == "roll_back":
            saver = _saver_of(trainer)
            assert saver is not None
            self._target = last_good_checkpoint(trainer, saver, self.ladder.first_step)
            run_state_of(trainer).rolls_back = self._target is not None
            if self._target is None:
                what += ", because there is no good checkpoint from before the incident"
            else:
                what = f"Training rolls back to step {self._target[0]} and skips the batches since then"
        publish_figures(trainer, figures)
        if trainer.is_global_zero:
            log.warning("step %d: %s. %s (attempt %d)", step, fault.text, what, attempt.number)

    @override
    def on_roll_back_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        target, self._target = self._target, None
        run_state_of(trainer).rolls_back = False
        saver = _saver_of(trainer)
        assert target is not None
        assert saver is not None
        step, saved_at = trainer.global_step, target[1].stat().st_mtime
        log_to_loggers(trainer, {ROLLED_BACK_METRIC: float(target[0])}, step)
        restore(trainer, pl_module, target, keeps=self)
        self._leaves_out_next = False
        for callback in callbacks_of(trainer):
            if isinstance(callback, Hook):
                rewind(callback, trainer.global_step)
        fire(trainer, "on_roll_back")
        if trainer.is_global_zero:
            abandon_later(trainer, saver, target[0])
            log.warning(
                "rolled back from step %d to step %d; the batches of these %d steps are skipped",
                *(step, target[0], step - target[0]),
            )
        lost_s = min(time.time() - saved_at, time.monotonic() - self._train_began_at)
        fire(trainer, "on_time_spent", "lost", max(lost_s, 0.0))
        saver.save(trainer, pl_module, wait=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "ladder": self.ladder.state_dict(),
            "history": self.history.state_dict(),
            "rate_factor": self.rate_factor,
            "lowered_until": self._lowered_until,
            "leaves_out_next": self._leaves_out_next,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ladder.load_state_dict(state_dict["ladder"])
        self.history.load_state_dict(state_dict["history"])
        self.rate_factor, self._lowered_until = state_dict["rate_factor"], state_dict["lowered_until"]
        self._leaves_out_next = state_dict["leaves_out_next"]

    def _raise_rate(self, trainer: pl.Trainer) -> None:
        self.rate_factor, self._lowered_until = 1.0, 0
        publish_figures(trainer, {"recover/lr_factor": 1.0})


def _of_all_ranks(trainer: pl.Trainer, loss: float | None) -> float | None:
    """The largest loss of all ranks, ``nan`` where one is not finite; the same on all."""
    largest = torch.tensor(as_maximum(loss), dtype=torch.float64, device=trainer.strategy.root_device)
    return from_maximum(trainer.strategy.reduce(largest, reduce_op="max").item())


def _tried(attempts: Sequence[Attempt]) -> str:
    return ", ".join(f"{attempt.rung} at step {attempt.step}" for attempt in attempts)


def _given_up(ladder: Ladder, step: int, text: str) -> str:
    return (
        f"training could not be recovered: {text}, at step {step}, after {len(ladder.attempts)} attempts since step "
        f"{ladder.attempts[0].step}: {_tried(ladder.attempts)}. Mend the cause, such as a learning rate that is too "
        "high or broken data, and resume from a checkpoint"
    )


def _argument_faults(
    ladder: Sequence[str],
    faults: Sequence[str],
    *,
    counts: dict[str, int],
    lr_factor: float,
) -> list[str]:
    """The faults in the arguments of `Recover`, each with what was expected."""
    wrong = [*_unknown("ladder", ladder, RUNGS), *_unknown("faults", faults, FAULT_KINDS)]
    wrong += [f"`{name}` {value} (expected a number >= 1)" for name, value in counts.items() if value < 1]
    if not isinstance(ladder, str) and 1 <= counts["max_attempts"] < len(ladder):
        wrong.append(f"`max_attempts` {counts['max_attempts']} (expected at least the {len(ladder)} rungs of `ladder`)")
    if not 0 < lr_factor < 1:
        wrong.append(f"`lr_factor` {lr_factor} (expected a number between 0 and 1)")
    return wrong


def _unknown(name: str, given: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    expected = ", ".join(known)
    if isinstance(given, str) or not given:
        yield f"`{name}` {given!r} (expected a list of at least one of {expected})"
    else:
        yield from (f"`{name}` with {each!r} (expected {expected})" for each in given if each not in known)


def _saver_of(trainer: pl.Trainer) -> Checkpoint | None:
    """The callback whose checkpoints a roll-back goes to: the first that saves while training."""
    return next((each for each in savers_of(trainer) if each.saves_while_training), None)


def _start_faults(
    trainer: pl.Trainer, pl_module: Any, rungs: Collection[str], faults: Collection[str], *, is_alone: bool
) -> list[str]:
    """Why a run cannot be recovered, each with the way out.

    Args:
        trainer: The trainer of the run, set up.
        pl_module: Its module.
        rungs: Of the ladder.
        faults: What is recovered from.
        is_alone: Whether there is no second `Recover`.
    """
    if getattr(pl_module, "discovered", None) is None:
        return [f"it needs a trainer class in a ContractModule, and {type(pl_module).__name__} is not one"]
    wrong = [] if is_alone else ["there is more than one Recover callback; keep one of them"]
    watches = (each for each in callbacks_of(trainer) if isinstance(each, WatchNonfinite) and each.policy != "warn")
    wrong += [f"`on_nonfinite: {each.policy}` (WatchNonfinite) conflicts with it; use `warn`" for each in watches]
    scaled = scaled_by(trainer, pl_module)
    sized = [kind for kind in faults if kind != "nonfinite"]
    if scaled and sized:
        wrong.append(
            f"{' and '.join(sized)} cannot be detected with {scaled}; use bf16-mixed, or `faults: [nonfinite]`"
        )
    if "lower_lr" in rungs:
        wrong += [
            f"'lower_lr' needs a learning rate, and a parameter group of {found.path} has none; leave that rung out"
            for found in pl_module.discovered.optimizers
            if any(group.get("lr") is None for group in found.value.param_groups)
        ]
    return [*wrong, *(_roll_back_faults(trainer, pl_module) if "roll_back" in rungs else ())]


def _roll_back_faults(trainer: pl.Trainer, pl_module: Any) -> Iterator[str]:
    if _saver_of(trainer) is None:
        yield (
            "'roll_back' needs checkpoints, and no `Checkpoint` callback saves any during training; give it a cadence "
            "(`checkpoint_every` of a job), or leave that rung out"
        )
    if isinstance(trainer.strategy, ModelParallelStrategy):
        yield "'roll_back' does not support sharded parameters (ModelParallelStrategy); leave that rung out"
    if callable(getattr(pl_module.plugin, "rollout", None)):
        yield "'roll_back' does not support trainers with a `rollout`: environments cannot go back; leave that rung out"
