"""The class under test and its data; trains it for a few steps under Lightning."""

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


class Observer(Hook):
    """Observes a training before its first step and after each step, before other callbacks report or save the step.

    Args:
        at_step: Called with the number of completed steps and the module.
        keep: Whether to take snapshots.
        stop_after: End the training after this many steps. The step limit of the job stays larger, because schedules
            use it.
        dropout: Whether dropout is on. Ranks draw different numbers for it, and these would hide other
            differences.
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
        """Number of rollouts that began."""
        self.snapshots: dict[int, Snapshot] = {}
        """Snapshots before the first step of this run and after each step, by step; only with `keep`."""
        self.metrics: list[dict[str, float]] = []
        """Metrics of each step; only with `keep`."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.module = pl_module
        if not self.dropout:
            turn_off_dropout(pl_module.modules())

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.keep:
            self.snapshots[trainer.global_step] = self.take_snapshot()
        self.at_step(trainer.global_step, pl_module)

    def on_rollout_start(self, *_: Any) -> None:
        """Count the rollout."""
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

    def take_snapshot(self, *kinds: str) -> Snapshot:
        """Return a snapshot of the class, of these kinds or of all. Collective if the class is sharded."""
        module = self.module
        return snapshot(module.contract_state, module.plugin, kinds=kinds or EVERYTHING, gather=True, host=module)


@dataclass(frozen=True)
class Subject:
    """A trainer class and its data."""

    import_path: str
    batches: tuple[Any, ...]
    """Raw batches, one for each step; twice as many as `steps`. Empty if the class collects its own by ``rollout``."""
    steps: int
    """Half of the steps of a run; the step of the interruption."""
    search_path: tuple[str, ...] = ()
    hyperparams: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    make_data: Callable[[], pl.LightningDataModule | None] | None = None
    """Makes the job's data, or returns None if the class has its own loader; None if there is no loader to check."""
    precision: str = "32-true"
    """Precision of the job."""

    def make(self) -> TrainerPlugin:
        """Return a new trainer."""
        return load_trainer_plugin(self.import_path, search_path=self.search_path)

    def train(
        self,
        observer: Observer,
        *,
        batches: Sequence[Any] | None = None,
        at_update: Callable[[Optimizer], None] = lambda _: None,
        save_to: Path | None = None,
        resume_from: Path | None = None,
        as_in_job: bool = False,
        **trainer_arguments: Any,
    ) -> Observer:
        """Train a new instance on the CPU, always from the same seed; return `observer`.

        Args:
            observer: A callback of the training.
            batches: Raw batches; None uses the batches of the subject. If there are none, the class collects its own.
            at_update: Called with an optimizer after each of its steps; an exception ends the training.
            save_to: Folder for a checkpoint of the step at which a run is interrupted.
            resume_from: Record of a checkpoint.
            as_in_job: Whether to use the job's own loader with its workers, and the job's precision. Epochs are shorter
                than the run, and the interruption is in the middle of an epoch.
            trainer_arguments: For Lightning's trainer.
        """
        batches = self.batches if batches is None else batches
        max_steps = 2 * self.steps
        job = TrainingJobSpec(run_id="check", max_steps=max_steps, metric_every=0, hyperparams=dict(self.hyperparams))
        module = ContractModule(self.make(), job)
        callbacks: list[pl.Callback] = [observer]
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
        return observer


def _plugin_of(precision: str) -> Precision:
    """Return the plugin for a job's precision, on the CPU."""
    if precision in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(precision, "cpu")  # type: ignore[arg-type]
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision)  # type: ignore[arg-type]
    return DoublePrecision() if precision == "64-true" else Precision()
