"""The training loop, as a Lightning loop.

Lightning has no public loop class since 2.0, so this module subclasses two protected ones. All use of protected names
of Lightning's loops is in this file, and a name that is missing is an `ImportError` when it is imported.

One epoch, with the hooks in Lightning's order::

    on_train_start; on_new_training_run
    a stop was asked for?  raise TrainingCanceled
    for every epoch:
        on_train_epoch_start
        while completed_steps < max_steps:
            raw = next(batches)                              # never after the last step
            callbacks, module, strategy: on_train_batch_start(raw)       # -1 of the module ends the epoch
            batch = prepare_batch(raw); result = train_step(batch)
            completed_steps += 1
            callbacks, module: on_train_batch_end            # cadences: metrics, checkpoint, samples
            on_mb_end
            a stop was asked for?  raise TrainingCanceled, and validate after a resume
            validation, where it is due and a validation loader and a `validation_step` exist
            pause for `backoff_seconds`
        on_train_epoch_end; on_train_phase_end; on_epoch_end
    on_train_end; on_training_end

What nobody overrides is not called. ``trainer.global_step`` is the number of completed steps, whatever optimizers do.

Where this differs from Lightning's own loop:

- Raw batches go to ``prepare_batch`` as the loader made them: hooks that transfer batches are not called.
- Who listens to the hooks of a step is looked up when an epoch begins: a callback that is added, removed or given a
  hook within one counts from the next epoch on.
- No batch is fetched ahead. So the last batch of a loader without length has ``is_last_batch`` False, its epoch is
  validated when the loader has ended, and not where the step limit ends the run first.
- A run without steps left to do starts and ends, with `on_train_start` and `on_train_end`.
- A resumed run goes on after any step with the batches, epochs and validations that were to come.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.progress import _ProcessedTracker, _Progress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from ...callbacks.hook.events import fire, run_state_of
from ...callbacks.hook.listeners import after_failure, listeners, skipping_hook
from ...callbacks.lightning_internals import require_names
from ..contract.exceptions import InputError, TrainingCanceled

if TYPE_CHECKING:
    from ..module.module import ContractModule

__all__ = ["ContractEpochLoop", "ContractFitLoop", "install_loop"]

STOP_POLL_S = 0.05
"""How often a pause looks for a stop request."""

require_names(
    "lightning",
    _FitLoop,
    "setup_data",
    "on_run_start",
    "on_run_end",
    "advance",
    "on_advance_end",
    "reset",
    "done",
    "teardown",
)
require_names(
    "lightning",
    _TrainingEpochLoop,
    "on_run_start",
    "on_advance_end",
    "reset",
    "run",
    "global_step",
    "update_restart_stage",
)
require_names("lightning", _PrefetchDataFetcher, "__next__", "setup")


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
        run_state_of(trainer).stop_reason = None  # the one that ended the last fit
        old.epoch_loop._results = _LoggedInSteps(module)
        return old
    loop = ContractFitLoop(trainer, module, min_epochs=old.min_epochs, max_epochs=old.max_epochs)
    loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = old.min_steps, old.max_steps
    loop.epoch_loop.global_step = loop.epoch_loop._batches_that_stepped = start_step
    loop.epoch_loop.val_loop = old.epoch_loop.val_loop
    loop._data_source = old._data_source
    trainer.fit_loop = loop
    return loop


class ContractFitLoop(_FitLoop):
    """Runs epochs until the contract's steps are done."""

    epoch_loop: ContractEpochLoop
    raises_stops = True
    """This loop raises `TrainingCanceled` itself, once every callback has seen the step after which the run stops."""

    def __init__(
        self, trainer: pl.Trainer, module: ContractModule, *, min_epochs: int | None, max_epochs: int | None
    ) -> None:
        self._fetcher: _DataFetcher | None = None
        super().__init__(trainer, min_epochs, max_epochs)
        self.module = module
        self.epoch_loop = ContractEpochLoop(trainer, module)
        self.restarts_within_epoch = False
        self.data_exhausted = False

    @property
    def _data_fetcher(self) -> _DataFetcher | None:
        return self._fetcher

    @_data_fetcher.setter
    def _data_fetcher(self, fetcher: _DataFetcher | None) -> None:
        # Lightning fetches one batch ahead of a loader without length, to know which batch is the last. The position
        # of such a loader would then be ahead of what was trained, and a resume would lose that batch.
        if isinstance(fetcher, _PrefetchDataFetcher):
            fetcher.prefetch_batches = 0
        self._fetcher = fetcher

    @override
    def _load_combined_loader_states(self) -> None:
        # Lightning loads them only within an epoch; a loader that counts epochs needs them between epochs too.
        if self._combined_loader_states_to_load and self._combined_loader is not None:
            self._combined_loader._load_state_dicts(self._combined_loader_states_to_load)
            self._combined_loader_states_to_load = []
            if self.epoch_loop.batch_progress.is_last_batch and not self.epoch_loop.loader_ended:
                _begin_and_leave(self._combined_loader.flattened)

    @override
    def reset(self) -> None:
        """Continue where the restored counters say: within an epoch, or after one."""
        torch.set_grad_enabled(True)
        if not self._loaded_from_state_dict:
            return
        counts = _counts(self.epoch_progress)
        is_over = self.epoch_loop.exhausted and counts[0].processed == counts[0].started
        self.restarts_within_epoch = counts[0].started > 0 and not is_over
        self.epoch_loop.restarting = self.restarts_within_epoch
        for counters in counts:
            if self.restarts_within_epoch:
                # A run that met its step limit has ended this epoch for Lightning, though there was data left.
                counters.processed = counters.completed = counters.started - 1
            else:
                counters.ready = counters.started = counters.completed = counters.processed

    @property
    def done(self) -> bool:
        """Whether to leave the loop."""
        return self.data_exhausted or bool(super().done)

    @property
    def skip(self) -> bool:
        """Whether not to run at all; a run without steps left to do still starts and ends."""
        return self.trainer.limit_train_batches == 0

    @property
    def restarted_mid_epoch(self) -> bool:
        """Whether this epoch was begun by an earlier attempt, which saw its ``on_train_epoch_start``."""
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
        self.epoch_loop.raise_if_stopped()

    @override
    def _warn_if_modules_in_eval_mode(self) -> None:
        """Nothing: frozen teachers and EMA copies are in eval mode on purpose."""

    @override
    def on_advance_start(self) -> None:
        super().on_advance_start()
        self._leave_what_is_left_of_earlier_epochs()
        # A feed that was resumed on another number of ranks within an epoch has another length in that epoch.
        length = None if self._combined_loader is None else sized_len(self._combined_loader)
        if length is not None:
            self.max_batches = length

    def _leave_what_is_left_of_earlier_epochs(self) -> None:
        # After a resume a feed cannot tell whether the rest of its epoch is to come, or was cut by
        # `limit_train_batches`; Lightning's loop does not know it either, since it ends an epoch at the step limit too.
        if self.restarts_within_epoch or self._combined_loader is None:
            return
        for loader in self._combined_loader.flattened:
            if hasattr(loader, "begin_epoch"):
                loader.begin_epoch(_counts(self.epoch_progress)[0].processed)

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
        state = run_state_of(self.trainer)
        state.epoch = self.epoch_progress.current.completed
        fire(self.trainer, "on_train_phase_end")
        fire(self.trainer, "on_epoch_end")
        batches = self.epoch_loop.batch_progress
        # Batches that the module's own `on_train_batch_start` refused are no empty source.
        if not self.epoch_loop.completed_steps and not batches.total.ready:
            raise _empty_source()
        # A source of one pass stays empty: another epoch would train nothing, and then another.
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


class ContractEpochLoop(_TrainingEpochLoop):
    """Takes batches from the loader and steps the trainer, until the data or the steps of the run are used up."""

    # A property of Lightning's, behind a property of the Trainer that hooks read in each step.
    global_step: int = 0

    def __init__(self, trainer: pl.Trainer, module: ContractModule) -> None:
        super().__init__(trainer)
        self.module = module
        self._results = _LoggedInSteps(module)
        self.exhausted = False
        """Whether the loader ended, rather than the step limit."""
        self.step_in_progress: int | None = None
        """The step (from 1) that is being executed; stays until the next one begins."""
        self.validates = False
        self.owes_validation = False
        """Whether the checkpoint was written before the validation that may be due after its step."""
        self.calls_module_on_train_batch_end = False
        """Whether the module's ``on_train_batch_end`` is called in this epoch."""
        self.loader_ended = False
        """Whether the loader was asked for a batch in this epoch that it did not have."""

    @property
    def completed_steps(self) -> int:
        """Steps of the contract that were completed."""
        return self.global_step

    @property
    def _is_validation_done(self) -> bool:
        # Lightning takes a restored loop without a validation run for one that was interrupted in it, and would train
        # one batch more than the epoch has. Here a validation that is due comes before the first batch.
        return True

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
        self.owes_validation = progress.current.completed < _counts(progress)[0].processed
        for counters in _counts(progress):
            counters.ready = counters.started = counters.completed = counters.processed

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        self.reset()
        self.on_run_start(data_fetcher)
        self.module.restore_rng()
        self.validates = self.trainer.enable_validation
        trainer, module, progress = self.trainer, self.module, self.batch_progress
        run_state = run_state_of(trainer)
        if self.restarting:
            self._make_up_for_what_the_checkpoint_preceded(data_fetcher)
        step = _Step(self, data_fetcher)
        current, batches = step.current, step.batches
        is_first = True
        while not (
            # `done` has many properties behind it; it is asked where these numbers do not say that there is more to do.
            (
                self.global_step >= self.max_steps != -1
                or current.ready == batches
                or progress.is_last_batch
                or trainer.should_stop
            )
            and self.done
        ):
            if not step.run():
                self.exhausted = progress.is_last_batch = True
                self.loader_ended = current.ready == current.completed  # or else the module refused a batch
                self._validate_where_nobody_knew_the_end(data_fetcher)
                break
            if is_first:
                is_first = False
                module.check_nothing_new()
            if (
                self.validates or trainer.should_stop or trainer._signal_connector.received_sigterm
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
    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        if self.validates:
            # Validation has a collection of its own in place of this loop's.
            self.module.feed_callback_metrics()
            super().on_advance_end(data_fetcher)
            return
        self._batches_that_stepped += 1
        if self.trainer.should_stop:
            self._save_loggers_on_train_batch_end()
        # What `trainer.received_sigterm` reads.
        if self.trainer._signal_connector.received_sigterm and not self._is_training_done:
            raise SIGTERMException

    def _make_up_for_what_the_checkpoint_preceded(self, data_fetcher: _DataFetcher) -> None:
        """Validate after the last step of the attempt before, if that is due and was not begun."""
        self.module.feed_callback_metrics()
        if self.owes_validation and self.validates:
            self._validate_where_due(data_fetcher)
        self.owes_validation = False

    def _validate_where_nobody_knew_the_end(self, data_fetcher: _DataFetcher) -> None:
        """Validate at the end of an epoch whose loader has no length."""
        has_trained = self.batch_progress.current.ready > 0
        if self.validates and self.loader_ended and has_trained and self.trainer.val_check_batch == math.inf:
            self._validate_where_due(data_fetcher)

    def _validate_where_due(self, data_fetcher: _DataFetcher) -> None:
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


_MAY_LOG = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""Hooks of a step in which Lightning lets a callback or a module call `log`."""


class _Step:
    """One step of an epoch, with everything that does not change between steps looked up once."""

    def __init__(self, loop: ContractEpochLoop, data_fetcher: _DataFetcher) -> None:
        trainer, module = loop.trainer, loop.module
        self.loop = loop
        self.trainer = trainer
        self.module = module
        self.names = module.__dict__
        """Of the module, past ``nn.Module.__setattr__``, which looks for parameters and costs more than a hook."""
        self.progress = loop.batch_progress
        self.current, self.total = _counts(loop.batch_progress)
        self.batches = trainer.num_training_batches
        self.connector = trainer._logger_connector
        self.logged = loop._results
        self.next_batch = _next_batch(trainer, data_fetcher)
        self.profiler = profiler_of(trainer)
        self.profiled = not isinstance(self.profiler, PassThroughProfiler)
        self.train = self._train_profiled if self.profiled else module.train_raw_batch
        self.on_start = listeners(trainer, "on_train_batch_start")
        on_end = listeners(trainer, "on_train_batch_end")
        self.on_end = [(hook, skipping_hook(hook)) for hook in on_end]
        for _, waits in self.on_end:
            if waits is not None:
                waits.next_due_step = 0
        self.run_state = run_state_of(trainer)
        self.scores_before = self.run_state.eval_scores
        self.on_mb_end = listeners(trainer, "on_mb_end")
        self.module_on_start = _module_hook(module, "on_train_batch_start")
        self.module_on_end = _module_hook(module, "on_train_batch_end")
        loop.calls_module_on_train_batch_end = self.profiled or self.module_on_end is not None
        strategy_hook = trainer.strategy.on_train_batch_start
        self.strategy_on_start = (
            strategy_hook if is_overridden("on_train_batch_start", trainer.strategy, pl.strategies.Strategy) else None
        )
        self.starts = bool(self.profiled or self.on_start or self.module_on_start or self.strategy_on_start)
        # Code that is not ours may call `pl_module.log` in any step.
        self.has_guests = any(
            _module_hook(module, name) or any(map(_is_guest, listeners(trainer, name))) for name in _MAY_LOG
        )
        self.name_at_end = "on_train_batch_end" if self.has_guests else None

    def run(self) -> bool:
        """Train one batch; False if there is none left or the module ended the epoch.

        What happens in every step of every run stands here and is not called, at the price of a long method.
        """
        loop, trainer, module, current, total = self.loop, self.trainer, self.module, self.current, self.total
        step = loop.step_in_progress = loop.global_step + 1
        try:
            raw = self.next_batch()
        except StopIteration:
            loop.step_in_progress = None
            return False
        index = current.ready
        current.ready = index + 1
        total.ready += 1
        self.progress.is_last_batch = index + 1 >= self.batches
        if self.has_guests:
            self._expect_logging(raw)
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
            self._batch_end_profiled(outputs, raw, index)
        else:
            self.names["_current_fx_name"] = self.name_at_end
            run_state = self.run_state
            scores, self.scores_before = self.scores_before, run_state.eval_scores
            for hook, waits in self.on_end:
                if (
                    waits is not None
                    and step < waits.next_due_step
                    and run_state.stop_reason is None
                    and run_state.eval_scores is scores
                ):
                    continue
                try:
                    hook(trainer, module, outputs, raw, index)
                except Exception as error:  # noqa: BLE001  # raised again where the policy of the hook says so
                    after_failure(hook, "on_train_batch_end", error)
            if self.has_guests:
                self._batch_end_of_guests(outputs, raw, index)
        if self.on_mb_end:
            _call(self.on_mb_end, "on_mb_end", trainer, module)
        current.completed += 1
        total.completed += 1
        return True

    def _train_profiled(self, raw: Any) -> Any:
        strategy = type(self.trainer.strategy).__name__
        # Lightning's names; its profiler of torch begins with the first one that ends in `training_step`.
        with (
            self.profiler.profile("run_training_batch"),
            self.profiler.profile(f"[Strategy]{strategy}.training_step"),
        ):
            return self.module.train_raw_batch(raw)

    def _batch_start(self, raw: Any, index: int) -> bool:
        trainer, module = self.trainer, self.module
        if self.profiled:
            call._call_callback_hooks(trainer, "on_train_batch_start", raw, index)
            response = call._call_lightning_module_hook(trainer, "on_train_batch_start", raw, index)
            call._call_strategy_hook(trainer, "on_train_batch_start", raw, index)
            return bool(response != -1)
        self.names["_current_fx_name"] = "on_train_batch_start"
        _call(self.on_start, "on_train_batch_start", trainer, module, raw, index)
        response = self.module_on_start(raw, index) if self.module_on_start else None
        if self.strategy_on_start is not None:
            self.strategy_on_start(raw, index)
        return bool(response != -1)

    def _batch_end_profiled(self, outputs: Any, raw: Any, index: int) -> None:
        call._call_callback_hooks(self.trainer, "on_train_batch_end", outputs, raw, index)
        call._call_lightning_module_hook(self.trainer, "on_train_batch_end", outputs, raw, index)
        self.names["_current_fx_name"] = None
        if self.has_guests:
            self._take_over_what_was_logged()

    def _batch_end_of_guests(self, outputs: Any, raw: Any, index: int) -> None:
        if self.module_on_end:
            self.module.on_train_batch_end(outputs, raw, index)  # by name: Checkpoint puts a save behind it
        self.names["_current_fx_name"] = None
        self._take_over_what_was_logged()

    def _expect_logging(self, raw: Any) -> None:
        """What the connector's ``on_batch_start`` does, which looks for the running loop by comparing enums."""
        self.connector._first_loop_iter = self.connector._first_loop_iter is None
        self.logged.batch, self.logged.batch_size, self.logged.dataloader_idx = raw, None, None

    def _take_over_what_was_logged(self) -> None:
        if len(self.logged):
            self.connector.on_batch_end()
            self.connector.update_train_step_metrics()
        else:
            self.logged.batch = self.logged.batch_size = None


class _LoggedInSteps(_ResultCollection):
    """What guests logged, and the metrics of the last step for whoever looks at ``trainer.callback_metrics``.

    Lightning asks this object at each look, so that a step whose metrics nobody looks at makes no tensors of them. In
    ``trainer.progress_bar_metrics`` are those that were sent to loggers last.
    """

    def __init__(self, module: ContractModule) -> None:
        super().__init__(training=True)
        self._module = module

    def __bool__(self) -> bool:
        return bool(len(self)) or self._module.step_result is not None

    @override
    def metrics(self, on_step: bool) -> Any:
        metrics = super().metrics(on_step)
        metrics["callback"] = {**self._module.metrics_on_device(), **metrics["callback"]}
        metrics["pbar"] = {**self._module.published, **metrics["pbar"]}
        return metrics


def _counts(progress: _Progress) -> tuple[_ProcessedTracker, _ProcessedTracker]:
    """The counters of this run of the loop and of all; Lightning declares them as a base class with fewer fields."""
    assert isinstance(progress.current, _ProcessedTracker)
    assert isinstance(progress.total, _ProcessedTracker)
    return progress.current, progress.total


def _begin_and_leave(loaders: list[Any]) -> None:
    """Have loaders take up their position behind the last batch of an epoch, so that the next pass begins anew.

    There may be batches left, where ``limit_train_batches`` or a shorter loader beside them ended the epoch. A loader
    that counts epochs is told of them.
    """
    with isolate_rng():
        for loader in loaders:
            if hasattr(loader, "load_state_dict") and not hasattr(loader, "begin_epoch"):
                next(iter(loader), None)


def _empty_source() -> InputError:
    return InputError("the source of batches is empty: not one step could be trained; check `dataset`")


def _next_batch(trainer: pl.Trainer, data_fetcher: _DataFetcher) -> Callable[[], Any]:
    """A function that returns the next batch or raises StopIteration."""
    combined = data_fetcher.combined_loader
    alone = len(combined.flattened) == 1 and combined.iterables is combined.flattened[0]
    if alone and isinstance(profiler_of(trainer), PassThroughProfiler):
        assert combined._iterator is not None
        iterator: Iterator[Any] = combined._iterator.iterators[0]
        return iterator.__next__
    return lambda: next(data_fetcher)[0]


def profiler_of(trainer: pl.Trainer) -> Profiler:
    """The profiler of `trainer`; Lightning sets the attribute without declaring it."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    return profiler


def _call(hooks: list[Callable[..., Any]], event: str, *args: Any) -> None:
    for hook in hooks:
        try:
            hook(*args)
        except Exception as error:  # noqa: BLE001  # raised again where the policy of the hook says so
            after_failure(hook, event, error)


def _module_hook(module: pl.LightningModule, name: str) -> Callable[..., Any] | None:
    hook: Callable[..., Any] = getattr(module, name)
    return hook if getattr(hook, "__func__", hook) is not getattr(pl.LightningModule, name) else None


def _is_guest(hook: Callable[..., Any]) -> bool:
    """Whether a hook is not genlight's own."""
    ours = __name__.rpartition(".adapter")[0] + "."
    return not type(getattr(hook, "__self__", None)).__module__.startswith(ours)
