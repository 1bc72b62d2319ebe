"""Compares the steps of a hosted training with those that a plain loop has left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from ...callbacks.hook.hook import Hook
from ...callbacks.hook.listeners import skippable
from ..module.module import ContractModule
from .causes import Circumstances, likely_cause
from .snapshot import (
    KINDS,
    Difference,
    Recording,
    Snapshot,
    StepDistances,
    compare_snapshots,
    described,
    snapshot,
)

__all__ = ["StepComparison", "default_rtol", "first_difference"]

NEVER = 1 << 62

_OF_THE_RUN = "trainer/"
"""Metrics that genlight adds to those of the class begin so."""


class StepComparison(Hook):
    """Takes a snapshot after each of the first steps, and hands it on with what the plain loop had.

    Args:
        steps: How many.
        recording: What the plain loop left; None on ranks that compare nothing, which take part in what is collective.
        told: Called with the distances of each step, and the first difference once there is one.
        how: How the two loops ran.
        rtol: Distances up to this are none.
    """

    critical = True
    ranks: Literal["zero", "all"] = "all"

    def __init__(
        self,
        steps: int,
        recording: Recording | None,
        how: Circumstances,
        rtol: float,
        told: Callable[[pl.Trainer, StepDistances, Difference | None], None],
    ) -> None:
        self.steps = steps
        self.recording = recording
        self.how = how
        self.rtol = rtol
        self.told = told

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
        self.next_due_step = step + 1 if step < self.steps else NEVER

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int) -> None:
        assert isinstance(pl_module, ContractModule)
        sharded = isinstance(trainer.strategy, ModelParallelStrategy)
        if self.recording is None and not sharded:
            return
        metrics = {} if step == 0 else pl_module.metrics()
        self.how.overflow_steps = int(metrics.get("trainer/overflow_steps", 0))
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_RUN)}
        state, plugin = pl_module.contract_state, pl_module.plugin
        hosted = snapshot(state, plugin, metrics, kinds=KINDS, whole=sharded, host=pl_module)
        if self.recording is None or step >= len(self.recording):
            return
        plain = self.recording[step]
        # On several ranks each has the metrics of its own rows.
        kinds = KINDS if self.how.world_size == 1 else KINDS[1:]
        found = compare_snapshots(step, plain, hosted, kinds=kinds, exact=self.how.is_exact)
        before = self.recording[step - 1] if step else None
        self.told(trainer, found, first_difference(found, plain, hosted, before, self.how, self.rtol))


def default_rtol(how: Circumstances) -> float:
    """Distances that the precision of a job and the order of its sums explain: 0.05 in half precision, else 1e-5."""
    return 0.05 if how.is_half else 1e-5


def first_difference(
    found: StepDistances, plain: Snapshot, hosted: Snapshot, before: Snapshot | None, how: Circumstances, rtol: float
) -> Difference | None:
    """The difference beyond `rtol` that stands nearest to its cause, with that; None where there is none.

    Args:
        found: How far the two loops are apart after a step.
        plain: What the plain loop had after it.
        hosted: What genlight had.
        before: What the plain loop had a step earlier; None where there was no step.
        how: How the two ran.
        rtol: Distances up to this are none.
    """
    worst = found.beyond(rtol)
    if worst is None:
        return None
    kind, name, size = worst
    cause = likely_cause(kind, name, found.step, plain, hosted, before, how)
    a, b = plain[kind].get(name), hosted[kind].get(name)
    return Difference(found.step, kind, name, size, described(a), described(b), cause)
