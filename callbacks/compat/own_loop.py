"""A loop of one's own, as callbacks see it who ask for a Lightning trainer and module.

They find what they look at on the trainer object of that loop, or on its ``state``: ``global_step`` (completed steps,
counted where it is not there), ``metrics`` (a mapping; else ``loss``), ``model``, ``optimizer``, ``epoch``,
``max_steps`` or ``total_steps``, ``output_dir`` and ``run_id``. To end training they set its ``should_stop``, which the
loop looks at after each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch

from ..hook.events import fire, run_state_of
from .trainer_view import is_number

__all__ = ["OwnLoop"]


class _Module(pl.LightningModule):
    """The module: what holds the model of the loop."""

    def __init__(self, trainer: Any, model: Any) -> None:
        super().__init__()
        self.contract_state = trainer
        if isinstance(model, torch.nn.Module):
            self.model = model


class OwnLoop:
    """The attributes that callbacks ask of a Lightning trainer, for the trainer object of a loop of one's own.

    Args:
        own: That object, of any class.
        callback: A Lightning callback, which may add others when it is set up.
    """

    world_size, is_global_zero, distributed_sampler_kwargs = 1, True, None
    max_epochs = -1
    enable_validation = True  # whoever waits for a score goes on waiting
    lr_scheduler_configs, precision_plugin = (), None

    def __init__(self, own: Any, callback: pl.Callback) -> None:
        self.own = own
        self.callbacks = [callback]
        self.loggers: list[Any] = []
        self._steps = 0
        self.lightning_module = _Module(own, self.find("model"))
        parameter = next(self.lightning_module.parameters(), torch.empty(0))
        self.strategy = SimpleNamespace(root_device=parameter.device)
        self.default_root_dir = self.find("output_dir", ".")
        run_state_of(self.as_trainer).run_id = str(self.find("run_id", ""))
        callback.setup(self.as_trainer, self.lightning_module, "fit")

    @property
    def as_trainer(self) -> Any:
        """This object, as what it stands in for."""
        return self

    def find(self, name: str, default: Any = None) -> Any:
        """An attribute of the trainer object, or of its ``state``; `default` where neither has it."""
        found = (getattr(holder, name, None) for holder in (self.own, getattr(self.own, "state", None)))
        return next((value for value in found if value is not None), default)

    @property
    def global_step(self) -> int:
        """Completed steps: the trainer's own number, else those since this was made."""
        return int(self.find("global_step", self._steps))

    @property
    def current_epoch(self) -> int:
        """Completed epochs."""
        return int(self.find("epoch", 0))

    @property
    def max_steps(self) -> int:
        """The step after which training ends; -1 where that is not known."""
        return int(self.find("max_steps", self.find("total_steps", -1)))

    @property
    def optimizers(self) -> list[Any]:
        """Its optimizer."""
        optimizer = self.find("optimizer")
        return [] if optimizer is None else [optimizer]

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The metrics of the last step; its loss where there is no mapping of them."""
        named = self.find("metrics")
        found = named if isinstance(named, Mapping) else {"loss": self.find("loss")}
        return {str(name): torch.as_tensor(value) for name, value in found.items() if is_number(value)}

    progress_bar_metrics = callback_metrics

    @property
    def should_stop(self) -> bool:
        """Whether training is to end."""
        return bool(self.find("should_stop", False))

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.own.should_stop = value

    def step_ended(self) -> None:
        """Count a step, and have all callbacks hear of it."""
        self._steps += 1
        metrics = self.callback_metrics
        numbers = {name: float(value) for name, value in metrics.items()}
        fire(self.as_trainer, "on_metrics", numbers, self.global_step)
        fire(self.as_trainer, "on_train_batch_end", metrics, None, self._steps - 1)
