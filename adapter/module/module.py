"""A trainer class of the contract as a LightningModule."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.checkpoint.plugins import DurableCheckpointIO
from ...callbacks.checkpoint.policy import savers_of
from ...callbacks.hook.events import callbacks_of, run_state_of
from ...callbacks.lightning_internals import set_callback_metrics, training_source
from ...callbacks.module_modes import keep_modes
from ...callbacks.rank_channel import ALONE
from ..cluster.job_context import JobContext, current_job_context
from ..contract.types import StepContext, StepResult, TrainerPlugin, TrainingJobSpec
from ..discovery.bare_parameters import BareParameters
from ..discovery.discover import Discovered, check_devices, discover
from ..discovery.rank_local import rank_local_of
from ..gradients.fsdp.state import whole_metrics
from ..gradients.fsdp.strategy import shard_for
from ..gradients.precision import contract_dtype
from ..gradients.step import StepRouter, step_router
from ..plumbing.counted_dict import CountedDict, uncounted
from ..plumbing.redaction import without_secrets
from .evaluation import host_evaluation
from .first_updates import FirstUpdates
from .loop import install_loop, own_epoch_loop, start_after
from .own_hooks import attach_own_hooks
from .plugin_loading import (
    check_arguments_of_loading,
    check_instance,
    load_trainer_plugin,
    loader_of_class,
    optional_hook,
)
from .rollout import RolloutBatches
from .state import PHASE, STATE, ToRestore, TrainerState, collect_from_ranks, rank_channel_of
from .step_metrics import named_scalars, validate_result, values_on_device
from .supported import (
    check_trainer_arguments,
    defer_setups,
    leave_unwrapped,
    missing_callbacks,
    run_deferred_setups,
)
from .trainer_files import check_result

log = logging.getLogger(__name__)


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
        self.ctx = ctx
        """The context that the trainer's hooks get."""
        self.plugin: TrainerPlugin = load_trainer_plugin(plugin) if isinstance(plugin, str) else check_instance(plugin)
        self.job = job
        self._keeps_context_dtype = context is not None
        self._callers_dataset = self.ctx.dataset
        self._keep_on_resume = keep_on_resume
        self._names_unread = True
        self.step_result: Any = None
        """The result of the last ``train_step``."""
        self.published: dict[str, float] = {}
        """The metrics last sent to loggers, by name."""
        self.ended = False
        """Whether the loop has ended as planned."""
        self._state: TrainerState | None = None
        self._cancel_checks: list[Callable[[], bool]] = [] if ctx.is_canceled is None else [ctx.is_canceled]
        self._router: StepRouter | None = None
        self._first_updates: FirstUpdates | None = None
        self._start_step = 0
        self._restored_step = 0
        self._to_restore: ToRestore | None = None
        self.rank_channel = ALONE
        """How the ranks of this training compare what they save."""
        # Only if the trainer has them: Lightning and our callbacks check whether a module has a method.
        self._rollouts = RolloutBatches(self) if optional_hook(self.plugin, "rollout") is not None else None
        if self._rollouts is not None:
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
        device = "cpu" if map_location is None else map_location
        io.store.base = lambda: dict(module._set_up_without_trainer(device).named_parameters(remove_duplicate=False))
        checkpoint = io.load_checkpoint(checkpoint_path)
        module._set_up_without_trainer(device)
        module._restored_step = checkpoint.get("global_step", 0)
        assert module._state is not None
        module._to_restore = module._state.load_weights(checkpoint, checkpoint_path, strict=strict is not False)
        module.restore_trainer()
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
        self._to_restore = ToRestore({} if payload is None else {STATE: payload}, checkpoint_dir)

    @property
    def contract_state(self) -> Any:
        """The result of ``configure``; None before it was called."""
        return None if self._state is None else self._state.value

    @property
    def discovered(self) -> Discovered | None:
        """The objects found in that result and on the trainer; None before ``configure``."""
        return None if self._state is None else self._state.discovered

    @property
    def original_job(self) -> TrainingJobSpec:
        """The job before the Lightning trainer adds its limits."""
        return self.job or self.ctx.job

    @property
    @override
    def hparams_initial(self) -> AttributeDict:
        """Hyperparameters for loggers: the job's, and those that a subclass has saved; without secrets."""
        return AttributeDict(without_secrets({**uncounted(self.original_job.hyperparams), **super().hparams_initial}))

    @property
    def completed_steps(self) -> int:
        """Steps trained so far, including those before a resume."""
        loop = own_epoch_loop(self)
        return 0 if loop is None else loop.completed_steps

    @property
    def restored_step(self) -> int:
        """Completed steps of the state that this module holds: trained here, or taken from its checkpoint."""
        return self.completed_steps or self._restored_step

    @property
    def failed_step(self) -> int:
        """The step to name in a failure: the one in progress, or else the number of completed steps."""
        loop = own_epoch_loop(self)
        return 0 if loop is None else loop.step_in_progress or loop.completed_steps

    @property
    def stopped(self) -> str | None:
        """Why training ended before its step limit: ``should_stop``, ``data_exhausted``, or None."""
        if not self.ended or self.completed_steps >= self.ctx.job.max_steps:
            return None
        return "should_stop" if self.trainer.should_stop else "data_exhausted"

    def metrics_on_device(self) -> dict[str, torch.Tensor]:
        """Return the metrics last sent to loggers, updated with the last step's; does not wait for the device.

        Metrics that are neither tensors nor plain numbers are updated only at a cadence, when `metrics` reads them.
        """
        return values_on_device(self.step_result, self.published)

    def feed_callback_metrics(self) -> None:
        """Give the last metrics to Lightning's monitors and progress bars, which read them also between steps."""
        set_callback_metrics(self.trainer, self.metrics_on_device(), self.published)

    def is_canceled(self) -> bool:
        """Whether a stop was requested; the result of ``ctx.is_canceled``."""
        return run_state_of(self.trainer).stop_reason is not None or any(check() for check in self._cancel_checks)

    def add_cancel_check(self, check: Callable[[], bool]) -> Callable[[], None]:
        """Have `is_canceled` call `check` too, until the returned function is called. Stop callbacks use it."""
        self._cancel_checks.append(check)
        return functools.partial(self._cancel_checks.remove, check)

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Both have hooks in torch while this process trains, so a copy starts without them.
        return {**super().__getstate__(), "_router": None, "_first_updates": None}

    def train_raw_batch(self, raw: Any) -> Mapping[str, Any]:
        """Run one step of the trainer on a raw batch; return its metrics unchanged.

        Raises:
            ContractError: ``train_step`` returned no metrics, or in the first step an invalid one.
        """
        assert self._state is not None
        state, ctx = self._state.value, self.ctx
        batch = self.plugin.prepare_batch(raw, state, ctx)
        if self._router is None:
            result = self.plugin.train_step(batch, state, ctx)
        else:
            with self._router:
                result = self.plugin.train_step(batch, state, ctx)
        if self._first_updates is not None and self._first_updates.is_over:
            self._end_first_updates()
            self._warn_of_unread_hyperparams()
        is_first = self.step_result is None  # find an invalid metric here, and not at a cadence much later
        if (
            is_first
            or type(result) is not StepResult
            or type(result.metrics) is not dict
            or type(result.debug) is not dict
        ):
            validate_result(result, reads_values=is_first)
        if self._state.is_sharded:
            debug, control = getattr(result, "debug", None) or {}, getattr(result, "control", None)
            result = StepResult(whole_metrics(result.metrics), whole_metrics(debug), control)
        # Bypass `nn.Module.__setattr__`: it searches for parameters and costs more than the rest of this method.
        self.__dict__["step_result"] = result
        metrics: Mapping[str, Any] = result.metrics
        return metrics

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise MisconfigurationException(
            "ContractModule needs the loop that its setup('fit') installs; call Trainer.fit"
        )

    def metrics(self) -> dict[str, float]:
        """Return the last step's metrics by their reported names, with the learning rate; waits for the device."""
        assert self._state is not None
        metrics = named_scalars(self.step_result, self._state.value, self.ctx, self._state.optimizers)
        overflow_steps = None if self._router is None else self._router.overflow_steps
        if overflow_steps is not None:
            metrics["trainer/overflow_steps"] = float(overflow_steps)
        return metrics if self._rollouts is None else metrics | self._rollouts.metrics

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        check_trainer_arguments(self.trainer)
        # With this attribute Lightning decides whether loggers get them. They are not saved: a job names them again.
        self._log_hyperparams = self._log_hyperparams or bool(self.original_job.hyperparams)
        defer_setups(self.trainer)
        host_evaluation(self)
        # Only if it is needed: Lightning and its callbacks check whether a module has one.
        vars(self).pop("configure_model", None)
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.configure_model = self._shard  # type: ignore[method-assign]
        return missing_callbacks(self.trainer, metric_every=self.ctx.job.metric_every)

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._set_up_loop()
        if stage != "predict":
            self.set_up_trainer(stage)

    def set_up_trainer(self, stage: str) -> None:
        """Configure the trainer if that was not done yet, and set up the callbacks that wait for its weights."""
        self.ctx = self._context_in(self.trainer)
        if self._state is None:
            self._configure(self.trainer.strategy.root_device, self.trainer.world_size)
        attach_own_hooks(self.trainer, self.plugin, self.contract_state, self.ctx)
        run_deferred_setups(self.trainer, self, stage)

    def _set_up_without_trainer(self, device: str | torch.device) -> Self:
        if self._state is None:
            dtype = self.ctx.dtype if self._keeps_context_dtype else "fp32"
            self.ctx = dataclasses.replace(self.ctx, job=self.original_job, device=str(device), dtype=dtype)
            self._configure(torch.device(device), world_size=1)
        return self

    def _configure(self, device: torch.device, world_size: int) -> None:
        self.plugin.setup(self.ctx)
        value = self.plugin.configure(self.ctx)
        discovered = discover(value, self.plugin, reserved=dir(self), host=self)
        check_devices(discovered, device, world_size=world_size)
        for module in discovered.modules:
            self.add_module(module.name, module.value)
        if discovered.parameters:
            # Checkpoints contain the name of this attribute.
            self.loose = BareParameters({found.name: found.value for found in discovered.parameters})
        self._state = TrainerState(self, self.plugin, value, discovered, self._keep_on_resume)

    def _context_in(self, trainer: pl.Trainer) -> StepContext:
        """Return the context with facts of `trainer`: device, type, rank, steps, run state, Slurm job and dataset."""
        ctx = self.ctx
        job = self.job or dataclasses.replace(ctx.job, max_steps=0)
        if trainer.max_steps != -1 and trainer.max_steps != job.max_steps:
            job = dataclasses.replace(job, max_steps=trainer.max_steps)
        if isinstance(ctx.job.hyperparams, CountedDict):
            job = dataclasses.replace(job, hyperparams=ctx.job.hyperparams)
        elif "omegaconf" not in sys.modules:  # OmegaConf accepts only plain dictionaries
            job = dataclasses.replace(job, hyperparams=CountedDict(job.hyperparams))
        context = dataclasses.replace(
            ctx,
            job=job,
            dataset=self._callers_dataset,
            device=str(trainer.strategy.root_device),
            dtype=ctx.dtype if self._keeps_context_dtype else contract_dtype(trainer.precision_plugin),
            is_canceled=_CancelCheck(self),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            run_state=run_state_of(trainer),
            job_context=ctx.job_context or _job_context(),
        )
        feed = None if self._callers_dataset is not None else _feed_of(trainer, self, context)
        return context if feed is None else dataclasses.replace(context, dataset=feed)

    def _set_up_loop(self) -> None:
        loop = install_loop(self.trainer, self, start_step=self._start_step)
        if self.job is not None and self.trainer.max_steps == -1 and self.job.max_steps:
            loop.epoch_loop.max_steps = self.job.max_steps
        leave_unwrapped(self.trainer.strategy)
        self.ended = False

    def _shard(self) -> None:
        if self._state is not None:
            self._state.is_sharded = shard_for(self.trainer.strategy, self._state.discovered)

    def replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield, by path, tensors that must be equal on all ranks: of parameters, buffers and optimizer states."""
        if self._state is not None:
            yield from rank_local_of(self.plugin).replicated(self._state.discovered)

    def replicated_settings(self) -> Iterator[tuple[str, Any]]:
        """Yield values that must be equal on all ranks, by path: settings of optimizers, counters, scheduler states."""
        if self._state is not None:
            yield from rank_local_of(self.plugin).settings(self._state.discovered)

    def check_unchanged(self) -> None:
        """Refuse modules, optimizers, layers and groups that a step built, added or removed.

        Raises:
            ContractError: Names the path of each.
        """
        assert self._state is not None
        self._state.check_unchanged()

    def check_storable(self) -> None:
        """Refuse optimizers and schedules that no checkpoint can hold, if the run saves checkpoints.

        Raises:
            UnstorableStateError: Names the path of the value.
        """
        assert self._state is not None
        if any(saver.saves_anything for saver in savers_of(self.trainer)):
            self._state.check_storable()

    @override
    def on_fit_start(self) -> None:
        self.open_router()
        self.rank_channel = rank_channel_of(self.trainer)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: before a run or a validation, gradients may belong to an open accumulation window or be views."""

    @override
    def on_fit_end(self) -> None:
        self.close_router()
        if self._router is not None:
            self._router.ended()

    def open_router(self) -> None:
        """Route the following steps through strategy and precision, if these change anything."""
        assert self._state is not None
        rank_local, before, discovered = rank_local_of(self.plugin), self._router, self._state.discovered
        self._router = step_router(self.trainer, self, discovered, rank_local, before)
        if self._router is not None:
            self._router.open()
        # Not under FSDP 2, which refuses hooks on shards; not twice for a module that is fitted again.
        if not self._state.is_sharded and self._first_updates is None:
            logs = self.trainer.is_global_zero
            self._first_updates = FirstUpdates(discovered, logs=logs)

    def close_router(self) -> None:
        """Restore torch to its state before the training, which has ended or failed."""
        self._end_first_updates()
        if self._router is not None:
            self._router.close()

    def _end_first_updates(self) -> None:
        if self._first_updates is not None:
            self._first_updates.close()
            self._first_updates = None

    @override
    def configure_optimizers(self) -> Any:
        """Return the optimizers and schedulers that were found; the trainer steps them, Lightning saves them."""
        assert self._state is not None
        return self._state.optimizer_configs()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self._state is not None
        if self._router is not None:
            self._router.before_save()
        self._warn_of_unread_hyperparams()
        self._state.put_into(checkpoint, self.metrics_on_device(), self._router)
        if self._rollouts is not None:
            self._rollouts.save(checkpoint[CONTRACT_KEY])
        collect_from_ranks(checkpoint, self.trainer, self.rank_channel)
        self._state.warn_of_ranks(checkpoint)

    def _warn_of_unread_hyperparams(self) -> None:
        hyperparams, is_first, self._names_unread = self.ctx.job.hyperparams, self._names_unread, False
        if is_first and isinstance(hyperparams, CountedDict) and hyperparams.unread and self.ctx.rank == 0:
            unread = ", ".join(f"`hyperparams.{name}`" for name in hyperparams.unread)
            log.warning("%s has not been used so far: correct the name, or remove it from the job", unread)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if isinstance(self.trainer.precision_plugin, DoublePrecision):
            # Lightning converts after it has loaded the weights, and fp32 parameters would round them.
            self.trainer.precision_plugin.convert_module(self)
        self._restored_step = checkpoint.get("global_step", 0)
        if CONTRACT_KEY in checkpoint and "state_dict" not in checkpoint:  # the older runtime's: the trainer restores
            checkpoint["state_dict"] = self.state_dict()
            start_after(self.trainer, self._restored_step)
        if CONTRACT_KEY in checkpoint:
            assert self._state is not None
            self._to_restore = self._state.take_from(checkpoint)
            self.published = dict(checkpoint[CONTRACT_KEY].get("metrics", {}))

    def state_payload(self) -> dict[str, object]:
        """Return the result of the trainer's ``state_dict``.

        Raises:
            ContractError: It is not a dict.
        """
        assert self._state is not None
        return self._state.payload()

    def restore_trainer(self) -> None:
        """Restore the trainer from its checkpoint; once, before the first step of a resumed run."""
        pending, self._to_restore = self._to_restore, None
        if pending is not None:
            assert self._state is not None
            self._state.restore(pending, self.ctx, self._router)
            if self._rollouts is not None:
                self._rollouts.restore(pending.parts.get(PHASE, {}))

    def restore_rng(self) -> None:
        """Restore the random number generators, before the first batch is fetched: fetching may draw numbers."""
        for callback in callbacks_of(self.trainer):
            restore = getattr(callback, "restore_pending_rng", None)
            if restore is not None:
                restore(self.trainer)

    def training_ended(self) -> None:
        """Record that the loop has ended as planned."""
        self.ended = True
        if self.stopped == "data_exhausted" and self.trainer.max_epochs != 0:
            log.warning(
                "the source of batches ended at step %d of %d; the run completes there",
                self.completed_steps,
                self.ctx.job.max_steps,
            )

    def _rollout_batches(self) -> RolloutBatches | None:
        return self._rollouts

    def _own_loader(self) -> Any:
        return loader_of_class(self.plugin, self.ctx)

    def _save_trainer_files(self, *, output_dir: Path, step: int, final: bool) -> Mapping[str, Any] | None:
        hook: Callable[..., Any] = self.plugin.save_checkpoint  # type: ignore[attr-defined]
        with keep_modes(self, "save_checkpoint"):
            returned = hook(state=self.contract_state, step=step, output_dir=str(output_dir), final=final, ctx=self.ctx)
        return check_result(returned, output_dir)


def _job_context() -> JobContext | None:
    """Return the context of the Slurm job that started this process; None outside of a job."""
    context = current_job_context()
    return None if context.job_id is None else context


def _feed_of(trainer: pl.Trainer, module: ContractModule, ctx: StepContext) -> Any:
    """Return the source of batches; None if the trainer class has its own, or if nothing is trained."""
    if trainer.state.fn != TrainerFn.FITTING:
        return None
    source = training_source(trainer)
    if hasattr(source, "use_context"):
        source.use_context(ctx)
    return None if source is module else getattr(source, "feed", source)


class _CancelCheck:
    """``is_canceled`` of `module`, without a strong reference: discovery would follow one from a trainer's context."""

    def __init__(self, module: ContractModule) -> None:
        self._module: weakref.ref[ContractModule] | None = weakref.ref(module)

    def __call__(self) -> bool:
        """Whether a stop was requested; False if the module no longer exists."""
        module = None if self._module is None else self._module()
        return module is not None and module.is_canceled()

    def __getstate__(self) -> dict[str, Any]:
        return {"module": None if self._module is None else self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy refers to the module that was copied along with it.
        self._module = None if state["module"] is None else weakref.ref(state["module"])
