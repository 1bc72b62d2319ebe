"""The trainer that six-hook callbacks are handed: a view of the Lightning trainer and the module."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from ...adapter.contract.exceptions import CheckpointError
from ...adapter.plumbing.text import nearest
from ..hook.events import model_of, run_state_of, step_metrics
from .torch_checkpoint import load_checkpoint, save_checkpoint

__all__ = ["TrainerView", "view_of"]

_ATTRIBUTE = "_genlight_trainer_view"
_OF_LIGHTNING = {
    "global_step": "global_step",
    "epoch": "current_epoch",
    "current_epoch": "current_epoch",
    "max_steps": "max_steps",
    "total_steps": "max_steps",
    "is_main_process": "is_global_zero",
    "logger": "logger",
}
"""Names of this style for attributes of the Lightning trainer."""


class TrainerView:
    """The trainer of the six-hook style.

    ``state`` is this object again, for callbacks that say ``trainer.state.global_step``. Of the Lightning trainer it
    has ``global_step`` and ``epoch`` (what is completed), ``max_steps`` or ``total_steps``, ``is_main_process`` and
    ``logger``.

    Attributes:
        lightning: The Lightning trainer.
        module: The LightningModule.
        best_loss: The smallest loss that any callback has seen; ``inf`` before. A loss that no one reads is not read.
        train_start_time: When the fit was set up, in seconds since 1970.
        ttfi_sec: Seconds from there to the end of the first step of this attempt; None before.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.lightning = trainer
        self.module = module
        self.best_loss = math.inf
        self.wants_stop = False
        self.train_start_time = time.time()
        self.ttfi_sec: float | None = None
        self._began_at = time.monotonic()
        self._first_step = self._last_step = trainer.global_step
        self._total_loss: Any = 0.0
        self._outputs: Any = None
        self._metrics: dict[str, float] | None = None

    @property
    def state(self) -> TrainerView:
        """This object."""
        return self

    @property
    def device(self) -> torch.device:
        """The device that trains."""
        return self.lightning.strategy.root_device

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return run_state_of(self.lightning).run_id

    @property
    def output_dir(self) -> Path:
        """Where the run puts its files."""
        return Path(self.lightning.default_root_dir)

    @property
    def model(self) -> torch.nn.Module:
        """The trainer's ``model``, else its only module, else the LightningModule."""
        model: torch.nn.Module = model_of(self.module)
        return model

    @property
    def optimizer(self) -> Any:
        """The first optimizer, or None."""
        return next(iter(self.lightning.optimizers), None)

    @property
    def scheduler(self) -> Any:
        """The first learning rate scheduler, or None."""
        return next((config.scheduler for config in self.lightning.lr_scheduler_configs), None)

    @property
    def scaler(self) -> Any:
        """The gradient scaler of the precision plugin, or None."""
        return getattr(self.lightning.precision_plugin, "scaler", None)

    @property
    def config(self) -> SimpleNamespace:
        """Hyperparameters, and ``total_steps, run_id, output_dir``."""
        own = {"total_steps": self.max_steps, "run_id": self.run_id, "output_dir": str(self.output_dir)}
        return SimpleNamespace(**{**own, **{str(name): value for name, value in self.module.hparams_initial.items()}})

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last step, as the step named them and as they are reported; read from the device once."""
        if self._metrics is None:
            self._metrics = self._read_metrics()
            loss = self._metrics.get("loss", math.nan)
            self.best_loss = loss if loss < self.best_loss else self.best_loss
        return self._metrics

    @property
    def loss(self) -> float | None:
        """The loss among `metrics`."""
        return self.metrics.get("loss")

    @property
    def total_loss(self) -> float:
        """The sum of the losses of this attempt's steps; read from the device when it is asked for."""
        return float(self._total_loss)

    def runtime_profile(self) -> dict[str, float | None]:
        """Seconds since the fit was set up, those to the end of the first step, and steps a second of this attempt."""
        elapsed = time.monotonic() - self._began_at
        steps = self.global_step - self._first_step
        return {
            "elapsed_sec": elapsed,
            "ttfi_sec": self.ttfi_sec,
            "throughput_steps_per_sec": steps / elapsed if elapsed > 0 else None,
        }

    @property
    def should_stop(self) -> bool:
        """Whether training ends; all ranks do, at most 10 steps after one of them has set it."""
        return self.lightning.should_stop or self.wants_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.wants_stop = bool(value)
        if self.lightning.world_size == 1:
            self.lightning.should_stop = self.wants_stop

    def save_checkpoint(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write a ``.pt`` checkpoint of this style, on rank zero; see `torch_checkpoint.save_checkpoint`.

        A run resumes from the checkpoints of `Checkpoint`, not from this one, which holds no position in the data and
        no random state.

        Args:
            path: The file; None is ``checkpoint_<step>.pt`` in `output_dir`.

        Raises:
            CheckpointError: It could not be written, or modules are sharded.
        """
        if isinstance(self.lightning.strategy, FSDPStrategy | ModelParallelStrategy):
            raise CheckpointError("a .pt checkpoint holds whole weights, and these are sharded; use `Checkpoint`")
        target = Path(path) if path is not None else self.output_dir / f"checkpoint_{self.global_step}.pt"
        return save_checkpoint(target, self._checkpoint()) if self.is_main_process else target

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Take over weights, and the states of optimizer, scheduler and scaler, from a ``.pt`` checkpoint.

        The step of the run stays; `torch_checkpoint.load_checkpoint` says what is raised.

        Returns:
            What the file holds.
        """
        checkpoint = load_checkpoint(path, map_location=self.device)
        self.model.load_state_dict(checkpoint["model_state_dict"])
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        for name, part in parts.items():
            if part is not None and checkpoint.get(f"{name}_state_dict"):
                part.load_state_dict(checkpoint[f"{name}_state_dict"])
        self.best_loss = checkpoint.get("best_loss", self.best_loss)
        return checkpoint

    def step_ended(self, outputs: Any) -> None:
        """A step has ended with `outputs`; metrics that were read before are of an earlier one.

        Each callback of the list says so; a step counts once.
        """
        self._outputs, self._metrics = outputs, None
        if self.global_step == self._last_step:
            return
        self._last_step = self.global_step
        if self.ttfi_sec is None:
            self.ttfi_sec = time.monotonic() - self._began_at
        loss = outputs if isinstance(outputs, torch.Tensor) else self._loss_of(outputs)
        if isinstance(loss, torch.Tensor):
            loss = loss.detach() if loss.numel() == 1 else None  # added on its device, which nobody waits for
        if loss is not None:
            self._total_loss = self._total_loss + loss

    def _loss_of(self, outputs: Any) -> Any:
        result = getattr(self.module, "step_result", None)
        named = outputs if isinstance(outputs, Mapping) else getattr(result, "metrics", {})
        return named.get("loss", named.get("train/loss"))

    def __getattr__(self, name: str) -> Any:
        if name in _OF_LIGHTNING:
            return getattr(self.lightning, _OF_LIGHTNING[name])
        known = [*_OF_LIGHTNING, *(known for known in dir(type(self)) if not known.startswith("_"))]
        raise AttributeError(f"the trainer of this style has no {name!r}.{nearest(name, known)}")

    def _checkpoint(self) -> dict[str, Any]:
        optimizer, scheduler, scaler, model = self.optimizer, self.scheduler, self.scaler, self.model
        checkpoint = {
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": {} if optimizer is None else optimizer.state_dict(),
            "global_step": self.global_step,
            "best_loss": self.best_loss,
            "config": vars(self.config),
        }
        if scheduler is not None:
            checkpoint["scheduler_state_dict"] = scheduler.state_dict()
        if scaler is not None:
            checkpoint["scaler_state_dict"] = scaler.state_dict()
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_dict"):
            checkpoint["model_config"] = config.to_dict()
        elif dataclasses.is_dataclass(config) and not isinstance(config, type):
            checkpoint["model_config"] = dataclasses.asdict(config)
        return checkpoint

    def _read_metrics(self) -> dict[str, float]:
        reported = step_metrics(self.lightning, self.module)
        named = {"loss": self._outputs} if isinstance(self._outputs, torch.Tensor) else self._outputs
        own = {name: _number(value) for name, value in named.items()} if isinstance(named, Mapping) else {}
        metrics = {**reported, **{str(name): value for name, value in own.items() if value is not None}}
        if "train/loss" in metrics:
            metrics.setdefault("loss", metrics["train/loss"])
        return metrics


def view_of(trainer: pl.Trainer, module: pl.LightningModule) -> TrainerView:
    """The view that all callbacks of this style share; made at the first call."""
    view: TrainerView | None = getattr(trainer, _ATTRIBUTE, None)
    if view is None or view.module is not module:
        view = TrainerView(trainer, module)
        setattr(trainer, _ATTRIBUTE, view)
    return view


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None
