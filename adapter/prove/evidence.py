"""The evidence that a rehearsal leaves, the witness of its steps and its final state; how two of them differ first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.checkpoint import find_final, load
from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.checkpoint.format.record import digest_of
from ...callbacks.witness.entry import Recorded, compare, file_of_rank, read_witness
from ...reporters import read_metrics
from ...reporters.events.event import RESUMED_METRIC
from ..check.snapshot import Snapshot, distance, flatten, is_real

_OF_AN_ATTEMPT = ("genlight_run_state", "callbacks")
"""Parts of a checkpoint with the number, the files and the clocks of an attempt."""
_OF_A_START = ("elapsed_s", "metrics", "witness")
"""Parts of the state with the duration, the speed and the identity of a training."""


@dataclass(frozen=True)
class Evidence:
    """The results of a run that completed."""

    witness: Mapping[int, Recorded]
    """The newest entry of each step, by rank."""
    state: Snapshot
    """The content of the final checkpoint by path, without facts of the attempt such as its duration."""
    repeated: int
    """Number of steps that rank 0 trained more than once."""

    @property
    def digest(self) -> str:
        """Digest of the final state: equal bits have equal digests."""
        return digest_of("\n".join(f"{path} {digest}" for path, digest in self.state.digests.items()).encode())


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ."""

    text: str
    size: float
    """Largest relative difference of floating-point values in the final states; infinite for other rows or random
    numbers."""


def read_evidence(checkpoints: Path, events: Path) -> Evidence:
    """Read the results of a completed run.

    Raises:
        LookupError: It has no final checkpoint, or no witness.
        BrokenCheckpointError: Its final checkpoint is broken.
    """
    record = find_final(checkpoints)
    if record is None:
        raise LookupError("the run has no final checkpoint")
    content = {key: value for key, value in load(record.path).items() if key not in _OF_AN_ATTEMPT}
    if isinstance(own := content.get(CONTRACT_KEY), Mapping):
        content[CONTRACT_KEY] = {key: value for key, value in own.items() if key not in _OF_A_START}
    witness = {rank: read_witness(file_of_rank(checkpoints, rank)) for rank in range(record.world_size)}
    lost = [rank for rank, recorded in witness.items() if recorded is None]
    if lost:
        raise LookupError(f"rank {lost[0]} of the run kept no witness of its steps")
    metrics = read_metrics(events, all_attempts=True).select(["attempt", "step", "name"]).to_pylist()
    trained = {(row["attempt"], row["step"]) for row in metrics if row["name"] != RESUMED_METRIC}
    return Evidence(
        witness={rank: recorded for rank, recorded in witness.items() if recorded is not None},
        state=flatten(content, "state"),
        repeated=len(trained) - len({step for _, step in trained}),
    )


def first_difference(expected: Evidence, actual: Evidence) -> Difference | None:
    """Return the first difference of two runs: in a step, with its cause, or only in the final state.

    Args:
        expected: The run without a fault.
        actual: The other run.
    """
    ours, theirs = expected.state["value"], actual.state["value"]
    paths = expected.state.differences(actual.state)
    measured = [path for path in paths if is_real(ours.get(path)) and is_real(theirs.get(path))]
    size = max((distance(ours[path], theirs[path]) for path in measured), default=0.0)
    # A resumed run has entries of other steps as well: of the first ones after its start.
    found = [
        difference
        for rank in expected.witness.keys() & actual.witness.keys()
        for first, second in [(expected.witness[rank].entries, actual.witness[rank].entries)]
        for key in first.keys() & second.keys()
        if (difference := compare(first[key], second[key], rank=rank, facts={})) is not None
    ]
    if found:
        first_found = min(found, key=lambda each: (each.key, each.rank))
        text = f"step {first_found.step} of rank {first_found.rank}: {first_found.text}"
        return Difference(text, math.inf if first_found.kind in ("rows", "random numbers") else size)
    if paths:
        more = f" and {len(paths) - 1} other values of the state differ" if len(paths) > 1 else " differs"
        return Difference(f"at the end, {paths[0]}{more}", size)
    return None
