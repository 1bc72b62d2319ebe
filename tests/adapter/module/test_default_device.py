"""Trainers that change the default device (`torch.set_default_device`) or the default type of new tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.callbacks.checkpoint.codec.tensors import digest_of_all
from support.resumed_fit import STEPS, Batches, Trains, fit
from support.trainers import quiet_trainer

OPTIMIZER = torch.optim.SGD if torch.__version__.startswith("2.9.") else torch.optim.Adam
"""The Adam of torch 2.9 counts its steps on the default device, and reads them."""


class Plain(Trains):
    def configure(self, ctx: Any) -> dict[str, Any]:
        net = torch.nn.Linear(2, 1, device="cpu", dtype=torch.float32)
        return {"net": net, "optimizer": OPTIMIZER(net.parameters(), lr=0.1)}


class OnAnotherDevice(Plain):
    """The meta device reveals each tensor that is made without a device, as a GPU would."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        state = super().configure(ctx)
        torch.set_default_device("meta")
        return state


class InDouble(Plain):
    def configure(self, ctx: Any) -> dict[str, Any]:
        state = super().configure(ctx)
        torch.set_default_dtype(torch.float64)
        return state


def no_default_device() -> None:
    """Restore the state before the first call: in torch 2.9, None itself would count as a default device."""
    torch.set_default_device(None)
    if hasattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context"):
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    no_default_device()
    torch.set_default_dtype(torch.float32)


def test_a_run_is_saved_and_resumed_whatever_the_default_device_is(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", Plain(), STEPS)
    fit(tmp_path / "parts", OnAnotherDevice(), 3)
    no_default_device()
    resumed = fit(tmp_path / "parts", OnAnotherDevice(), STEPS, ckpt_path=str(tmp_path / "parts" / "final.json"))
    assert all(torch.equal(plain[name], resumed[name]) for name in plain)


def test_gradients_are_unscaled_whatever_the_default_type_is() -> None:
    trainer = quiet_trainer(
        max_steps=2, plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    )
    trainer.fit(ContractModule(InDouble(), TrainingJobSpec("double", 2)), Batches())
    assert trainer.global_step == 2


def test_tensors_are_compared_between_ranks_whatever_the_default_device_is() -> None:
    tensor = torch.arange(3.0)
    expected = digest_of_all([tensor], tensor.device)
    torch.set_default_device("meta")

    assert digest_of_all([tensor], tensor.device).item() == expected.item()
