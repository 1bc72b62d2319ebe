"""What is looked at before the first step, so that a run does not fail at its first checkpoint, or only at its end."""

from __future__ import annotations

import math
from pathlib import Path

import lightning.pytorch as pl
from torch.distributed.tensor import DTensor

from ...adapter.contract.exceptions import StartupContractError
from ..hook.hook import ending_the_run
from .earlier_runs import in_use_fault, note_directory
from .format.layout import FINAL_NAME
from .ownership import require_replaceable
from .sharded.save import require_shared_directory
from .sharded.strategy import rank_groups_of
from .storage.commit import require_space

__all__ = ["check_directory", "require_choice", "require_cadences"]

_ADAM_STATES = 2
"""Copies of the parameters that the usual optimizer adds; for the estimate before it exists."""


def check_directory(
    trainer: pl.Trainer, pl_module: pl.LightningModule, directory: Path, *, replaces: bool, saves_final: bool
) -> None:
    """Refuse to train where checkpoints cannot go to `directory`. Collective.

    Args:
        trainer: The trainer that is about to train.
        pl_module: The module that it trains.
        directory: Where the checkpoints of this training go.
        replaces: Whether those of another run there may be replaced.
        saves_final: Whether a ``final`` checkpoint is saved at the end.

    Raises:
        StartupContractError: The directory holds another run's checkpoints, and none was named to go on from.
        CheckpointError: It has no space for one, another file has the name of one, or a rank does not see it.
    """
    _refuse_to_mix_runs(trainer, directory, replaces=replaces)
    groups = rank_groups_of(trainer.strategy)
    if groups is not None and any(isinstance(p, DTensor) for p in pl_module.parameters()):
        require_shared_directory(groups.training, directory)
    if trainer.is_global_zero:
        if saves_final:
            require_replaceable(directory / f"{FINAL_NAME}.json")
        require_space(directory, _size_of_first_checkpoint(pl_module))


def require_choice(name: str, value: object, one: str, other: str) -> None:
    """Raise where the argument `name` is neither of two values.

    Raises:
        ValueError: It is not.
    """
    if value not in (one, other):
        raise ValueError(f"Invalid `{name}`. Expected {one!r} or {other!r}, but received {value!r}.")


def require_cadences(every_n_epochs: int, every_minutes: float, *, needs_monitor: bool, monitor: str | None) -> None:
    """Raise where these arguments of `Checkpoint` make no sense; `needs_monitor` is its ``save_on_improvement``.

    Raises:
        ValueError: They do not; all that is wrong is named.
    """
    wrong = []
    if every_n_epochs < 0:
        wrong.append(f"Invalid `every_n_epochs`. Expected a number >= 0, but received {every_n_epochs}.")
    if not 0 <= every_minutes < math.inf:
        wrong.append(f"Invalid `every_minutes`. Expected a number >= 0, but received {every_minutes}.")
    if needs_monitor and not monitor:
        wrong.append("`save_on_improvement` needs a `monitor`: the metric or score that is to improve.")
    if wrong:
        raise ValueError(" ".join(wrong))


def _refuse_to_mix_runs(trainer: pl.Trainer, directory: Path, *, replaces: bool) -> None:
    fault = None
    begins_anew = trainer.ckpt_path is None and trainer.global_step == 0
    if begins_anew and trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
        fault = None if replaces else in_use_fault(directory)
    fault = trainer.strategy.broadcast(fault)  # the other ranks would wait for rank zero
    if fault is not None:
        raise ending_the_run(StartupContractError("startup.artifacts_in_use", fault))
    note_directory(directory)


def _size_of_first_checkpoint(module: pl.LightningModule) -> int:
    """About how many bytes: the weights, and what the usual optimizer keeps for each that is trained."""
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return int(weights + _ADAM_STATES * trained)
