"""Restores the state of a checkpoint within a running training, without rewinding the data.

Weights, optimizers, schedulers, scalers, the state of the trainer class, random states, gradients of an open
accumulation window, callbacks and the step counter are restored as by a resume. Loaders keep their position, with the
counters of batches and epochs: the batches since the checkpoint are skipped.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from ...adapter.contract.exceptions import RecoveryError
from ..checkpoint.capture import CONTRACT_KEY
from ..checkpoint.codec.state_tree import format_path
from ..checkpoint.format.record import CheckpointRecord
from ..checkpoint.policy import Checkpoint
from ..checkpoint.rank_state import (
    digests_of,
    gradients_of_rank,
    restore_gradients,
    restore_rng_of_rank,
)
from ..checkpoint.selection import WRITER, list_checkpoints, newest_valid, own_records
from ..checkpoint.storage import delete_checkpoint
from ..hook.events import callbacks_of, run_state_of
from ..lightning_internals import checkpoint_connector

__all__ = ["Target", "abandon_later", "last_good_checkpoint", "restore"]

log = logging.getLogger(__name__)

Target = tuple[int, Path]
"""Step and record of a checkpoint."""

_OF_THE_DATA = ("run_id", "epoch", "minibatch_index", "latest_checkpoint_uri")
"""Facts of the run state that do not go back."""


def last_good_checkpoint(trainer: pl.Trainer, saver: Checkpoint, before: int) -> Target | None:
    """The newest checkpoint of this run before step `before` that proves whole and has finite weights. Collective."""
    saver.wait(trainer)
    target: Target | None = None
    if trainer.is_global_zero:

        def is_good(record: CheckpointRecord) -> bool:
            return _is_of_run(record, trainer, saver) and record.finite_weights is not False and record.step < before

        record, warnings = newest_valid(saver.directory, accept=is_good, knows_types=True)
        for warning in warnings:
            log.warning("%s", warning)
        target = None if record is None else (record.step, record.path)
    shared: Target | None = trainer.strategy.broadcast(target)
    return shared


def abandon_later(trainer: pl.Trainer, saver: Checkpoint, step: int) -> None:
    """Remove the checkpoints that this run saved after `step`, so that no start resumes from them. On rank zero."""
    for record in own_records(list_checkpoints(saver.directory)):
        if record.step > step and _is_of_run(record, trainer, saver):
            delete_checkpoint(record.path)


def _is_of_run(record: CheckpointRecord, trainer: pl.Trainer, saver: Checkpoint) -> bool:
    return record.writer == WRITER and record.run_id == (saver.run.run_id or run_state_of(trainer).run_id)


def restore(trainer: pl.Trainer, pl_module: Any, target: Target, *, keeps: pl.Callback) -> None:
    """Restore everything but the position in the data from `target`. Collective.

    Args:
        trainer: The trainer, between two steps of genlight's loop.
        pl_module: The module that hosts a trainer class.
        target: The checkpoint.
        keeps: The callback whose state stays as it is.

    Raises:
        BrokenCheckpointError: The checkpoint is no longer whole.
        RecoveryError: The restored state differs from the checkpoint; names the value.
    """
    step, path = target
    connector, given = checkpoint_connector(trainer), trainer.ckpt_path
    data = {name: getattr(run_state_of(trainer), name) for name in _OF_THE_DATA}
    connector.resume_start(path)
    checkpoint = connector._loaded_checkpoint
    try:
        connector.restore_model()
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
        _restore_callbacks(trainer, pl_module, checkpoint, keeps)
        pl_module.restore_trainer()
    finally:
        connector._loaded_checkpoint, connector._ckpt_path = {}, given
    for name, fact in data.items():
        setattr(run_state_of(trainer), name, fact)
    pl_module.step_result = None
    loop: Any = trainer.fit_loop.epoch_loop
    loop.roll_back_to(step)
    trainer.should_stop = False  # what asked for it has seen steps that are undone
    _require_equal(trainer, pl_module, checkpoint, path)
    parts = checkpoint[CONTRACT_KEY]
    gradients = gradients_of_rank(parts.get("gradients", []), trainer.global_rank, trainer.world_size)
    restore_gradients(pl_module, gradients, clears_others=True)
    restore_rng_of_rank(parts["rng"], trainer.global_rank)
    pl_module.feed_callback_metrics()


def _restore_callbacks(
    trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any], keeps: pl.Callback
) -> None:
    states: Mapping[str, Any] = checkpoint.get("callbacks", {})
    for callback in callbacks_of(trainer):
        if callback is keeps:
            continue
        if not isinstance(callback, Checkpoint):  # of which a roll-back puts the parts back by itself
            callback.on_load_checkpoint(trainer, pl_module, checkpoint)
        if state := states.get(callback.state_key):
            callback.load_state_dict(copy.deepcopy(state))


def _require_equal(trainer: pl.Trainer, pl_module: Any, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Refuse a state that is not that of the checkpoint: a class may not expect ``load_state_dict`` within a run."""
    expected = {
        "weights": checkpoint["state_dict"],
        "optimizers": [
            None if hasattr(optimizer, "consolidate_state_dict") else state
            for optimizer, state in zip(trainer.optimizers, checkpoint["optimizer_states"], strict=True)
        ],
        "state": checkpoint[CONTRACT_KEY].get("state", {}),
    }
    where = _first_difference(expected, _what_there_is(trainer, pl_module), _what_there_is(trainer, pl_module))
    if where is not None:
        raise RecoveryError(
            f"the roll-back to {path.stem} is not exact: {where} differs from the checkpoint, after "
            f"`load_state_dict` of {type(pl_module.plugin).__name__} was called within a run. Restore the whole "
            "payload there, or leave 'roll_back' out of the ladder; the run can be resumed from that checkpoint"
        )


def _what_there_is(trainer: pl.Trainer, pl_module: Any) -> dict[str, Any]:
    return {
        "weights": pl_module.state_dict(),
        "optimizers": [
            None if hasattr(optimizer, "consolidate_state_dict") else optimizer.state_dict()
            for optimizer in trainer.optimizers
        ],
        "state": pl_module.state_payload(),
    }


def _first_difference(expected: Any, actual: Any, again: Any) -> str | None:
    """The path of the first value of `actual` that is not the `expected` one; None where all are.

    Args:
        expected: What a checkpoint holds.
        actual: What there is, a list or a tuple alike, on any device.
        again: What there is a moment later: what differs between the two, such as a time, has no fixed value.
    """
    saved, now, later = (digests_of(_plain(tree)) for tree in (expected, actual, again))
    paths = (path for path in {**saved, **now} if saved.get(path) != now.get(path) and now.get(path) == later.get(path))
    found = next(paths, None)
    return None if found is None else format_path(found)


def _plain(value: Any) -> Any:
    """A tree in host memory, whose digests are those of a checkpoint; its containers differ by nothing but members."""
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.cpu()
    return [_plain(member) for member in value] if isinstance(value, list | tuple) else value
