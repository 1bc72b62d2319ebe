"""The trainer that six-hook callbacks get, and its ``.pt`` checkpoints.

Such a file is complete or absent, and reading it runs no code: it is written under a temporary name next to its target,
loaded again to prove it, then renamed. It holds only tensors and plain values, including the states of optimizers, so
that ``torch.load(weights_only=True)`` reads all of it.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.durable import write_proven
from ...adapter.plumbing.redaction import safe_str
from ...adapter.plumbing.safe_open import open_regular
from ..early_stopping import StopVote
from ..hook.events import is_number, model_of, run_state_of, step_metrics

ESSENTIAL: Final = ("model_state_dict", "optimizer_state_dict", "global_step")
"""Keys that every checkpoint of this style has."""

_ATTRIBUTE = "_genlight_trainer_view"
_LOSSES = ("loss", "train/loss", "train_loss")
"""Names by which a step may return its loss."""
_OF_LIGHTNING = {"epoch": "current_epoch", "total_steps": "max_steps", "is_main_process": "is_global_zero"}
"""Attributes of the Lightning trainer, by the names that other trainers use."""


class TrainerView:
    """The trainer of the six-hook style.

    ``state`` is this object again, for callbacks that read ``trainer.state.global_step``. Other attributes come from
    the Lightning trainer, three of them under the names ``epoch``, ``total_steps`` and ``is_main_process``.

    Args:
        trainer: The Lightning trainer.
        module: Its module.

    Attributes:
        lightning: The Lightning trainer.
        module: The LightningModule.
        state: This object.
        device: The device that trains.
        output_dir: The folder for the files of the run.
        train_start_time: When the fit was set up, in seconds since 1970.
        ttfi_sec: Seconds from `train_start_time` to the end of the first step of this attempt; None before that.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.lightning = trainer
        self.module = module
        self.state = self
        self.device = trainer.strategy.root_device
        self.output_dir = Path(trainer.default_root_dir)
        self._best_loss: Any = math.inf
        self.stop_vote = StopVote(self, trainer.global_step)
        self.train_start_time = time.time()
        self.ttfi_sec: float | None = None
        self._began_at = time.monotonic()
        self._first_step = self._last_step = trainer.global_step
        self._total_loss: Any = 0.0
        self._named: Mapping[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._metrics_step: int | None = None
        """The step of `_metrics`; None if they must be read again."""

    def __getattr__(self, name: str) -> Any:
        if "lightning" not in vars(self):  # `copy` and `pickle` look up attributes before they set any
            raise AttributeError(name)
        return getattr(self.lightning, _OF_LIGHTNING.get(name, name))

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return run_state_of(self.lightning).run_id

    @property
    def model(self) -> Any:
        """The trainer's ``model``, otherwise its only module, otherwise the LightningModule."""
        return model_of(self.module)

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
        """Metrics of the last step, by the names that it returned and those that are reported; read once."""
        if self._metrics_step != self.global_step:  # without a `CallbackList`, nobody calls `step_ended`
            self._metrics_step = self.global_step
            own = {str(name): float(value) for name, value in self._named.items() if is_number(value)}
            self._metrics = {**step_metrics(self.lightning, self.module), **own}
            if "train/loss" in self._metrics:
                self._metrics.setdefault("loss", self._metrics["train/loss"])
            self._note_loss(self._metrics.get("loss", math.inf))
        return self._metrics

    @property
    def loss(self) -> float | None:
        """The loss among `metrics`."""
        return self.metrics.get("loss")

    @property
    def best_loss(self) -> float:
        """The smallest loss of any step, ``inf`` before the first; each access waits for the device."""
        return float(self._best_loss)

    @best_loss.setter
    def best_loss(self, value: float) -> None:
        self._best_loss = value

    @property
    def total_loss(self) -> float:
        """The sum of the losses of this attempt's steps; each access waits for the device."""
        return float(self._total_loss)

    def runtime_profile(self) -> dict[str, float | None]:
        """Seconds since the fit was set up, seconds until its first step ended, and this attempt's steps per second."""
        elapsed = time.monotonic() - self._began_at
        steps = self.global_step - self._first_step
        return {
            "elapsed_sec": elapsed,
            "ttfi_sec": self.ttfi_sec,
            "throughput_steps_per_sec": steps / elapsed if elapsed > 0 else None,
        }

    @property
    def should_stop(self) -> bool:
        """Whether training ends. All ranks end at most 10 steps after one of them has set this."""
        return self.lightning.should_stop or self.stop_vote.is_requested

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.stop_vote.request(self.lightning, bool(value))

    def save_checkpoint(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write a ``.pt`` checkpoint of this style, on rank zero; see the function `save_checkpoint`.

        A run resumes from the checkpoints of `Checkpoint`, not from this one: it holds no position in the data and no
        random state.

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
        """Load weights, and the states of optimizer, scheduler and scaler, from a ``.pt`` checkpoint.

        The step of the run does not change. Exceptions are those of the function `load_checkpoint`.

        Returns:
            The content of the file.
        """
        checkpoint = load_checkpoint(path, map_location=self.device)
        self.model.load_state_dict(checkpoint["model_state_dict"])
        for name in ("optimizer", "scheduler", "scaler"):
            part, state = getattr(self, name), checkpoint.get(f"{name}_state_dict")
            if part is not None and state:
                part.load_state_dict(state)
        self.best_loss = checkpoint.get("best_loss", self.best_loss)
        return checkpoint

    def step_ended(self, outputs: Any) -> None:
        """Note that a step has ended with `outputs`.

        Each `CallbackList` of the trainer calls this; a step counts once.
        """
        self._named = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
        self._metrics_step = None
        if self.global_step == self._last_step:
            return
        self._last_step = self.global_step
        if self.ttfi_sec is None:
            self.ttfi_sec = time.monotonic() - self._began_at
        loss = next((self._named[name] for name in _LOSSES if name in self._named), None)
        if is_number(loss):
            # Computed on the device, without waiting for it.
            loss = loss.detach().reshape(()) if isinstance(loss, torch.Tensor) else loss
            self._total_loss = self._total_loss + loss
            self._note_loss(loss)

    def _note_loss(self, loss: Any) -> None:
        """Keep the smallest loss; nan does not count."""
        if isinstance(loss, torch.Tensor) or isinstance(self._best_loss, torch.Tensor):
            self._best_loss = torch.fmin(torch.as_tensor(self._best_loss), torch.as_tensor(loss))
        else:
            self._best_loss = min(self._best_loss, loss)

    def _checkpoint(self) -> dict[str, Any]:
        """Return the content of a ``.pt`` checkpoint of this moment."""
        checkpoint = {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": {} if self.optimizer is None else self.optimizer.state_dict(),
            "global_step": self.global_step,
            "best_loss": self.best_loss,
            "config": vars(self.config),
        }
        for name, part in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if part is not None:
                checkpoint[f"{name}_state_dict"] = part.state_dict()
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "to_dict"):
            checkpoint["model_config"] = config.to_dict()
        return checkpoint


def view_of(trainer: pl.Trainer, module: pl.LightningModule) -> TrainerView:
    """Return the view that all callbacks of this style share; the first call makes it."""
    view: TrainerView | None = getattr(trainer, _ATTRIBUTE, None)
    if view is None or view.module is not module:
        view = TrainerView(trainer, module)
        setattr(trainer, _ATTRIBUTE, view)
    return view


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> Path:
    """Write a checkpoint of the six-hook style; durable when this returns.

    Args:
        path: The file; an existing one is replaced once the new one is proven.
        checkpoint: ``model_state_dict, optimizer_state_dict, global_step``, and other entries (``best_loss, config,
            scheduler_state_dict, scaler_state_dict, model_config``). A value that is neither a tensor nor a plain value
            is stored as text.

    Returns:
        The file.

    Raises:
        CheckpointError: An essential key is missing, or the file could not be written or read again. An existing file
            is unchanged, and no temporary file remains.
    """
    target = Path(path)
    missing = [name for name in ESSENTIAL if name not in checkpoint]
    if missing:
        raise CheckpointError(f"a checkpoint for {target} lacks {', '.join(missing)}")
    try:
        write_proven(target, lambda temporary: torch.save(_to_plain(checkpoint), temporary), load_checkpoint)
    except (OSError, RuntimeError) as error:  # torch raises a RuntimeError if the disk is full
        raise CheckpointError(f"the checkpoint {target} could not be written: {safe_str(error)}") from error
    return target


def load_checkpoint(path: str | os.PathLike[str], *, map_location: Any = "cpu") -> dict[str, Any]:
    """Return the content of a checkpoint of the six-hook style, without running code from it.

    Args:
        path: The file.
        map_location: The device for tensors, as in ``torch.load``.

    Raises:
        FileNotFoundError: There is no such file.
        BrokenCheckpointError: It is damaged, holds anything but tensors and plain values, or lacks an essential key.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        reason = "it holds more than tensors and plain values, and loading that could run code"
        raise BrokenCheckpointError(str(path), f"{reason} ({safe_str(error).splitlines()[0]})") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise BrokenCheckpointError(str(path), f"it cannot be read: {safe_str(error)}") from error
    missing = [name for name in ESSENTIAL if not isinstance(checkpoint, dict) or name not in checkpoint]
    if missing:
        raise BrokenCheckpointError(str(path), f"it lacks {', '.join(missing)}")
    loaded: dict[str, Any] = checkpoint
    return loaded


def _to_plain(value: Any) -> Any:
    """Return `value` in a form that ``weights_only`` can read: what is neither a tensor nor plain becomes text."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key if type(key) in (str, int) else str(key): _to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(entry) for entry in value]
    if getattr(value, "shape", None) == ():  # a number of numpy's
        return value.item()
    return value if value is None or type(value) in (bool, int, float, str, bytes) else str(value)
