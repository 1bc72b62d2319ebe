"""The class under test, its data, and how it is run for a few steps under Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import override

from ...callbacks.checkpoint import Checkpoint
from ...callbacks.hook.hook import Hook
from ..contract.types import TrainerPlugin, TrainingJobSpec
from ..discovery.discover import Discovered
from ..feed.data_module import MockDataModule
from ..module.module import ContractModule
from ..module.plugin_loading import load_trainer_plugin, on_sys_path
from .isolation import quiet, seeded, turn_off_dropout
from .snapshot import EVERYTHING, Snapshot, snapshot

__all__ = ["Subject", "Watched"]


class Watched(Hook):
    """A training as it is seen before its first step and after each, before a callback reports or saves that step.

    Args:
        at_step: Called with the completed steps and the module.
        keep: Whether to take snapshots.
        stop_after: Ends the training after so many steps, though the job asks for more: schedules go by its step limit.
        dropout: Whether dropout layers drop anything: which numbers a rank draws is its own affair, and hides whether
            all else agrees.
    """

    critical = True
    ranks: Literal["zero", "all"] = "all"
    module: ContractModule

    def __init__(
        self,
        at_step: Callable[[int, ContractModule], None] = lambda *_: None,
        *,
        keep: bool = False,
        stop_after: int | None = None,
        dropout: bool = True,
    ) -> None:
        self.at_step, self.keep, self.stop_after, self.dropout = at_step, keep, stop_after, dropout
        self.rollouts = 0
        """How many were begun."""
        self.snapshots: dict[int, Snapshot] = {}
        """Snapshots before the first step of this run and after each; only where they were asked for."""
        self.metrics: list[dict[str, float]] = []
        """Of each of these steps."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.module = pl_module
        if not self.dropout:
            turn_off_dropout(pl_module.modules())

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.keep:
            self.snapshots[trainer.global_step] = self.reached()
        self.at_step(trainer.global_step, pl_module)

    def on_rollout_start(self, *_: Any) -> None:
        """Count."""
        self.rollouts += 1

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.on_train_start(trainer, pl_module)
        if self.keep:
            self.metrics.append(pl_module.metrics())
        if self.stop_after is not None and trainer.global_step >= self.stop_after:
            trainer.should_stop = True

    @property
    def discovered(self) -> Discovered:
        """The objects that the class built."""
        assert self.module.discovered is not None
        return self.module.discovered

    def reached(self, *kinds: str) -> Snapshot:
        """A snapshot of the class now, of these kinds or of all; a collective where it is sharded."""
        module = self.module
        return snapshot(module.contract_state, module.plugin, kinds=kinds or EVERYTHING, whole=True, host=module)


@dataclass(frozen=True)
class Subject:
    """A trainer class and what it is fed with."""

    import_path: str
    batches: tuple[Any, ...]
    """Raw batches, one for each step; twice as many as `steps`. None has a class with ``rollout`` collect its own."""
    steps: int
    """Half of a whole run: where it is interrupted."""
    search_path: tuple[str, ...] = ()
    hyperparams: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    make_data: Callable[[], pl.LightningDataModule | None] | None = None
    """Makes the job's own data, or None if the class has its own loader; None without a loader to check."""
    precision: str = "32-true"
    """The job's."""

    def make(self) -> TrainerPlugin:
        """A new trainer."""
        return load_trainer_plugin(self.import_path, search_path=self.search_path)

    def train(
        self,
        watched: Watched,
        *,
        batches: Sequence[Any] | None = None,
        at_update: Callable[[Optimizer], None] = lambda _: None,
        save_to: Path | None = None,
        resume_from: Path | None = None,
        as_in_job: bool = False,
        **trainer_arguments: Any,
    ) -> Watched:
        """Train a new instance, from the same seed each time, on the CPU; returns `watched`.

        Args:
            watched: Sees the training.
            batches: Raw batches; None takes those of the subject. Without any the class collects its own.
            at_update: Called with an optimizer after each of its steps; what it raises ends the training.
            save_to: Folder for a checkpoint of the step at which the run is left.
            resume_from: Record of a checkpoint.
            as_in_job: Whether the job's own loader feeds the training, with its workers and in epochs that end within
                it, and in the job's precision; it is interrupted in the middle of an epoch.
            trainer_arguments: For Lightning's trainer.
        """
        batches = self.batches if batches is None else batches
        max_steps = 2 * self.steps
        job = TrainingJobSpec(run_id="check", max_steps=max_steps, metric_every=0, hyperparams=dict(self.hyperparams))
        module = ContractModule(self.make(), job)
        callbacks: list[pl.Callback] = [watched]
        epochs: dict[str, Any] = {"max_epochs": 1 if batches else -1}
        make_data = self.make_data if as_in_job else None
        if make_data is not None:
            epochs = {"max_epochs": -1, "limit_train_batches": max(1, self.steps - 2)}
        if as_in_job:
            trainer_arguments = {"plugins": [_plugin_of(self.precision)], **trainer_arguments}
        if save_to is not None:
            callbacks.append(Checkpoint(save_to, every_n_steps=self.steps, save_final=False, keep_last=None))
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: at_update(optimizer))
        with ExitStack() as stack:
            stack.callback(handle.remove)
            stack.enter_context(quiet())
            stack.enter_context(seeded(self.seed))
            trainer = pl.Trainer(
                **{"accelerator": "cpu", "devices": 1, "plugins": [Precision()], **trainer_arguments},
                max_steps=max_steps,
                **epochs,
                callbacks=callbacks,
                logger=False,
                enable_checkpointing=save_to is not None,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                limit_val_batches=0,
            )
            stack.enter_context(on_sys_path([Path(folder) for folder in self.search_path]))
            data: pl.LightningDataModule | None = MockDataModule(list(batches)) if batches else None
            if make_data is not None:
                data = make_data()
            trainer.fit(module, datamodule=data, ckpt_path=None if resume_from is None else str(resume_from))
        return watched


def _plugin_of(precision: str) -> Precision:
    """The plugin for a job's precision, on the CPU."""
    if precision in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(precision, "cpu")  # type: ignore[arg-type]
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision)  # type: ignore[arg-type]
    return DoublePrecision() if precision == "64-true" else Precision()
