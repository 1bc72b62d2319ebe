"""One step of an epoch, and the metrics that a step logs.

`Step.run` is one long method without helper calls because it runs in every step: with all standard callbacks a step
may cost 25 µs more than a bare loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from ...callbacks.hook.events import fire, run_state_of
from ...callbacks.hook.hook import listeners, skipping_hook
from ...callbacks.lightning_internals import (
    DataFetcher,
    ProcessedTracker,
    Progress,
    ResultCollection,
    call_hooks,
    logger_connector,
    only_iterator,
)
from ..contract.exceptions import TrainingCanceled

if TYPE_CHECKING:
    from .loop import ContractEpochLoop
    from .module import ContractModule


_MAY_LOG = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""Hooks of a step in which Lightning lets a callback or a module call `log`."""


class Step:
    """One step of an epoch, with everything that does not change between steps looked up once.

    Args:
        loop: The loop that runs the steps.
        data_fetcher: Fetches the batches.
    """

    def __init__(self, loop: ContractEpochLoop, data_fetcher: DataFetcher) -> None:
        trainer, module = loop.trainer, loop.module
        self.loop = loop
        self.trainer = trainer
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
        self.train = self._train_profiled if self.profiled else module.train_raw_batch
        self.on_start = listeners(trainer, "on_train_batch_start")
        on_end = listeners(trainer, "on_train_batch_end")
        self.on_end = [(hook, skipping_hook(hook)) for hook in on_end]
        for _, waits in self.on_end:
            if waits is not None:
                waits.next_due_step = 0
        self.run_state = run_state_of(trainer)
        self.counts_minibatches = getattr(module.plugin, "rollout", None) is None  # `RolloutBatches` counts its own
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
        # Code that is not ours may call `pl_module.log` in any step.
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
            # Lightning would treat it as the end of the data and end the run as if it were complete.
            raise RuntimeError("the trainer raised StopIteration inside a step") from error
        current.processed += 1
        total.processed += 1
        loop.global_step = step
        if self.profiled:
            self._batch_end_profiled(outputs, raw, index)
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
        if self.run_state.rolls_back:  # before the step counts as complete, like every save
            fire(trainer, "on_roll_back_due")
            module.check_unchanged()
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
            return self.module.train_raw_batch(raw)

    def _batch_start(self, raw: Any, index: int) -> bool:
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

    def _batch_end_profiled(self, outputs: Any, raw: Any, index: int) -> None:
        call_hooks(self.trainer, "on_train_batch_end", outputs, raw, index)
        self._after_module_hook()

    def _after_module_hook(self) -> None:
        """Call callbacks after the module's own hook, and collect the metrics logged in the step."""
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
    """Metrics that user callbacks logged, and the last step's for readers of ``trainer.callback_metrics``.

    Lightning reads this object at each access, so a step makes no tensors of metrics that nobody reads.
    ``trainer.progress_bar_metrics`` has the metrics last sent to loggers.
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


def _module_hook(module: ContractModule, name: str) -> Callable[..., Any] | None:
    hook: Callable[..., Any] = getattr(module, name)
    return hook if getattr(hook, "__func__", hook) is not getattr(pl.LightningModule, name) else None


def _is_user_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook is not genlight's own."""
    ours = __name__.rpartition(".adapter")[0] + "."
    return not type(getattr(hook, "__self__", None)).__module__.startswith(ours)
