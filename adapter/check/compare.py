"""``genlight compare``: a job's trainer class in a plain loop and under genlight, step by step on the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from ..inputs import MaterializedInputs, materialize_inputs
from ..job.config import RunConfig
from ..job.lightning_objects import instantiate_alone, make_data
from ..module.module import ContractModule
from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path
from .causes import Circumstances
from .isolation import WithoutDropout, quiet, seeded
from .plain_loop import circumstances_of, recorded_plain_loop
from .snapshot import KINDS, Difference, Recording, StepDistances
from .watch import StepComparison, default_rtol

__all__ = ["ComparedJob", "Comparison", "compare_job", "compared_job"]


@dataclass(frozen=True)
class Comparison:
    """What came of it."""

    steps: list[StepDistances] = field(default_factory=list)
    first: Difference | None = None
    rtol: float = 0.0
    kinds: tuple[str, ...] = KINDS
    notes: list[str] = field(default_factory=list)
    """What a reader has to know of how the two ran."""

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object; an infinite distance is null."""
        return {
            "equal": self.first is None,
            "rtol": self.rtol,
            "notes": self.notes,
            "first_difference": None if self.first is None else self.first.as_json(),
            "steps": [
                {
                    "step": step.step,
                    "largest": {
                        kind: {"name": worst[0], "distance": worst[1] if math.isfinite(worst[1]) else None}
                        for kind in self.kinds
                        if (worst := step.largest(kind)) is not None
                    },
                }
                for step in self.steps
            ],
        }


@dataclass(frozen=True)
class ComparedJob:
    """A job that is about to be compared, with its inputs on this machine."""

    config: RunConfig
    target: Any
    """Its trainer class, or an instance of it."""
    inputs: MaterializedInputs
    seed: int

    @property
    def parquet_paths(self) -> list[str]:
        """Data files that its inputs brought here."""
        return [str(path) for path in self.inputs.parquet_paths]

    def train(self, callbacks: list[pl.Callback], *, at_start: Callable[[pl.Trainer], None] | None = None) -> None:
        """Train under genlight, on all ranks of the job, and leave nothing behind.

        Args:
            callbacks: The only ones.
            at_start: Called with the Lightning trainer before ranks are started.
        """
        trainer = instantiate_alone(self.config, callbacks)
        if at_start is not None:
            at_start(trainer)
        if trainer.world_size > 1:
            callbacks_of_trainer: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            callbacks_of_trainer.append(WithoutDropout())
        module = ContractModule(
            make_trainer(self.target),
            self.config.job,
            model_handles=self.inputs.model_handles(),
        )
        with seeded(self.seed):
            trainer.fit(module, datamodule=make_data(self.config, self.parquet_paths))


def compared_job(config: RunConfig, *, seed: int) -> ComparedJob:
    """Find the trainer class of a job and fetch its inputs.

    Raises:
        ContractError: The import path does not lead to one conforming trainer.
        InputError: Inputs are missing.
    """
    target = find_trainer(config.trainer)
    return ComparedJob(config, target, materialize_inputs(config), seed)


def compare_job(config: RunConfig, *, steps: int, rtol: float | None = None, seed: int = 0) -> Comparison | None:
    """Train a job's class for some steps in a plain loop, then under genlight, and compare all that it has.

    Dropout layers drop nothing on several ranks, where each would draw its own numbers.

    Args:
        config: The job; of its ``lightning`` block devices, strategy, precision and plugins count.
        steps: How many, at least 1; fewer where the job has fewer steps or batches.
        rtol: Distances up to this are none; None takes `default_rtol`.
        seed: Of the random numbers of both.

    Returns:
        What came of it; None on ranks other than the first.

    Raises:
        GenlightError: The class, its data or the ``lightning`` block cannot be used.
        Exception: What the class itself raises.
    """
    with ExitStack() as stack:
        stack.enter_context(on_sys_path([config.spec_dir, Path.cwd()]))
        stack.enter_context(quiet())
        job = compared_job(config, seed=seed)
        watch = StepComparison(steps, None, Circumstances(), 0.0, lambda *_: None)
        done: list[StepDistances] = []
        differences: list[Difference] = []

        def told(_: pl.Trainer, found: StepDistances, difference: Difference | None) -> None:
            done.append(found)
            differences.extend([] if difference is None else [difference])

        def at_start(trainer: pl.Trainer) -> None:
            watch.how, watch.told = circumstances_of(trainer), told
            watch.rtol = default_rtol(watch.how) if rtol is None else rtol
            if not trainer.is_global_zero:
                return
            with seeded(seed):
                watch.recording = recorded_plain_loop(
                    config,
                    job.target,
                    trainer,
                    watch.how,
                    steps=steps,
                    parquet_paths=job.parquet_paths,
                    model_handles=job.inputs.model_handles(),
                    dropout=trainer.world_size == 1,
                )
            stack.callback(watch.recording.close)

        job.train([watch, StopAfter(steps)], at_start=at_start)
        if watch.recording is None:
            return None
        return _comparison(watch, watch.recording, done, differences, steps)


class StopAfter(pl.Callback):
    """Ends a training after so many steps, though the job asks for more: schedules go by its step limit."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """End it after the last step."""
        if trainer.global_step >= self._steps:
            trainer.should_stop = True


def _comparison(
    watch: StepComparison, recording: Recording, done: list[StepDistances], differences: list[Difference], steps: int
) -> Comparison:
    how, trained = watch.how, len(recording) - 1
    notes = [f"plain: fp32, one process; genlight: {how.described}"]
    if how.world_size > 1:
        notes.append(
            "dropout layers are off in both, and metrics are not compared: each rank has those of its own rows"
        )
    if trained < steps:
        notes.append(f"the job has {trained} steps, of {steps} that were asked for")
    if not differences and len(done) != len(recording):
        differences.append(
            Difference(
                len(done) - 1,
                "steps",
                "steps",
                math.inf,
                str(trained),
                str(len(done) - 1),
                "A loop met the end of its data before the other.",
            )
        )
    kinds = KINDS if how.world_size == 1 else KINDS[1:]
    return Comparison(done, differences[0] if differences else None, watch.rtol, kinds, notes)
