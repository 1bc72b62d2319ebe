"""Send metrics to loggers, monitors and the progress bar at a cadence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from typing_extensions import override

from ..adapter.plumbing.text import require
from .hook.cadence import next_multiple, step_cadence, suppressed
from .hook.events import FIGURES_FIELD, data_wait_s, hosted_by, run_state_of
from .hook.hook import Hook, listeners, skippable
from .lightning_internals import logger_connector, set_callback_metrics
from .rank_channel import Channel

log = logging.getLogger(__name__)


WAIT_FRACTION = "data/wait_fraction"
"""Metric: share of the time spent waiting for data, from 0 to 1."""


EVALUATED_STEP = "trainer/evaluated_step"
"""Metric: the step of scores that arrive at a later step."""


class LogMetrics(Hook):
    """Sends one record of metrics to every logger of the trainer at a cadence of steps.

    A record merges the metrics of the step, the means of the newest rollout's statistics (``rollout/…``), the share of
    time spent waiting for data, the scores of an evaluation, and the figures of other hooks: ``time/…`` of `Goodput`,
    ``system/…`` of `SystemMonitor`, ``perf/…`` of `Heartbeat`, ``diagnosis/…`` of `Diagnosis`. Scores and figures that
    come at another step are sent at the end of that step. ``trainer/evaluated_step`` is the earlier step to which late
    scores belong.

    Metrics and scores, but not figures, also go to ``callback_metrics`` and the progress bar. Fires ``on_metrics``.

    On several ranks, metrics and statistics of rollouts come from rank zero and describe only its rows. With
    ``reduce="mean"`` they are the means over all ranks, which exchange them only at the cadence. A rank without a
    metric does not count in its mean. A monitor that reads metrics between two cadences sees those of rank zero.

    It is for modules that host a trainer class. Other modules log by themselves: for these it warns, and sends only
    scores and the figures of other hooks.

    Args:
        every_n_steps: Cadence in steps; 0 turns it off.
        reduce: ``mean``: report the means over all ranks; None: rank zero's metrics.

    Raises:
        ValueError: `every_n_steps` is negative, or `reduce` is something else.
    """

    critical = True
    _of_this_process = frozenset({"_channel", "_listeners"})
    _channel: Channel | None = None
    """Exchanges metrics with the other ranks; None if only the metrics of rank zero are sent."""
    _listeners: Sequence[Callable[..., Any]] = ()
    """The ``on_metrics`` of other callbacks."""
    optional_reads = ("eval_scores", FIGURES_FIELD)
    writes = ("loss_stats",)

    def __init__(self, every_n_steps: int = 10, *, reduce: Literal["mean"] | None = None) -> None:
        require((reduce in (None, "mean"), "reduce", "'mean' or None", reduce))
        self.reduce = reduce
        self.ranks = "zero" if reduce is None else "all"
        self.every_n_steps = step_cadence("every_n_steps", every_n_steps)
        self._unsent_scores: Mapping[str, float] = {}
        self._unsent_figures: Mapping[str, float] = {}
        self._waited: tuple[float, float] | None = None
        """Seconds waited for data until the last record, and its time; None if the loader measures no wait."""
        self._sent_rollout: Mapping[str, Any] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and hosted_by(pl_module) is None and trainer.is_global_zero:
            name = type(pl_module).__name__
            log.warning("LogMetrics sends no metrics of steps: %s does not host a trainer and logs by itself", name)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._unsent_scores, self._unsent_figures = {}, {}
        self._listeners = listeners(trainer, "on_metrics")
        self._sent_rollout = run_state_of(trainer).rollout_stats
        waited_s = data_wait_s(trainer)
        self._waited = None if waited_s is None else (waited_s, time.monotonic())
        self._channel = Channel() if self.reduce is not None and trainer.world_size > 1 else None

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        every = self.every_n_steps
        self.next_due_step = next_multiple(step, every)
        metrics: dict[str, float] = {}
        step_metrics: dict[str, float] | None = None
        rollout_metrics: dict[str, float] = {}
        # Steps come one by one, so a multiple of the cadence is a crossed boundary.
        is_due = every > 0 and step % every == 0
        hosted = getattr(pl_module, "hosted_trainer", None) if is_due else None  # `hosted_by`, inlined for speed
        if hosted is not None and hosted.step_result is not None and not suppressed(pl_module):
            step_metrics = hosted.metrics()
            run_state = run_state_of(trainer)
            rollout = run_state.rollout_stats
            if rollout is not self._sent_rollout:
                self._sent_rollout = rollout
                rollout_metrics = rollout_means(rollout or {})
        if is_due and self._channel is not None:  # also on a rank without metrics, or the others would wait for it
            everyone = self._channel.gather_everywhere((step_metrics or {}, rollout_metrics))
            if step_metrics is not None:
                step_metrics, rollout_metrics = (_means([each[part] for each in everyone]) for part in (0, 1))
        if self.ranks == "all" and not trainer.is_global_zero:
            return
        if step_metrics is not None:
            run_state.loss_stats = step_metrics
            for listener in self._listeners:  # like `publish_metrics`, but only callbacks that override it
                listener(trainer, pl_module, step_metrics, step)
            metrics = {**step_metrics, **rollout_metrics}
            if self._waited is not None:
                metrics = {**metrics, WAIT_FRACTION: self._wait_fraction(trainer, *self._waited)}
        metrics, figures = {**metrics, **self._unsent_scores}, self._unsent_figures
        self._unsent_scores, self._unsent_figures = {}, {}
        if metrics or figures:
            _send(trainer, pl_module, metrics, figures, step)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._unsent_scores and trainer.is_global_zero:  # an evaluation command has ended after the last step
            _send(trainer, pl_module, self._unsent_scores, {}, trainer.global_step)
            if (hosted := hosted_by(pl_module)) is not None:
                hosted.feed_callback_metrics()

    @override
    def on_scores(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Mapping[str, float], step: int
    ) -> None:
        if not trainer.validating:  # Lightning itself logs the scores of `trainer.validate`
            evaluated = {EVALUATED_STEP: float(step)} if step < trainer.global_step else {}
            self._unsent_scores = {**self._unsent_scores, **scores, **evaluated}
            self.next_due_step = 0

    def on_figures(self, trainer: pl.Trainer, pl_module: pl.LightningModule, figures: Mapping[str, float]) -> None:
        """Add `figures` of another hook to the record of this step."""
        self._unsent_figures = {**self._unsent_figures, **figures}
        self.next_due_step = 0

    def _wait_fraction(self, trainer: pl.Trainer, before_s: float, since: float) -> float:
        """Return the share of the time since the last cadence that steps waited for data."""
        waited_s, now = data_wait_s(trainer) or 0.0, time.monotonic()
        self._waited = waited_s, now
        return min(1.0, max(0.0, waited_s - before_s) / max(now - since, 1e-9))


def _means(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the ranks that have it."""
    names = dict.fromkeys(name for each in metrics for name in each)
    return {name: fmean(each[name] for each in metrics if name in each) for name in names}


def rollout_means(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the means of the numeric statistics of a rollout, as metrics; others are skipped."""
    means: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
        if value is None or isinstance(value, str | bytes):
            continue
        try:
            numbers = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError):
            continue
        if numbers.size:
            means[f"rollout/{name}"] = float(numbers.mean())
    return means


def _send(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    metrics: Mapping[str, float],
    figures: Mapping[str, float],
    step: int,
) -> None:
    """Send `metrics` to monitors and progress bars, and one record of `metrics` and `figures` to all loggers."""
    hosted = getattr(pl_module, "hosted_trainer", None)
    if hosted is not None:
        hosted.published.update(metrics)  # read lazily by monitors and progress bars
    else:
        on_device = {name: torch.tensor(value) for name, value in metrics.items()}
        set_callback_metrics(trainer, on_device, dict(metrics))
    loggers = trainer.loggers
    if loggers:
        # Like `log_metrics` of the connector, without its search for tensors: these are numbers.
        logger_connector(trainer)._logged_metrics.update(metrics)  # type: ignore[arg-type]
        record = {**metrics, **figures} if figures else metrics
        for logger in loggers:
            logger.log_metrics(metrics=record, step=step)  # type: ignore[arg-type]
            if type(logger).save is not Logger.save:  # the base implementation does nothing
                logger.save()
