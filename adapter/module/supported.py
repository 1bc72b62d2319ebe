"""Which of Lightning's strategies and settings can host a trainer class, which calls its modules itself, and how."""

from __future__ import annotations

import types
from typing import Any

import lightning.pytorch as pl
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

from ...callbacks.checkpoint.sharded.strategy import sharded_url_faults
from ...callbacks.hook.events import callbacks_of
from ...callbacks.lightning_internals import ddp_settings, tensor_parallel_size
from ..contract.exceptions import StartupContractError
from ..contract.types import TrainingJobSpec
from ..gradients.hook_state import fault_of_hook_state
from ..job.trainer_arguments import ENDS_WITH_ITS_PROCESSES
from .finders import fault_of_finder
from .late_setup import faults_of_callbacks

__all__ = ["check_strategy", "check_trainer_arguments", "leave_unwrapped"]

_REFUSED: dict[type[Strategy], str] = {
    DeepSpeedStrategy: "DeepSpeed's engine must own the module, backward and the optimizer, which the trainer class "
    "owns. Use ddp, or ModelParallelStrategy to shard",
    FSDPStrategy: "FSDP 1 works in the forward of a wrapper that a trainer class never calls, and its gradients are "
    "plain tensors that hold one rank's part, so that clip_grad_norm_ would clip differently on each rank. Use FSDP 2: "
    "lightning.pytorch.strategies.ModelParallelStrategy with data_parallel_size=N and tensor_parallel_size=1",
    XLAStrategy: "XLA runs a step lazily and needs markers inside it",
    SingleDeviceXLAStrategy: "XLA runs a step lazily and needs markers inside it",
}


def check_trainer_arguments(trainer: pl.Trainer, job: TrainingJobSpec, data: Any) -> None:
    """Refuse a strategy, an argument or a callback of a Lightning trainer that cannot host a trainer class.

    Args:
        trainer: The Lightning trainer.
        job: What the trainer class is given.
        data: The data module; None where there is none.

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
    errors += faults_of_callbacks(trainer) + sharded_url_faults(trainer)
    errors += filter(None, (fault_of_finder(callback, trainer, job, data) for callback in callbacks_of(trainer)))
    if errors:
        raise StartupContractError("startup.invalid_job_spec", "; ".join(errors))


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
            raise _refusal(name, f"start_method={settings.start_method!r}: {ENDS_WITH_ITS_PROCESSES}")
        fault = fault_of_hook_state(strategy)
        if fault is not None:
            raise _refusal(name, fault)
        if settings.model_averaging_period is not None:
            raise _refusal(name, "it averages models instead of gradients, which would have to know the optimizers")
    elif isinstance(strategy, ModelParallelStrategy):
        if tensor_parallel_size(strategy) != 1:
            raise _refusal(
                name,
                "tensor parallelism needs a plan for the layers of a module. "
                "Give `data_parallel_size=N, tensor_parallel_size=1`",
            )
    elif not isinstance(strategy, SingleDeviceStrategy):
        raise _refusal(name, "genlight does not know how it synchronizes. Use auto, ddp or ModelParallelStrategy")


def leave_unwrapped(strategy: Strategy) -> None:
    """Keep a `DDPStrategy` from wrapping the LightningModule, to be called before ``strategy.setup``.

    The wrapper's forward would never run, its buckets would cost the memory of all gradients, and it refuses modules
    without trainable parameters. `GradientSync` does its work. Other strategies are left as they are.
    """
    if isinstance(strategy, DDPStrategy):
        strategy.configure_ddp = types.MethodType(_configure_nothing, strategy)  # type: ignore[method-assign]


def _configure_nothing(strategy: DDPStrategy) -> None:
    """In place of `DDPStrategy.configure_ddp`."""


def _refusal(name: str, reason: str) -> StartupContractError:
    return StartupContractError("startup.invalid_job_spec", f"{name} cannot host a trainer class: {reason}.")
