"""Check which Lightning strategies, settings and callbacks work with a trainer class that owns its update.

`_REFUSED` and `_REFUSED_CALLBACKS` list the classes that do not work, with the reason and the way out; the functions
also check settings. `genlight doctor` calls `check_trainer_arguments`, too.
"""

from __future__ import annotations

import types
from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from ...callbacks.checkpoint.plugins import url_faults
from ...callbacks.hook.events import callbacks_of
from ...callbacks.lightning_internals import WEIGHT_AVERAGING, ddp_settings, tensor_parallel_size
from ...callbacks.log_metrics import LogMetrics
from ...callbacks.replica_guard import ReplicaGuard
from ..contract.exceptions import StartupContractError
from ..gradients.ddp.buckets import wire_type
from ..gradients.fsdp.strategy import FSDP2Strategy
from ..gradients.torch_internals import require_fsdp

_SHORT_LIVED_PROCESSES = (
    "the trainer class would be set up in processes that end with training, and the process that started them would "
    "not get the result. Use ddp, which starts the script once for each device"
)
"""Why a strategy that spawns or forks its training processes cannot host a trainer class."""

_REFUSED: dict[type[Strategy], str] = {
    DeepSpeedStrategy: "DeepSpeed's engine must own the module, backward and the optimizer, but the trainer class owns "
    "them. Use ddp, or FSDP2Strategy to shard",
    FSDPStrategy: "FSDP 1 works in the forward of a wrapper that a trainer class never calls, and its gradients are "
    "plain tensors that hold one rank's part, so clip_grad_norm_ would clip differently on each rank. Use FSDP 2: "
    "genlight.adapter.FSDP2Strategy",
    XLAStrategy: "XLA runs a step lazily and needs markers inside it",
    SingleDeviceXLAStrategy: "XLA runs a step lazily and needs markers inside it",
}

_REFUSED_CALLBACKS: dict[type[pl.Callback], str] = {
    GradientAccumulationScheduler: "the trainer class owns gradient accumulation; do it in train_step",
    StochasticWeightAveraging: "it replaces the schedule of the learning rate and trains an epoch without updates, but "
    "the trainer class owns both; use lightning.pytorch.callbacks.WeightAveraging, or torch.optim.swa_utils in the "
    "class",
    LearningRateFinder: "it replaces the optimizers, but the trainer class owns them; try each rate in a separate "
    "short run (`genlight run job.json --set hyperparams.lr=…`)",
    BatchSizeFinder: "it trains with the weights of the run and restores them afterwards, but not the other state of "
    "the trainer class; try each size in a separate short run (`--set dataset.batch_size=…`)",
    ModelPruning: "it replaces weights that `configure` built; use torch.nn.utils.prune in `configure`",
    BaseFinetuning: "it adds groups to optimizers that `configure` built; give the optimizer all groups in "
    "`configure`, and freeze and unfreeze layers by `requires_grad_` in train_step",
}


def check_trainer_arguments(trainer: pl.Trainer) -> None:
    """Refuse a strategy, an argument or a callback of a Lightning trainer that does not work with a trainer class.

    Raises:
        StartupContractError: Names each, the reason and the way out.
    """
    check_strategy(trainer.strategy)
    errors = []
    if trainer.accumulate_grad_batches != 1:
        errors.append(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: the trainer class owns gradient "
            "accumulation; do it in train_step, or leave it at 1"
        )
    if trainer.gradient_clip_val:
        errors.append(
            f"gradient_clip_val={trainer.gradient_clip_val}: the trainer class owns clipping; call "
            "torch.nn.utils.clip_grad_norm_ in train_step"
        )
    errors += [fault for callback in callbacks_of(trainer) for fault in _faults_of(callback, trainer.strategy)]
    errors += url_faults(trainer)
    if errors:
        raise StartupContractError("startup.invalid_job_spec", "; ".join(errors))


def _faults_of(callback: pl.Callback, strategy: Strategy) -> Iterator[str]:
    name = type(callback).__name__
    for refused, reason in _REFUSED_CALLBACKS.items():
        if isinstance(callback, refused):
            yield f"{name}: {reason}"
    if isinstance(callback, WEIGHT_AVERAGING) and isinstance(strategy, ModelParallelStrategy):
        yield f"{name} needs complete weights, but ModelParallelStrategy shards them; use ddp"


def check_strategy(strategy: Strategy) -> None:
    """Refuse a strategy, or a setting of one, that cannot host a trainer class.

    Raises:
        StartupContractError: Names the strategy, the reason and the way out.
    """
    name = type(strategy).__name__
    for refused, reason in _REFUSED.items():
        if isinstance(strategy, refused):
            raise _refusal(name, reason)
    if isinstance(strategy, DDPStrategy):
        settings = ddp_settings(strategy)
        if settings.start_method != "popen":
            raise _refusal(name, f"start_method={settings.start_method!r}: {_SHORT_LIVED_PROCESSES}")
        try:
            wire_type(strategy)
        except ValueError as error:
            raise _refusal(name, str(error)) from error
        if settings.model_averaging_period is not None:
            raise _refusal(name, "it averages models instead of gradients, and would have to know the optimizers")
    elif isinstance(strategy, ModelParallelStrategy):
        if tensor_parallel_size(strategy) != 1:
            raise _refusal(
                name,
                "tensor parallelism needs a plan for the layers of a module. "
                "Pass `data_parallel_size=N, tensor_parallel_size=1`",
            )
        try:
            require_fsdp(unused_parameters=isinstance(strategy, FSDP2Strategy) and strategy.sharding.unused_parameters)
        except ImportError as error:
            raise _refusal(name, str(error)) from error
    elif not isinstance(strategy, SingleDeviceStrategy):
        raise _refusal(name, "genlight does not know how it synchronizes. Use auto, ddp or FSDP2Strategy")


def prevent_wrapping(strategy: Strategy) -> None:
    """Prevent a `DDPStrategy` from wrapping the LightningModule; call this before ``strategy.setup``.

    The forward of the wrapper would never run, its buckets would take the memory of all gradients, and it refuses
    modules without trainable parameters. `gradients.ddp` does its work. Other strategies stay unchanged.
    """
    if isinstance(strategy, DDPStrategy):
        strategy.configure_ddp = types.MethodType(_configure_nothing, strategy)  # type: ignore[method-assign]


def missing_callbacks(trainer: pl.Trainer, *, metric_every: int) -> list[pl.Callback]:
    """Return the callbacks that every training of a trainer class needs and `trainer` does not have."""
    present = callbacks_of(trainer)
    missing: list[pl.Callback] = []
    if not any(isinstance(callback, LogMetrics) for callback in present):
        missing.append(LogMetrics(every_n_steps=metric_every))
    if trainer.world_size > 1 and not any(isinstance(callback, ReplicaGuard) for callback in present):
        missing.append(ReplicaGuard())
    return missing


def defer_setups(trainer: pl.Trainer) -> None:
    """Postpone ``setup`` of callbacks that copy the weights until `run_deferred_setups`.

    Lightning sets up callbacks before the module, because it expects the module's constructor to make all layers. A
    trainer class builds its layers only in ``configure``.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, WEIGHT_AVERAGING):
            callback.setup = _postpone  # type: ignore[method-assign]


def run_deferred_setups(trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
    """Restore ``setup`` of the postponed callbacks and call it, in the order of the callbacks."""
    for callback in callbacks_of(trainer):
        if vars(callback).get("setup") is _postpone:
            del callback.setup
            callback.setup(trainer, module, stage)


def _postpone(trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
    """Replace a callback's ``setup`` until the module has its weights."""


def _configure_nothing(strategy: DDPStrategy) -> None:
    """Replace `DDPStrategy.configure_ddp`."""


def _refusal(name: str, reason: str) -> StartupContractError:
    return StartupContractError("startup.invalid_job_spec", f"{name} cannot host a trainer class: {reason}.")
