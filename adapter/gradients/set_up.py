"""What a run needs of this folder: equal ranks, their inputs in the weights' type, and a router or none."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from importlib.metadata import version

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from ...callbacks.health.recover import Recover
from ...callbacks.health.watch_nonfinite import WatchNonfinite
from ...callbacks.hook.events import callbacks_of
from ...callbacks.lightning_internals import NEWEST_TORCH, ddp_settings, is_untested_torch
from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered, check_devices
from ..discovery.rank_local import EVERYTHING_SHARED, RankLocal
from .ddp.averaging import Averaging
from .ddp.buckets import wire_type
from .ddp.buffers import BufferSync, broadcast_from_zero
from .fsdp.step import fsdp_modules
from .precision import cast_inputs, step_precision
from .rank_check import check_same_on_all_ranks
from .step import StepRouter, step_hooks
from .update_guard import UpdateGuard

__all__ = ["step_router"]

log = logging.getLogger(__name__)


@functools.cache
def _warn_of_untested_torch() -> None:
    if is_untested_torch():
        log.warning(
            "torch %s is later than %s, the newest release that genlight was tested with",
            version("torch"),
            NEWEST_TORCH,
        )


def step_router(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    discovered: Discovered,
    rank_local: RankLocal = EVERYTHING_SHARED,
    before: StepRouter | None = None,
) -> StepRouter | None:
    """The router that this run needs, or None where plain torch does the same.

    To be called once, with the modules on their device and before a checkpoint is restored. On several ranks it also
    gives every rank the weights of rank 0. `before` is the router of a training before this one.

    Raises:
        ContractError: The ranks built different things, something is on another device than this rank's, or the
            precision cannot host the trainer.
    """
    _warn_of_untested_torch()
    check_devices(discovered, trainer.strategy.root_device, world_size=trainer.world_size)
    precision = step_precision(trainer.precision_plugin, discovered)
    hooks = step_hooks(trainer, module)
    averaging, buffers, local = None, None, frozenset[int]()
    if dist.is_available() and dist.is_initialized() and trainer.world_size > 1:
        group = _data_parallel_group(trainer)
        check_same_on_all_ranks(discovered, group, rank_local)
        broadcast_from_zero([tensor for _, tensor in rank_local.tensors(discovered)], group)
        ddp = ddp_settings(trainer.strategy).ddp_arguments if isinstance(trainer.strategy, DDPStrategy) else {}
        megabytes = ddp.get("bucket_cap_mb")
        averaging = Averaging(
            discovered,
            trainer.strategy.root_device,
            group,
            rank_local,
            bucket_bytes=None if megabytes is None else int(megabytes * 2**20),  # DDP's megabytes
            wire=wire_type(trainer.strategy),
            is_last_step=lambda: trainer.global_step + 1 == trainer.max_steps,
        )
        buffers = BufferSync(discovered, group, rank_local)
        local = frozenset(rank_local.ids(discovered))
    if precision.cast_inputs_to is not None:
        cast_inputs([found.value for found in discovered.modules], precision.cast_inputs_to)
    guard = _update_guard(trainer, discovered, averaging, local, scales=precision.scaler is not None)
    needs_router = bool(precision.context or averaging or guard or hooks or fsdp_modules(discovered))
    if not needs_router:
        return None
    router = StepRouter(
        discovered,
        trainer.strategy.root_device,
        precision=precision,
        hooks=hooks,
        averaging=averaging,
        buffers=buffers,
        guard=guard,
        completed_steps=lambda: trainer.global_step,
    )
    if averaging is not None and before is not None and before.averaging is not None:
        averaging.load_state_dict(before.averaging.state_dict())
    return router


def _update_guard(
    trainer: pl.Trainer,
    discovered: Discovered,
    averaging: Averaging | None,
    rank_local: frozenset[int],
    *,
    scales: bool,
) -> UpdateGuard | None:
    callbacks = callbacks_of(trainer)
    judge: Recover | WatchNonfinite | None = next((c for c in callbacks if isinstance(c, Recover)), None)
    if judge is None:
        judge = next((c for c in callbacks if isinstance(c, WatchNonfinite) and c.policy == "skip"), None)
    if judge is None:
        return None
    if isinstance(judge, Recover) and averaging is not None:
        _require_shared(discovered, averaging.shared)
    return UpdateGuard(
        discovered,
        judge,
        group=None if averaging is None else averaging.group,
        shared=() if averaging is None else averaging.shared,
        rank_local=rank_local,
        scales=scales,
    )


def _require_shared(discovered: Discovered, shared: Collection[int]) -> None:
    """Refuse optimizers of which each rank has its own: their faults would be told by one rank alone."""
    own = [found.path for found in discovered.optimizers if id(found.value) not in shared]
    if own:
        raise ContractError(
            f"`Recover` needs updates that all ranks make alike, and those of {', '.join(own)} are each rank's own "
            "(`rank_local`). Use `on_nonfinite: skip`, or one device."
        )


def _data_parallel_group(trainer: pl.Trainer) -> dist.ProcessGroup | None:
    if isinstance(trainer.strategy, ModelParallelStrategy):
        return trainer.strategy.device_mesh["data_parallel"].get_group()
    return None
