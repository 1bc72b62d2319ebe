"""Lightning's callbacks that have a state behave the same with our checkpoint plugin and without it.

A run from the start and one that resumes within an epoch are compared in everything that a checkpoint may change: hooks
in order, files, contents of checkpoints, metrics, states of callbacks and loops, weights.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    Timer,
)
from torch.utils.data import DataLoader

from genlight.callbacks import DurableCheckpointIO
from support.trainers import quiet_trainer

pytestmark = [
    pytest.mark.promise(name="checkpoint"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning"),
]

MEASURED = "time"
"""Part of the names of values that depend on the clock; these values are not compared."""


class Regression(pl.LightningModule):
    """A backbone and a head, a scheduler, hyperparameters, and metrics of every kind."""

    def __init__(self, rate: float = 0.05, sizes: tuple[int, ...] = (4, 8)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 1)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.head(self.backbone(batch)) - batch.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self._loss(batch))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams["rate"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


class Records(pl.Callback):
    """Records every hook that is called, with its step."""

    state_key = "every hook"

    def __init__(self) -> None:
        self.called: list[tuple[str, int]] = []
        for name, method in inspect.getmembers(pl.Callback, inspect.isfunction):
            if name.startswith("on_") or name in ("setup", "teardown"):
                setattr(self, name, self._noting(name, method))

    def _noting(self, name: str, method: Any) -> Any:
        def note(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
            self.called.append((name, trainer.global_step))
            return method(self, trainer, *args, **kwargs)

        return note

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.called), ("a", 1): {2: torch.tensor([1.0])}, "nothing": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.called.append((f"load_state_dict {sorted(map(str, state_dict))}", int(state_dict["calls"])))


def run(folder: Path, plugin: DurableCheckpointIO | None, *, epochs: int, resumes: bool = False) -> Any:
    """Train or resume with all callbacks."""
    torch.manual_seed(7)
    records = Records()
    callbacks: list[pl.Callback] = [
        records,
        BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, verbose=False),
        EarlyStopping("val", patience=10),
        EMAWeightAveraging(decay=0.9, update_every_n_steps=2),
        GradientAccumulationScheduler({0: 1, 2: 2}),
        ModelCheckpoint(folder / "best", monitor="val", save_top_k=2, save_last=True, filename="{epoch}-{step}"),
        ModelCheckpoint(folder / "steps", every_n_train_steps=3, save_top_k=-1, filename="{step}"),
        Timer(timedelta(hours=1)),
    ]
    plugins = [] if plugin is None else [plugin]
    trainer = quiet_trainer(
        *callbacks, max_epochs=epochs, plugins=plugins, default_root_dir=folder, gradient_clip_val=1.0
    )
    module, within_an_epoch = Regression(), folder / "steps" / "step=6.ckpt"
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
    trained, validated = DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=8)
    trainer.fit(module, trained, validated, ckpt_path=within_an_epoch if resumes else None)
    return {
        "hooks": records.called,
        "steps": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "metrics": _plain(dict(trainer.callback_metrics)),
        "weights": _plain(module.state_dict()),
        "optimizer": _plain(trainer.optimizers[0].state_dict()),
        "callbacks": [_plain(_relative(callback.state_dict(), folder)) for callback in callbacks],
        "files": _files(folder),
        "checkpoints": {
            path.relative_to(folder): _plain(_relative(_load(trainer, path), folder))
            for path in sorted(folder.rglob("*.ckpt"))
        },
    }


def _load(trainer: pl.Trainer, path: Path) -> Any:
    return trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=False)


def _files(folder: Path) -> list[str]:
    """Return all files except the data of checkpoints, because the plugin stores these differently."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    data = {path.with_suffix("") for path in found if path.suffix == ".ckpt"}
    own = [str(path) for path in found if not any(_without_number(parent) in data for parent in path.parents)]
    return sorted(own)


def _without_number(path: Path) -> Path:
    return path.parent / path.name.removesuffix("~1")


def _plain(value: Any, name: str = "") -> Any:
    """Return `value` in a form that ``==`` compares bit by bit with types, without measured values."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        # Weights come back as torch's own mapping, also if a callback has made a plain dictionary of it.
        kind = "dict" if isinstance(value, OrderedDict) else type(value).__name__
        return {kind: {key: _plain(item, f"{name}/{key}") for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [_plain(item, name) for item in value])
    return None if MEASURED in name else value


def _relative(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        items = {_relative(key, folder): _relative(item, folder) for key, item in value.items()}
        return items if type(value) is dict else value
    return value.replace(str(folder), "FOLDER") if isinstance(value, str) else value


def assert_same(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    for what, expected in stock.items():
        assert ours[what] == expected, what


def test_lightnings_callbacks_see_no_difference(tmp_path: Path) -> None:
    def train(name: str, **settings: Any) -> dict[str, Any]:
        plugin = DurableCheckpointIO(asynchronous=True) if name == "ours" else None
        return run(tmp_path / name, plugin, **settings)

    assert_same(train("ours", epochs=3), expected := train("stock", epochs=3))
    assert len(expected["checkpoints"]) >= 5
    assert len(expected["hooks"]) > 100

    assert_same(train("ours", epochs=4, resumes=True), expected := train("stock", epochs=4, resumes=True))
    assert expected["steps"] == (12, 4, False)
