"""Have each logger of a resumed run log each step once.

By default, if a resumed fit writes into the same folder, `CSVLogger` deletes the steps before the resume, and
TensorBoard shows the steps after the checkpoint twice. This module corrects their files. W&B and MLflow cannot delete
rows, so they do not get steps that an earlier attempt has logged.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import logging
import os
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from typing_extensions import override

from ..adapter.plumbing.durable import write_bytes_durably
from ..adapter.plumbing.redaction import safe_str
from ..adapter.plumbing.safe_open import open_own, read_own
from .hook.events import hosted_by
from .lightning_internals import logged_step

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.csv"
_BACKUP_FILE = ".metrics-before.csv"
_LARGEST = 16 << 20
"""Maximum size in bytes of a file that holds a `_Logged`."""


def keep_logged_steps(trainer: pl.Trainer) -> None:
    """Have the loggers of a fit keep each step before a resume exactly once.

    Call this on rank zero, before the fit.
    """
    csv_loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger) and _keep_file(logger)]
    if csv_loggers or any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        trainer.callbacks.append(_KeepLoggedSteps(csv_loggers))  # type: ignore[attr-defined]


class _Logged(msgspec.Struct):
    run: str
    """The run of the logger; for another run the steps do not count."""
    last: dict[str, int]
    """The last logged step of each metric. One step for all would not do: a kill may come after the loss of a step was
    logged, and before its scores."""


def log_each_step_once(logger: Logger, path: Path, run: str, *, resumes: bool) -> None:
    """Have `logger` skip each metric up to the last step at which an earlier attempt has logged it to the same run.

    An exact resume gives these steps the same values. A step counts as logged once the logger has received it. A logger
    that keeps steps in memory may lose the last ones in a kill. Steps that `Recover` repeats within an attempt are
    logged.

    Args:
        logger: The logger.
        path: The file with the last steps; a kill leaves it intact.
        run: The run that the logger writes.
        resumes: Whether it continues this run.
    """
    logged = _Logged(run, {})
    if resumes:
        with contextlib.suppress(FileNotFoundError):
            try:
                logged = msgspec.json.decode(read_own(path, limit=_LARGEST), type=_Logged)
            except ValueError as error:
                log.warning("%s cannot be read, so its logger may repeat steps: %s", path, safe_str(error))
    earlier = dict(logged.last) if logged.run == run else {}
    log_new = functools.partial(_log_new, logger, path, earlier, _Logged(run, dict(earlier)))
    logger.log_metrics = log_new  # type: ignore[method-assign]


def _log_new(
    logger: Logger,
    path: Path,
    earlier: Mapping[str, int],
    logged: _Logged,
    metrics: Mapping[str, Any],
    step: int | None = None,
) -> None:
    """Log the `metrics` that no earlier attempt has logged at `step`, and record the step of each in the file."""
    new = {name: value for name, value in metrics.items() if step is None or step > earlier.get(name, -1)}
    if step is not None and new:
        logged.last.update(dict.fromkeys(new, step))
        with open(open_own(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as file:
            text = msgspec.json.encode(logged)
            # One system call, so that a kill leaves either the old or the new text.
            file.write(text.ljust(os.fstat(file.fileno()).st_size))
    if new:
        type(logger).log_metrics(logger, new, step)


def _keep_file(logger: CSVLogger) -> bool:
    """Open the file of `logger` without losing its rows; return whether it had a file."""
    folder = Path(logger.log_dir)
    if "://" in logger.log_dir:
        log.warning(
            "CSVLogger deletes earlier steps in %s if this fit resumes there; remove its `version`",
            logger.log_dir,
        )
        return False
    file, backup = folder / METRICS_FILE, folder / _BACKUP_FILE
    if file.is_file() and not backup.is_file():  # an existing backup comes from a process killed in the lines below
        os.replace(file, backup)
    if not backup.is_file():
        return False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Experiment logs directory")  # Lightning warns that it deletes the file
        _ = logger.experiment
    os.replace(backup, file)
    return True


class _KeepLoggedSteps(Callback):
    """Removes steps that training will repeat from the files of loggers.

    It does so when the first batch begins, because only then it is known at which step Lightning's own loop logs next.

    Args:
        csv_loggers: Loggers whose file has rows of an earlier attempt.
    """

    def __init__(self, csv_loggers: list[CSVLogger]) -> None:
        self._csv_loggers = csv_loggers
        self._is_done = False

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._is_done:
            return
        self._is_done = True
        # A hosted trainer logs at the number of completed steps, Lightning's own loop at the index of the batch.
        first = trainer.global_step + 1 if hosted_by(pl_module) is not None else logged_step(trainer)
        for logger in self._csv_loggers:
            _drop_rows(logger, first if trainer.global_step else 0)
        if trainer.global_step:
            for each in trainer.loggers:
                if isinstance(each, TensorBoardLogger):
                    _purge(each, first)


def _drop_rows(logger: CSVLogger, first: int) -> None:
    """Rewrite the file of `logger` with the rows before step `first`."""
    writer = logger.experiment
    path = Path(writer.metrics_file_path)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        names = sorted(reader.fieldnames or ())  # the order of columns when the logger appends rows
        rows = list(reader)
    kept = [row for row in rows if (row.get("step") or "").isdecimal() and int(row["step"]) < first]
    if rows and not kept:
        log.warning("%s starts again at step 0: deleting its %d rows of an earlier attempt", path, len(rows))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, names, extrasaction="ignore")
    table.writeheader()
    table.writerows(kept)
    write_bytes_durably(path, text.getvalue().encode(), mode=stat.S_IMODE(path.stat().st_mode))
    writer.metrics_keys = names


def _purge(logger: TensorBoardLogger, first: int) -> None:
    """Have TensorBoard hide steps from `first` on in earlier files of the same folder."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
    except ImportError:  # only tensorboardX is installed; its event classes differ
        log.warning("TensorBoard shows the steps from %d on twice in %s; remove its `version`", first, logger.log_dir)
        return
    start = SessionLog(status=SessionLog.START)
    logger.experiment.file_writer.add_event(Event(step=first, session_log=start))
