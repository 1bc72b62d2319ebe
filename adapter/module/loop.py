"""The training loop, as a Lightning loop.

Lightning has no public loop class since 2.0, so two protected ones are subclassed.
`genlight.callbacks.lightning_internals` imports the names used of them; a missing name is an `ImportError` there.

One epoch, with the hooks in Lightning's order::

    on_train_start; on_new_training_run
    a stop was requested?  raise TrainingCanceled
    for every epoch:
        on_train_epoch_start
        while completed_steps < max_steps:
            raw = next(batches)                              # never after the last step
            callbacks, module, strategy: on_train_batch_start(raw)       # -1 from the module ends the epoch
            batch = prepare_batch(raw); result = train_step(batch)
            completed_steps += 1
            callbacks, module: on_train_batch_end            # cadences: metrics, checkpoint, samples
            on_module_batch_end                              # if the module has an on_train_batch_end
            on_mb_end
            `Recover` requested it?  on_roll_back_due, which resets completed_steps to a checkpoint's
            a stop was requested?  raise TrainingCanceled, and validate after a resume
            validation, if it is due and a validation loader and a `validation_step` exist
            pause for `backoff_seconds`
        on_train_epoch_end; on_train_phase_end; on_epoch_end
    on_train_end; on_training_end

A hook that is not overridden is not called. ``trainer.global_step`` is the number of completed steps, whatever
optimizers do.

Where this differs from Lightning's own loop:

- Raw batches go to ``prepare_batch`` as the loader made them: hooks that transfer batches are not called.
- Listeners of the hooks of a step are looked up when an epoch begins: a callback that is added, removed or changed
  within an epoch counts from the next epoch on.
- No batch is fetched ahead. So the last batch of a loader without length has ``is_last_batch`` False, and its epoch is
  validated when the loader has ended; not if the step limit ends the run first.
- A list of batches is refused: Lightning treats each batch in it as a loader.
- A run without steps left to do starts and ends, with `on_train_start` and `on_train_end`.
- A resumed run continues after any step with the next batches, epochs and validations of the original run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ...callbacks.checkpoint.loader_position import begin_and_leave, set_up_data
from ...callbacks.checkpoint.positioned_loader import with_position
from ...callbacks.hook.events import fire, run_state_of
from ...callbacks.lightning_internals import (
    DataFetcher,
    FitLoop,
    PrefetchDataFetcher,
    TrainingEpochLoop,
    attached_trainer,
    load_loader_states,
    received_sigterm,
    share_data_source,
    signal_connector,
)
from ..contract.exceptions import InputError, TrainingCanceled
from .step import LoggedInSteps, Step, counts_of

if TYPE_CHECKING:
    from .module import ContractModule


STOP_POLL_S = 0.05
"""Seconds between two checks for a stop request during a pause."""
CHECK_EVERY_N_STEPS = 1000
"""Fewest steps between two searches for modules that steps have built; a search follows the first step of an epoch.

It takes as long as several small steps, and with rollouts an epoch has only a few. Each checkpoint searches, too."""


def install_loop(trainer: pl.Trainer, module: ContractModule, *, start_step: int = 0) -> ContractFitLoop:
    """Replace the fit loop of `trainer` by ours, with the limits and data sources of the old one.

    Called from the module's ``setup("fit")``: Lightning has parsed its limits and attached the data by then, and has
    not yet restored the state of its loops.
    """
    old = trainer.fit_loop
    if isinstance(old, ContractFitLoop):
        old.module = old.epoch_loop.module = module
        old.epoch_loop.step_in_progress = None
        old.data_exhausted = False
        run_state_of(trainer).stop_reason = None  # it belongs to the last fit
        old.epoch_loop._results = LoggedInSteps(module)
        return old
    if old._combined_loader is not None:  # a caller has read its length; workers of these loaders would stay alive
        old._combined_loader.reset()
    loop = ContractFitLoop(trainer, module, min_epochs=old.min_epochs, max_epochs=old.max_epochs)
    loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = old.min_steps, old.max_steps
    loop.epoch_loop.val_loop = old.epoch_loop.val_loop
    share_data_source(loop, old)
    trainer.fit_loop = loop
    start_after(trainer, start_step)
    return loop


def start_after(trainer: pl.Trainer, step: int) -> None:
    """Count `step` steps as completed by the loop of `trainer`, if it is ours."""
    if isinstance(trainer.fit_loop, ContractFitLoop):
        trainer.fit_loop.epoch_loop.global_step = trainer.fit_loop.epoch_loop._batches_that_stepped = step


def own_epoch_loop(module: pl.LightningModule) -> ContractEpochLoop | None:
    """Return the loop that steps `module`; None before `install_loop`."""
    trainer = attached_trainer(module)
    loop = None if trainer is None else trainer.fit_loop
    return loop.epoch_loop if isinstance(loop, ContractFitLoop) else None


class ContractFitLoop(FitLoop):
    """Runs epochs until the contract's steps are done."""

    epoch_loop: ContractEpochLoop
    raises_stops = True
    """This loop raises `TrainingCanceled` itself, once every callback has seen the step after which the run stops."""

    def __init__(
        self, trainer: pl.Trainer, module: ContractModule, *, min_epochs: int | None, max_epochs: int | None
    ) -> None:
        self._fetcher: DataFetcher | None = None
        super().__init__(trainer, min_epochs, max_epochs)
        self.module = module
        self.epoch_loop = ContractEpochLoop(trainer, module)
        self.restarts_within_epoch = False
        self.data_exhausted = False

    @property
    def _data_fetcher(self) -> DataFetcher | None:
        return self._fetcher

    @_data_fetcher.setter
    def _data_fetcher(self, fetcher: DataFetcher | None) -> None:
        # Lightning fetches one batch ahead from a loader without length, to know which batch is the last. The position
        # of such a loader would then be ahead of the last trained batch, and a resume would lose one.
        if isinstance(fetcher, PrefetchDataFetcher):
            fetcher.prefetch_batches = 0
        self._fetcher = fetcher

    @override
    def setup_data(self) -> None:
        set_up_data(self, super().setup_data)
        if self._combined_loader is not None:
            _refuse_batches(self._combined_loader.iterables, self._combined_loader.flattened)

    @override
    def _load_combined_loader_states(self) -> None:
        if self._combined_loader is not None:  # Lightning makes its iterators right after this
            loaders = self._combined_loader.flattened
            positioned = [with_position(loader, self.trainer.world_size) for loader in loaders]
            if any(new is not old for new, old in zip(positioned, loaders, strict=True)):
                self._combined_loader.flattened = positioned
        # Lightning loads them only within an epoch; a loader that counts epochs needs them between epochs too.
        if self._combined_loader_states_to_load and self._combined_loader is not None:
            load_loader_states(self._combined_loader, self._combined_loader_states_to_load)
            self._combined_loader_states_to_load = []
            if self.epoch_loop.batch_progress.is_last_batch and not self.epoch_loop.loader_ended:
                # Advance loaders that count epochs by themselves.
                begin_and_leave(
                    loader
                    for loader in self._combined_loader.flattened
                    if hasattr(loader, "load_state_dict") and not hasattr(loader, "begin_epoch")
                )

    @override
    def reset(self) -> None:
        """Continue at the place of the restored counters: within an epoch, or after one."""
        torch.set_grad_enabled(True)
        if not self._loaded_from_state_dict:
            return
        counts = counts_of(self.epoch_progress)
        is_over = self.epoch_loop.exhausted and counts[0].processed == counts[0].started
        self.restarts_within_epoch = counts[0].started > 0 and not is_over
        self.epoch_loop.restarting = self.restarts_within_epoch
        for counters in counts:
            if self.restarts_within_epoch:
                # A run that reached its step limit has ended this epoch for Lightning, although data was left.
                counters.processed = counters.completed = counters.started - 1
            else:
                counters.ready = counters.started = counters.completed = counters.processed

    @property
    def done(self) -> bool:
        """Whether to leave the loop."""
        return self.data_exhausted or bool(super().done)

    @property
    def skip(self) -> bool:
        """Whether to skip the run completely; a run without steps left to do still starts and ends."""
        return self.trainer.limit_train_batches == 0

    @property
    def restarted_mid_epoch(self) -> bool:
        """Whether an earlier attempt began this epoch and called its ``on_train_epoch_start``."""
        return self.restarts_within_epoch

    @override
    def reset_restart_stage(self) -> None:
        self.restarts_within_epoch = False

    @override
    def on_run_start(self) -> None:
        if self.max_batches == 0 and self.epoch_loop.completed_steps == 0:
            raise _empty_source()
        self.module.restore_trainer()
        super().on_run_start()
        fire(self.trainer, "on_new_training_run")
        self.module.check_storable()
        self.epoch_loop.raise_if_stopped()

    @override
    def _warn_if_modules_in_eval_mode(self) -> None:
        """Do nothing: frozen teachers and EMA copies are in eval mode on purpose."""

    @override
    def on_advance_start(self) -> None:
        super().on_advance_start()
        self._skip_to_current_epoch()
        # A feed resumed within an epoch on another number of ranks has another length in that epoch.
        length = None if self._combined_loader is None else sized_len(self._combined_loader)
        if length is not None:
            self.max_batches = length

    def _skip_to_current_epoch(self) -> None:
        # After a resume a feed cannot know whether the rest of its epoch is still to be trained or was cut by
        # `limit_train_batches`. Lightning's loop does not know it either, since the step limit ends an epoch, too.
        if self.restarts_within_epoch or self._combined_loader is None:
            return
        for loader in self._combined_loader.flattened:
            if hasattr(loader, "begin_epoch"):
                loader.begin_epoch(counts_of(self.epoch_progress)[0].processed)

    @override
    def advance(self) -> None:
        try:
            super().advance()
        except StopIteration as error:
            # Lightning's loop would end the run as if it were complete.
            raise RuntimeError("a hook raised StopIteration within an epoch") from error

    @override
    def on_advance_end(self) -> None:
        super().on_advance_end()
        fire(self.trainer, "on_train_phase_end")
        run_state_of(self.trainer).epoch = self.epoch_progress.current.completed
        fire(self.trainer, "on_epoch_end")
        batches = self.epoch_loop.batch_progress
        # If the module's own `on_train_batch_start` refused all batches, the source is not empty.
        if not self.epoch_loop.completed_steps and not batches.total.ready:
            raise _empty_source()
        # A source of one pass stays empty; otherwise endless epochs would follow that train nothing.
        self.data_exhausted = batches.current.ready == 0

    @override
    def teardown(self) -> None:
        super().teardown()
        self.module.close_router()

    @override
    def on_run_end(self) -> None:
        self.module.training_ended()
        self.module.feed_callback_metrics()
        super().on_run_end()
        fire(self.trainer, "on_training_end")


class ContractEpochLoop(TrainingEpochLoop):
    """Takes batches from the loader and steps the trainer, until the data or the steps of the run are used up."""

    # In Lightning this is a property behind a property of the Trainer, and hooks read it in each step.
    global_step: int = 0

    def __init__(self, trainer: pl.Trainer, module: ContractModule) -> None:
        super().__init__(trainer)
        self.module = module
        self._results = LoggedInSteps(module)
        self.exhausted = False
        """Whether the loader ended, rather than the step limit."""
        self.step_in_progress: int | None = None
        """The step (from 1) that is being executed; stays until the next one begins."""
        self.validates = False
        self.validates_within = False
        """Whether validations run within epochs, not only at their ends."""
        self.owes_validation = False
        """Whether the validation that may be due after the checkpoint's step has not run yet."""
        self.fires_module_batch_end = False
        """Whether ``on_module_batch_end`` is fired in this epoch: the module has an ``on_train_batch_end``."""
        self.loader_ended = False
        """Whether the loader ran out of batches in this epoch, as opposed to reaching a limit."""
        self._next_check = 0
        """Number of completed steps from which the first step of an epoch calls `check_unchanged`."""

    @property
    def completed_steps(self) -> int:
        """Steps of the contract that were completed."""
        return self.global_step

    @property
    def _is_validation_done(self) -> bool:
        # Lightning assumes that a restored loop without a validation run was interrupted in it, and would train one
        # batch more than the epoch has. Here an overdue validation runs before the first batch.
        return True

    def roll_back_to(self, step: int) -> None:
        """Continue counting from `step`. Batch and epoch counters stay, because the data continues from its place."""
        self.global_step = step
        self._batches_that_stepped = step - 1  # the end of the step adds one
        self.step_in_progress = None

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state: dict[str, Any] = super().on_save_checkpoint()
        own = {"exhausted": self.exhausted, "loader_ended": self.loader_ended}
        return {**state, "completed_steps": self.completed_steps, **own}

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.global_step = state_dict["completed_steps"]
        self.exhausted = state_dict["exhausted"]
        self.loader_ended = state_dict.get("loader_ended", False)
        self._batches_that_stepped = self.global_step

    @override
    def update_restart_stage(self) -> None:
        self.val_loop.update_restart_stage()

    @override
    def reset(self) -> None:
        progress = self.batch_progress
        if not self.restarting:
            progress.reset_on_run()
            self.val_loop.batch_progress.total.reset()
            self.exhausted = self.loader_ended = False
            return
        self.val_loop.restarting = False  # otherwise its first run would begin where the last one ended
        # A checkpoint is written while the hooks of its step run; that step counts as processed, not yet completed.
        self.owes_validation = progress.current.completed < counts_of(progress)[0].processed
        for counters in counts_of(progress):
            counters.ready = counters.started = counters.completed = counters.processed

    @override
    def run(self, data_fetcher: DataFetcher) -> None:
        self.reset()
        self.on_run_start(data_fetcher)
        self.module.restore_rng()
        self.validates = self.trainer.enable_validation
        self.validates_within = self.validates and not _validates_at_ends(self.trainer)
        trainer, module, progress = self.trainer, self.module, self.batch_progress
        run_state = run_state_of(trainer)
        if self.restarting:
            self._run_overdue_validation(data_fetcher)
        step = Step(self, data_fetcher)
        current, batches = step.current, step.batches
        signals = signal_connector(trainer)
        is_first = True
        while not (
            # `done` reads many properties; skip it while these numbers already show that there is more to do.
            (
                (self.max_steps != -1 and self.global_step >= self.max_steps)
                or current.ready == batches
                or progress.is_last_batch
                or trainer.should_stop
            )
            and self.done
        ):
            if not step.run():
                self.exhausted = progress.is_last_batch = True
                self.loader_ended = current.ready == current.completed  # otherwise the module refused a batch
                self._validate_after_unknown_length(data_fetcher)
                break
            if is_first:
                is_first = False
                if self.global_step >= self._next_check:
                    self._next_check = self.global_step + CHECK_EVERY_N_STEPS
                    module.check_unchanged()
            if (
                self.validates_within
                or (self.validates and progress.is_last_batch)
                or trainer.should_stop
                or signals.received_sigterm
            ) and run_state.stop_reason is None:
                self.on_advance_end(data_fetcher)
            else:
                self._batches_that_stepped += 1
            if self._restarting or self._resuming_from_checkpoint:
                self.on_iteration_done()
            if run_state.stop_reason is not None:
                raise TrainingCanceled(run_state.stop_reason)
            control = getattr(module.step_result, "control", None)
            if control is not None and not self.done:
                self._pause(getattr(control, "backoff_seconds", None))
        else:
            self.exhausted = self.exhausted or current.ready >= batches
        self.on_iteration_done()

    @override
    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        if self.validates:
            # During a validation, Lightning reads the validation loop's results instead of this loop's.
            self.module.feed_callback_metrics()
            super().on_advance_end(data_fetcher)
            return
        self._batches_that_stepped += 1
        if self.trainer.should_stop:
            self._save_loggers_on_train_batch_end()
        # The flag behind `trainer.received_sigterm`.
        if received_sigterm(self.trainer) and not self._is_training_done:
            raise SIGTERMException

    def _run_overdue_validation(self, data_fetcher: DataFetcher) -> None:
        """Validate after the last step of the previous attempt, if a validation was due and had not begun."""
        self.module.feed_callback_metrics()
        if self.owes_validation and self.validates:
            self._validate_if_due(data_fetcher)
        self.owes_validation = False

    def _validate_after_unknown_length(self, data_fetcher: DataFetcher) -> None:
        """Validate at the end of an epoch whose loader has no length."""
        has_trained = self.batch_progress.current.ready > 0
        if self.validates and self.loader_ended and has_trained and self.trainer.val_check_batch == math.inf:
            self._validate_if_due(data_fetcher)

    def _validate_if_due(self, data_fetcher: DataFetcher) -> None:
        """Run the end of a step again for a step that was already counted."""
        self._batches_that_stepped -= 1
        self.on_advance_end(data_fetcher)

    def raise_if_stopped(self) -> None:
        """End the run if the ranks have agreed on a stop.

        Raises:
            TrainingCanceled: With the reason in the run state.
        """
        reason = run_state_of(self.trainer).stop_reason
        if reason is not None:
            raise TrainingCanceled(reason)

    def _pause(self, seconds: float | None) -> None:
        if not seconds:
            return
        fire(self.trainer, "on_hold_up", "pause")
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self.module.is_canceled():
            time.sleep(min(left, STOP_POLL_S))
        fire(self.trainer, "on_hold_up", None)


def _empty_source() -> InputError:
    return InputError("the source of batches is empty: not one step could be trained; check `dataset`")


def _refuse_batches(source: Any, loaders: Sequence[Any]) -> None:
    """Refuse a list of batches: Lightning treats each batch in it as a loader.

    Raises:
        InputError: Each of the `loaders` that Lightning finds in `source` is a batch.
    """
    kinds: tuple[type, ...] = (torch.Tensor, np.ndarray, dict)
    arrow = sys.modules.get("pyarrow")  # without an import of pyarrow there can be no batch of its types
    if arrow is not None:
        kinds += (arrow.RecordBatch, arrow.Table)
    if isinstance(source, list | tuple) and loaders and all(isinstance(loader, kinds) for loader in loaders):
        raise InputError(
            f"The data is a list of batches ({len(loaders)}, of type {type(loaders[0]).__name__}). Lightning treats "
            "each of them as a loader and iterates over all of them in parallel. Pass "
            "`torch.utils.data.DataLoader(batches, batch_size=None)` instead."
        )


def _validates_at_ends(trainer: pl.Trainer) -> bool:
    """Whether `trainer` validates only at the ends of epochs."""
    interval = trainer.val_check_batch  # None for an interval in seconds
    return (
        trainer.check_val_every_n_epoch is not None
        and interval is not None
        and (interval >= trainer.num_training_batches)
    )
