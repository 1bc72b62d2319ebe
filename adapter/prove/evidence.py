"""The evidence that a rehearsal leaves (the witness of its steps, its final state), and its comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...callbacks.checkpoint import find_final, load
from ...callbacks.checkpoint.format.record import digest_of
from ...callbacks.witness.entry import Proof, Recorded, compare, file_of_rank, read_witness, summarize
from ...callbacks.witness.state import differing_values, digest, values_of_state
from ...reporters import read_metrics
from ...reporters.events.event import RESUMED_METRIC
from ..check.snapshot import distance


@dataclass(frozen=True)
class Evidence:
    """The results of a run that completed."""

    witness: Mapping[int, Recorded]
    """The newest entry of each step, by rank."""
    state: Mapping[str, Any]
    """The values of the final checkpoint by path, without facts of the attempt such as its duration."""
    repeated: int
    """How often rank 0 trained a step again; a step that it trained three times counts twice."""

    @property
    def first_nonfinite(self) -> int | None:
        """The first step whose loss is not finite; None if there is none. A step without a loss does not count."""
        entries = (entry for recorded in self.witness.values() for entry in recorded.entries.values())
        return min((entry.step for entry in entries if entry.losses and not math.isfinite(entry.loss)), default=None)

    @property
    def digest(self) -> str:
        """Digest of the final state: equal bits have equal digests."""
        return digest_of("\n".join(f"{path} {digest(value)}" for path, value in self.state.items()).encode())


def read_evidence(checkpoints: Path, events: Path) -> Evidence:
    """Read the results of a completed run.

    Raises:
        LookupError: It has no final checkpoint, or no witness.
        BrokenCheckpointError: Its final checkpoint is broken.
    """
    if (record := find_final(checkpoints)) is None:
        raise LookupError("the run has no final checkpoint")
    witness = {rank: read_witness(file_of_rank(checkpoints, rank)) for rank in range(record.world_size)}
    lost = [rank for rank, recorded in witness.items() if recorded is None]
    if lost:
        raise LookupError(f"rank {lost[0]} of the run kept no witness of its steps")
    metrics = read_metrics(events, all_attempts=True).select(["attempt", "step", "name"]).to_pylist()
    trained = {(row["attempt"], row["step"]) for row in metrics if row["name"] != RESUMED_METRIC}
    return Evidence(
        witness={rank: recorded for rank, recorded in witness.items() if recorded is not None},
        state=values_of_state(load(record.path)),
        repeated=len(trained) - len({step for _, step in trained}),
    )


def compare_witnesses(
    expected: Mapping[int, Recorded],
    actual: Mapping[int, Recorded],
    *,
    with_values: bool = True,
    hints: Mapping[str, str] = {},
) -> Proof | None:
    """Compare the steps that two runs have recorded, by rank; None if they have no step in common.

    Args:
        expected: The witness of one run, by rank.
        actual: The witness of the other run.
        with_values: As for `compare`.
        hints: As for `compare`.
    """
    of_ranks = []
    for rank in sorted(expected.keys() & actual.keys()):
        equal, found = [], None
        first, second = expected[rank].entries, actual[rank].entries
        # Runs that started at different steps record different steps, so only common steps are compared.
        for key in sorted(first.keys() & second.keys()):
            found = compare(first[key], second[key], rank=rank, facts={}, with_values=with_values, hints=hints)
            if found is not None:
                break
            equal.append(key[0])
        of_ranks.append((equal, found))
    return summarize(of_ranks)


def first_difference(expected: Evidence, actual: Evidence, hints: Mapping[str, str] = {}) -> tuple[str, float] | None:
    """Return the first difference of two runs in words, and its size; None if there is none.

    The words name a step and the cause, or a value of the final state. The size is the largest relative difference of
    tensors in the final states; it is infinite if rows or random numbers differ.

    Args:
        expected: The run without a fault.
        actual: The other run.
        hints: Usual causes of a difference, by its kind.
    """
    proof = compare_witnesses(expected.witness, actual.witness, hints=hints)
    paths = differing_values(expected.state, actual.state)
    sizes = (_size(expected.state.get(path), actual.state.get(path)) for path in paths)
    if proof is not None and (found := proof.difference) is not None:
        text = f"step {found.step} of rank {found.rank}: {found.text}"
        return text, math.inf if found.kind in ("rows", "random numbers") else max(sizes, default=0.0)
    if paths:
        more = f" and {len(paths) - 1} other values of the state differ" if len(paths) > 1 else " differs"
        return f"at the end, {paths[0]}{more}", max(sizes)
    return None


def _size(first: Any, second: Any) -> float:
    are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor) and not (first.is_sparse or second.is_sparse)
    return distance(first, second) if are_tensors and first.is_floating_point() else 0.0
