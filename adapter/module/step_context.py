"""The context that a hosted trainer gets, filled in from the Lightning trainer that runs it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from ...callbacks.hook.events import run_state_of
from ...callbacks.lightning_internals import training_source
from ..cluster.job_context import JobContext, current_job_context
from ..contract.types import StepContext, TrainingJobSpec
from ..gradients.precision import contract_dtype

__all__ = ["CancelCheck", "filled_in"]


class _Cancelable(Protocol):
    def is_canceled(self) -> bool:
        """Whether a stop was asked for."""
        ...


def filled_in(
    ctx: StepContext, job: TrainingJobSpec | None, dataset: Any, module: Any, trainer: pl.Trainer, *, keeps_dtype: bool
) -> StepContext:
    """`ctx` with what `trainer` knows: device, type, rank, steps, run state, Slurm job and what feeds the run.

    Args:
        ctx: The context so far.
        job: The job; None takes that of `ctx`, without its step limit.
        dataset: What the caller gave; None takes what feeds the run.
        module: What hosts the trainer class, and says whether a stop was asked for.
        trainer: Runs it.
        keeps_dtype: Whether the ``dtype`` of `ctx` is the caller's.
    """
    job = job or dataclasses.replace(ctx.job, max_steps=0)
    if trainer.max_steps != -1 and trainer.max_steps != job.max_steps:
        job = dataclasses.replace(job, max_steps=trainer.max_steps)
    return dataclasses.replace(
        ctx,
        job=job,
        dataset=_feed_of(trainer, module) if dataset is None else dataset,
        device=str(trainer.strategy.root_device),
        dtype=ctx.dtype if keeps_dtype else contract_dtype(trainer.precision_plugin),
        is_canceled=CancelCheck(module),
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        run_state=run_state_of(trainer),
        job_context=ctx.job_context or _job_context(),
    )


def _job_context() -> JobContext | None:
    """Where Slurm, torchrun or Kubernetes placed this process; None where none did."""
    context = current_job_context()
    return None if context.job_id is None and context.rank is None else context


def _feed_of(trainer: pl.Trainer, module: Any) -> Any:
    """What feeds the run; None where the trainer collects its own batches, or nothing is trained."""
    if trainer.state.fn != TrainerFn.FITTING:
        return None
    source = training_source(trainer)
    return None if source is module else getattr(source, "feed", source)


class CancelCheck:
    """``is_canceled`` of `module` without a way to it: in a context that a trainer keeps, the module would be found."""

    def __init__(self, module: _Cancelable) -> None:
        self._asked: weakref.ref[_Cancelable] | None = weakref.ref(module)

    def __call__(self) -> bool:
        """Whether a stop was asked for; no, where the module is gone."""
        alive = None if self._asked is None else self._asked()
        return alive is not None and alive.is_canceled()

    def __getstate__(self) -> dict[str, Any]:
        return {"module": None if self._asked is None else self._asked()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy asks the module that was copied along with it.
        self._asked = None if state["module"] is None else weakref.ref(state["module"])
