"""The Lightning fit of a session: what takes part gets the session, loggers go on, and the other ranks are watched.

Imports Lightning, so that it is imported only once there is something to train.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from ...callbacks.checkpoint.policy import savers_of
from ...callbacks.hook.events import run_state_of
from ...callbacks.hook.hook import join_run
from ...callbacks.lightning_internals import set_run_of_logger
from ...reporters.events.event_logger import EventLogger
from ..contract.exceptions import TrainingCanceled
from ..plumbing.durable import write_bytes_durably
from ..plumbing.redaction import text_of, without_secrets
from ..plumbing.safe_open import PRIVATE_FILE, read_own
from .ranks import (
    RankProcesses,
    RankZero,
    failed_ranks,
    kill_paused,
    lasting,
    paused_ranks,
    stopped_before_meeting,
)
from .report import explained
from .session import Session
from .start import RUNS_FILE

__all__ = ["continue_runs", "fit", "join"]

log = logging.getLogger(__name__)

LARGEST_BYTES = 1 << 20
ENDS_BY_ITSELF_S = 10.0
"""How long a fit that keeps its own log and uploads may take to end of what another rank died of."""


def join(session: Session, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Hand the session to the callbacks and loggers of `trainer`, and have it follow the training of `module`.

    Loggers get hyperparameters without secrets, whichever class `module` is.
    """
    for logger in trainer.loggers:
        logger.log_hyperparams = functools.partial(_log_hyperparams, logger)  # type: ignore[method-assign]
    session.stop.run_state = run_state_of(trainer)
    session.count_steps = lambda: int(getattr(module, "failed_step", trainer.global_step))
    join_run(trainer, session)
    session.before_report += [functools.partial(saver.report_durable, trainer) for saver in savers_of(trainer)]


def _log_hyperparams(logger: Logger, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
    public = without_secrets(vars(params) if isinstance(params, Namespace) else params)
    type(logger).log_hyperparams(logger, public, *args, **kwargs)


def fit(session: Session, trainer: pl.Trainer, module: pl.LightningModule, **arguments: Any) -> None:
    """Train `module`; what others can tell in better words than torch and Lightning is raised in those.

    Args:
        session: Which the callbacks have joined.
        trainer: Trains.
        module: Is trained.
        **arguments: Further ones of ``Trainer.fit``.

    Raises:
        TrainingCanceled: The training was stopped.
    """
    if session.is_rank_zero:
        saves = "saves a checkpoint after the current step, and stops"
        stops = "stops after the current step"
        session.stop.signals.what_next = f"the run {stops if session.checkpoints_dir is None else saves}"
    try:
        with _watched_ranks(session, trainer):
            trainer.fit(module, **arguments)
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        if better := explained(error):
            raise better from error
        raise
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning makes one of the other
            raise TrainingCanceled("canceled") from error.__context__
        raise
    finally:
        session.stop.signals.what_next = ""


@contextlib.contextmanager
def _watched_ranks(session: Session, trainer: pl.Trainer) -> Iterator[None]:
    """End the attempt when another rank fails, also while this one hangs in a collective."""
    if trainer.world_size == 1:
        yield
        return
    processes = session.processes = RankProcesses(trainer)
    session.stop.signals.before_exit = processes.kill
    files = session.rank_files if session.is_rank_zero else None
    failed = failed_ranks(files, processes)
    checks = [stopped_before_meeting(session.stop)]
    checks.append(failed if session.reports_at_once else lasting(ENDS_BY_ITSELF_S, failed))
    if files is not None:
        checks.append(paused_ranks(lambda: files.processes, session.stop))
        session.before_exit += [lambda error: _end_logs(trainer, error), lambda _: kill_paused(files.processes)]
    session.before_exit.append(lambda _: processes.kill())
    announced = RankZero.announced() if session.is_rank_zero else contextlib.nullcontext()
    try:
        with session.watch.looking(*checks), announced:
            yield
    finally:
        session.stop.signals.before_exit = lambda: None


def _end_logs(trainer: pl.Trainer, error: BaseException) -> None:
    """Have event loggers that keep their own log write how it ended, as Lightning does when training raises."""
    for logger in trainer.loggers:
        if isinstance(logger, EventLogger):
            try:
                raise error
            except BaseException:  # noqa: BLE001 - the logger looks at the exception that is handled
                logger.finalize("failed")


def continue_runs(trainer: pl.Trainer, directory: Path, *, resumes: bool) -> None:
    """Make or find the runs of the trainer's W&B and MLflow loggers; to be called on rank zero, before the fit.

    Where the training resumes, each logger goes on with the run that it had. Neither can take back the rows beyond the
    step of the checkpoint: training makes the same ones again, and they are there twice.

    Args:
        trainer: Its loggers are looked at; those of other classes are left alone.
        directory: Where `RUNS_FILE` is kept, which says which run each logger has.
        resumes: Whether loggers go on with the runs that they had, rather than with new ones.
    """
    tracked = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger | MLFlowLogger)]
    if not tracked:
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / RUNS_FILE
    known, runs = _read(path) if resumes else {}, {}
    for index, logger in enumerate(tracked):
        name = f"{type(logger).__name__}-{index}"
        if name in known and set_run_of_logger(logger, known[name]):
            try:
                _run_of(logger)
            except Exception as error:  # noqa: BLE001  # of the backend, whose classes only its package has
                log.warning("%s begins a new run, since it cannot go on with %s: %s", name, known[name], text_of(error))
                set_run_of_logger(logger, None)
        runs[name] = _run_of(logger)
    write_bytes_durably(path, msgspec.json.encode(runs) + b"\n", mode=PRIVATE_FILE)


def _read(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(read_own(path, limit=LARGEST_BYTES), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("loggers begin new runs, because %s cannot be read: %s", path, text_of(error))
        return {}


def _run_of(logger: Any) -> str:
    """The identity of the logger's run, which is made or found on its server now."""
    run = logger.experiment
    return str(logger.run_id if isinstance(logger, MLFlowLogger) else run.id)
