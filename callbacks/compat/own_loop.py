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

from ..early_stopping import EarlyStopping
from ..health.diagnosis import Diagnosis
from ..health.faults import Reading
from ..hook.cadence import crossed
from ..hook.events import run_state_of
from ..telemetry.heartbeat import Heartbeat

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
        self._began_at = time.monotonic()
        self._first_step_s: float | None = None
        self._first_step = self.global_step
        self._seen: dict[int, int] = {}
        """By the id of each callback, the step of its last look."""
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

    def is_due(self, callback: Any, every: int) -> bool:
        """Whether a cadence of a callback was crossed since its last look."""
        before, now = self._seen.get(id(callback), self._first_step), self.global_step
        self._seen[id(callback)] = now
        return crossed(before, now, every)

    def step_ended(self) -> None:
        """Count a step; before its callbacks are called."""
        self._steps += 1
        if self._first_step_s is None:
            self._first_step_s = time.monotonic() - self._began_at
        loss = self.metric("loss")
        if loss is not None:
            self._losses = [*self._losses[-255:], (self.global_step, loss if math.isfinite(loss) else math.nan)]

    def stop_early(self, early_stopping: EarlyStopping) -> None:
        """Judge the monitored metric of the step that has ended."""
        value = self.metric(early_stopping.monitor)
        values = {} if value is None else {early_stopping.monitor: value}
        early_stopping.judge(self, values, self.global_step)  # type: ignore[arg-type]

    def beat(self, heartbeat: Heartbeat, run_id: str | None) -> None:
        """Write a heartbeat, where it is due."""
        if not self.is_due(heartbeat, heartbeat.interval_steps):
            return
        self._name_run(run_id)
        seconds = time.monotonic() - self._began_at
        heartbeat.events.write(
            self,  # type: ignore[arg-type]
            event="heartbeat",
            success=True,
            duration_sec=seconds,
            ttfi_sec=self._first_step_s,
            throughput_steps_per_sec=(self.global_step - self._first_step) / seconds if seconds else None,
        )

    def diagnose(self, diagnosis: Diagnosis, run_id: str | None) -> None:
        """Look at losses, at the gradients that the step has left, and at the spread of latent values, where due."""
        if not self.is_due(diagnosis, diagnosis.check_interval):
            return
        self._name_run(run_id)
        named = getattr(getattr(self.trainer, "model", None), "named_parameters", dict)
        norms = {name: float(value.grad.norm()) for name, value in dict(named()).items() if value.grad is not None}
        spreads = ((name, self.metric(name)) for name in ("latent_std", "z_std"))
        latent = next(((name, value) for name, value in spreads if value is not None), None)
        losses, self._losses = self._losses, []
        norms = {name: norm if math.isfinite(norm) else math.nan for name, norm in norms.items()}
        reading = Reading(self.global_step, norms, losses=losses, latent=latent)
        diagnosis.judge(self, reading)  # type: ignore[arg-type]

    def _name_run(self, run_id: str | None) -> None:
        state = run_state_of(self)  # type: ignore[arg-type]
        state.run_id = state.run_id or str(getattr(self.trainer, "run_id", "") or run_id or "")
