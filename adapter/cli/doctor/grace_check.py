"""Whether a save fits between the stop signal of a scheduler and the end that follows it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from ....callbacks.checkpoint.selection import list_checkpoints
from ....callbacks.stop.sources import SAVE_MARGIN
from ...job.config import RunConfig
from ...plumbing.durable import temporary_name, write_all
from ...plumbing.finding import Finding
from ...plumbing.safe_open import PRIVATE_FILE
from ...plumbing.text import size_text

__all__ = ["check_grace"]

MOST_WRITTEN_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20


def check_grace(config: RunConfig) -> Iterator[Finding]:
    """What a save like the run's last one takes on this disk now, against the time that a stop has.

    Says nothing where no scheduler has told its grace period, or the run has saved nothing yet.
    """
    if config.stop_grace_s is None:
        return
    sizes = [found.record.size_bytes for found in list_checkpoints(config.checkpoints_dir) if found.record is not None]
    if not sizes:
        return
    try:
        seconds = save_seconds(config.checkpoints_dir, max(sizes))
    except OSError as error:
        yield Finding("grace", "warn", f"no save could be measured in {config.checkpoints_dir}: {error.strerror}")
        return
    said = (
        f"a stop has {config.stop_grace_s:g} s (`TRAINER_STOP_GRACE_SECONDS`), and writing a checkpoint of "
        f"{size_text(max(sizes))} takes {seconds:.2g} s here"
    )
    if SAVE_MARGIN * seconds > config.stop_grace_s:
        remedy = f"have the scheduler send its signal at least {SAVE_MARGIN * seconds:.2g} s before the end"
        yield Finding("grace", "fail", said, remedy)
    else:
        yield Finding("grace", "pass", said)


def save_seconds(directory: Path, size_bytes: int) -> float:
    """How long it takes to write so many bytes to `directory`, durably; of many, a part is written.

    Raises:
        OSError: Nothing can be written there.
    """
    part = min(size_bytes, MOST_WRITTEN_BYTES)
    chunk = os.urandom(_CHUNK_BYTES)  # which no file system makes smaller
    path = directory / temporary_name("probe")
    began = time.monotonic()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        for start in range(0, part, _CHUNK_BYTES):
            write_all(descriptor, chunk[: part - start])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()
    return (time.monotonic() - began) * max(size_bytes / max(part, 1), 1.0)
