"""Runs of W&B and MLflow that go on after a resume."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from ...callbacks.lightning_internals import metric_name, set_run_of_logger
from ...reporters.events.event import RESUMED_METRIC
from ...reporters.events.reader import read_metrics
from ..contract.exceptions import EventLogError
from ..plumbing.durable import write_bytes_durably
from ..plumbing.redaction import text_of
from ..plumbing.safe_open import PRIVATE_FILE, read_own
from .resume import RUNS_FILE

__all__ = ["continue_runs"]

log = logging.getLogger(__name__)

LARGEST_BYTES = 1 << 20


def continue_runs(trainer: pl.Trainer, directory: Path, *, resumed_step: int | None, events_path: Path | None) -> None:
    """Make or find the runs of the trainer's W&B and MLflow loggers; to be called on rank zero, before the fit.

    Where the training resumes, each logger goes on with the run that it had. Metrics up to the step from which training
    goes on that this run does not hold are sent again from the event log. Rows that it holds beyond that step are not
    sent a second time when training makes them again: neither W&B nor MLflow can take rows back, and an exact resume
    makes the same ones. A run of W&B that its server does not know, as one offline, goes on by its id alone: what it
    holds is not known.

    Args:
        trainer: Its loggers are looked at; those of other classes are left alone.
        directory: Where `RUNS_FILE` is kept, which says which run each logger has.
        resumed_step: The last step that training does not report again; None where it begins, with new runs.
        events_path: The event log of the earlier attempts; None sends nothing again.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger | MLFlowLogger)]
    if not loggers:
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / RUNS_FILE
    known = {} if resumed_step is None else _read(path)
    names = _names(loggers)
    found = [(logger, _go_on(logger, name, known[name])) for name, logger in names.items() if name in known]
    runs = {name: _run_of(logger) for name, logger in names.items()}
    write_bytes_durably(path, msgspec.json.encode(runs) + b"\n", mode=PRIVATE_FILE)
    held = [(logger, steps) for logger, steps in found if steps is not None]
    if held and resumed_step is not None and events_path is not None:
        _send_missing(held, events_path, resumed_step)
    for logger, steps in held:
        _skip_held(logger, steps)


def _names(loggers: Iterable[Logger]) -> dict[str, Logger]:
    """The loggers by class and, of several of a class, number."""
    names: dict[str, Logger] = {}
    for logger in loggers:
        of_class = sum(type(other) is type(logger) for other in names.values())
        names[f"{type(logger).__name__}-{of_class}"] = logger
    return names


def _read(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(read_own(path, limit=LARGEST_BYTES), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("loggers begin new runs, because %s cannot be read: %s", path, text_of(error))
        return {}


def _run_of(logger: Any) -> str:
    """The identity of the logger's run, which is made if there is none yet."""
    return str(logger.run_id if isinstance(logger, MLFlowLogger) else logger.experiment.id)


def _go_on(logger: Any, name: str, run_id: str) -> Mapping[str, int] | None:
    """Have `logger` go on with a run.

    Returns:
        The last step of each metric that the run holds; none for a new run, and None where that is not known, or where
        another run is configured.
    """
    if not set_run_of_logger(logger, run_id):
        return None
    try:
        if isinstance(logger, MLFlowLogger):
            client = logger.experiment
            client.update_run(run_id, status="RUNNING")  # which a stop has ended
            return {metric.key: metric.step for metric in client.get_run(run_id).data.to_proto().metrics}
        run = logger.experiment
        if not run.resumed:
            return None
        last = run.summary.get("trainer/global_step")  # of W&B's server
        return {name: int(last) for name in run.summary.keys()} if isinstance(last, int | float) else {}  # noqa: SIM118
    except Exception as error:  # noqa: BLE001  # of the backend, whose classes only its package has
        log.warning("%s begins a new run, because it cannot go on with %s: %s", name, run_id, text_of(error))
        set_run_of_logger(logger, None)
        return {}


def _send_missing(held: list[tuple[Any, Mapping[str, int]]], events_path: Path, resumed_step: int) -> None:
    """Send the loggers what they lack of the metrics in the event log."""
    try:
        for step, metrics in sorted(_metrics_by_step(events_path, resumed_step).items()):
            for logger, steps in held:
                _send_unless_held(type(logger).log_metrics, logger, steps, metrics, step)
    except EventLogError as error:
        log.warning("what loggers lack of the metrics before the resume is not sent again: %s", error)


def _metrics_by_step(events_path: Path, up_to: int) -> dict[int, dict[str, float]]:
    """The metrics of the log's newest run, as the attempt that made a step last logged them."""
    rows: dict[int, dict[str, float]] = {}
    table = read_metrics(events_path)
    runs, steps, names, values = (table[column].to_pylist() for column in ("run_id", "step", "name", "value"))
    for run, step, name, value in zip(runs, steps, names, values, strict=True):
        if run == runs[-1] and step <= up_to and name != RESUMED_METRIC:
            rows.setdefault(step, {})[name] = value
    return rows


def _skip_held(logger: Any, held: Mapping[str, int]) -> None:
    """Leave out what the run of `logger` holds, until training is past that."""
    if held:
        logger.log_metrics = functools.partial(_log_metrics, logger, held, max(held.values()))


def _log_metrics(
    logger: Any, held: Mapping[str, int], last: int, metrics: Mapping[str, float], step: int | None = None
) -> None:
    send = type(logger).log_metrics
    if step is not None and step <= last:
        _send_unless_held(send, logger, held, metrics, step)
        return
    if step is not None:
        vars(logger).pop("log_metrics", None)
    send(logger, metrics, step)


def _send_unless_held(
    send: Callable[..., None], logger: Any, held: Mapping[str, int], metrics: Mapping[str, float], step: int
) -> None:
    missing = {name: value for name, value in metrics.items() if step > held.get(metric_name(logger, name), -1)}
    if missing:
        send(logger, missing, step)
