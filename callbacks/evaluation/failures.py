"""What becomes of an evaluation that fails: on all ranks alike, and for good after some failures in a row."""

from __future__ import annotations

import logging
from collections.abc import Callable

import lightning.pytorch as pl
import torch.distributed as dist

from ...adapter.contract.exceptions import EvaluationError
from ...adapter.plumbing.redaction import text_of

__all__ = ["FailuresInARow", "scores_of_all_ranks"]

log = logging.getLogger(__name__)


class FailuresInARow:
    """Counts failures without a success between them, and says when it is enough.

    Args:
        label: How a message names what fails.
        most: After how many it is switched off; 0 never does.
    """

    def __init__(self, label: str, most: int) -> None:
        self._label, self._most = label, most
        self._count = 0

    @property
    def is_off(self) -> bool:
        """Whether it has failed too often."""
        return 0 < self._most <= self._count

    def clear(self) -> None:
        """It has worked, or a new fit begins."""
        self._count = 0

    def note(self, error: Exception) -> None:
        """It has failed by `error`; the last failure that it may have is told."""
        self._count += 1
        if self.is_off:
            log.warning(
                "%s has failed %d times in a row and is off for the rest of this fit; the last failure: %s",
                *(self._label, self._count, text_of(error)),
            )


def scores_of_all_ranks(
    trainer: pl.Trainer, evaluate: Callable[[], dict[str, float]], *, average: bool
) -> dict[str, float]:
    """What `evaluate` returns, the same on all ranks: the mean over ranks, or rank zero's. Collective.

    Raises:
        EvaluationError: It failed on another rank, or scores to average have different names on different ranks.
        Exception: What `evaluate` raised on this rank, after all ranks know of it.
    """
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return evaluate()
    scores: dict[str, float] = {}
    failure: Exception | None = None
    try:
        scores = evaluate()
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks do not wait for this one
        failure = error
    everyone: list[tuple[dict[str, float], str | None]] = [({}, None)] * trainer.world_size
    said = None if failure is None else f"{type(failure).__qualname__}: {text_of(failure)}"
    dist.all_gather_object(everyone, (scores, said))
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            raise EvaluationError(f"the evaluation failed on rank {rank}: {problem}")
    if not average:
        return everyone[0][0]
    for rank, (theirs, _) in enumerate(everyone):
        if set(theirs) != set(everyone[0][0]):
            raise EvaluationError(
                f"scores cannot be averaged: rank 0 has {sorted(everyone[0][0])}, and rank {rank} has {sorted(theirs)}"
            )
    return {name: sum(theirs[name] for theirs, _ in everyone) / len(everyone) for name in everyone[0][0]}
