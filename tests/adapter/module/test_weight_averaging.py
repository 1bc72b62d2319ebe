"""Lightning's `WeightAveraging` copies the weights in ``setup``, but a trainer class builds them later."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, DurableCheckpointIO
from support.trainer_class import Trains
from support.trainers import quiet_trainer

stock: Any = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="since Lightning 2.6")
EMAWeightAveraging, WeightAveraging = stock.EMAWeightAveraging, stock.WeightAveraging


class TwoParts(Trains):
    """A backbone and a head under one optimizer; records the weights after each step."""

    def __init__(self) -> None:
        self.history: list[torch.Tensor] = []

    def configure(self, ctx: Any) -> dict[str, Any]:
        backbone, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam([*head.parameters(), *backbone.parameters()], lr=0.05)
        return {"backbone": backbone, "head": head, "optimizer": optimizer}

    def loss(self, batch: torch.Tensor, state: Any) -> torch.Tensor:
        loss: torch.Tensor = (state["head"](state["backbone"](batch).tanh()) - 1).pow(2).mean()
        return loss

    def train_step(self, batch: torch.Tensor, state: Any, ctx: Any) -> StepResult:
        result = super().train_step(batch, state, ctx)
        self.history.append(state["backbone"].weight.detach().clone())
        return result

    def evaluate(self, state: Any, ctx: Any) -> dict[str, float]:
        return {"norm": float(state["backbone"].weight.detach().norm())}


def batches() -> DataLoader[Any]:
    """Two batches per epoch."""
    return DataLoader([torch.full((2, 4), 0.1 * i) for i in (1, 2)], batch_size=None)


def fit(
    folder: Path, *callbacks: pl.Callback, epochs: int = 4, ckpt_path: str | None = None, **settings: Any
) -> tuple[pl.Trainer, ContractModule]:
    """Train with stock callbacks and a checkpoint after each epoch."""
    trainer = quiet_trainer(
        *callbacks,
        Checkpoint(folder / "made", every_n_epochs=1, keep_last=None),
        max_epochs=epochs,
        default_root_dir=folder,
        plugins=[DurableCheckpointIO()],
        **settings,
    )
    module = ContractModule(TwoParts(), TrainingJobSpec("parts", 100))
    trainer.fit(module, batches(), ckpt_path=ckpt_path)
    return trainer, module


def weights(module: ContractModule) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_averaged_weights_take_the_place_of_the_last_ones_when_training_ends(tmp_path: Path) -> None:
    """The mean of the weights after all steps, in the modules of the trainer class itself."""
    _, module = fit(tmp_path, WeightAveraging())
    history = module.plugin.history  # type: ignore[attr-defined]
    assert len(history) == 8
    torch.testing.assert_close(module.contract_state["backbone"].weight, torch.stack(history).mean(0))


def test_a_validation_within_the_training_evaluates_the_averaged_weights(tmp_path: Path) -> None:
    """``evaluate`` sees the average, and training continues with its own weights."""
    trainer, module = fit(tmp_path, WeightAveraging(), val_check_interval=2, check_val_every_n_epoch=4)
    history = module.plugin.history  # type: ignore[attr-defined]
    assert float(trainer.callback_metrics["norm"]) == pytest.approx(float(torch.stack(history).mean(0).norm()))


@pytest.mark.parametrize("make", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.5)])
def test_averaging_is_exact_after_a_resume(tmp_path: Path, make: Any) -> None:
    """A checkpoint holds the average and the current weights, and a resume restores both."""
    _, straight = fit(tmp_path / "straight", make())
    fit(tmp_path, make(), epochs=2)
    _, resumed = fit(tmp_path, make(), ckpt_path=str(tmp_path / "made" / "step-00000004.json"))
    assert_same(weights(resumed), weights(straight))


def test_a_postponed_setup_is_restored(tmp_path: Path) -> None:
    """Also if ``configure`` failed meanwhile; other callbacks are set up before the module, as always."""
    order: list[str] = []

    class Early(pl.Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            order.append("early")

    class Late(WeightAveraging):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            order.append("late")
            super().setup(trainer, pl_module, stage)

    late = Late()
    module = ContractModule(TwoParts(), TrainingJobSpec("parts", 1))
    settings: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 1}
    plugin: Any = module.plugin
    plugin.setup = lambda ctx: order.append("module") or 1 / 0
    trainer = pl.Trainer(**settings, callbacks=[late, Early()], default_root_dir=tmp_path)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, batches())
    copied = copy.deepcopy(late)
    del plugin.setup
    trainer = pl.Trainer(**settings, callbacks=[copied, Early()], default_root_dir=tmp_path)
    trainer.fit(module, batches())
    assert order == ["early", "module", "early", "late"]
    assert "setup" not in vars(copied)
