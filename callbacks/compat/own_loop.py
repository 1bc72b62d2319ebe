"""The callbacks of the six-hook style in a loop of one's own, which has neither a Lightning trainer nor a module.

What they look at is found on the trainer object of that loop: `global_step` (completed steps, counted where it is not
there), `metrics` (a mapping; else attributes such as `loss`), `model`, `epoch`, and `run_id`. To end training they set
`should_stop`, which the loop looks at after each step; checkpoints are written by its own `save_checkpoint(path)`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..hook.events import run_state_of

__all__ = ["OwnLoop"]


class OwnLoop:
    """The attributes that callbacks ask of a Lightning trainer, for the trainer object of a loop of one's own.

    Args:
        trainer: That object, of any class.
    """

    world_size = 1
    is_global_zero = True
    enable_validation = False
    lightning_module = None

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.callbacks: list[Any] = []
        self.loggers: list[Any] = []
        self._steps = 0
        self.began_at = time.monotonic()
        self.first_step_s: float | None = None
        self.first_step = self.global_step
        self._losses: list[tuple[int, float]] = []

    @property
    def global_step(self) -> int:
        """Completed steps: the trainer's own number, else those since this was made."""
        state = getattr(self.trainer, "state", None)
        found = getattr(self.trainer, "global_step", getattr(state, "global_step", None))
        return self._steps if found is None else int(found)

    @property
    def current_epoch(self) -> int:
        """Completed epochs."""
        return int(getattr(self.trainer, "epoch", 0) or 0)

    @property
    def should_stop(self) -> bool:
        """Whether training is to end."""
        return bool(getattr(self.trainer, "should_stop", False))

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.trainer.should_stop = value

    def metric(self, name: str) -> float | None:
        """The last value of a metric of the trainer, of its `metrics` or an attribute; None where it has none."""
        for holder in (self.trainer, getattr(self.trainer, "state", None)):
            metrics = getattr(holder, "metrics", None)
            value = metrics.get(name) if isinstance(metrics, Mapping) else None
            value = getattr(holder, name, None) if value is None else value
            if isinstance(value, int | float | torch.Tensor):
                return float(value)
        return None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the trainer; its loss where it has no mapping of them."""
        named = getattr(self.trainer, "metrics", None)
        found = named if isinstance(named, Mapping) else {"loss": self.metric("loss")}
        return {name: float(value) for name, value in found.items() if value is not None}

    @property
    def output_dir(self) -> Path:
        """Where the trainer puts its files; else the working directory."""
        return Path(getattr(self.trainer, "output_dir", "."))

    def save_checkpoint(self, path: Path) -> None:
        """Have the trainer write a checkpoint.

        Raises:
            TypeError: It has no such method.
        """
        save = getattr(self.trainer, "save_checkpoint", None)
        if save is None:
            raise TypeError(f"CheckpointCallback needs `save_checkpoint(path)` of {type(self.trainer).__name__}.")
        save(path)

    def step_ended(self) -> None:
        """Count a step; before its callbacks are called."""
        self._steps += 1
        if self.first_step_s is None:
            self.first_step_s = time.monotonic() - self.began_at
        loss = self.metric("loss")
        if loss is not None:
            self._losses = [*self._losses[-255:], (self.global_step, loss if math.isfinite(loss) else math.nan)]

    def take_losses(self) -> list[tuple[int, float]]:
        """Steps and losses since the last call, the newest 256; ``nan`` where one is not finite."""
        losses, self._losses = self._losses, []
        return losses

    def name_run(self, run_id: str | None) -> None:
        """Have events name the run as its trainer does, else by `run_id`."""
        state = run_state_of(self)  # type: ignore[arg-type]
        state.run_id = state.run_id or str(getattr(self.trainer, "run_id", "") or run_id or "")
