"""What `Recover` refuses before the first step, all of it at once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy

from ..checkpoint.checkpoint import Checkpoint
from ..hook.events import callbacks_of
from ..watch_nonfinite import WatchNonfinite
from .ladder import RUNGS
from .update_faults import FAULTS

__all__ = ["argument_faults", "saver_of", "start_faults"]


def argument_faults(
    ladder: Sequence[str],
    faults: Collection[str],
    *,
    counts: dict[str, int],
    lr_factor: float,
    limits: dict[str, float],
    scenario: str,
) -> list[str]:
    """What is wrong with the arguments of `Recover`, each with what was expected."""
    wrong = []
    if isinstance(ladder, str) or not ladder:
        wrong.append(f"`ladder` {ladder!r} (expected a list of at least one of {', '.join(RUNGS)})")
    else:
        wrong += [f"`ladder` with {rung!r} (expected {', '.join(RUNGS)})" for rung in ladder if rung not in RUNGS]
    if isinstance(faults, str) or not faults:
        wrong.append(f"`faults` {faults!r} (expected a list of at least one of {', '.join(FAULTS)})")
    else:
        wrong += [f"`faults` with {kind!r} (expected {', '.join(FAULTS)})" for kind in faults if kind not in FAULTS]
    wrong += [f"`{name}` {value} (expected a number >= 1)" for name, value in counts.items() if value < 1]
    if not isinstance(ladder, str) and 1 <= counts["max_attempts"] < len(ladder):
        wrong.append(f"`max_attempts` {counts['max_attempts']} (expected at least the {len(ladder)} rungs of `ladder`)")
    if not 0 < lr_factor < 1:
        wrong.append(f"`lr_factor` {lr_factor} (expected a number between 0 and 1)")
    wrong += [f"`{name}` {value} (expected a number > 0)" for name, value in limits.items() if not 0 < value < math.inf]
    if not scenario:
        wrong.append("`scenario` '' (expected a text that is not empty)")
    return wrong


def saver_of(trainer: pl.Trainer) -> Checkpoint | None:
    """The callback whose checkpoints a roll-back goes to: the first that saves while training."""
    savers = (callback for callback in callbacks_of(trainer) if isinstance(callback, Checkpoint))
    return next((each for each in savers if each.every_n_steps or each.every_n_epochs or each.triggers), None)


def start_faults(
    trainer: pl.Trainer, pl_module: Any, rungs: Collection[str], faults: Collection[str], *, is_alone: bool
) -> list[str]:
    """Why a run cannot be recovered, each with the way out.

    Args:
        trainer: The trainer of the run, set up.
        pl_module: Its module.
        rungs: Of the ladder.
        faults: What is recovered from.
        is_alone: Whether there is no second `Recover`.
    """
    if getattr(pl_module, "discovered", None) is None:
        return [f"it needs a trainer class in a ContractModule, and {type(pl_module).__name__} is not one"]
    wrong = [] if is_alone else ["there is more than one Recover callback; keep one of them"]
    watches = (each for each in callbacks_of(trainer) if isinstance(each, WatchNonfinite) and each.policy != "warn")
    wrong += [f"`on_nonfinite: {each.policy}` (WatchNonfinite) conflicts with it; use `warn`" for each in watches]
    scaled = _scalers(trainer, pl_module)
    sized = [kind for kind in faults if kind != "nonfinite"]
    if scaled and sized:
        wrong.append(
            f"{' and '.join(sized)} cannot be detected with {scaled}; use bf16-mixed, or `faults: [nonfinite]`"
        )
    if "lower_lr" in rungs:
        wrong += [
            f"'lower_lr' needs a learning rate, and a parameter group of {found.path} has none; leave that rung out"
            for found in pl_module.discovered.optimizers
            if any(group.get("lr") is None for group in found.value.param_groups)
        ]
    return [*wrong, *(_roll_back_faults(trainer, pl_module) if "roll_back" in rungs else ())]


def _scalers(trainer: pl.Trainer, pl_module: Any) -> str:
    """What scales losses, in words; empty where nothing does."""
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "16-mixed, which leaves out updates by itself"
    return "a gradient scaler of the trainer's own" if pl_module.discovered.scalers else ""


def _roll_back_faults(trainer: pl.Trainer, pl_module: Any) -> Iterator[str]:
    if saver_of(trainer) is None:
        yield (
            "'roll_back' needs checkpoints, and no `Checkpoint` callback saves any during training; give it a cadence "
            "(`checkpoint_every` of a job), or leave that rung out"
        )
    if isinstance(trainer.strategy, ModelParallelStrategy):
        yield "'roll_back' does not support sharded parameters (ModelParallelStrategy); leave that rung out"
    if callable(getattr(pl_module.plugin, "rollout", None)):
        yield "'roll_back' does not support trainers with a `rollout`: environments cannot go back; leave that rung out"
