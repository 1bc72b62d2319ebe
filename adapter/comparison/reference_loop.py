"""A job's trainer class in a plain loop on the job's own batches: what a training under genlight is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.seed import isolate_rng

from ..contract.exceptions import ContractError, InputError
from ..contract.run_state import RunState
from ..contract.types import StepContext
from ..job.config import RunConfig
from ..job.lightning_config import epochs_of, make_data
from ..module.plugin_loading import optional_hook
from ..plumbing.devices import release_memory
from .batches import joined_batches, rank_feed
from .causes import Circumstances
from .facts import Recording
from .plain_loop import another_trainer, plain_steps

__all__ = ["circumstances_of", "job_batches", "plain_context", "recorded_plain_loop"]


def circumstances_of(trainer: pl.Trainer) -> Circumstances:
    """On how many ranks and in which precision `trainer` runs."""
    return Circumstances(world_size=trainer.world_size, precision=str(trainer.precision))


def recorded_plain_loop(
    config: RunConfig,
    target: Any,
    trainer: pl.Trainer,
    how: Circumstances,
    *,
    steps: int,
    parquet_paths: Sequence[str] = (),
    model_handles: Mapping[str, Any] | None = None,
    look: Callable[[], None] = lambda: None,
    dropout: bool = True,
    refuse_dropout: str = "",
) -> Recording:
    """Step the trainer class of a job in a plain loop; random numbers are afterwards as they were before.

    Args:
        config: The job.
        target: Its trainer class, or an instance of it, which is copied.
        trainer: The Lightning trainer that runs the job, for its device and number of ranks.
        how: Filled in with what the loop shows.
        steps: How many; fewer where the job has fewer steps or batches.
        parquet_paths: Data files that its inputs brought here; otherwise those that it names.
        model_handles: What its inputs brought here for the class.
        look: Called before each step; what it raises ends the loop.
        dropout: Whether dropout layers drop anything.
        refuse_dropout: Why a class with dropout layers cannot be compared; empty where it can.

    Raises:
        ContractError: The class cannot be copied, or it collects its own batches on several ranks, or theirs cannot be
            put together.
        InputError: There is no batch.
    """
    collects = make_data(config, parquet_paths) is None and optional_hook(target, "rollout") is not None
    if collects and how.world_size > 1:
        raise ContractError(
            "A class with `rollout` collects other batches on each rank, and one plain loop cannot have them. Compare "
            "on one device: --set lightning.devices=1"
        )
    recording = Recording()
    try:
        with isolate_rng(), _feed(config, parquet_paths, how) as dataset:
            plugin = another_trainer(target)
            ctx = plain_context(config, trainer, dataset, model_handles)
            for facts in plain_steps(
                plugin,
                ctx,
                None if collects else job_batches(config, parquet_paths, how),
                how,
                steps=min(steps, ctx.job.max_steps or steps),
                dropout=dropout,
                look=look,
                refuse_dropout=refuse_dropout,
            ):
                recording.add(facts)
            del plugin, ctx
        release_memory()  # the training that follows needs it
        if len(recording) < 2:
            raise InputError("the source of batches is empty: there is no step to compare; check `dataset`")
    except BaseException:
        recording.close()
        raise
    return recording


def job_batches(config: RunConfig, parquet_paths: Sequence[str], how: Circumstances) -> Iterator[Any]:
    """The raw batches of a job, those of all ranks joined.

    Raises:
        InputError: The job names no data, or it cannot be read.
    """

    def data() -> pl.LightningDataModule:
        made = make_data(config, parquet_paths)
        if made is None:
            raise InputError("The job names no data: add `dataset.parquet_paths` or `mock_batches`.")
        return made

    return joined_batches(data, how.world_size, epochs=epochs_of(config))


def plain_context(
    config: RunConfig, trainer: pl.Trainer, dataset: Any, model_handles: Mapping[str, Any] | None
) -> StepContext:
    """What a trainer class gets in a plain loop: one rank, fp32, the device of rank zero of the job."""
    job = config.job if trainer.max_steps == -1 else replace(config.job, max_steps=trainer.max_steps)
    return StepContext(
        job=job,
        model_handles=dict(model_handles or {}),
        dataset=dataset,
        device=str(trainer.strategy.root_device),
        dtype="fp32",
        is_canceled=lambda: False,
        run_state=RunState(run_id=config.run_id),
    )


@contextmanager
def _feed(config: RunConfig, parquet_paths: Sequence[str], how: Circumstances) -> Iterator[Any]:
    """What a class finds as ``ctx.dataset`` on rank zero."""
    with ExitStack() as stack:
        data = make_data(config, parquet_paths)
        yield None if data is None else rank_feed(data, 0, how.world_size, stack)
