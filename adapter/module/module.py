"""A trainer class of the contract as a LightningModule."""

from __future__ import annotations

import dataclasses
import logging
import numbers
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from ...callbacks.checkpoint.checkpoint_io import DurableCheckpointIO
from ...callbacks.checkpoint.loading import MapLocation
from ...callbacks.checkpoint.saving import CONTRACT_KEY
from ...callbacks.checkpoint.sharded.rank_channel import Channel
from ...callbacks.checkpoint.sharded.strategy import keep_sharded_for, rank_groups_of
from ...callbacks.hook.events import callbacks_of, run_state_of
from ...callbacks.lightning_internals import set_callback_metrics
from ...callbacks.log_metrics import LogMetrics
from ...callbacks.replica_guard import ReplicaGuard
from ..contract.exceptions import ContractError
from ..contract.types import StepContext, StepResult, TrainerPlugin, TrainingJobSpec
from ..discovery.bare_parameters import LooseTensors
from ..discovery.discover import Discovered, Found, check_devices, check_nothing_new, discover
from ..discovery.rank_local import rank_local_of
from ..discovery.wrapped_optimizers import KeptByWrapper, kept_by_wrappers
from ..gradients.fsdp import ShardPolicy, shard_copies, shard_for, whole_metrics, whole_payload
from ..gradients.precision import contract_dtype
from ..gradients.router import StepRouter, step_router
from ..loop.fit_loop import ContractFitLoop, install_loop, start_after, training_source
from .deferred_optimizers import put_back_what_fits, restore_set_aside, set_aside
from .evaluation import host_evaluation
from .late_setup import (
    defer_setups,
    run_deferred_setups,
    train_what_optimizers_hold,
    without_masks,
)
from .plugin_loading import check_instance, load_trainer_plugin, optional_hook
from .rank_state import collect_from_ranks, take_own_part
from .rollout import RolloutBatches
from .step_metrics import metric_name, named_scalars, scalar, validated_result
from .supported import check_trainer_arguments, leave_unwrapped
from .trainer_files import checked_result, trainer_directory

__all__ = ["ContractModule"]

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
        shard_policy: What becomes a unit of its own under ``ModelParallelStrategy``: ``whole`` modules, the submodules
            of named classes (``Block``), or those that a callable picks; see `genlight.adapter.gradients.fsdp`.
        context: A context of the caller's own. Device, rank and run state are filled in; its ``dtype`` is kept.

    Raises:
        ContractError: The import path names no trainer that conforms, or the object is none.
    """

    def __init__(
        self,
        plugin: str | TrainerPlugin,
        job: TrainingJobSpec | None = None,
        *,
        model_handles: Mapping[str, Any] | None = None,
        shard_policy: ShardPolicy = "whole",
        context: StepContext | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plugin: TrainerPlugin = load_trainer_plugin(plugin) if isinstance(plugin, str) else check_instance(plugin)
        self.job = job
        self.ctx: StepContext = context or StepContext(
            job=job or TrainingJobSpec(run_id="local", max_steps=0), model_handles=dict(model_handles or {})
        )
        self._keeps_context_dtype = context is not None
        self._given_dataset = self.ctx.dataset
        self.shard_policy = shard_policy
        self.contract_state: Any = None
        """What ``configure`` returned."""
        self.discovered: Discovered | None = None
        self.step_result: Any = None
        """What the last ``train_step`` returned."""
        self.published: dict[str, float] = {}
        """What was last sent to loggers, by name."""
        self.configured = False
        self.ended = False
        self._found_optimizers: list[Optimizer] = []
        self._frozen: list[torch.nn.Parameter] = []
        """By callbacks of this fit, before it began."""
        self._kept_by_wrappers: list[KeptByWrapper] = []
        self._router: StepRouter | None = None
        self._is_sharded = False
        self._start_step = self._restored_step = 0
        self._to_restore: dict[str, Any] | None = None
        self._rank_channel: Channel | None = None
        """How the ranks of this training compare what they save; None on a single one."""
        # Only where the trainer has them: Lightning and our callbacks go by whether a module has a method.
        if optional_hook(self.plugin, "rollout") is not None:
            self.train_dataloader = self._rollout_batches  # type: ignore[method-assign]
        if optional_hook(self.plugin, "save_checkpoint") is not None:
            self.save_trainer_files = self._save_trainer_files
        callers_check = self.ctx.is_canceled
        self._cancel_checks: list[Callable[[], bool]] = [] if callers_check is None else [callers_check]

    @classmethod
    @override
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: Any,
        map_location: MapLocation = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **arguments: Any,
    ) -> Self:
        """A trainer class as a checkpoint has it, without a Lightning trainer: to sample, to evaluate, to look at.

        Of a file of torch, such as an exported checkpoint, it is the weights. Nothing is unpickled in any case.

        Args:
            checkpoint_path: A record, or the folder that holds it; also a ``.ckpt`` file.
            map_location: Where the class is told to build; None is the CPU.
            hparams_file: Refused; hyperparameters are those of `job`.
            strict: Whether the weights must be exactly those of the class; None means yes.
            weights_only: Always.
            arguments: The constructor's: `plugin`, and `job` for a class that reads hyperparameters.

        Raises:
            TypeError: `plugin` is not given.
            FileNotFoundError: There is no such checkpoint.
            BrokenCheckpointError: It is not whole.
            RuntimeError: Its weights are not those of the class.
        """
        if "plugin" not in arguments:
            raise TypeError(
                f"{cls.__name__}.load_from_checkpoint needs `plugin`, the trainer class of the checkpoint "
                "(module:Class, or an instance): a checkpoint names no code to run."
            )
        if hparams_file is not None:
            raise TypeError(f"{cls.__name__} takes no `hparams_file`: give `job`, a TrainingJobSpec with hyperparams.")
        module = cls(**arguments)
        checkpoint = DurableCheckpointIO().load_checkpoint(checkpoint_path, map_location)
        module._set_up_alone(map_location if isinstance(map_location, str | torch.device) else "cpu")
        if "state_dict" in checkpoint:
            module.load_state_dict(checkpoint["state_dict"], strict=strict is not False)
        module._restored_step = checkpoint.get("global_step", 0)
        payload = checkpoint.get(CONTRACT_KEY, {}).get("state")
        module._to_restore = {"state": payload, "trainer_directory": trainer_directory(checkpoint_path, module.plugin)}
        module.restore_trainer()
        return module

    def resume_from(
        self, *, step: int, payload: dict[str, object] | None = None, checkpoint_dir: Path | None = None
    ) -> None:
        """Start after `step` with what a trainer saved there, instead of from a Lightning checkpoint.

        Args:
            step: Steps that count as completed.
            payload: For ``load_state_dict``; None does not call it.
            checkpoint_dir: For ``load_checkpoint``, where the trainer has it; None does not call it.
        """
        self._start_step = step
        self._to_restore = {"state": payload, "trainer_directory": checkpoint_dir}

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_router": None}  # it leads torch while this process trains

    # what the loop asks for

    @property
    def completed_steps(self) -> int:
        """Steps trained so far, those before a resume included."""
        loop = self._trainer.fit_loop if self._trainer is not None else None
        return loop.epoch_loop.completed_steps if isinstance(loop, ContractFitLoop) else 0

    @property
    def restored_step(self) -> int:
        """Steps behind what this module holds now: those trained here, else those of the checkpoint it was given."""
        return self.completed_steps or self._restored_step

    @property
    def failed_step(self) -> int:
        """The step to name in a failure: the one that was being executed, else the completed steps."""
        loop = self._trainer.fit_loop if self._trainer is not None else None
        if not isinstance(loop, ContractFitLoop):
            return 0
        return loop.epoch_loop.step_in_progress or loop.epoch_loop.completed_steps

    @property
    def stopped(self) -> str | None:
        """Why training ended before its step limit: ``should_stop``, ``data_exhausted``, or None."""
        if not self.ended or self.completed_steps >= self.ctx.job.max_steps:
            return None
        return "should_stop" if self.trainer.should_stop else "data_exhausted"

    def train_raw_batch(self, raw: Any) -> Mapping[str, Any]:
        """One step of the trainer on a raw batch; its metrics as they are.

        Raises:
            ContractError: ``train_step`` returned something without metrics.
        """
        state, ctx = self.contract_state, self.ctx
        batch = self.plugin.prepare_batch(raw, state, ctx)
        if self._router is None:
            result = self.plugin.train_step(batch, state, ctx)
        else:
            with self._router:
                result = self.plugin.train_step(batch, state, ctx)
        if type(result) is not StepResult or type(result.metrics) is not dict:
            validated_result(result)
        if self._is_sharded:
            debug, control = getattr(result, "debug", None) or {}, getattr(result, "control", None)
            result = StepResult(whole_metrics(result.metrics), whole_metrics(debug), control)
        # Past `nn.Module.__setattr__`, which looks for parameters and costs more than the rest of this method.
        self.__dict__["step_result"] = result
        metrics: Mapping[str, Any] = result.metrics
        return metrics

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise MisconfigurationException(
            "ContractModule is stepped by its own loop, which its setup('fit') installs; call Trainer.fit"
        )

    def metrics(self) -> dict[str, float]:
        """Metrics of the last step under their reported names, the learning rate included; waits for the device."""
        metrics = named_scalars(self.step_result, self.contract_state, self.ctx, self._found_optimizers)
        if self._router is not None and self._router.scales:
            metrics["trainer/overflow_steps"] = float(self._router.overflow_steps)
        return metrics

    def metrics_on_device(self) -> dict[str, torch.Tensor]:
        """What was last sent to loggers, with the last step's metrics in place of older ones; waits for no device.

        Metrics that are neither tensors nor plain numbers come at a cadence alone, where `metrics` reads them.
        """
        last_step = {} if self.step_result is None else self.step_result.metrics
        known = {
            metric_name(name): value
            for name, value in last_step.items()
            if isinstance(name, str) and isinstance(value, torch.Tensor | numbers.Real)
        }
        return {name: _as_tensor(name, value) for name, value in {**self.published, **known}.items()}

    def feed_callback_metrics(self) -> None:
        """Leave the last metrics where Lightning's monitors and progress bars find them outside of training steps."""
        set_callback_metrics(self.trainer, self.metrics_on_device(), self.published)

    def is_canceled(self) -> bool:
        """Whether a stop was asked for; what ``ctx.is_canceled`` answers."""
        return run_state_of(self.trainer).stop_reason is not None or any(check() for check in self._cancel_checks)

    def add_cancel_check(self, check: Callable[[], bool]) -> None:
        """Have `is_canceled` ask `check` too; a stop callback adds what it watches."""
        self._cancel_checks.append(check)

    def training_ended(self) -> None:
        """The loop has ended as planned."""
        self.ended = True
        if self.stopped == "data_exhausted" and self.trainer.max_epochs != 0:
            log.warning(
                "the source of batches ended at step %d of %d; the run completes there",
                self.completed_steps,
                self.ctx.job.max_steps,
            )

    # Lightning's hooks

    @property
    @override
    def hparams_initial(self) -> AttributeDict:
        """What loggers are told: the job's hyperparameters, and those that a subclass has saved."""
        return AttributeDict({**(self.job or self.ctx.job).hyperparams, **super().hparams_initial})

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        check_trainer_arguments(self.trainer)
        # Lightning's word for whether loggers are told. They are not saved: a checkpoint's trainer is built of a job.
        self._log_hyperparams = self._log_hyperparams or bool((self.job or self.ctx.job).hyperparams)
        defer_setups(self.trainer)
        host_evaluation(self)
        # Only where it is needed: Lightning and its callbacks go by whether a module has one.
        vars(self).pop("configure_model", None)
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.configure_model = self._shard  # type: ignore[method-assign]
        present = callbacks_of(self.trainer)
        added: list[pl.Callback] = []
        if not any(isinstance(callback, LogMetrics) for callback in present):
            added.append(LogMetrics(every_n_steps=self.ctx.job.metric_every))
        if self.trainer.world_size > 1 and not any(isinstance(callback, ReplicaGuard) for callback in present):
            added.append(ReplicaGuard())
        return added

    @override
    def setup(self, stage: str) -> None:
        if stage == "predict":
            return
        if stage == "fit":
            self._set_up_loop()
        self.ctx = self._context()
        if not self.configured:
            self._configure(self.trainer.strategy.root_device, self.trainer.world_size)
        self._frozen = run_deferred_setups(self.trainer, self, stage, self._found_optimizers)

    def _set_up_alone(self, device: str | torch.device) -> None:
        dtype = self.ctx.dtype if self._keeps_context_dtype else "fp32"
        self.ctx = dataclasses.replace(self.ctx, job=self.job or self.ctx.job, device=str(device), dtype=dtype)
        self._configure(torch.device(device), world_size=1)

    def _configure(self, device: torch.device, world_size: int) -> None:
        self.plugin.setup(self.ctx)
        self.contract_state = self.plugin.configure(self.ctx)
        discovered = discover(self.contract_state, self.plugin, reserved=dir(self), host=self)
        check_devices(discovered, device, world_size=world_size)
        self._register(discovered)
        self.configured = True

    def _set_up_loop(self) -> None:
        loop = install_loop(self.trainer, self, start_step=self._start_step)
        if self.job is not None and self.trainer.max_steps == -1 and self.job.max_steps:
            loop.epoch_loop.max_steps = self.job.max_steps
        leave_unwrapped(self.trainer.strategy)
        self.ended = False

    def _shard(self) -> None:
        if self.discovered is not None:
            self._is_sharded = shard_for(self.trainer.strategy, self.discovered, self.shard_policy)

    def replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What must be equal on all ranks, by path: parameters, trained tensors, buffers and optimizer states."""
        if self.discovered is not None:
            rank_local = rank_local_of(self.plugin)
            yield from rank_local.tensors(self.discovered)
            yield from rank_local.optimizer_states(self.discovered)

    def check_nothing_new(self) -> None:
        """Refuse modules and optimizers that a step built.

        Raises:
            ContractError: Names the path of each.
        """
        assert self.discovered is not None
        check_nothing_new(self.discovered, self.contract_state, self.plugin, host=self)

    @override
    def on_fit_start(self) -> None:
        assert self.discovered is not None
        if self._to_restore is not None and "optimizers" in self._to_restore:
            waiting, states = self._to_restore["optimizers"], self._to_restore["optimizer_states"]
            put_back_what_fits(self.discovered.optimizers, waiting, states)
        train_what_optimizers_hold(self._frozen, self._found_optimizers)
        self._router = step_router(self.trainer, self, self.discovered, rank_local_of(self.plugin))
        if self._router is not None:
            self._router.open()
        self._rank_channel = None
        if self.trainer.world_size > 1:
            groups = rank_groups_of(self.trainer.strategy)
            self._rank_channel = Channel() if groups is None else groups.training

    @override
    def on_validation_model_zero_grad(self) -> None:
        """Nothing: gradients may belong to a window of accumulation that the trainer goes on with."""

    @override
    def on_fit_end(self) -> None:
        self.close_router()

    def close_router(self) -> None:
        """Leave torch as it was before the training, which has ended or failed."""
        if self._router is not None:
            self._router.close()

    def _context(self) -> StepContext:
        trainer = self.trainer
        job = self.job or dataclasses.replace(self.ctx.job, max_steps=0)
        if trainer.max_steps != -1 and trainer.max_steps != job.max_steps:
            job = dataclasses.replace(job, max_steps=trainer.max_steps)
        return dataclasses.replace(
            self.ctx,
            job=job,
            dataset=self._dataset(),
            device=str(trainer.strategy.root_device),
            dtype=self.ctx.dtype if self._keeps_context_dtype else contract_dtype(trainer.precision_plugin),
            is_canceled=_CancelCheck(self),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            run_state=run_state_of(trainer),
        )

    def _dataset(self) -> Any:
        """What feeds the run; None where the trainer collects its own batches, or nothing is trained."""
        if self._given_dataset is not None or self.trainer.state.fn != TrainerFn.FITTING:
            return self._given_dataset
        source = training_source(self.trainer)
        return None if source is self else getattr(source, "feed", source)

    def _register(self, discovered: Discovered) -> None:
        self.discovered = discovered
        self._found_optimizers = [found.value for found in discovered.optimizers]
        self._kept_by_wrappers = kept_by_wrappers(discovered.optimizers)
        for module in discovered.modules:
            self.add_module(module.name, module.value)
        if discovered.parameters:
            self.loose = LooseTensors({found.name: found.value for found in discovered.parameters})

    @override
    def configure_optimizers(self) -> Any:
        """The optimizers and schedulers that were found; the trainer steps them, Lightning saves them."""
        assert self.discovered is not None
        configs: list[dict[str, Any]] = [{"optimizer": found.value} for found in self.discovered.optimizers]
        for found in self.discovered.schedulers:
            for config in configs:
                if getattr(found.value, "optimizer", None) is config["optimizer"] and "lr_scheduler" not in config:
                    config["lr_scheduler"] = {"scheduler": found.value, "interval": "step"}
        return configs

    # checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_nothing_new()
        parts = checkpoint.setdefault(CONTRACT_KEY, {})
        with keep_sharded_for(self.trainer.strategy):
            payload = self.state_payload()
        is_pruned = any(isinstance(callback, ModelPruning) for callback in callbacks_of(self.trainer))
        parts["state"] = without_masks(payload) if is_pruned else payload
        parts["unmanaged"] = {name: kept.state_dict() for name, kept in self._unmanaged()}
        if self._rank_channel is not None:
            collect_from_ranks(checkpoint, self.trainer, self._rank_channel)
        # For monitors that look at the end of an epoch, where a resume from its last step has no step before that.
        metrics = {name: value for name, value in self.metrics_on_device().items() if value.numel() == 1}
        parts["metrics"] = {name: float(value) for name, value in metrics.items() if not value.is_complex()}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if isinstance(self.trainer.precision_plugin, DoublePrecision):
            # Lightning does it after it has loaded the weights, which fp32 would round.
            self.trainer.precision_plugin.convert_module(self)
        self._restored_step = checkpoint.get("global_step", 0)
        if CONTRACT_KEY in checkpoint and "state_dict" not in checkpoint:  # an older runtime's: the trainer restores
            checkpoint["state_dict"] = self.state_dict()
            start_after(self.trainer, self._restored_step)
        if CONTRACT_KEY in checkpoint:
            own_weights = take_own_part(checkpoint, self.trainer.global_rank, self.trainer.world_size)
            self.published = dict(checkpoint[CONTRACT_KEY].get("metrics", {}))
            self._to_restore = {
                "state": checkpoint[CONTRACT_KEY].get("state"),
                "unmanaged": checkpoint[CONTRACT_KEY].get("unmanaged", {}),
                "trainer_directory": trainer_directory(self.trainer.ckpt_path, self.plugin),
                "own_weights": own_weights,
            }
            if self.discovered is not None and not self._is_sharded:
                states = checkpoint.get("optimizer_states", [])
                self._to_restore["optimizers"] = set_aside(self.discovered.optimizers, states)
                self._to_restore["optimizer_states"] = states

    def state_payload(self) -> dict[str, object]:
        """What the trainer's ``state_dict`` returns.

        Raises:
            ContractError: It is no dict.
        """
        payload = self.plugin.state_dict(self.contract_state)
        if not isinstance(payload, dict):
            raise ContractError(f"state_dict returned a {type(payload).__qualname__}; it must be a dict")
        return whole_payload(payload) if self._is_sharded else payload

    def restore_trainer(self) -> None:
        """Hand the trainer what its checkpoint held; once, before the first step of a resumed run."""
        restored, self._to_restore = self._to_restore, None
        if restored is None:
            return
        self._tell_of_scripted_modules()
        if restored.get("own_weights"):
            self.load_state_dict(restored["own_weights"], strict=False)
        unmanaged = restored.get("unmanaged", {})
        for name, kept in self._unmanaged() if unmanaged else ():
            if name in unmanaged:
                kept.load_state_dict(unmanaged[name])
        payload = restored["state"]
        if payload is not None:
            self.plugin.load_state_dict(self.contract_state, payload, self.ctx)
        directory = restored.get("trainer_directory")
        load_checkpoint = optional_hook(self.plugin, "load_checkpoint")
        if directory is not None and load_checkpoint is not None:
            load_checkpoint(
                state=self.contract_state, checkpoint_dir=str(directory), payload=payload or {}, ctx=self.ctx
            )
        if self._is_sharded:
            shard_copies(discover(self.contract_state, self.plugin, reserved=dir(self), host=self))
        if "optimizers" in restored:
            assert self.discovered is not None
            restore_set_aside(self.discovered.optimizers, restored["optimizers"])

    def _tell_of_scripted_modules(self) -> None:
        assert self.discovered is not None
        scripted = [
            found.path
            for found in self.discovered.modules
            if any(isinstance(module, torch.jit.ScriptModule) for module in found.value.modules())
        ]
        if scripted:
            log.warning(
                "%s is compiled by TorchScript, which optimises after its first calls in a process: the resumed run "
                "rounds otherwise for some steps, and may not be bit-equal to one that was never interrupted. "
                "torch.compile, or the bare module, is exact.",
                ", ".join(scripted),
            )

    def _unmanaged(self) -> Iterator[tuple[str, Any]]:
        """What Lightning does not save: gradient scalers, further schedulers, what wrappers of optimizers keep."""
        assert self.discovered is not None
        managed = {id(config.scheduler) for config in self.trainer.lr_scheduler_configs}
        kept: list[Found[Any]] = [*self.discovered.scalers, *self.discovered.schedulers]
        for found in kept:
            if id(found.value) not in managed:
                yield found.path, found.value
        yield from ((kept.path, kept) for kept in self._kept_by_wrappers)

    def restore_rng(self) -> None:
        """Continue the random numbers of the checkpoint: before the first batch is fetched, which may draw some."""
        for callback in callbacks_of(self.trainer):
            restore = getattr(callback, "restore_pending_rng", None)
            if restore is not None:
                restore(self.trainer)

    def _rollout_batches(self) -> RolloutBatches:
        return RolloutBatches(self)

    def _save_trainer_files(self, *, output_dir: Path, step: int, final: bool) -> Mapping[str, Any] | None:
        """Let the trainer's ``save_checkpoint`` write its own files into a checkpoint.

        Raises:
            ContractError: It returned something else than a mapping or None, or a ``primary_path`` that is not there.
        """
        hook: Callable[..., Any] = self.plugin.save_checkpoint  # type: ignore[attr-defined]
        result = hook(state=self.contract_state, step=step, output_dir=str(output_dir), final=final, ctx=self.ctx)
        return checked_result(result, output_dir)


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # a number that is none of torch's types, or too large for one
        return torch.tensor(scalar(name, value), dtype=torch.float64)


class _CancelCheck:
    """``is_canceled`` of `module` without a way to it: in a context that a trainer keeps, the module would be found."""

    def __init__(self, module: ContractModule) -> None:
        self._asked: weakref.ref[ContractModule] | None = weakref.ref(module)

    def __call__(self) -> bool:
        alive = None if self._asked is None else self._asked()
        return alive is not None and alive.is_canceled()

    def __getstate__(self) -> dict[str, Any]:
        return {"module": None if self._asked is None else self._asked()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy asks the module that was copied along with it.
        self._asked = None if state["module"] is None else weakref.ref(state["module"])
