"""``genlight run --shadow N``: the first steps of a run, compared with those of a plain loop before it goes on.

A copy of the trainer class takes the steps first, alone and on the rows of all ranks, from the same random numbers,
which are put back. The run then trains as ever; after each of its first steps, before a callback reports or saves it,
everything is compared. A difference ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...reporters.events.event_log import EventLog
from ..contract.exceptions import ContractError, ShadowMismatchError, StartupContractError
from ..job.config import RunConfig
from ..module.plugin_loading import find_trainer

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ..check.snapshot import Difference

__all__ = ["SHADOW_METRIC", "check_shadow_start", "shadowed"]

log = logging.getLogger(__name__)

SHADOW_METRIC = "trainer/shadow_difference"
"""The largest relative difference of the checked steps; reported once, at the last of them."""
_DROPOUT = "Dropout layers draw other numbers on each rank. Use `genlight compare`, which turns them off in both loops."


def check_shadow_start(steps: int, resumes_after: int | None) -> bool:
    """Whether a run has steps to check.

    Args:
        steps: How many are to be checked.
        resumes_after: The step of the checkpoint that the run resumes from; None where it begins anew.

    Raises:
        StartupContractError: It goes on within the steps that were to be checked.
    """
    if resumes_after is None:
        return True
    if resumes_after < steps:
        raise StartupContractError(
            "startup.artifacts_in_use",
            f"--shadow {steps} checks the first {steps} steps, and the run goes on after step {resumes_after}, where a "
            "plain loop cannot follow. Begin anew with --fresh, or leave --shadow out.",
        )
    log.info("--shadow: the first %d steps are done, so there is nothing to check", steps)
    return False


@contextmanager
def shadowed(
    config: RunConfig,
    trainer: pl.Trainer,
    steps: int,
    *,
    parquet_paths: Sequence[str],
    model_handles: Mapping[str, Any],
    compares: bool,
    event_log: EventLog | None,
    look: Callable[[], None],
) -> Iterator[None]:
    """Take the steps of the plain loop, and have `trainer` compare its own with them inside of the block.

    Args:
        config: The job.
        trainer: Gets a callback that comes before those that it has.
        steps: How many; fewer where the job has fewer steps or batches.
        parquet_paths: Data files that its inputs brought here.
        model_handles: What its inputs brought here for the class.
        compares: Whether this rank compares, and does not only take part.
        event_log: Gets `SHADOW_METRIC`.
        look: Called before each step of the plain loop; what it raises ends it.

    Raises:
        StartupContractError: ``startup.invalid_trainer``: the class cannot be copied, or cannot be compared.
    """
    from ...callbacks.hook.events import callbacks_of
    from ..check.compare import Comparison, step_comparison
    from ..check.plain_loop import recorded_plain_loop

    comparison = Comparison.of(trainer)
    how = comparison.how
    try:
        if compares:
            comparison.recording = recorded_plain_loop(
                config, find_trainer(config.trainer), trainer, how, steps=steps, parquet_paths=parquet_paths,
                model_handles=model_handles, look=look, refuse_dropout=_DROPOUT,
            )  # fmt: skip
    except ContractError as error:
        raise StartupContractError("startup.invalid_trainer", f"--shadow: {error}") from error

    def compared() -> None:
        if comparison.first is not None:
            raise _mismatch(comparison.first, comparison.rtol)
        step = comparison.steps[-1].step
        if comparison.recording is None or step < len(comparison.recording) - 1:
            return
        sizes = [worst[1] for found in comparison.steps for kind in found.distances if (worst := found.largest(kind))]
        largest = max(sizes, default=0.0)
        log.info("--shadow: the first %d steps are those of a plain loop, to %.1e", step, largest)
        if event_log is not None:
            event_log.metric(name=SHADOW_METRIC, value=largest, step=step)

    callbacks_of(trainer).insert(0, step_comparison(steps, comparison, compared))
    try:
        yield
    finally:
        if comparison.recording is not None:
            comparison.recording.close()


def _mismatch(found: Difference, rtol: float) -> ShadowMismatchError:
    return ShadowMismatchError(
        f"--shadow: after step {found.step} {found.kind} {found.name} differs from that of a plain loop by "
        f"{found.distance:.1e} (beyond {rtol:g}): {found.plain} there, {found.hosted} here. {found.cause}"
    )
