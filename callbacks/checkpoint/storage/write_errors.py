"""What the system says when a checkpoint cannot be written, told with the checkpoint and the way out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ....adapter.contract.exceptions import CheckpointError, UnwrittenCheckpointError
from ..format.layout import name_of

__all__ = ["naming_the_checkpoint"]


@contextlib.contextmanager
def naming_the_checkpoint(record: Path, nbytes: int | None = None) -> Iterator[None]:
    """Raise an `OSError` of the block as one that names the checkpoint of `record`, of about `nbytes` bytes.

    Raises:
        UnwrittenCheckpointError: In place of any other `OSError`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        directory = os.fspath(record.parent)
        raise UnwrittenCheckpointError(
            name_of(record), directory, nbytes, error.errno, reason, error.filename
        ) from error
