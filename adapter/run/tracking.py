"""Runs of W&B and MLflow that go on after a resume."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from ...callbacks.lightning_internals import metric_name, set_run_of_logger
from ..plumbing.durable import write_bytes_durably
from ..plumbing.redaction import text_of
from ..plumbing.safe_open import PRIVATE_FILE, read_own
from .resume import RUNS_FILE

__all__ = ["continue_runs"]

log = logging.getLogger(__name__)

LARGEST_BYTES = 1 << 20


def continue_runs(trainer: pl.Trainer, directory: Path, *, resumes: bool) -> None:
    """Make or find the runs of the trainer's W&B and MLflow loggers; to be called on rank zero, before the fit.

    Where the training resumes, each logger goes on with the run that it had. Rows that this run holds beyond the step
    of the checkpoint are not sent a second time when training makes them again: neither W&B nor MLflow can take rows
    back, and an exact resume makes the same ones. A run of W&B that its server does not know, as one offline, goes on
    by its id alone: what it holds is not known. What a logger has lost is in the event log.

    Args:
        trainer: Its loggers are looked at; those of other classes are left alone.
        directory: Where `RUNS_FILE` is kept, which says which run each logger has.
        resumes: Whether loggers go on with the runs that they had, rather than with new ones.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger | MLFlowLogger)]
    if not loggers:
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / RUNS_FILE
    known = _read(path) if resumes else {}
    names = {f"{type(logger).__name__}-{index}": logger for index, logger in enumerate(loggers)}
    found = [(logger, _go_on(logger, name, known[name])) for name, logger in names.items() if name in known]
    runs = {name: _run_of(logger) for name, logger in names.items()}
    write_bytes_durably(path, msgspec.json.encode(runs) + b"\n", mode=PRIVATE_FILE)
    for logger, steps in found:
        if steps:
            logger.log_metrics = functools.partial(  # type: ignore[method-assign]
                _log_metrics, logger, steps, max(steps.values())
            )


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


def _go_on(logger: Any, name: str, run_id: str) -> Mapping[str, int]:
    """Have `logger` go on with a run.

    Returns:
        The last step of each metric that the run holds, as far as that is known.
    """
    if not set_run_of_logger(logger, run_id):  # another run is configured
        return {}
    try:
        if isinstance(logger, MLFlowLogger):
            client = logger.experiment
            client.update_run(run_id, status="RUNNING")  # which a stop has ended
            return {metric.key: metric.step for metric in client.get_run(run_id).data.to_proto().metrics}
        run = logger.experiment
        last = run.summary.get("trainer/global_step") if run.resumed else None  # of W&B's server
        return {name: int(last) for name in run.summary.keys()} if isinstance(last, int | float) else {}  # noqa: SIM118
    except Exception as error:  # noqa: BLE001  # of the backend, whose classes only its package has
        log.warning("%s begins a new run, because it cannot go on with %s: %s", name, run_id, text_of(error))
        set_run_of_logger(logger, None)
        return {}


def _log_metrics(
    logger: Any, held: Mapping[str, int], last: int, metrics: Mapping[str, float], step: int | None = None
) -> None:
    """Leave out what the run of `logger` holds, until training is past the last step of that."""
    if step is not None and step > last:
        vars(logger).pop("log_metrics", None)
    elif step is not None:
        metrics = {name: value for name, value in metrics.items() if step > held.get(metric_name(logger, name), -1)}
    if metrics:
        type(logger).log_metrics(logger, metrics, step)
