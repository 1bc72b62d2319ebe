"""The evidence that a rehearsal leaves: the rows and metrics of its steps and its final state; the first difference."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from ...callbacks.checkpoint import find_final, load
from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.checkpoint.format.record import digest_of
from ...reporters import read_metrics
from ..check.snapshot import Snapshot, distance, flatten

_OF_AN_ATTEMPT = ("genlight_run_state", "callbacks")
"""Parts of a checkpoint with the number, the files and the clocks of an attempt."""
_CLOCK = "elapsed_s"


@dataclass(frozen=True)
class Evidence:
    """The results of a run that completed."""

    rows: Mapping[tuple[int, int], str]
    """Digest of the batch by step and rank; a repeated step has its last one."""
    metrics: Mapping[tuple[int, str], float]
    """Metrics by step and name."""
    state: Snapshot
    """The content of the final checkpoint by path, without facts of the attempt such as its duration."""
    ranks: int
    """Number of processes that trained."""
    repeated: int
    """Number of steps that rank 0 trained more than once."""

    @property
    def digest(self) -> str:
        """Digest of the final state: equal bits have equal digests."""
        return _digest_of_snapshot(self.state)


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ."""

    text: str
    size: float
    """Largest relative difference of floating-point values in the final states, or of the metric; infinite for rows."""


def rows_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank notes the rows of its steps."""
    return folder / f"rows-{rank}.jsonl"


def digest_of_batch(batch: Any) -> str:
    """Return one digest of all tensors, arrays, numbers and strings in `batch`, or of its Arrow columns."""
    if isinstance(batch, pa.RecordBatch | pa.Table):
        batch = batch.to_pydict()
    return _digest_of_snapshot(flatten(batch, "batch"))


def _digest_of_snapshot(values: Snapshot) -> str:
    return digest_of("\n".join(f"{path} {digest}" for path, digest in values.digests.items()).encode())


def read_evidence(folder: Path, checkpoints: Path, events: Path) -> Evidence:
    """Read the results of a completed run.

    Raises:
        LookupError: It has no final checkpoint.
        BrokenCheckpointError: Its final checkpoint is broken.
    """
    record = find_final(checkpoints)
    if record is None:
        raise LookupError("the run has no final checkpoint")
    content = {key: value for key, value in load(record.path).items() if key not in _OF_AN_ATTEMPT}
    if isinstance(own := content.get(CONTRACT_KEY), Mapping):
        content[CONTRACT_KEY] = {key: value for key, value in own.items() if key != _CLOCK}
    noted = {
        rank: [json.loads(line) for line in rows_file(folder, rank).read_text().splitlines()]
        for rank in range(record.world_size)
    }
    metrics = read_metrics(events).select(["step", "name", "value"]).to_pylist()
    return Evidence(
        rows={(step, rank): digest for rank, steps in noted.items() for step, digest in steps},
        metrics={(row["step"], row["name"]): row["value"] for row in metrics},
        state=flatten(content, "state"),
        ranks=record.world_size,
        repeated=len(noted[0]) - len({step for step, _ in noted[0]}),
    )


def first_difference(expected: Evidence, actual: Evidence, names: frozenset[str]) -> Difference | None:
    """Return the first difference of two runs: the rows of a step, one of its metrics, or the final state.

    Args:
        expected: The run without a fault.
        actual: The other run.
        names: The metrics to compare; others, such as speeds, differ in any two runs.
    """
    ours, theirs = expected.state["value"], actual.state["value"]
    paths = expected.state.differences(actual.state)
    measured = [path for path in paths if _is_measured(ours.get(path)) and _is_measured(theirs.get(path))]
    size = max((distance(ours[path], theirs[path]) for path in measured), default=0.0)
    for step, rank in sorted(expected.rows.keys() | actual.rows.keys()):
        if expected.rows.get((step, rank)) != actual.rows.get((step, rank)):
            return Difference(f"step {step} of rank {rank} got other rows", math.inf)
    for step, name in sorted(expected.metrics.keys() | actual.metrics.keys()):
        a, b = expected.metrics.get((step, name)), actual.metrics.get((step, name))
        if name in names and repr(a) != repr(b):
            apart = math.inf if a is None or b is None else distance(a, b)
            return Difference(f"{name} of step {step} is {b} instead of {a}", max(size, apart))
    if paths:
        more = f" and {len(paths) - 1} other values of the state differ" if len(paths) > 1 else " differs"
        return Difference(f"at the end, {paths[0]}{more}", size)
    return None


def _is_measured(value: Any) -> bool:
    """Whether `value` is a floating-point tensor or number; a counter or a random state is equal, or it differs."""
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def equal_metrics(first: Evidence, second: Evidence) -> frozenset[str]:
    """Return the names of metrics that are equal in all steps of two runs."""
    keys = first.metrics.keys() | second.metrics.keys()
    differing = {
        name for step, name in keys if repr(first.metrics.get((step, name))) != repr(second.metrics.get((step, name)))
    }
    return frozenset({name for _, name in keys} - differing)
