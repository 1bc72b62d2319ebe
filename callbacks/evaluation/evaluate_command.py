"""Scores of durable checkpoints by a command that runs while training goes on."""

from __future__ import annotations

import concurrent.futures
import math
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import msgspec
from typing_extensions import override

from ...adapter.contract.exceptions import EvaluationError
from ...adapter.plumbing.redaction import hide_secrets
from ...adapter.plumbing.threads import DaemonThreads
from ..checkpoint.format.record import CheckpointRecord
from ..checkpoint.policy import Checkpoint
from ..hook.cadence import NEVER, StepCadence, crossed
from ..hook.events import callbacks_of, publish_scores
from ..hook.hook import Hook, skippable
from ..stop.stop_requests import StopRequests

__all__ = ["EvaluateCommand"]

LONGEST_OUTPUT = 1 << 20
"""Bytes of standard output, or of standard error, after which a command is killed."""
POLL_S = 0.05
"""How often a running command is polled, in seconds."""
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
        self.every_n_steps = every_n_steps
        self.time_limit_s = time_limit_s
        self.critical = critical
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
            saver.keep_while_in_use(self._files_in_use)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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
            self._report(trainer, self._running)

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
                self._report(trainer, self._running)
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
        if self._running is not None or self._waiting is None:
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

    def _report(self, trainer: pl.Trainer, running: _Running) -> None:
        """Report the scores of a command that has ended, and begin the next one."""
        try:
            scores = running.scores.result()
        except Exception as error:
            self._running = None
            self._begin_next()
            raise EvaluationError(f"{error} (checkpoint of step {running.record.step})") from error
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

    def _files_in_use(self) -> Collection[Path]:
        """The files that retention must keep; asked in the thread that writes."""
        waiting, running = self._waiting, self._running
        return [record.path for record in (waiting, running.record if running else None) if record is not None]


def command_for(command: Sequence[str], checkpoint: Path, step: int) -> list[str]:
    """`command` with the path of a checkpoint in place of ``{checkpoint}``, or else appended, and ``{step}``."""
    named = any("{checkpoint}" in argument for argument in command)
    arguments = [*command, *([] if named else ["{checkpoint}"])]
    return [argument.replace("{checkpoint}", str(checkpoint)).replace("{step}", str(step)) for argument in arguments]


def run_score_command(
    arguments: Sequence[str], *, time_limit_s: float, canceled: threading.Event | None = None
) -> dict[str, float]:
    """Run a command in a process group of its own, and return the scores that it prints.

    It gets no standard input, and none of the variables that make a process a rank of this run. What is left of its
    process group is killed when this returns.

    Args:
        arguments: Program and arguments; no shell reads them.
        time_limit_s: After how many seconds it is ended: SIGTERM, and SIGKILL 2 s later.
        canceled: Ends it when set.

    Raises:
        EvaluationError: It could not be started, failed, took too long, printed too much, or printed no scores.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_RANK and not name.startswith(_PREFIXES_OF_A_RANK)
    }
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise EvaluationError(f"the evaluation command {arguments[0]!r} cannot be started: {error}") from error
        try:
            problem = _wait(process, time_limit_s, canceled, (output, errors))
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # also what the command left behind
            process.wait()
        if problem is None and process.returncode:
            problem = _ending(process.returncode)
        if problem is not None:
            said = hide_secrets(_end_of(errors, 16 * QUOTED)).strip()[-QUOTED:]
            raise EvaluationError(f"the evaluation command {problem}{f': {said}' if said else ''}")
        return parse_scores(_end_of(output, LONGEST_OUTPUT))


def parse_scores(text: str) -> dict[str, float]:
    """The scores in what a command printed: a JSON object of numbers, as all of it or as its last line.

    Raises:
        EvaluationError: There is none, or a value is not a finite number.
    """
    said = text.strip()
    problem = "nothing"
    for candidate in (said, said.rpartition("\n")[2]):
        try:
            return msgspec.json.decode(candidate, type=dict[str, float])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            problem = f"{hide_secrets(said)[-QUOTED:]!r} ({str(error)[:QUOTED]})" if said else "nothing"
    raise EvaluationError(
        f"the evaluation command printed {problem}; its last line must be a JSON object of finite numbers, such as "
        '{"val/loss": 0.25}'
    )


def _wait(
    process: subprocess.Popen[bytes], time_limit_s: float, canceled: threading.Event | None, files: Sequence[IO[bytes]]
) -> str | None:
    """Return when `process` has ended, or was told to: why, or None where it ended by itself."""
    deadline = time.monotonic() + time_limit_s
    while True:
        has_ended = _has_ended(process)  # first: what it prints until then counts
        if max(os.fstat(file.fileno()).st_size for file in files) > LONGEST_OUTPUT:
            problem = f"printed more than {LONGEST_OUTPUT:,} bytes"
        elif has_ended:
            return None
        elif time.monotonic() >= deadline:
            problem = f"did not end within {time_limit_s:g} s and was killed"
        elif canceled is not None and canceled.is_set():
            problem = "was ended with the run"
        else:
            time.sleep(POLL_S)
            continue
        break
    if not has_ended:
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while not _has_ended(process) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return problem


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, without reaping it: as long as it is not, no other process group can get its number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


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
