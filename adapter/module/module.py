"""A trainer class of the contract as a LightningModule, and its own ``evaluate`` as the validation of Lightning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.checkpoint.plugins import DurableCheckpointIO
from ...callbacks.evaluation.evaluate import Evaluate, keep_modes, scores_of
from ...callbacks.hook.events import callbacks_of, publish_scores
from ...callbacks.lightning_internals import attach_loaders, set_validation_source
from ..contract.exceptions import StartupContractError
from ..contract.types import StepContext, TrainerPlugin, TrainingJobSpec
from ..discovery.discover import Discovered
from ..discovery.rank_local import rank_local_of
from ..plumbing.counted_dict import uncounted
from ..plumbing.redaction import without_secrets
from .epoch_loop import own_epoch_loop, start_after
from .hosted_trainer import HostedTrainer
from .loop import ContractFitLoop, install_loop
from .plugin_loading import check_arguments_of_loading, loader_of_class, optional_hook
from .rollout import RolloutBatches
from .supported import (
    check_trainer_arguments,
    defer_setups,
    missing_callbacks,
    prevent_wrapping,
    run_deferred_setups,
)
from .trainer_files import check_result

log = logging.getLogger(__name__)

_KINDS = {TrainerFn.FITTING: "validation", TrainerFn.VALIDATING: "validation", TrainerFn.TESTING: "test"}
"""The word in the names of Lightning's evaluation hooks, such as ``validation_step``, by ``trainer.state.fn``."""


class ContractModule(pl.LightningModule):
    """Hosts a trainer class: its hooks become the steps of a Lightning training.

    Modules, optimizers and schedulers that the trainer built in ``configure`` are found and registered, so that
    Lightning moves, saves, summarizes and restores them. The trainer keeps its own references and owns forward,
    backward and update.

    Args:
        plugin: A trainer, or the import path of one (``module:Class``).
        job: Identity, cadences and hyperparameters. None means the step limit of the Lightning trainer and the
            contract's defaults.
        model_handles: Handed to the trainer as ``ctx.model_handles``.
        context: A context made by the caller. Device, rank and run state are filled in; its ``dtype`` is kept.
        keep_on_resume: Settings that a resume leaves as ``configure`` built them instead of taking them from the
            checkpoint: settings of optimizers by name (``lr``, ``weight_decay``, …), ``schedule`` or ``scaler``.

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
        # Set these methods only if the trainer needs them: Lightning and our callbacks check whether a module has one.
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

        If the file was written by torch, such as an exported checkpoint, only its weights are loaded. Nothing is ever
        unpickled.

        Args:
            checkpoint_path: A record, the folder that holds it, or a ``.ckpt`` file.
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
        """Start after `step` with a state that the trainer class saved itself, instead of from a Lightning checkpoint.

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
        """The objects found in `contract_state` and on the trainer; None before ``configure`` was called."""
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
        return 0 if loop is None else loop.global_step

    @property
    def failed_step(self) -> int:
        """The step to name in a failure: the step in progress, or the number of completed steps between steps."""
        loop = own_epoch_loop(self)
        return 0 if loop is None else loop.step_in_progress or loop.global_step

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
        # Set `configure_model` only if it is needed: Lightning and its callbacks check whether a module has it.
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
            prevent_wrapping(self.trainer.strategy)
        if stage != "predict":
            self.hosted_trainer.set_up(self.trainer)
            run_deferred_setups(self.trainer, self, stage)

    def replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors that must be equal on all ranks, with their paths: parameters, buffers and optimizer states."""
        if self.discovered is not None:
            yield from rank_local_of(self.plugin).replicated(self.discovered)

    def replicated_values(self) -> list[torch.Tensor]:
        """Return the tensors of `replicated_tensors`, each once."""
        return [] if self.discovered is None else rank_local_of(self.plugin).replicated_values(self.discovered)

    def replicated_settings(self) -> Iterator[tuple[str, Any]]:
        """Yield other values that must be equal on all ranks, with their paths, such as settings of optimizers."""
        if self.discovered is not None:
            yield from rank_local_of(self.plugin).settings(self.discovered)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: Lightning calls this before a run or a validation, and the class may still need its gradients."""

    @override
    def on_fit_start(self) -> None:
        self.hosted_trainer.open_router()

    @override
    def on_fit_end(self) -> None:
        self.hosted_trainer.close_router()
        if self.hosted_trainer.router is not None:
            self.hosted_trainer.router.release_group()

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
        # A checkpoint of the older runtime has no weights: the class restores them.
        if CONTRACT_KEY in checkpoint and "state_dict" not in checkpoint:
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


class _OneBatch:
    """A loader of one batch with one row, for callbacks that measure batches."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(1)])


def host_evaluation(hosted: HostedTrainer) -> None:
    """Let the module of `hosted` evaluate the trainer class when Lightning validates or tests, and at no other time.

    Lightning needs a step and a loader for that, and a trainer class has neither. The module gets both for the length
    of such a run; the loader has one batch. Before that batch, the trainer evaluates itself as in training: without
    autocast, with gradients enabled, and with modules in the modes that training set. If a callback puts averaged
    weights in place for a validation, the trainer evaluates these.

    Lightning validates a training after each epoch, or as ``val_check_interval``, ``check_val_every_n_epoch`` and
    ``limit_val_batches`` say. An `Evaluate` callback has its own cadence and replaces Lightning's default.

    Raises:
        StartupContractError: An evaluation was requested, and the trainer class has no ``evaluate``.
    """
    module, trainer = hosted.module, hosted.module.trainer
    for each in _KINDS.values():
        for name in _evaluation_hooks(each):
            module.__dict__.pop(name, None)
    kind = _KINDS.get(trainer.state.fn) if trainer.state.fn is not None else None
    if kind is None:
        return
    class_name = type(hosted.plugin).__name__
    can_evaluate = callable(getattr(hosted.plugin, "evaluate", None))
    if trainer.state.fn == TrainerFn.FITTING:
        has_schedule = _has_validation_schedule(trainer)
        has_own_cadence = any(isinstance(callback, Evaluate) for callback in callbacks_of(trainer))
        if is_overridden("validation_step", module) or (not has_schedule and (has_own_cadence or not can_evaluate)):
            return
        if not can_evaluate:
            log.warning(
                "val_check_interval=%r and check_val_every_n_epoch=%r have no effect: %s has no `evaluate(state, ctx)`",
                trainer.val_check_interval,
                trainer.check_val_every_n_epoch,
                class_name,
            )
            return
    elif not can_evaluate:
        raise StartupContractError(
            "startup.invalid_trainer",
            f"{class_name} has no `evaluate(state, ctx)` to validate or test with. Add one that returns a mapping of "
            "scores.",
        )
    # Not earlier, because Lightning looks for validation data in every training whose module has these hooks.
    for name, hook in zip(
        _evaluation_hooks(kind), (_do_nothing, _do_nothing, partial(_report_scores, hosted)), strict=True
    ):
        setattr(module, name, hook)
    if trainer.state.fn == TrainerFn.FITTING:
        set_validation_source(trainer, _OneBatch())
    else:
        loaders = {"val_dataloaders": _OneBatch(), "test_dataloaders": _OneBatch()}
        attach_loaders(trainer, trainer.lightning_module, **loaders)


def _has_validation_schedule(trainer: pl.Trainer) -> bool:
    """Whether the trainer's arguments change Lightning's default schedule of validations."""
    interval = trainer.val_check_interval
    # An integer counts batches, a float is a share of an epoch.
    return type(interval) is int or interval != 1.0 or trainer.check_val_every_n_epoch != 1


def _evaluation_hooks(kind: str) -> tuple[str, str, str]:
    return f"{kind}_step", f"on_{kind}_model_eval", f"on_{kind}_batch_start"


def _do_nothing(*_: Any) -> None: ...


def _report_scores(hosted: HostedTrainer, *_: Any) -> None:
    """Restore the trainer if a checkpoint was named, and log the scores of rank 0."""
    module, trainer = hosted.module, hosted.module.trainer
    if trainer.sanity_checking:
        return  # before the first step, Lightning's sanity check would run the complete evaluation, which may be costly
    with torch.inference_mode(False), torch.enable_grad():
        hosted.restore()
        scores = scores_of(module)
    scores = trainer.strategy.broadcast(scores)
    step = hosted.count_steps()
    within_training = trainer.state.fn == TrainerFn.FITTING
    if within_training:
        publish_scores(trainer, scores, step)
    if within_training or step != trainer.global_step:
        scores = {"step": float(step), **scores}  # Lightning passes this entry to loggers as the step
    # The scores are equal on all ranks now; a mean over the ranks could round them, a maximum does not.
    module.log_dict(scores, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max", batch_size=1)
