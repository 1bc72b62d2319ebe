"""The loop over the steps of an epoch, one step of it, and the metrics that a step logs.

`Step.run` is one long method without helper calls because it runs in every step. The limit for all of genlight's code
in a step, with all standard callbacks, is 25 µs more than a bare loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from ...callbacks.hook.events import callbacks_of, fire, run_state_of
from ...callbacks.hook.hook import listeners, skipping_hook
from ...callbacks.lightning_internals import (
    DataFetcher,
    ProcessedTracker,
    Progress,
    ResultCollection,
    TrainingEpochLoop,
    attached_trainer,
    call_hooks,
    logger_connector,
    only_iterator,
    received_sigterm,
    signal_connector,
)
from ..contract.exceptions import TrainingCanceled
from .hosted_trainer import HostedTrainer

STOP_POLL_S = 0.05
"""Seconds between two checks for a stop request during a pause."""
CHECK_EVERY_N_STEPS = 1000
"""Minimum number of steps between two calls of `check_unchanged`, which searches for modules that a step has built.

The loop calls it after the first step of an epoch. A search takes as long as several small steps, and with rollouts an
epoch may have only a few steps. Each save of a checkpoint also calls it."""
_MAY_LOG = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""Hooks of a step in which Lightning lets a callback or a module call `log`."""


class ContractEpochLoop(TrainingEpochLoop):
    """Takes batches from the loader and steps the trainer, until the data or the steps of the run are used up."""

    # A plain attribute, because hooks read it in each step, and Lightning's property costs several calls.
    global_step: int = 0
    """Completed steps of the contract."""

    def __init__(self, trainer: pl.Trainer, hosted: HostedTrainer) -> None:
        super().__init__(trainer)
        self.hosted = hosted
        self._results = LoggedInSteps(hosted)
        self.exhausted = False
        """Whether the epoch is over: its batches are used up, or the module ended it. The step limit does not count."""
        self.step_in_progress: int | None = None
        """The step (from 1) that is being executed or was executed last; None if no step began."""
        self.validates = False
        """Whether this run validates at all."""
        self.validates_within = False
        """Whether validations run within epochs, not only at their ends."""
        self.owes_validation = False
        """Whether a validation may be due after the step of the loaded checkpoint and has not run yet."""
        self.fires_module_batch_end = False
        """Whether ``on_module_batch_end`` is fired in this epoch: the module has an ``on_train_batch_end``."""
        self.loader_ended = False
        """Whether the loader raised StopIteration in this epoch; False if a length, a limit or the module ended it."""
        self._next_check = 0
        """The first step of an epoch calls `check_unchanged` only if at least this many steps are completed."""

    @property
    def _is_validation_done(self) -> bool:
        # Lightning assumes that a restored loop without a completed validation was interrupted within one, and would
        # train one batch too many. Here an overdue validation runs before the first batch.
        return True

    def roll_back_to(self, step: int) -> None:
        """Continue counting from `step`. Counters of batches and epochs stay, because the data is not rolled back."""
        self.global_step = step
        self._batches_that_stepped = step - 1  # the end of the step adds one
        self.step_in_progress = None

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state: dict[str, Any] = super().on_save_checkpoint()
        own = {"exhausted": self.exhausted, "loader_ended": self.loader_ended}
        return {**state, "completed_steps": self.global_step, **own}

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
        self.val_loop.restarting = False  # otherwise the first validation would begin where the last one ended
        # A checkpoint is written while the hooks of its step run; that step counts as processed, not yet completed.
        self.owes_validation = progress.current.completed < counts_of(progress)[0].processed
        for counters in counts_of(progress):
            counters.ready = counters.started = counters.completed = counters.processed

    @override
    def run(self, data_fetcher: DataFetcher) -> None:
        self.reset()
        self.on_run_start(data_fetcher)
        _restore_rng(self.trainer)
        self.validates = self.trainer.enable_validation
        self.validates_within = self.validates and not _validates_at_ends(self.trainer)
        trainer, hosted, progress = self.trainer, self.hosted, self.batch_progress
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
                self.loader_ended = current.ready == current.completed  # if they differ, the module refused a batch
                self._validate_after_unknown_length(data_fetcher)
                break
            if is_first:
                is_first = False
                if self.global_step >= self._next_check:
                    self._next_check = self.global_step + CHECK_EVERY_N_STEPS
                    hosted.state.check_unchanged()
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
            control = getattr(hosted.step_result, "control", None)
            if control is not None and not self.done:
                self._pause(getattr(control, "backoff_seconds", None))
        else:
            self.exhausted = self.exhausted or current.ready >= batches
        self.on_iteration_done()

    @override
    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        if self.validates:
            # Copy the metrics first: in a validation, Lightning reads the validation loop's results, not this loop's.
            self.hosted.feed_callback_metrics()
            super().on_advance_end(data_fetcher)
            return
        self._batches_that_stepped += 1
        if self.trainer.should_stop:
            self._save_loggers_on_train_batch_end()
        if received_sigterm(self.trainer) and not self._is_training_done:
            raise SIGTERMException

    def _run_overdue_validation(self, data_fetcher: DataFetcher) -> None:
        """Validate after the last step of the previous attempt, if a validation was due and had not begun."""
        self.hosted.feed_callback_metrics()
        if self.owes_validation and self.validates:
            self._validate_if_due(data_fetcher)
        self.owes_validation = False

    def _validate_after_unknown_length(self, data_fetcher: DataFetcher) -> None:
        """Validate at the end of an epoch whose loader has no length."""
        has_trained = self.batch_progress.current.ready > 0
        if self.validates and self.loader_ended and has_trained and self.trainer.val_check_batch == math.inf:
            self._validate_if_due(data_fetcher)

    def _validate_if_due(self, data_fetcher: DataFetcher) -> None:
        """Run the end of the last step again, since a validation begins there, without counting the step twice."""
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
        """Wait, as a step requested it, until `seconds` are over or a stop is requested."""
        if not seconds:
            return
        fire(self.trainer, "on_hold_up", "pause")
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self.hosted.is_canceled():
            time.sleep(min(left, STOP_POLL_S))
        fire(self.trainer, "on_hold_up", None)


class Step:
    """One step of an epoch, with everything that does not change between steps looked up once.

    Args:
        loop: The loop that runs the steps.
        data_fetcher: Fetches the batches.
    """

    def __init__(self, loop: ContractEpochLoop, data_fetcher: DataFetcher) -> None:
        trainer, hosted, module = loop.trainer, loop.hosted, loop.hosted.module
        self.loop = loop
        self.trainer = trainer
        self.hosted = hosted
        self.module = module
        self.names = module.__dict__
        """Attributes of the module; writing here bypasses ``nn.Module.__setattr__``, which costs more than a hook."""
        self.progress = loop.batch_progress
        self.current, self.total = counts_of(loop.batch_progress)
        self.batches = trainer.num_training_batches
        self.connector = logger_connector(trainer)
        self.logged = loop._results
        self.next_batch = _next_batch(trainer, data_fetcher)
        self.profiler = profiler_of(trainer)
        self.profiled = not isinstance(self.profiler, PassThroughProfiler)
        self.train = self._train_profiled if self.profiled else hosted.train_raw_batch
        self.on_start = listeners(trainer, "on_train_batch_start")
        on_end = listeners(trainer, "on_train_batch_end")
        self.on_end = [(hook, skipping_hook(hook)) for hook in on_end]
        for _, waits in self.on_end:
            if waits is not None:
                waits.next_due_step = 0
        self.run_state = run_state_of(trainer)
        self.counts_minibatches = hosted.rollouts is None  # `RolloutBatches` counts its own
        self.on_mb_end = listeners(trainer, "on_mb_end")
        self.module_on_start = _module_hook(module, "on_train_batch_start")
        self.module_on_end = _module_hook(module, "on_train_batch_end")
        self.after_module_hook = listeners(trainer, "on_module_batch_end")
        loop.fires_module_batch_end = self.module_on_end is not None
        strategy_hook = trainer.strategy.on_train_batch_start
        self.strategy_on_start = (
            strategy_hook if is_overridden("on_train_batch_start", trainer.strategy, pl.strategies.Strategy) else None
        )
        self.starts = bool(self.profiled or self.on_start or self.module_on_start or self.strategy_on_start)
        # Only code of the user calls `pl_module.log` in a step. Without any, skip Lightning's work for it.
        self.has_user_hooks = any(
            _module_hook(module, name) or any(map(_is_user_hook, listeners(trainer, name))) for name in _MAY_LOG
        )
        self.name_at_end = "on_train_batch_end" if self.has_user_hooks else None

    def run(self) -> bool:
        """Train one batch; False if there is none left or the module ended the epoch."""
        loop, trainer, module, current, total = self.loop, self.trainer, self.module, self.current, self.total
        step = loop.step_in_progress = loop.global_step + 1
        try:
            raw = self.next_batch()
        except StopIteration:
            loop.step_in_progress = None
            return False
        except TrainingCanceled:  # a stop ended the wait for the batch, and the step has not begun
            loop.step_in_progress = None
            raise
        index = current.ready
        if self.counts_minibatches:
            self.run_state.minibatch_index = index
        current.ready = index + 1
        total.ready += 1
        self.progress.is_last_batch = index + 1 >= self.batches
        if self.has_user_hooks:
            self.connector.on_batch_start(raw)
        if self.starts and not self._batch_start(raw, index):
            loop.step_in_progress = None
            return False
        current.started += 1
        total.started += 1
        self.names["_current_fx_name"] = "training_step"
        try:
            outputs = self.train(raw)
        except StopIteration as error:
            # Lightning would take it for the end of the data and end the run as if it were complete.
            raise RuntimeError("the trainer raised StopIteration inside a step") from error
        current.processed += 1
        total.processed += 1
        loop.global_step = step
        if self.profiled:
            call_hooks(trainer, "on_train_batch_end", outputs, raw, index)
            self._after_module_hook()
        else:
            self.names["_current_fx_name"] = self.name_at_end
            run_state = self.run_state
            for hook, waits in self.on_end:
                if waits is not None and step < waits.next_due_step and run_state.stop_reason is None:
                    continue
                hook(trainer, module, outputs, raw, index)
            if self.has_user_hooks:
                if self.module_on_end:
                    self.module_on_end(outputs, raw, index)
                self._after_module_hook()
        for hook in self.on_mb_end:
            hook(trainer, module)
        if self.run_state.rolls_back:  # like a save, this happens before the step counts as complete
            fire(trainer, "on_roll_back_due")
            self.hosted.state.check_unchanged()
        current.completed += 1
        total.completed += 1
        return True

    def _train_profiled(self, raw: Any) -> Any:
        strategy = type(self.trainer.strategy).__name__
        # Lightning's names; its profiler of torch starts at the first one that ends in `training_step`.
        with (
            self.profiler.profile("run_training_batch"),
            self.profiler.profile(f"[Strategy]{strategy}.training_step"),
        ):
            return self.hosted.train_raw_batch(raw)

    def _batch_start(self, raw: Any, index: int) -> bool:
        """Call the hooks before a step; False if the module ends the epoch."""
        trainer, module = self.trainer, self.module
        if self.profiled:
            return bool(call_hooks(trainer, "on_train_batch_start", raw, index) != -1)
        self.names["_current_fx_name"] = "on_train_batch_start"
        for hook in self.on_start:
            hook(trainer, module, raw, index)
        response = self.module_on_start(raw, index) if self.module_on_start else None
        if self.strategy_on_start is not None:
            self.strategy_on_start(raw, index)
        return bool(response != -1)

    def _after_module_hook(self) -> None:
        """Fire ``on_module_batch_end`` if the module has the hook, and collect the metrics logged in the step."""
        for hook in self.after_module_hook if self.module_on_end else ():
            hook(self.trainer, self.module)
        self.names["_current_fx_name"] = None
        if not self.has_user_hooks:
            return
        if len(self.logged):
            self.connector.on_batch_end()
            self.connector.update_train_step_metrics()
        else:
            self.logged.batch = self.logged.batch_size = None


class LoggedInSteps(ResultCollection):
    """The metrics that user code logged, and the last step's metrics, for readers of ``trainer.callback_metrics``.

    Lightning asks this object at each access, so no step makes tensors of metrics that nobody reads.
    ``trainer.progress_bar_metrics`` has the metrics last sent to loggers.
    """

    def __init__(self, hosted: HostedTrainer) -> None:
        super().__init__(training=True)
        self._hosted = hosted

    def __bool__(self) -> bool:
        return bool(len(self)) or self._hosted.step_result is not None

    @override
    def metrics(self, on_step: bool) -> Any:
        metrics = super().metrics(on_step)
        metrics["callback"] = {**self._hosted.metrics_on_device(), **metrics["callback"]}
        metrics["pbar"] = {**self._hosted.published, **metrics["pbar"]}
        return metrics


def start_after(trainer: pl.Trainer, step: int) -> None:
    """Set the number of completed steps of the loop of `trainer` to `step`, if it is a `ContractEpochLoop`."""
    loop = trainer.fit_loop.epoch_loop
    if isinstance(loop, ContractEpochLoop):
        loop.global_step = loop._batches_that_stepped = step


def own_epoch_loop(module: pl.LightningModule) -> ContractEpochLoop | None:
    """Return the loop that steps `module`; None before `install_loop`."""
    trainer = attached_trainer(module)
    loop = None if trainer is None else trainer.fit_loop.epoch_loop
    return loop if isinstance(loop, ContractEpochLoop) else None


def _restore_rng(trainer: pl.Trainer) -> None:
    """Restore the random number generators before the first batch is fetched, because fetching may draw numbers."""
    for callback in callbacks_of(trainer):
        restore = getattr(callback, "restore_pending_rng", None)
        if restore is not None:
            restore(trainer)


def counts_of(progress: Progress) -> tuple[ProcessedTracker, ProcessedTracker]:
    """Return the counters of this run of the loop and of all runs, with the type that Lightning does not declare."""
    assert isinstance(progress.current, ProcessedTracker)
    assert isinstance(progress.total, ProcessedTracker)
    return progress.current, progress.total


def _next_batch(trainer: pl.Trainer, data_fetcher: DataFetcher) -> Callable[[], Any]:
    """Return a function that returns the next batch or raises StopIteration."""
    combined = data_fetcher.combined_loader
    is_single = len(combined.flattened) == 1 and combined.iterables is combined.flattened[0]
    if is_single and isinstance(profiler_of(trainer), PassThroughProfiler):
        return only_iterator(combined).__next__
    return lambda: next(data_fetcher)[0]


def profiler_of(trainer: pl.Trainer) -> Profiler:
    """Return the profiler of `trainer`; Lightning sets the attribute without declaring it."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    return profiler


def _module_hook(module: pl.LightningModule, name: str) -> Callable[..., Any] | None:
    hook: Callable[..., Any] = getattr(module, name)
    return hook if getattr(hook, "__func__", hook) is not getattr(pl.LightningModule, name) else None


def _is_user_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook is not genlight's own."""
    ours = __name__.rpartition(".adapter")[0] + "."
    return not type(getattr(hook, "__self__", None)).__module__.startswith(ours)


def _validates_at_ends(trainer: pl.Trainer) -> bool:
    """Whether `trainer` validates only at the ends of epochs."""
    interval = trainer.val_check_batch  # None if the interval is in seconds
    return (
        trainer.check_val_every_n_epoch is not None
        and interval is not None
        and (interval >= trainer.num_training_batches)
    )
