"""Score durable checkpoints with a command that runs during training."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import msgspec
from typing_extensions import override

from ...adapter.contract.exceptions import EvaluationError
from ...adapter.plumbing.redaction import hide_secrets
from ..checkpoint.format.record import CheckpointRecord
from ..checkpoint.policy import savers_of
from ..hook.cadence import NEVER, Pace, crossed, positive, step_cadence
from ..hook.events import callbacks_of, publish_scores
from ..hook.hook import Hook, judge, skippable
from ..stop.stop_requests import StopRequests

MOST_READ = 1 << 20
"""Bytes at the end of standard output, and of standard error, that are read."""
POLL_S = 0.05
"""Approximate seconds between two polls of a running command; polls happen between steps."""
QUOTED = 500
"""Characters at the end of a command's output that an error quotes."""

_OF_A_RANK = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_"),
    *("SLURM_STEP_", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("PMI_", "PMIX_", "OMPI_", "GENLIGHT_NODES"),
)
"""Prefixes of the variables that make a process a rank."""


class EvaluateCommand(Hook):
    """Scores the newest durable checkpoint with a command during training, and fires ``on_scores`` for its step.

    The last argument of the command is the path of the checkpoint's record; the record contains the step. The command
    prints its scores as a JSON object of numbers in the last line of its standard output. One command runs at a time.
    While it runs, only the newest checkpoint is queued; it is not removed before it is scored. Scores are reported for
    their checkpoint's step, after the current step has finished. The end of a fit waits for them, unless there is a
    stop request; a stop or a failure ends the command.

    It runs on rank zero's machine, in a separate process group, and does not get the variables that make a process a
    rank.

    Args:
        command: Program and arguments, as a list or as one string that is split as a shell splits it. No shell runs it.
        every_n_steps: Score the first checkpoint after every N steps, and the final one; 1 scores each, 0 none.
        time_limit_s: Seconds after which a command is killed; checked between two steps.
        critical: Whether a failure ends the run.

    Raises:
        ValueError: An argument is invalid.
        EvaluationError: At the start: no `Checkpoint` callback saves checkpoints. While training: the command cannot be
            started, fails, takes too long, or prints no scores.
    """

    writes = ("eval_scores",)
    _of_this_process = frozenset({"_running", "_waiting"})
    _running: ScoreCommand | None = None
    _waiting: CheckpointRecord | None = None
    _not_events = Hook._not_events | {"on_fit_start"}
    # Refuse a run without checkpoints to score, even if `critical` is false.

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        every_n_steps: int = 1,
        time_limit_s: float = 300.0,
        critical: bool = False,
    ) -> None:
        try:
            arguments = shlex.split(command) if isinstance(command, str) else [str(part) for part in command]
        except ValueError as error:
            raise ValueError(f"Invalid `command` {command!r}: {error}.") from error
        if not arguments or not arguments[0]:
            raise ValueError(f"Invalid `command`. Expected a program and its arguments, but received {command!r}.")
        self.command = arguments
        self.every_n_steps = step_cadence("every_n_steps", every_n_steps)
        self.time_limit_s = positive("time_limit_s", time_limit_s)
        self.critical = critical
        self._step = 0
        self._begun_step: int | None = None
        self._pace = Pace(POLL_S)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        savers = savers_of(trainer)
        if not any(saver.saves_anything for saver in savers):
            raise EvaluationError(
                "EvaluateCommand scores checkpoints, but no callback saves any. Add a `Checkpoint` callback that does, "
                "or use `Evaluate`"
            )
        for saver in savers:
            saver.keep_while_in_use(self._files_in_use)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end()
        self._step, self._begun_step = trainer.global_step, None

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_start(trainer, pl_module)  # drop scores of undone steps: the steps will be repeated

    @override
    def on_checkpoint_durable(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: CheckpointRecord
    ) -> None:
        is_due = crossed(self._step, record.step, self.every_n_steps)
        self._step = max(self._step, record.step)
        is_last = record.final and self.every_n_steps > 0 and record.step != self._begun_step
        if (is_due or is_last) and not trainer.interrupted:
            self._waiting = record
            self._begin_next()

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.next_due_step = NEVER if self._running is None else self._pace.next_look(trainer.global_step)
        self._report(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        stops = [callback for callback in callbacks_of(trainer) if isinstance(callback, StopRequests)]
        try:
            while self._running is not None and all(stop.requested() is None for stop in stops):
                try:
                    self._report(trainer)
                except EvaluationError as error:  # still score the checkpoint that may be queued
                    judge(self, "on_fit_end", error)
                time.sleep(POLL_S)
        finally:
            self._end()

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    def _begin_next(self) -> None:
        if self._running is None and self._waiting is not None:
            record, self._waiting = self._waiting, None
            self._begun_step = record.step
            self._running = ScoreCommand(self.command, record, time_limit_s=self.time_limit_s)
            self.next_due_step = 0

    def _report(self, trainer: pl.Trainer) -> None:
        """Report the scores of a command that has ended, and begin the next one."""
        command = self._running
        if command is None or not command.is_over():
            return
        try:
            publish_scores(trainer, command.scores(), command.record.step)
        finally:
            self._running = None  # not earlier: until now, retention must keep the checkpoint
            self._begin_next()

    def _end(self) -> None:
        """End the running command and drop the queued checkpoint. Returns once no process is left."""
        running, self._running, self._waiting = self._running, None, None
        if running is not None:
            running.end()

    def _files_in_use(self) -> Collection[Path]:
        """Return the files that retention must keep; called in the writing thread."""
        waiting, running = self._waiting, self._running
        return [record.path for record in (waiting, running.record if running else None) if record is not None]


class ScoreCommand:
    """A command that prints scores, in a separate process group. When it ends, the complete group is killed.

    It gets no standard input, and no variables that make a process a rank.

    Args:
        command: Program and arguments; no shell reads them.
        record: The checkpoint to score; its path becomes the last argument.
        time_limit_s: Seconds after which it is over.

    Raises:
        EvaluationError: It could not be started.
    """

    def __init__(self, command: Sequence[str], record: CheckpointRecord, *, time_limit_s: float) -> None:
        self.record = record
        self._time_limit_s = time_limit_s
        self._ends_at = time.monotonic() + time_limit_s
        self._what = f"the evaluation command for the checkpoint of step {record.step}"
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - `_close`
        try:
            self._process = subprocess.Popen(
                [*command, str(record.path)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                env={name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._close()
            raise EvaluationError(f"{self._what} cannot be started: {error}") from error

    def is_over(self) -> bool:
        """Return whether it has ended or has taken too long."""
        return self._has_ended() or time.monotonic() >= self._ends_at

    def scores(self) -> dict[str, float]:
        """Return the scores of a command that is over: the JSON object of numbers in its last line.

        Raises:
            EvaluationError: It failed, did not end in time, or printed no scores.
        """
        has_ended = self._has_ended()
        self._kill()
        errors = hide_secrets(_end_of(self._errors)).strip()[-QUOTED:]
        output = _end_of(self._output).strip()
        self._close()
        if not has_ended:
            raise EvaluationError(f"{self._what} did not end within {self._time_limit_s:g} s and was killed: {errors}")
        if self._process.returncode:
            raise EvaluationError(f"{self._what} ended with exit code {self._process.returncode}: {errors}")
        try:
            return msgspec.json.decode(output.rpartition("\n")[2], type=dict[str, float])
        except (msgspec.DecodeError, RecursionError) as error:
            quoted = f"{hide_secrets(output)[-QUOTED:]!r} ({str(error)[:QUOTED]})" if output else "nothing"
            raise EvaluationError(
                f"{self._what} printed {quoted}; its last line must be a JSON object of finite numbers, such as "
                '{"val/loss": 0.25}'
            ) from error

    def end(self) -> None:
        """Kill it. Returns once no process of it is left."""
        self._kill()
        self._close()

    def _has_ended(self) -> bool:
        """Return whether it has ended; does not reap it, so that its process id stays reserved until `_kill`."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # including children of the command that outlived it
        self._process.wait()

    def _close(self) -> None:
        self._output.close()
        self._errors.close()


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_READ))
    return file.read().decode(errors="replace")
