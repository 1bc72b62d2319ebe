"""Scores of durable checkpoints by a command that runs beside training."""

from __future__ import annotations

import concurrent.futures
import math
import shlex
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ...adapter.contract.exceptions import EvaluationError
from ...adapter.plumbing.threads import DaemonThreads
from ..checkpoint.format.record import CheckpointRecord
from ..checkpoint.policy import Checkpoint
from ..hook.cadence import NEVER, StepCadence, crossed
from ..hook.events import callbacks_of, publish_scores
from ..hook.hook import Hook
from ..hook.listeners import skippable
from ..stop.stop_requests import StopRequests
from .evaluate import FailuresInARow
from .score_command import command_for, run_score_command

__all__ = ["EvaluateCommand"]

WAIT_S = 0.1
"""How often the end of a fit looks whether a stop was asked for, in seconds."""


@dataclass(frozen=True)
class _Running:
    record: CheckpointRecord
    scores: Future[dict[str, float]]


class EvaluateCommand(Hook):
    """Has a command score the newest durable checkpoint while training goes on, and fires ``on_scores`` for its step.

    The command gets the path of the checkpoint's record as its last argument, or in place of ``{checkpoint}``, and its
    step in place of ``{step}``. It answers with a JSON object of numbers as the last line of its standard output.
    One command runs at a time. While it runs, only the newest checkpoint is queued, which is not removed before it is
    scored. Scores are reported for their checkpoint's step, once the current step has finished. The end of a fit waits
    for them, unless a stop was asked for; a stop or a failure ends the command.

    It runs on rank zero's machine, in a process group of its own, without the variables that make a process a rank.

    Args:
        command: Program and arguments, as a list or as one string that is split as a shell splits it. No shell runs it.
        every_n_steps: Score the first checkpoint after every so many steps, and the final one; 1 scores each, 0 none.
        time_limit_s: After how many seconds a command is killed.
        max_failures: After how many failures in a row it switches itself off for the rest of the fit; 0 never does.
        critical: Whether a failure ends the run.

    Raises:
        ValueError: An argument makes no sense; all that do are named.
        EvaluationError: At the start: no `Checkpoint` callback writes what it could score. While training: the command
            cannot be started, fails, takes too long, or prints no scores.
    """

    writes = ("eval_scores",)
    every_n_steps = StepCadence()
    _of_this_process = frozenset({"_running", "_waiting", "_canceled"})
    _running: _Running | None = None
    _waiting: CheckpointRecord | None = None
    _canceled: threading.Event | None = None
    _not_events = Hook._not_events | {"on_fit_start"}
    # A run in which nothing could ever be scored is refused, also where a failing evaluation would be forgiven.

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        every_n_steps: int = 1,
        time_limit_s: float = 300.0,
        max_failures: int = 3,
        critical: bool = False,
    ) -> None:
        wrong = []
        try:
            arguments = shlex.split(command) if isinstance(command, str) else [str(part) for part in command]
        except ValueError as error:
            arguments = [""]
            wrong.append(f"`command` {command!r} ({error})")
        if not arguments or (not wrong and not arguments[0]):
            wrong.append(f"`command` {command!r} (expected a program and its arguments)")
        if every_n_steps < 0:
            wrong.append(f"`every_n_steps` {every_n_steps} (expected a number >= 0)")
        if not 0 < time_limit_s < math.inf:
            wrong.append(f"`time_limit_s` {time_limit_s} (expected a number of seconds > 0)")
        if max_failures < 0:
            wrong.append(f"`max_failures` {max_failures} (expected a number >= 0)")
        if wrong:
            raise ValueError(f"Invalid arguments of EvaluateCommand: {', '.join(wrong)}.")
        self.command = arguments
        self.every_n_steps = every_n_steps
        self.time_limit_s = time_limit_s
        self.critical = critical
        self._failures_in_a_row = FailuresInARow(self.label, max_failures)
        self._step = 0
        self._begun_step: int | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        savers = [callback for callback in callbacks_of(trainer) if isinstance(callback, Checkpoint)]
        if not any(saver.saves_anything for saver in savers):
            raise EvaluationError(
                "EvaluateCommand scores checkpoints, and nothing saves one. Add a `Checkpoint` callback that does, "
                "or use `Evaluate` or `EvaluateLoader`"
            )
        for saver in savers:
            saver.spare(self._awaited_paths)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._failures_in_a_row.clear()
        self._running = self._waiting = self._begun_step = None
        self._canceled = threading.Event()
        self._step = trainer.global_step
        self.next_due_step = 0

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        records = (self._running.record if self._running is not None else None, self._waiting)
        if any(record is not None and record.step > self._step for record in records):
            self._end()  # its scores would be taken for those of the step that comes again
            self._canceled, self._begun_step = threading.Event(), None

    @override
    def on_checkpoint_durable(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: CheckpointRecord
    ) -> None:
        is_due = crossed(self._step, record.step, self.every_n_steps)
        self._step = max(self._step, record.step)
        is_last = record.final and self.every_n_steps > 0 and record.step != self._begun_step
        if is_due or is_last:
            self._waiting = record
            self._begin_next()

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.next_due_step = NEVER  # before the look, which sees what ends meanwhile
        if self._running is not None and self._running.scores.done():
            self._tell(trainer, self._running)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        stops = [callback for callback in callbacks_of(trainer) if isinstance(callback, StopRequests)]
        errors: list[EvaluationError] = []
        while self._running is not None:
            concurrent.futures.wait([self._running.scores], timeout=WAIT_S)
            if not self._running.scores.done():
                if any(stop.requested() is not None for stop in stops):
                    break
                continue
            try:
                self._tell(trainer, self._running)
            except EvaluationError as error:
                errors.append(error)
        self._end()
        if errors:
            raise errors[0]

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._end()

    def _begin_next(self) -> None:
        if self._running is not None or self._waiting is None or self._failures_in_a_row.is_off:
            return
        record = self._waiting
        scores = DaemonThreads(1, "genlight-evaluation").submit(
            run_score_command,
            command_for(self.command, record.path, record.step),
            time_limit_s=self.time_limit_s,
            canceled=self._canceled,
        )
        self._running, self._waiting, self._begun_step = _Running(record, scores), None, record.step
        scores.add_done_callback(self._wake)

    def _wake(self, _: object) -> None:
        self.next_due_step = 0

    def _tell(self, trainer: pl.Trainer, running: _Running) -> None:
        """Tell the scores of a command that has ended, and begin the next one."""
        try:
            scores = running.scores.result()
        except Exception as error:
            self._running = None
            told = EvaluationError(f"{error} (checkpoint of step {running.record.step})")
            self._failures_in_a_row.note(told)
            self._begin_next()
            raise told from error
        self._failures_in_a_row.clear()
        try:
            publish_scores(trainer, scores, running.record.step)
        finally:
            self._running = None  # retention leaves the checkpoint until its score is known
            self._begin_next()

    def _end(self) -> None:
        """End what runs, and forget what waits; returns once no process is left."""
        running, self._running, self._waiting = self._running, None, None
        if running is not None:
            if self._canceled is not None:
                self._canceled.set()
            concurrent.futures.wait([running.scores])

    def _awaited_paths(self) -> Collection[Path]:
        """The files that retention must keep; asked in the thread that writes."""
        waiting, running = self._waiting, self._running
        return [record.path for record in (waiting, running.record if running else None) if record is not None]
