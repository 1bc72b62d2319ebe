"""Scores that come after their checkpoint was saved, from a command that evaluates it while training goes on.

A record is never changed. So such scores go into a file beside the records, a line of JSON for each, and name the
record by its digest: a checkpoint that takes another one's place does not inherit its score.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from ...adapter.plumbing.durable import fsync_directory, write_all
from ...adapter.plumbing.safe_open import open_own, read_own
from .format.record import CheckpointRecord

__all__ = ["SCORES_FILE", "add_score", "read_scores", "with_scores"]

log = logging.getLogger(__name__)

SCORES_FILE = "genlight-scores.jsonl"
"""Its name beside the records."""
LARGEST_BYTES = 64 << 20


class _Line(msgspec.Struct):
    digest: str
    name: str
    value: float


_decode = msgspec.json.Decoder(_Line).decode


def add_score(record: CheckpointRecord, name: str, value: float) -> None:
    """Note the score `value` of `record`; durable when this returns.

    Raises:
        OSError: The file cannot be written.
    """
    directory = record.path.parent
    descriptor = open_own(directory / SCORES_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        line = msgspec.json.encode(_Line(record.digest, name, value)) + b"\n"
        write_all(descriptor, (b"\n" if is_torn else b"") + line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_directory(directory)


def read_scores(directory: str | os.PathLike[str]) -> dict[str, dict[str, float]]:
    """The scores that are noted in `directory`, by digest of the record and name; a damaged line is left out."""
    scores: dict[str, dict[str, float]] = {}
    try:
        content = read_own(Path(directory, SCORES_FILE), limit=LARGEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return scores
    except OSError as error:
        log.warning("scores of checkpoints in %s cannot be read: %s", directory, error.strerror or error)
        return scores
    for line in content.splitlines():
        try:
            score = _decode(line)
        except (ValueError, RecursionError):
            continue  # a process was killed while it wrote
        if math.isfinite(score.value):
            scores.setdefault(score.digest, {})[score.name] = score.value
    return scores


def with_scores(record: CheckpointRecord, scores: Mapping[str, Mapping[str, float]]) -> CheckpointRecord:
    """`record` with what `scores` say of it among its metrics."""
    later = scores.get(record.digest) if record.digest else None
    return record if later is None else replace(record, metrics={**record.metrics, **later})
