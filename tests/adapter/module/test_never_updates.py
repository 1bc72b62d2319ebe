"""A class whose steps change no weight is warned of, once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from support.resumed_fit import Trains


class Forgets(Trains):
    """No ``optimizer.step()``; the statistics of the batch norm change nevertheless."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        loss = self.outputs(batch, state).square().mean()
        loss.backward()
        return StepResult({"loss": loss.detach()})


class UpdatesLate(Forgets):
    """One update in the first fifty steps, the last one."""

    steps = 0

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        result = super().train_step(batch, state, ctx)
        self.steps += 1
        if self.steps == 50:
            self.update(state)
        return result

    def update(self, state: Any) -> None:
        state["optimizer"].step()


class UpdatesThroughData(UpdatesLate):
    """As old code does; torch does not count it."""

    def update(self, state: Any) -> None:
        state["net"][0].weight.data.add_(1.0)


class HasNoWeights(Forgets):
    def configure(self, ctx: Any) -> dict[str, Any]:
        return {}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        return StepResult({"loss": 1.0})


@pytest.mark.parametrize(
    ("cls", "steps", "said"),
    [
        (Forgets, 120, 'Forgets has changed no weight in 50 steps (state["optimizer"]). Look for'),
        (Forgets, 49, ""),
        (UpdatesLate, 60, ""),
        (UpdatesThroughData, 60, ""),
        (HasNoWeights, 60, ""),
    ],
)
def test_a_class_that_changes_no_weight_in_fifty_steps_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cls: type[Forgets], steps: int, said: str
) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    rows = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.WARNING, "genlight"):
        trainer.fit(ContractModule(cls(), TrainingJobSpec("never", steps)), [rows for _ in range(steps)].__iter__())
    told = [record.getMessage() for record in caplog.records if "no weight" in record.getMessage()]
    assert len(told) == bool(said)
    assert all(message.startswith(said) for message in told)
