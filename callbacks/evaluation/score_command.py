"""A command that scores a checkpoint, as a process of its own that always ends.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ...adapter.contract.exceptions import EvaluationError
from ...adapter.plumbing.redaction import hide_secrets

__all__ = ["command_for", "parse_scores", "run_score_command"]

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
    environment = {name: value for name, value in os.environ.items() if not _is_of_a_rank(name)}
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
            problem = _wait(process, time_limit_s, canceled, output, errors)
        finally:
            _kill_group(process)
        if problem is None and process.returncode:
            problem = _ending(process.returncode)
        if problem is not None:
            raise EvaluationError(f"the evaluation command {problem}{_quoted(errors)}")
        return parse_scores(_end_of(output, LONGEST_OUTPUT))


def parse_scores(text: str) -> dict[str, float]:
    """The scores in what a command printed: a JSON object of numbers, as all of it or as its last line.

    Raises:
        EvaluationError: There is none, or a value is not a finite number.
    """
    lines = text.strip().splitlines()
    found: Any = None
    for candidate in (text, lines[-1] if lines else ""):
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        break
    if not isinstance(found, Mapping):
        said = f"{hide_secrets(text.strip())[-QUOTED:]!r}" if lines else "nothing"
        raise EvaluationError(
            f'the evaluation command printed {said}; its last line must be a JSON object such as {{"val/loss": 0.25}}'
        )
    wrong = [f"{name!r} {value!r}"[:QUOTED] for name, value in found.items() if not _is_score(value)]
    if wrong:
        raise EvaluationError(f"scores of the evaluation command must be finite numbers: {', '.join(wrong[:10])}")
    return {str(name): float(value) for name, value in found.items()}


def _is_score(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_of_a_rank(variable: str) -> bool:
    return variable in _OF_A_RANK or variable.startswith(_PREFIXES_OF_A_RANK)


def _wait(
    process: subprocess.Popen[bytes],
    time_limit_s: float,
    canceled: threading.Event | None,
    output: IO[bytes],
    errors: IO[bytes],
) -> str | None:
    """Return when `process` has ended, or has to be killed: why, or None where it ended by itself."""
    deadline = time.monotonic() + time_limit_s
    while not _has_ended(process):
        if time.monotonic() >= deadline:
            problem = f"did not end within {time_limit_s:g} s and was killed"
        elif canceled is not None and canceled.is_set():
            problem = "was ended with the run"
        elif max(os.fstat(file.fileno()).st_size for file in (output, errors)) > LONGEST_OUTPUT:
            problem = f"printed more than {LONGEST_OUTPUT:,} bytes and was killed"
        else:
            time.sleep(POLL_S)
            continue
        _terminate(process)
        return problem
    if os.fstat(output.fileno()).st_size > LONGEST_OUTPUT:
        return f"printed more than {LONGEST_OUTPUT:,} bytes"
    return None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, without reaping it: as long as it is not, no other process group can get its number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _terminate(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)  # also what the command left behind
    process.wait()


def _ending(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _quoted(errors: IO[bytes]) -> str:
    said = hide_secrets(_end_of(errors, 16 * QUOTED)).strip()[-QUOTED:]
    return f": {said}" if said else ""


def _end_of(file: IO[bytes], most: int) -> str:
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - most))
    return file.read(most).decode(errors="replace")
