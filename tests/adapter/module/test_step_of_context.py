"""``ctx.step`` is the number of completed steps in every hook, and needs no counter in a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule, StepContext, StepResult, TrainingJobSpec
from genlight.adapter.check.plain_loop import PlainLoop
from genlight.callbacks import Checkpoint, DurableCheckpointIO
from support.trainer_class import Trains
from support.trainers import quiet_trainer

BATCHES = list(torch.rand(8, 4, 2, generator=torch.Generator().manual_seed(1)))


class Cosine(Trains):
    """A cosine schedule and accumulation over two steps, both by ``ctx.step`` only; notes what each hook sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def configure(self, ctx: StepContext) -> Any:
        self.kept = ctx
        self.seen.append(("configure", ctx.step))
        return super().configure(ctx)

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
        self.seen.append(("train_step", ctx.step))
        for group in state["optimizer"].param_groups:
            group["lr"] = 0.1 * (1 + math.cos(math.pi * ctx.step / ctx.job.max_steps))
        loss = self.loss(batch, state)
        loss.backward()
        if (ctx.step + 1) % 2 == 0:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, Any]:
        self.seen.append(("state_dict", self.kept.step))
        return {}

    def load_state_dict(self, state: Any, payload: dict[str, Any], ctx: StepContext) -> None:
        self.seen.append(("load_state_dict", ctx.step))

    def evaluate(self, state: Any, ctx: StepContext) -> dict[str, float]:
        self.seen.append(("evaluate", ctx.step))
        return {"score": 1.0}

    def steps_in(self, hook: str) -> list[int]:
        return [step for name, step in self.seen if name == hook]


class Collects(Cosine):
    update_epochs = 2

    def rollout(self, state: Any, ctx: StepContext) -> Any:
        self.seen.append(("rollout", ctx.step))
        return BATCHES[:2]


def fit(plugin: Cosine, saves_to: Path, *, ckpt_path: Path | None = None) -> ContractModule:
    module = ContractModule(plugin, TrainingJobSpec("r", max_steps=8))
    trainer = quiet_trainer(
        Checkpoint(saves_to, every_n_steps=1, keep_last=None), max_steps=8, max_epochs=-1, limit_val_batches=0
    )
    data = None if hasattr(plugin, "rollout") else DataLoader(BATCHES[:4], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


def weights(module: ContractModule) -> torch.Tensor:
    return torch.cat([each.flatten() for each in module.contract_state["model"].parameters()])


@pytest.mark.promise(name="resume")
@pytest.mark.parametrize("kind", [Cosine, Collects])
def test_step_is_exact_over_a_resume_accumulation_and_rollouts(tmp_path: Path, kind: type[Cosine]) -> None:
    whole, resumed = kind(), kind()
    expected = weights(fit(whole, tmp_path / "a"))
    # Step 3 is in the middle of an accumulation window and of a pass over the rollout.
    ends_with = weights(fit(resumed, tmp_path / "b", ckpt_path=tmp_path / "a" / "step-00000003.json"))

    assert torch.equal(ends_with, expected), "the schedule and the updates are those of the uninterrupted run"
    assert whole.steps_in("train_step") == list(range(8))
    assert resumed.steps_in("train_step") == list(range(3, 8))
    assert whole.steps_in("rollout") == ([0, 4] if kind is Collects else [])
    assert resumed.steps_in("rollout") == ([4] if kind is Collects else [])
    assert whole.steps_in("state_dict")[:8] == list(range(1, 9)), "a checkpoint is of the completed steps"
    assert resumed.seen[:2] == [("configure", 0), ("load_state_dict", 3)]


def test_step_is_that_of_the_checkpoint_without_a_fit_and_0_in_the_next_fit(tmp_path: Path) -> None:
    fit(Cosine(), tmp_path)
    record = tmp_path / "step-00000003.json"
    evaluated, loaded = Cosine(), Cosine()
    quiet_trainer(plugins=[DurableCheckpointIO()]).validate(ContractModule(evaluated), ckpt_path=record, verbose=False)
    assert evaluated.steps_in("evaluate") == [3]

    module = ContractModule.load_from_checkpoint(record, plugin=loaded)
    assert loaded.steps_in("load_state_dict") == [3]
    loaded.seen.clear()
    quiet_trainer(max_steps=2).fit(module, DataLoader(BATCHES, batch_size=None))  # type: ignore[arg-type]
    assert loaded.steps_in("train_step") == [0, 1]


def test_the_plain_loop_of_compare_and_doctor_counts_as_a_run_does() -> None:
    plugin = Cosine()
    loop = PlainLoop(plugin, StepContext(TrainingJobSpec("r", max_steps=8), device="cpu"))
    for batch in BATCHES[:3]:
        loop.step(batch)
    assert plugin.steps_in("train_step") == [0, 1, 2]
    assert StepContext(TrainingJobSpec("r", max_steps=8), count_steps=lambda: 7).step == 7
