"""Scores of durable checkpoints by a command that runs while training goes on."""

from __future__ import annotations

import math
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
from ..hook.cadence import NEVER, Pace, crossed, step_cadence
from ..hook.events import callbacks_of, publish_scores
from ..hook.hook import Hook, skippable
from ..stop.stop_requests import StopRequests

__all__ = ["EvaluateCommand"]

LONGEST_OUTPUT = 1 << 20
"""Bytes of standard output, or of standard error, after which a command is killed."""
POLL_S = 0.05
"""About how often a running command is polled, in seconds; between two steps."""
GRACE_S = 2.0
"""How long a command may take to heed SIGTERM, in seconds; SIGKILL follows."""
QUOTED = 500
"""Characters of a command's output that an error quotes, from its end."""

_OF_A_RANK = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    )
)
_PREFIXES_OF_A_RANK = ("TORCHELASTIC_", "SLURM_STEP_", "PMI_", "PMIX_", "OMPI_")


class EvaluateCommand(Hook):
    """Has a command score the newest durable checkpoint while training goes on, and fires ``on_scores`` for its step.

    The command gets the path of the checkpoint's record, which says its step, as its last argument. It answers with a
    JSON object of numbers as the last line of its standard output.
    One command runs at a time. While it runs, only the newest checkpoint is queued, which is not removed before it is
    scored. Scores are reported for their checkpoint's step, once the current step has finished. The end of a fit waits
    for them, unless a stop was asked for; a stop or a failure ends the command.

    It runs on rank zero's machine, in a process group of its own, without the variables that make a process a rank.

    Args:
        command: Program and arguments, as a list or as one string that is split as a shell splits it. No shell runs it.
        every_n_steps: Score the first checkpoint after every so many steps, and the final one; 1 scores each, 0 none.
        time_limit_s: After how many seconds a command is killed, between two steps.
        critical: Whether a failure ends the run.

    Raises:
        ValueError: An argument makes no sense; all that do are named.
        EvaluationError: At the start: no `Checkpoint` callback writes what it could score. While training: the command
            cannot be started, fails, takes too long, or prints no scores.
    """

    writes = ("eval_scores",)
    _of_this_process = frozenset({"_running", "_waiting"})
    _running: tuple[CheckpointRecord, ScoreCommand] | None = None
    _waiting: CheckpointRecord | None = None
    _not_events = Hook._not_events | {"on_fit_start"}
    # A run in which nothing could ever be scored is refused, also where a failing evaluation would be forgiven.

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        every_n_steps: int = 1,
        time_limit_s: float = 300.0,
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
        if wrong:
            raise ValueError(f"Invalid arguments of EvaluateCommand: {', '.join(wrong)}.")
        self.command = arguments
        self.every_n_steps = step_cadence("every_n_steps", every_n_steps)
        self.time_limit_s = time_limit_s
        self.critical = critical
        self._step = 0
        self._begun_step: int | None = None
        self._pace = Pace(POLL_S)
        self._has_failed = False
        """Whether training has failed, after which a checkpoint may still become durable."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        savers = savers_of(trainer)
        if not any(saver.saves_anything for saver in savers):
            raise EvaluationError(
                "EvaluateCommand scores checkpoints, and nothing saves one. Add a `Checkpoint` callback that does, "
                "or use `Evaluate`"
            )
        for saver in savers:
            saver.keep_while_in_use(self._files_in_use)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._running = self._waiting = self._begun_step = None
        self._has_failed = False
        self._step = trainer.global_step
        self.next_due_step = 0

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        records = (self._running[0] if self._running is not None else None, self._waiting)
        if any(record is not None and record.step > self._step for record in records):
            self._end()  # its scores would be taken for those of the step that comes again
            self._begun_step = None

    @override
    def on_checkpoint_durable(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: CheckpointRecord
    ) -> None:
        is_due = crossed(self._step, record.step, self.every_n_steps)
        self._step = max(self._step, record.step)
        is_last = record.final and self.every_n_steps > 0 and record.step != self._begun_step
        if (is_due or is_last) and not self._has_failed:
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
        errors: list[EvaluationError] = []
        while self._running is not None and all(stop.requested() is None for stop in stops):
            try:
                self._report(trainer)
            except EvaluationError as error:
                errors.append(error)
            time.sleep(POLL_S)
        self._end()
        if errors:
            raise errors[0]

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._has_failed = True
        self._end()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._end()

    def _begin_next(self) -> None:
        if self._running is not None or self._waiting is None:
            return
        record, self._waiting = self._waiting, None
        self._begun_step = record.step
        command = ScoreCommand([*self.command, str(record.path)], time_limit_s=self.time_limit_s)
        self._running = record, command
        self.next_due_step = 0

    def _report(self, trainer: pl.Trainer) -> None:
        """Report the scores of a command that has ended, and begin the next one."""
        if self._running is None:
            return
        record, command = self._running
        try:
            scores = command.poll()
        except EvaluationError as error:
            self._running = None
            self._begin_next()
            raise EvaluationError(f"{error} (checkpoint of step {record.step})") from error
        if scores is None:
            return
        try:
            publish_scores(trainer, scores, record.step)
        finally:
            self._running = None  # retention leaves the checkpoint until its score is known
            self._begin_next()

    def _end(self) -> None:
        """End what runs, and forget what waits; returns once no process is left."""
        running, self._running, self._waiting = self._running, None, None
        if running is not None:
            running[1].end()

    def _files_in_use(self) -> Collection[Path]:
        """The files that retention must keep; asked in the thread that writes."""
        waiting, running = self._waiting, self._running
        return [record.path for record in (waiting, running[0] if running else None) if record is not None]


class ScoreCommand:
    """A command that prints scores, in a process group of its own, which is killed when it ends or is ended.

    It gets no standard input, and none of the variables that make a process a rank of this run.

    Args:
        arguments: Program and arguments; no shell reads them.
        time_limit_s: After how many seconds it is ended.

    Raises:
        EvaluationError: It could not be started.
    """

    def __init__(self, arguments: Sequence[str], *, time_limit_s: float) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in _OF_A_RANK and not name.startswith(_PREFIXES_OF_A_RANK)
        }
        self._time_limit_s = time_limit_s
        self._ends_at = time.monotonic() + time_limit_s
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - `_close`
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._close()
            raise EvaluationError(f"the evaluation command {arguments[0]!r} cannot be started: {error}") from error

    def has_ended(self) -> bool:
        """Whether it has, without reaping it: as long as it is not, no other process group can get its number."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def poll(self) -> dict[str, float] | None:
        """The scores, once it has ended, which is to be asked for until then; None while it runs.

        Raises:
            EvaluationError: It failed, took too long, printed too much, or printed no scores.
        """
        has_ended, problem = self.has_ended(), ""
        if max(os.fstat(file.fileno()).st_size for file in (self._output, self._errors)) > LONGEST_OUTPUT:
            problem = f"printed more than {LONGEST_OUTPUT:,} bytes"
        elif not has_ended and time.monotonic() >= self._ends_at:
            problem = f"did not end within {self._time_limit_s:g} s and was killed"
        elif not has_ended:
            return None
        self._kill()
        with self._output, self._errors:
            if self._process.returncode and not problem:
                problem = _ending(self._process.returncode)
            if problem:
                said = hide_secrets(_end_of(self._errors, 16 * QUOTED)).strip()[-QUOTED:]
                raise EvaluationError(f"the evaluation command {problem}{f': {said}' if said else ''}")
            return parse_scores(_end_of(self._output, LONGEST_OUTPUT))

    def end(self) -> None:
        """End it; returns once no process of it is left."""
        self._kill()
        self._close()

    def _close(self) -> None:
        self._output.close()
        self._errors.close()

    def _kill(self) -> None:
        if not self.has_ended():
            os.killpg(self._process.pid, signal.SIGTERM)
            killed_at = time.monotonic() + GRACE_S
            while not self.has_ended() and time.monotonic() < killed_at:
                time.sleep(POLL_S)
        os.killpg(self._process.pid, signal.SIGKILL)  # also what the command left behind
        self._process.wait()


def parse_scores(text: str) -> dict[str, float]:
    """The scores in what a command printed: a JSON object of numbers as its last line.

    Raises:
        EvaluationError: There is none, or a value is not a finite number.
    """
    said = text.strip()
    try:
        return msgspec.json.decode(said.rpartition("\n")[2], type=dict[str, float])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        what = f"{hide_secrets(said)[-QUOTED:]!r} ({str(error)[:QUOTED]})" if said else "nothing"
        raise EvaluationError(
            f"the evaluation command printed {what}; its last line must be a JSON object of finite numbers, such as "
            '{"val/loss": 0.25}'
        ) from error


def _ending(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _end_of(file: IO[bytes], most: int) -> str:
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - most))
    return file.read(most).decode(errors="replace")
