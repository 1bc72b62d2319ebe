"""A job's class under genlight beside another loop: ``genlight compare``, with ``--against`` an old function.

The other loop runs first, in one process, and leaves a `Recording`. The hosted training is then compared with it, step
by step or update by update. ``run --shadow`` does the same with the first steps of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from ...callbacks.hook.hook import Hook
from ...callbacks.hook.listeners import skippable
from ..inputs import materialize_inputs
from ..job.config import RunConfig
from ..job.lightning_objects import instantiate_alone, make_data
from ..module.module import ContractModule
from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path
from .against import KINDS_OF_UPDATES, UpdateComparison, named_function, record_function
from .causes import Circumstances, likely_cause
from .isolation import WithoutDropout, quiet, seeded
from .plain_loop import recorded_plain_loop
from .snapshot import KINDS, Difference, Recording, Snapshot, StepDistances, compare_snapshots, described, snapshot

__all__ = ["Comparison", "StepComparison", "compare_job"]

NEVER = 1 << 62

_OF_THE_RUN = "trainer/"
"""Metrics that genlight adds to those of the class begin so."""


@dataclass
class Comparison:
    """How far a hosted training is from another loop; grows while it trains."""

    how: Circumstances = field(default_factory=Circumstances)
    """How the two run."""
    rtol: float = 0.0
    """Distances up to this are none."""
    kinds: tuple[str, ...] = KINDS
    """What is compared."""
    recording: Recording | None = None
    """What the other loop left; None on ranks that compare nothing."""
    steps: list[StepDistances] = field(default_factory=list)
    first: Difference | None = None
    """The difference beyond `rtol` that came first, and of that step the one that stands nearest to its cause."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know of how the two ran."""

    @classmethod
    def of(cls, trainer: pl.Trainer, rtol: float | None = None) -> Comparison:
        """The comparison for what `trainer` runs; without `rtol`, that of its precision and the order of its sums."""
        how = Circumstances(world_size=trainer.world_size, precision=str(trainer.precision))
        # On several ranks each has the metrics of its own rows.
        kinds = KINDS if how.world_size == 1 else KINDS[1:]
        return cls(how, (0.05 if how.is_half else 1e-5) if rtol is None else rtol, kinds)

    def take(self, step: int, plain: Snapshot, hosted: Snapshot, before: Snapshot | None = None) -> None:
        """Compare what the two loops have after a step.

        Args:
            step: Its number.
            plain: Of the other loop.
            hosted: Under genlight.
            before: What the other loop had a step earlier; None where there was no step.
        """
        found = compare_snapshots(step, plain, hosted, kinds=self.kinds, exact=self.how.is_exact)
        self.steps.append(found)
        worst = found.beyond(self.rtol)
        if worst is not None and self.first is None:
            kind, name, size = worst
            there, here = described(plain[kind].get(name)), described(hosted[kind].get(name))
            cause = likely_cause(kind, name, step, plain, hosted, before, self.how)
            self.first = Difference(step, kind, name, size, there, here, cause)

    def finish(self, recorded: int, what: str) -> Comparison:
        """Training is over; a loop that made fewer steps than the `recorded` ones of the other is a difference."""
        made = self.steps[-1].step if self.steps else 0
        if self.first is None and made < recorded:
            cause = "A loop met the end of its data before the other, or makes fewer updates of as many batches."
            self.first = Difference(made, "steps", what, math.inf, str(recorded), str(made), cause)
        return self

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


class StepComparison(Hook):
    """Compares each of the first steps of a hosted training with those of a plain loop.

    Args:
        steps: How many.
        comparison: Gets them. Ranks without a recording take part in what is collective.
        compared: Called after each step that was compared.
        stops: Whether the training ends after them, though the job asks for more: schedules go by its step limit.
    """

    critical = True
    ranks: Literal["zero", "all"] = "all"

    def __init__(
        self, steps: int, comparison: Comparison, compared: Callable[[], None] = lambda: None, *, stops: bool = False
    ) -> None:
        self.steps = steps
        self.comparison = comparison
        self.compared = compared
        self.stops = stops

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            self._compare(trainer, pl_module, 0)
        else:
            self.next_due_step = NEVER

    @override
    @skippable
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step <= self.steps:
            self._compare(trainer, pl_module, step)
        if self.stops and step >= self.steps:
            trainer.should_stop = True
        self.next_due_step = step + 1 if step < self.steps else NEVER

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int) -> None:
        assert isinstance(pl_module, ContractModule)
        recording, how = self.comparison.recording, self.comparison.how
        sharded = isinstance(trainer.strategy, ModelParallelStrategy)
        if recording is None and not sharded:
            return
        metrics = {} if step == 0 else pl_module.metrics()
        how.overflow_steps = int(metrics.get("trainer/overflow_steps", 0))
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_RUN)}
        state, plugin = pl_module.contract_state, pl_module.plugin
        hosted = snapshot(state, plugin, metrics, kinds=KINDS, whole=sharded, host=pl_module)
        if recording is not None and step < len(recording):
            self.comparison.take(step, recording[step], hosted, recording[step - 1] if step else None)
            self.compared()


def compare_job(
    config: RunConfig, *, steps: int, against: str | None = None, rtol: float | None = None, seed: int = 0
) -> Comparison | None:
    """Train a job's class for some steps in a plain loop, then under genlight, and compare all that it has.

    Dropout layers drop nothing on several ranks, where each would draw its own numbers.

    Args:
        config: The job; of its ``lightning`` block devices, strategy, precision and plugins count.
        steps: How many, at least 1; fewer where the job has fewer steps or batches.
        against: ``module:function``, an old training function that runs instead of the class in a plain loop, and is
            compared at each ``optimizer.step``, of which `steps` are made. See `record_function`.
        rtol: Distances up to this are none; None takes 0.05 in half precision, else 1e-5.
        seed: Of the random numbers of both.

    Returns:
        What came of it; None on ranks other than the first.

    Raises:
        ContractError: There is no such function, it cannot be called so, or one of the two never steps an optimizer.
        GenlightError: The class, its data or the ``lightning`` block cannot be used.
        Exception: What the class or the function itself raises.
    """
    with ExitStack() as stack:
        stack.enter_context(on_sys_path([config.spec_dir, Path.cwd()]))
        stack.enter_context(quiet())
        function = None if against is None else named_function(against)
        target, inputs = find_trainer(config.trainer), materialize_inputs(config)
        paths, handles = [str(path) for path in inputs.parquet_paths], inputs.model_handles()
        trainer = instantiate_alone(config, [])
        comparison = Comparison.of(trainer, rtol)
        how = comparison.how
        if trainer.is_global_zero:
            with seeded(seed):
                if function is None:
                    comparison.recording = recorded_plain_loop(
                        config, target, trainer, how, steps=steps, parquet_paths=paths, model_handles=handles,
                        dropout=how.world_size == 1,
                    )  # fmt: skip
                else:
                    comparison.recording = record_function(
                        function, config, trainer, how, updates=steps, parquet_paths=paths, model_handles=handles
                    )
            stack.callback(comparison.recording.close)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if function is None:
            callbacks.append(StepComparison(steps, comparison, stops=True))
        else:
            comparison.kinds = KINDS_OF_UPDATES
            callbacks.append(UpdateComparison(steps, comparison))
        if how.world_size > 1:
            callbacks.append(WithoutDropout())
        module = ContractModule(make_trainer(target), config.job, model_handles=handles)
        with seeded(seed):
            trainer.fit(module, datamodule=make_data(config, paths))
        if comparison.recording is None:
            return None
        recorded = len(comparison.recording) - (function is None)  # of a class that before the first step, too
        if function is None:
            comparison.notes.append(f"plain: fp32, one process; genlight: {how.described}")
            if how.world_size > 1:
                comparison.notes.append(
                    "dropout layers are off in both, and metrics are not compared: each rank has those of its own rows"
                )
            short = f"the job has {recorded} steps, of {steps} that were asked for"
        else:
            comparison.notes.append(
                f"{against}: one process; genlight: {how.described}; a step is a call of optimizer.step"
            )
            short = f"{against} ended after {recorded} of {steps} updates"
        comparison.notes += [short] if recorded < steps else []
        return comparison.finish(recorded, "steps" if function is None else "updates")
