"""A trainer class within a LightningModule: its context, its state, its steps, and its part of a checkpoint.

The loop, the evaluation and genlight's callbacks work with `HostedTrainer`; Lightning sees only the module.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.hook.events import callbacks_of, run_state_of
from ...callbacks.hook.hook import order_callbacks
from ...callbacks.lightning_internals import attached_trainer, set_callback_metrics, training_source
from ...callbacks.rank_channel import ALONE
from ...callbacks.trainer_hooks import TrainerHookAdapter
from ..cluster.job_context import current_job_context
from ..contract.exceptions import ContractError
from ..contract.types import StepContext, StepResult, TrainerPlugin, TrainingJobSpec
from ..discovery.discover import check_devices, discover
from ..discovery.rank_local import rank_local_of
from ..gradients.fsdp.shard import whole_metrics
from ..gradients.fsdp.strategy import shard_for
from ..gradients.precision import contract_dtype
from ..gradients.step import StepRouter, step_router
from ..plumbing.counted_dict import CountedDict
from .plugin_loading import check_instance, load_trainer_plugin, optional_hook, own_hooks
from .rollout import RolloutBatches
from .state import PHASE, STATE, ConfiguredState, ToRestore, collect_from_ranks, rank_channel_of
from .step_metrics import named_scalars, validate_result, values_on_device

log = logging.getLogger(__name__)


class HostedTrainer:
    """A trainer, hosted by a LightningModule in which its modules are registered.

    Args:
        module: The LightningModule.
        plugin: A trainer, or the import path of one (``module:Class``).
        job: Identity, cadences and hyperparameters; None takes the contract's defaults.
        context: The context before device, rank and run state are filled in.
        keeps_dtype: Whether the ``dtype`` of `context` stays instead of following the Lightning trainer's precision.
        keep_on_resume: Settings that a resume leaves as ``configure`` built them; see `BuiltSettings`.

    Raises:
        ContractError: The import path does not name a conforming trainer, or the object is not one.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        plugin: str | TrainerPlugin,
        job: TrainingJobSpec | None,
        context: StepContext,
        *,
        keeps_dtype: bool,
        keep_on_resume: Sequence[str],
    ) -> None:
        self.module = module
        self.plugin: TrainerPlugin = load_trainer_plugin(plugin) if isinstance(plugin, str) else check_instance(plugin)
        self.job = job
        self.ctx = dataclasses.replace(context, count_steps=self.count_steps)
        """The context that the trainer's hooks get."""
        self.step_result: Any = None
        """The result of the last ``train_step``."""
        self.published: dict[str, float] = {}
        """The metrics last sent to loggers, by name."""
        self.restored_step = 0
        """The completed steps of the checkpoint that was loaded last."""
        self.rank_channel = ALONE
        """The channel through which the ranks of this training compare the states that they save."""
        has_rollout = optional_hook(self.plugin, "rollout") is not None
        self.rollouts = RolloutBatches(self.plugin, module) if has_rollout else None
        self.to_restore: ToRestore | None = None
        """The loaded state that `restore` has not put into the trainer yet."""
        self.router: StepRouter | None = None
        """Changes ``backward`` and ``step`` of torch during a step; None if this run needs no change."""
        self._state: ConfiguredState | None = None
        self._keeps_dtype = keeps_dtype
        self._keep_on_resume = keep_on_resume
        self._callers_dataset = context.dataset
        self._has_checked_hyperparams = False
        self._cancel_checks: list[Callable[[], bool]] = [] if context.is_canceled is None else [context.is_canceled]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "router": None}  # a router has replaced functions of torch, in this process only

    @property
    def is_configured(self) -> bool:
        """Whether ``configure`` was called."""
        return self._state is not None

    @property
    def state(self) -> ConfiguredState:
        """The objects that ``configure`` built."""
        assert self._state is not None
        return self._state

    @property
    def original_job(self) -> TrainingJobSpec:
        """The job before the Lightning trainer adds its limits."""
        return self.job or self.ctx.job

    def set_up(self, trainer: pl.Trainer) -> None:
        """Fill in the context, configure the trainer if that was not done yet, and attach the hooks that it defines."""
        self.ctx = self._context_in(trainer)
        self._configure(trainer.strategy.root_device, trainer.world_size)
        attach_own_hooks(trainer, self.plugin, self.state.value, self.ctx)

    def set_up_without_trainer(self, device: str | torch.device) -> pl.LightningModule:
        """Configure the trainer on `device` if that was not done yet; return the module."""
        if self._state is None:
            dtype = self.ctx.dtype if self._keeps_dtype else "fp32"
            self.ctx = dataclasses.replace(self.ctx, job=self.original_job, device=str(device), dtype=dtype)
            self._configure(torch.device(device), world_size=1)
        return self.module

    def _configure(self, device: torch.device, world_size: int) -> None:
        """Call ``setup`` and ``configure`` if that was not done yet, and register the objects that they built."""
        if self._state is None:
            self.plugin.setup(self.ctx)
            value = self.plugin.configure(self.ctx)
            discovered = discover(value, self.plugin, reserved=dir(self.module), host=self.module)
            check_devices(discovered, device, world_size=world_size)
            for found in discovered.modules:
                self.module.add_module(found.name, found.value)
            if discovered.parameters:
                # Do not rename this attribute: checkpoints contain its name.
                self.module.loose = BareParameters({found.name: found.value for found in discovered.parameters})
            self._state = ConfiguredState(self.module, self.plugin, value, discovered, self._keep_on_resume)
        if self.rollouts is not None:
            self.rollouts.state, self.rollouts.ctx = self._state.value, self.ctx

    def _context_in(self, trainer: pl.Trainer) -> StepContext:
        """Return the context with device, dtype, rank, step limit, run state, Slurm job and dataset of `trainer`."""
        ctx = self.ctx
        job = self.job or dataclasses.replace(ctx.job, max_steps=0)
        if trainer.max_steps != -1 and trainer.max_steps != job.max_steps:
            job = dataclasses.replace(job, max_steps=trainer.max_steps)
        if isinstance(ctx.job.hyperparams, CountedDict):
            job = dataclasses.replace(job, hyperparams=ctx.job.hyperparams)
        elif "omegaconf" not in sys.modules:  # a class may pass them to OmegaConf, which refuses subclasses of `dict`
            job = dataclasses.replace(job, hyperparams=CountedDict(job.hyperparams))
        slurm_job = current_job_context()
        context = dataclasses.replace(
            ctx,
            job=job,
            dataset=self._callers_dataset,
            device=str(trainer.strategy.root_device),
            dtype=ctx.dtype if self._keeps_dtype else contract_dtype(trainer.precision_plugin),
            is_canceled=self.is_canceled,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            run_state=run_state_of(trainer),
            job_context=ctx.job_context or (None if slurm_job.job_id is None else slurm_job),
        )
        feed = None if self._callers_dataset is not None else _source_of_batches(trainer, self.module, context)
        return context if feed is None else dataclasses.replace(context, dataset=feed)

    def shard(self) -> None:
        """Shard the trainer's modules, if the strategy shards."""
        if self._state is not None:
            self._state.is_sharded = shard_for(self.module.trainer.strategy, self._state.discovered)

    def open_router(self) -> None:
        """Make and open the router of the following steps, unless plain torch does the same. Collective."""
        trainer, discovered = self.module.trainer, self.state.discovered
        self.router = step_router(trainer, self.module, discovered, rank_local_of(self.plugin), self.router)
        if self.router is not None:
            self.router.open()
        self.rank_channel = rank_channel_of(trainer)
        if self.rollouts is not None:
            self.rollouts.channel = self.rank_channel

    def close_router(self) -> None:
        """Undo the router's replacements in torch, after training has ended or failed."""
        if self.step_result is not None:
            self._warn_of_unread_hyperparams()
        if self.router is not None:
            self.router.close()

    def train_raw_batch(self, raw: Any) -> Mapping[str, Any]:
        """Run one step of the trainer on a raw batch; return its metrics, with full tensors in place of shards.

        Raises:
            ContractError: ``train_step`` returned no metrics, or, in the first step, a metric that is not a number.
        """
        assert self._state is not None
        state, ctx = self._state.value, self.ctx
        batch = self.plugin.prepare_batch(raw, state, ctx)
        if self.router is None:
            result = self.plugin.train_step(batch, state, ctx)
        else:
            with self.router:
                result = self.plugin.train_step(batch, state, ctx)
        is_first = self.step_result is None  # report an invalid metric in the first step, not at a cadence much later
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
        self.step_result = result
        metrics: Mapping[str, Any] = result.metrics
        return metrics

    def metrics(self) -> dict[str, float]:
        """Return the last step's metrics by their reported names, with the learning rate; waits for the device.

        The first call logs the hyperparameters that nothing has read.
        """
        assert self._state is not None
        self._warn_of_unread_hyperparams()
        metrics = named_scalars(self.step_result, self._state.value, self.ctx, self._state.optimizers)
        overflow_steps = None if self.router is None else self.router.overflow_steps
        if overflow_steps is not None:
            metrics["trainer/overflow_steps"] = float(overflow_steps)
        return metrics if self.rollouts is None else metrics | self.rollouts.metrics

    def metrics_on_device(self) -> dict[str, Tensor]:
        """Return the metrics last sent to loggers, updated with the last step's; does not wait for the device.

        Metrics that are neither tensors nor plain numbers are updated only at a cadence, when `metrics` reads them.
        """
        return values_on_device(self.step_result, self.published)

    def feed_callback_metrics(self) -> None:
        """Give the last metrics to Lightning's monitors and progress bars, which read them also between steps."""
        set_callback_metrics(self.module.trainer, self.metrics_on_device(), self.published)

    def is_canceled(self) -> bool:
        """Whether a stop was requested; the result of ``ctx.is_canceled``."""
        return run_state_of(self.module.trainer).stop_reason is not None or any(
            check() for check in self._cancel_checks
        )

    def count_steps(self) -> int:
        """Return ``ctx.step``: ``trainer.global_step``; outside of a fit, if that is 0, the steps of the checkpoint."""
        trainer = attached_trainer(self.module)
        steps = 0 if trainer is None else trainer.global_step
        return steps if trainer is not None and trainer.state.fn == TrainerFn.FITTING else steps or self.restored_step

    def add_cancel_check(self, check: Callable[[], bool]) -> Callable[[], None]:
        """Let `is_canceled` call `check` too, until the returned function is called. `StopRequests` uses this."""
        self._cancel_checks.append(check)
        return functools.partial(self._cancel_checks.remove, check)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the contract's part to a checkpoint that Lightning saves. Collective."""
        if self.router is not None:
            self.router.before_save()
        self._warn_of_unread_hyperparams()
        self.state.put_into(checkpoint, self.metrics_on_device(), self.router)
        if self.rollouts is not None:
            self.rollouts.save(checkpoint[CONTRACT_KEY])
        collect_from_ranks(checkpoint, self.module.trainer, self.rank_channel)
        self.state.warn_of_rank_differences(checkpoint)

    def _warn_of_unread_hyperparams(self) -> None:
        """Warn once of hyperparameters that nothing has read."""
        if self._has_checked_hyperparams:
            return
        self._has_checked_hyperparams = True
        hyperparams = self.ctx.job.hyperparams
        if isinstance(hyperparams, CountedDict) and hyperparams.unread and self.ctx.rank == 0:
            unread = ", ".join(f"`hyperparams.{name}`" for name in hyperparams.unread)
            log.warning("%s has not been used so far: correct the name, or remove it from the job", unread)

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take the contract's part from a checkpoint that Lightning loads; `restore` uses it."""
        self.to_restore = self.state.take_from(checkpoint)
        self.published = dict(checkpoint[CONTRACT_KEY].get("metrics", {}))

    def restore(self) -> None:
        """Restore the trainer from the loaded checkpoint, once, before the first step of a resumed run. Collective."""
        pending, self.to_restore = self.to_restore, None
        if pending is not None:
            self.state.restore(pending, self.ctx, self.router)
            if self.rollouts is not None and PHASE in pending.parts:
                self.rollouts.restore(pending.parts[PHASE])

    def resume_from(self, payload: dict[str, object] | None, checkpoint_dir: Path | None) -> None:
        """Let `restore` pass these to ``load_state_dict`` and ``load_checkpoint``; a hook is not called for None."""
        self.to_restore = ToRestore({} if payload is None else {STATE: payload}, checkpoint_dir)


class BareParameters(nn.Module):
    """Holds trained tensors that belong to no module, such as SAC's ``log_alpha``: moves, casts and saves them.

    They are registered as buffers, but stay the same objects when they move. Torch would replace a moved buffer by a
    new tensor, while the trainer and its optimizer would keep the old one.

    Args:
        tensors: The tensors, by their names in the state dict.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def named_bare_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by name; `rank_state.py` also saves their gradients, as it does for parameters."""
        yield from self.named_buffers()

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with torch.no_grad():
            for tensor in self.buffers():
                tensor.data = fn(tensor.data)
                if tensor.grad is not None:
                    tensor.grad.data = fn(tensor.grad.data)
        return self


def _source_of_batches(trainer: pl.Trainer, module: pl.LightningModule, ctx: StepContext) -> Any:
    """Return the source of batches; None if the trainer class has its own, or if nothing is trained."""
    if trainer.state.fn != TrainerFn.FITTING:
        return None
    source = training_source(trainer)
    if hasattr(source, "use_context"):
        source.use_context(ctx)
    return None if source is module else getattr(source, "feed", source)


class OwnHookAdapter(TrainerHookAdapter):
    """Runs a hook of a trainer class as part of the training: on all ranks, before callbacks; its failures end the run.

    ``on_mb_end`` comes before a checkpoint of the step is written, so the checkpoint holds the changes of the hook.

    Args:
        hook: Any object with methods for events.

    Raises:
        TypeError: `hook` has no method for an event, or is a class.
    """

    def __init__(self, hook: Any) -> None:
        super().__init__(hook)
        self.critical, self.ranks = True, "all"

    def on_mb_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do nothing: the hook got this event in `on_train_batch_end`, before the checkpoint of the step."""

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.call_event("on_mb_end", trainer, pl_module)


def attach_own_hooks(trainer: pl.Trainer, plugin: Any, state: Any, ctx: StepContext) -> None:
    """Add the hooks that ``trainer_hooks`` of a trainer class returns to `trainer`, before its callbacks.

    Raises:
        ContractError: One of them has no method for an event, or is a class.
    """
    hooks = own_hooks(plugin, state, ctx)
    try:
        adapters = [OwnHookAdapter(hook) for hook in hooks]
    except TypeError as error:
        raise ContractError(f"trainer_hooks of {type(plugin).__qualname__}: {error}") from None
    others = [callback for callback in callbacks_of(trainer) if not isinstance(callback, OwnHookAdapter)]
    if adapters or len(others) < len(callbacks_of(trainer)):
        trainer.callbacks = [*adapters, *others]  # type: ignore[attr-defined]
        order_callbacks(trainer)
