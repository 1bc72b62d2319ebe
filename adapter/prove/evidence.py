"""The evidence that a rehearsal leaves, the witness of its steps and its final state; how two of them differ first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.checkpoint import find_final, load
from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.checkpoint.format.record import CheckpointRecord, digest_of
from ...callbacks.witness.entry import Proof, Recorded, compare, file_of_rank, read_witness, summarize
from ...reporters import read_metrics
from ...reporters.events.event import RESUMED_METRIC
from ..check.snapshot import Snapshot, distance, flatten, is_real

_OF_AN_ATTEMPT = ("genlight_run_state", "callbacks", "loops", "pytorch-lightning_version", "hyper_parameters")
"""Parts of a checkpoint with the number, the files, the clocks and the settings of an attempt. Of the loops, only the
positions of loaders are compared: Lightning counts epochs in another way after a resume."""
_OF_A_START = ("elapsed_s", "is_between_batches", "metrics", "witness")
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
    witness = {rank: read_witness(file_of_rank(checkpoints, rank)) for rank in range(record.world_size)}
    lost = [rank for rank, recorded in witness.items() if recorded is None]
    if lost:
        raise LookupError(f"rank {lost[0]} of the run kept no witness of its steps")
    metrics = read_metrics(events, all_attempts=True).select(["attempt", "step", "name"]).to_pylist()
    trained = {(row["attempt"], row["step"]) for row in metrics if row["name"] != RESUMED_METRIC}
    return Evidence(
        witness={rank: recorded for rank, recorded in witness.items() if recorded is not None},
        state=state_of(record),
        repeated=len(trained) - len({step for _, step in trained}),
    )


def state_of(record: CheckpointRecord) -> Snapshot:
    """Return the content of a checkpoint by path, without facts of the attempt such as its duration.

    Raises:
        BrokenCheckpointError: It is broken.
        CheckpointError: It has a type that this process does not know.
    """
    loaded = load(record.path)
    content = {key: value for key, value in loaded.items() if key not in _OF_AN_ATTEMPT}
    content["positions"] = loaded.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
    if isinstance(own := content.get(CONTRACT_KEY), Mapping):
        content[CONTRACT_KEY] = {key: value for key, value in own.items() if key not in _OF_A_START}
    return flatten(content, "state")


def compare_witnesses(
    expected: Mapping[int, Recorded], actual: Mapping[int, Recorded], *, with_values: bool = True
) -> Proof | None:
    """Compare the steps that two runs have recorded, by rank; None if they have no step in common.

    Args:
        expected: One witness, by rank.
        actual: The other one.
        with_values: As for `compare`.
    """
    of_ranks = []
    for rank in sorted(expected.keys() & actual.keys()):
        equal, found = [], None
        first, second = expected[rank].entries, actual[rank].entries
        # A resumed run has entries of other steps as well: of the first ones after its start.
        for key in sorted(first.keys() & second.keys()):
            found = compare(first[key], second[key], rank=rank, facts={}, with_values=with_values, hints={})
            if found is not None:
                break
            equal.append(key[0])
        of_ranks.append((equal, found))
    return summarize(of_ranks)


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
    proof = compare_witnesses(expected.witness, actual.witness)
    if proof is not None and (found := proof.difference) is not None:
        text = f"step {found.step} of rank {found.rank}: {found.text}"
        return Difference(text, math.inf if found.kind in ("rows", "random numbers") else size)
    if paths:
        more = f" and {len(paths) - 1} other values of the state differ" if len(paths) > 1 else " differs"
        return Difference(f"at the end, {paths[0]}{more}", size)
    return None
