"""The Lightning fit of a session: what takes part gets the session, and the other ranks are watched.

Imports Lightning, so that it is imported only once there is something to train.
"""

from __future__ import annotations

import contextlib
import functools
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger

from ...callbacks.checkpoint.policy import savers_of
from ...callbacks.hook.events import run_state_of
from ...callbacks.hook.hook import join_run
from ...reporters.events.event_logger import EventLogger
from ..contract.exceptions import TrainingCanceled
from ..plumbing.redaction import without_secrets
from .explained import explained
from .ranks.watch import (
    Check,
    RankProcesses,
    RankZero,
    after,
    failed_ranks,
    kill_paused,
    killed_on_this_node,
    lost_ranks,
    paused_ranks,
    stopped_before_meeting,
)
from .session import Session

__all__ = ["fit", "join"]

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
    saves = session.checkpoints_dir is not None
    if session.is_rank_zero:
        session.stop.signals.what_next = (
            "the run saves a checkpoint after the current step, and stops"
            if saves
            else "the run stops after the current step"
        )
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
    session.expects_ranks = True
    processes = session.processes = RankProcesses(trainer)
    session.stop.signals.before_exit = processes.kill
    checks: list[Check] = [stopped_before_meeting(session.stop)]
    announced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not session.is_rank_zero:
        checks.append(killed_on_this_node(processes))
    else:
        announced = RankZero.announced()
        elsewhere = dict if session.rank_files is None else session.rank_files.processes
        checks.append(paused_ranks(lambda: elsewhere() | processes.ids(), session.stop))
        if session.rank_files is not None:
            failures = [failed_ranks(session.rank_files, processes), lost_ranks(session.rank_files)]
            checks += failures if session.reports_at_once else [after(ENDS_BY_ITSELF_S, each) for each in failures]
            session.before_exit += [lambda error: _end_logs(trainer, error), lambda _: kill_paused(elsewhere())]
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
