"""A trainer class of the contract as a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.checkpoint.plugins import DurableCheckpointIO
from ...callbacks.evaluation.evaluate import keep_modes
from ..contract.types import StepContext, TrainerPlugin, TrainingJobSpec
from ..discovery.discover import Discovered
from ..discovery.rank_local import rank_local_of
from ..plumbing.counted_dict import uncounted
from ..plumbing.redaction import without_secrets
from .epoch_loop import own_epoch_loop, start_after
from .evaluation import host_evaluation
from .hosted_trainer import HostedTrainer
from .loop import ContractFitLoop, install_loop
from .plugin_loading import check_arguments_of_loading, loader_of_class, optional_hook
from .rollout import RolloutBatches
from .supported import (
    check_trainer_arguments,
    defer_setups,
    leave_unwrapped,
    missing_callbacks,
    run_deferred_setups,
)
from .trainer_files import check_result


class ContractModule(pl.LightningModule):
    """Hosts a trainer class: its hooks become the steps of a Lightning training.

    Modules, optimizers and schedulers that the trainer built in ``configure`` are found and registered, so that
    Lightning moves, saves, summarises and restores them. The trainer keeps its own references and owns forward,
    backward and update.

    Args:
        plugin: A trainer, or the import path of one (``module:Class``).
        job: Identity, cadences and hyperparameters. None takes the step limit of the Lightning trainer and the
            contract's defaults.
        model_handles: Handed to the trainer as ``ctx.model_handles``.
        context: A context made by the caller. Device, rank and run state are filled in; its ``dtype`` is kept.
        keep_on_resume: Settings of optimizers (``lr``, ``weight_decay``, …), ``schedule`` or ``scaler``, that a
            resume leaves as ``configure`` built them instead of taking them from the checkpoint.

    Raises:
        ContractError: The import path does not name a conforming trainer, or the object is not one.
    """

    def __init__(
        self,
        plugin: str | TrainerPlugin,
        job: TrainingJobSpec | None = None,
        *,
        model_handles: Mapping[str, Any] | None = None,
        context: StepContext | None = None,
        keep_on_resume: Sequence[str] = (),
    ) -> None:
        ctx = context or StepContext(
            job=job or TrainingJobSpec(run_id="local", max_steps=0), model_handles=dict(model_handles or {})
        )
        super().__init__()
        self.automatic_optimization = False
        self.hosted_trainer = HostedTrainer(
            self, plugin, job, ctx, keeps_dtype=context is not None, keep_on_resume=keep_on_resume
        )
        """The trainer with its context, state and last result, for callbacks."""
        self._start_step = 0
        # Only if the trainer has them: Lightning and our callbacks check whether a module has a method.
        if self.hosted_trainer.rollouts is not None:
            self.train_dataloader = self._rollout_batches  # type: ignore[method-assign]
        elif optional_hook(self.plugin, "train_loader") is not None:
            self.train_dataloader = self._own_loader  # type: ignore[method-assign]
        if optional_hook(self.plugin, "save_checkpoint") is not None:
            self.save_trainer_files = self._save_trainer_files

    @classmethod
    @override
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: Any,
        map_location: str | torch.device | None = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **arguments: Any,
    ) -> Self:
        """Load a trainer class from a checkpoint, without a Lightning trainer: to sample, evaluate or inspect it.

        From a file of torch, such as an exported checkpoint, only the weights are loaded. Nothing is ever unpickled.

        Args:
            checkpoint_path: A record, or the folder that holds it; also a ``.ckpt`` file.
            map_location: The device on which the class builds its modules; None is the CPU.
            hparams_file: Refused; hyperparameters come from `job`.
            strict: Whether the weights must match the class exactly; None means yes.
            weights_only: Ignored; a checkpoint is always loaded without unpickling.
            arguments: Arguments of the constructor: `plugin`, and `job` for a class that reads hyperparameters.

        Raises:
            TypeError: `plugin` is missing.
            FileNotFoundError: There is no such checkpoint.
            BrokenCheckpointError: It is not complete.
            RuntimeError: Its weights do not match the class.
        """
        check_arguments_of_loading(cls.__name__, arguments, hparams_file)
        module, io = cls(**arguments), DurableCheckpointIO()
        device, hosted = "cpu" if map_location is None else map_location, module.hosted_trainer
        io.store.base = lambda: dict(hosted.set_up_without_trainer(device).named_parameters(remove_duplicate=False))
        checkpoint = io.load_checkpoint(checkpoint_path)
        hosted.set_up_without_trainer(device)
        hosted.restored_step = checkpoint.get("global_step", 0)
        hosted.to_restore = hosted.state.load_weights(checkpoint, checkpoint_path, strict=strict is not False)
        hosted.restore()
        return module

    def resume_from(
        self, *, step: int, payload: dict[str, object] | None = None, checkpoint_dir: Path | None = None
    ) -> None:
        """Start after `step` with the state that a trainer saved there, instead of from a Lightning checkpoint.

        Args:
            step: Steps that count as completed.
            payload: For ``load_state_dict``; None does not call it.
            checkpoint_dir: For ``load_checkpoint``, if the trainer has one; None does not call it.
        """
        self._start_step = step
        self.hosted_trainer.resume_from(payload, checkpoint_dir)

    @property
    def plugin(self) -> TrainerPlugin:
        """The trainer."""
        return self.hosted_trainer.plugin

    @property
    def ctx(self) -> StepContext:
        """The context that the trainer's hooks get."""
        return self.hosted_trainer.ctx

    @property
    def contract_state(self) -> Any:
        """The result of ``configure``; None before it was called."""
        return self.hosted_trainer.state.value if self.hosted_trainer.is_configured else None

    @property
    def discovered(self) -> Discovered | None:
        """The objects found in that result and on the trainer; None before ``configure``."""
        return self.hosted_trainer.state.discovered if self.hosted_trainer.is_configured else None

    @property
    @override
    def hparams_initial(self) -> AttributeDict:
        """Hyperparameters for loggers: the job's, and those that a subclass has saved; without secrets."""
        hyperparams = uncounted(self.hosted_trainer.original_job.hyperparams)
        return AttributeDict(without_secrets({**hyperparams, **super().hparams_initial}))

    @property
    def completed_steps(self) -> int:
        """Steps trained so far, including those before a resume."""
        loop = own_epoch_loop(self)
        return 0 if loop is None else loop.completed_steps

    @property
    def failed_step(self) -> int:
        """The step to name in a failure: the one in progress, or else the number of completed steps."""
        loop = own_epoch_loop(self)
        return 0 if loop is None else loop.step_in_progress or loop.completed_steps

    @property
    def stopped(self) -> str | None:
        """Why training ended before its step limit: ``should_stop``, ``data_exhausted``, or None."""
        loop = self.trainer.fit_loop
        return loop.stopped if isinstance(loop, ContractFitLoop) else None

    def metrics(self) -> dict[str, float]:
        """Return the last step's metrics by their reported names, with the learning rate; waits for the device."""
        return self.hosted_trainer.metrics()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise MisconfigurationException(
            "ContractModule needs the loop that its setup('fit') installs; call Trainer.fit"
        )

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        check_trainer_arguments(self.trainer)
        # By this attribute Lightning decides whether loggers get hyperparameters. Checkpoints do not hold them, because
        # each start takes them from its job.
        self._log_hyperparams = self._log_hyperparams or bool(self.hosted_trainer.original_job.hyperparams)
        defer_setups(self.trainer)
        host_evaluation(self.hosted_trainer)
        # Only if it is needed: Lightning and its callbacks check whether a module has one.
        vars(self).pop("configure_model", None)
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.configure_model = self.hosted_trainer.shard  # type: ignore[method-assign]
        return missing_callbacks(self.trainer, metric_every=self.ctx.job.metric_every)

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            job = self.hosted_trainer.job
            loop = install_loop(self.trainer, self.hosted_trainer, start_step=self._start_step)
            if job is not None and self.trainer.max_steps == -1 and job.max_steps:
                loop.epoch_loop.max_steps = job.max_steps
            leave_unwrapped(self.trainer.strategy)
        if stage != "predict":
            self.hosted_trainer.set_up(self.trainer)
            run_deferred_setups(self.trainer, self, stage)

    def replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield, by path, tensors that must be equal on all ranks: of parameters, buffers and optimizer states."""
        if self.discovered is not None:
            yield from rank_local_of(self.plugin).replicated(self.discovered)

    def replicated_values(self) -> list[torch.Tensor]:
        """Return the tensors of `replicated_tensors`, each once."""
        return [] if self.discovered is None else rank_local_of(self.plugin).replicated_values(self.discovered)

    def replicated_settings(self) -> Iterator[tuple[str, Any]]:
        """Yield values that must be equal on all ranks, by path: settings of optimizers, counters, scheduler states."""
        if self.discovered is not None:
            yield from rank_local_of(self.plugin).settings(self.discovered)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: before a run or a validation, gradients may belong to an open accumulation window or be views."""

    @override
    def on_fit_start(self) -> None:
        self.hosted_trainer.open_router()

    @override
    def on_fit_end(self) -> None:
        self.hosted_trainer.close_router()
        if self.hosted_trainer.router is not None:
            self.hosted_trainer.router.ended()

    @override
    def configure_optimizers(self) -> Any:
        """Return the optimizers and schedulers that were found; the trainer steps them, Lightning saves them."""
        return self.hosted_trainer.state.optimizer_configs()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hosted_trainer.save(checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        step = self.hosted_trainer.restored_step = checkpoint.get("global_step", 0)
        if CONTRACT_KEY in checkpoint and "state_dict" not in checkpoint:  # the older runtime's: the trainer restores
            checkpoint["state_dict"] = self.state_dict()
            start_after(self.trainer, step)
        if CONTRACT_KEY in checkpoint:
            self.hosted_trainer.load(checkpoint)

    def _rollout_batches(self) -> RolloutBatches | None:
        return self.hosted_trainer.rollouts

    def _own_loader(self) -> Any:
        return loader_of_class(self.plugin, self.ctx)

    def _save_trainer_files(self, *, output_dir: Path, step: int, final: bool) -> Mapping[str, Any] | None:
        hook: Callable[..., Any] = self.plugin.save_checkpoint  # type: ignore[attr-defined]
        with keep_modes(self, "save_checkpoint"):
            returned = hook(state=self.contract_state, step=step, output_dir=str(output_dir), final=final, ctx=self.ctx)
        return check_result(returned, output_dir)
