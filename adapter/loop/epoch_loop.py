"""The epoch loop: batches from the loader, steps of the trainer, until the data or the steps are used up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ...callbacks.hook.events import run_state_of
from ...callbacks.lightning_internals import DataFetcher, TrainingEpochLoop, received_sigterm, signal_connector
from ..contract.exceptions import TrainingCanceled
from .hosted_module import HostedModule
from .step import LoggedInSteps, Step, counts_of

__all__ = ["ContractEpochLoop"]

STOP_POLL_S = 0.05
"""How often a pause looks for a stop request."""
CHECK_EVERY_N_STEPS = 1000
"""How often, at most, the first step of an epoch is followed by a search for modules that steps have built.

It takes as long as several small steps, and a rollout is an epoch of a few. Each checkpoint searches, too."""


class ContractEpochLoop(TrainingEpochLoop):
    """Takes batches from the loader and steps the trainer, until the data or the steps of the run are used up."""

    # A property of Lightning's, behind a property of the Trainer that hooks read in each step.
    global_step: int = 0

    def __init__(self, trainer: pl.Trainer, module: HostedModule) -> None:
        super().__init__(trainer)
        self.module = module
        self._results = LoggedInSteps(module)
        self.exhausted = False
        """Whether the loader ended, rather than the step limit."""
        self.step_in_progress: int | None = None
        """The step (from 1) that is being executed; stays until the next one begins."""
        self.validates = False
        self.validates_within = False
        """Whether validations come within epochs, not only where they end."""
        self.owes_validation = False
        """Whether the checkpoint was written before the validation that may be due after its step."""
        self.fires_module_batch_end = False
        """Whether ``on_module_batch_end`` is fired in this epoch: the module has an ``on_train_batch_end``."""
        self.loader_ended = False
        """Whether the loader was asked for a batch in this epoch that it did not have."""
        self._next_check = 0
        """Completed steps from which on an epoch's first step is followed by `check_unchanged`."""

    @property
    def completed_steps(self) -> int:
        """Steps of the contract that were completed."""
        return self.global_step

    @property
    def _is_validation_done(self) -> bool:
        # Lightning takes a restored loop without a validation run for one that was interrupted in it, and would train
        # one batch more than the epoch has. Here a validation that is due comes before the first batch.
        return True

    def roll_back_to(self, step: int) -> None:
        """Count on from `step`. Batches and epochs are those of the data, which goes on where it is."""
        self.global_step = step
        self._batches_that_stepped = step - 1  # it is counted where a step has ended
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
        self.val_loop.restarting = False  # or its first run would begin where the last one ended
        # A checkpoint is written while its step's hooks run, where the step counts as processed, not yet completed.
        self.owes_validation = progress.current.completed < counts_of(progress)[0].processed
        for counters in counts_of(progress):
            counters.ready = counters.started = counters.completed = counters.processed

    @override
    def run(self, data_fetcher: DataFetcher) -> None:
        sync = self.module.buffer_sync
        with nullcontext() if sync is None else sync.deferred() as settle:
            self._run(data_fetcher, settle)

    def _run(self, data_fetcher: DataFetcher, settle: Callable[[], None] | None) -> None:
        """An epoch; `settle` comes before all that may look at buffers, except for what a step itself calls."""
        self.reset()
        self.on_run_start(data_fetcher)
        self.module.restore_rng()
        self.validates = self.trainer.enable_validation
        self.validates_within = self.validates and not _validates_at_ends(self.trainer)
        trainer, module, progress = self.trainer, self.module, self.batch_progress
        run_state = run_state_of(trainer)
        if self.restarting:
            self._make_up_for_what_the_checkpoint_preceded(data_fetcher)
        step = Step(self, data_fetcher, settle)
        current, batches = step.current, step.batches
        signals = signal_connector(trainer)
        is_first = True
        while not (
            # `done` has many properties behind it; it is asked where these numbers do not say that there is more to do.
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
                self.loader_ended = current.ready == current.completed  # or else the module refused a batch
                if settle is not None:
                    settle()
                self._validate_after_unknown_length(data_fetcher)
                break
            if is_first:
                is_first = False
                if self.global_step >= self._next_check:
                    self._next_check = self.global_step + CHECK_EVERY_N_STEPS
                    if settle is not None:
                        settle()
                    module.check_unchanged()
            if (
                self.validates_within
                or (self.validates and progress.is_last_batch)
                or trainer.should_stop
                or signals.received_sigterm
            ) and run_state.stop_reason is None:
                if settle is not None:
                    settle()
                self.on_advance_end(data_fetcher)
            else:
                self._batches_that_stepped += 1
            if self._restarting or self._resuming_from_checkpoint:
                self.on_iteration_done()
            if run_state.stop_reason is not None:
                raise TrainingCanceled(run_state.stop_reason)
            control = getattr(module.step_result, "control", None)
            if control is not None and not self.done:
                if settle is not None:  # a pause asks the caller whether to stop
                    settle()
                self._pause(getattr(control, "backoff_seconds", None))
        else:
            self.exhausted = self.exhausted or current.ready >= batches
        self.on_iteration_done()

    @override
    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        if self.validates:
            # Validation has a collection of its own in place of this loop's.
            self.module.feed_callback_metrics()
            super().on_advance_end(data_fetcher)
            return
        self._batches_that_stepped += 1
        if self.trainer.should_stop:
            self._save_loggers_on_train_batch_end()
        # What `trainer.received_sigterm` reads.
        if received_sigterm(self.trainer) and not self._is_training_done:
            raise SIGTERMException

    def _make_up_for_what_the_checkpoint_preceded(self, data_fetcher: DataFetcher) -> None:
        """Validate after the last step of the attempt before, if that is due and was not begun."""
        self.module.feed_callback_metrics()
        if self.owes_validation and self.validates:
            self._validate_where_due(data_fetcher)
        self.owes_validation = False

    def _validate_after_unknown_length(self, data_fetcher: DataFetcher) -> None:
        """Validate at the end of an epoch whose loader has no length."""
        has_trained = self.batch_progress.current.ready > 0
        if self.validates and self.loader_ended and has_trained and self.trainer.val_check_batch == math.inf:
            self._validate_where_due(data_fetcher)

    def _validate_where_due(self, data_fetcher: DataFetcher) -> None:
        """What follows a step, of one that was counted before."""
        self._batches_that_stepped -= 1
        self.on_advance_end(data_fetcher)

    def raise_if_stopped(self) -> None:
        """End the run once a stop was agreed on.

        Raises:
            TrainingCanceled: With the reason that stands in the run state.
        """
        reason = run_state_of(self.trainer).stop_reason
        if reason is not None:
            raise TrainingCanceled(reason)

    def _pause(self, seconds: float | None) -> None:
        if not seconds:
            return
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self.module.is_canceled():
            time.sleep(min(left, STOP_POLL_S))


def _validates_at_ends(trainer: pl.Trainer) -> bool:
    """Whether validations of `trainer` come only where an epoch ends."""
    interval = trainer.val_check_batch  # None for one in seconds
    return (
        trainer.check_val_every_n_epoch is not None
        and interval is not None
        and (interval >= trainer.num_training_batches)
    )
