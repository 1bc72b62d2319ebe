"""A resume logs each setting of the checkpoint that overrides one of `configure`, or keeps the new one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.adapter.contract.exceptions import ContractError
from genlight.callbacks import Checkpoint
from support.messages import refusal
from support.resumed_fit import Batches, Trains
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="resume")


class Builds(Trains):
    """Its optimizer has the settings of the job; `schedule` names a scheduler."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        given = ctx.job.hyperparams
        net = torch.nn.Linear(2, 1)
        settings = {name: given[name] for name in ("lr", "weight_decay") if name in given}
        state = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), **settings)}
        if "gamma" in given:
            state["schedule"] = torch.optim.lr_scheduler.ExponentialLR(state["optimizer"], given["gamma"])
        if "total" in given:
            warm = torch.optim.lr_scheduler.LinearLR(state["optimizer"], 0.5, total_iters=2)
            then = torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], given["total"])
            state["schedule"] = torch.optim.lr_scheduler.SequentialLR(state["optimizer"], [warm, then], [2])
        return state

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        result = super().train_step(batch, state, ctx)
        if "schedule" in state:
            state["schedule"].step()
        if ctx.job.hyperparams.get("own_schedule"):
            state["optimizer"].param_groups[0]["lr"] *= 0.5
        return result


@pytest.fixture
def train(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Train to a step, from the newest checkpoint if there is one; return the group and the log."""

    def run(steps: int, *keep: str, **hyperparams: Any) -> tuple[dict[str, Any], str]:
        caplog.clear()
        caplog.set_level("INFO", logger="genlight")
        trainer = quiet_trainer(Checkpoint(tmp_path, asynchronous=False), max_steps=steps, default_root_dir=tmp_path)
        module = ContractModule(Builds(), TrainingJobSpec("r", steps, hyperparams=hyperparams), keep_on_resume=keep)
        final = tmp_path / "final.json"
        trainer.fit(module, Batches(), ckpt_path=str(final) if final.exists() else None)
        group = module.contract_state["optimizer"].param_groups[0]
        said = [message for message in caplog.messages if "configure" in message]
        return group, "\n".join(said)

    return run


def test_a_rate_that_the_checkpoint_overrides_is_logged_with_both_values_until_it_is_kept(train):
    train(2, lr=0.1, weight_decay=0.0)
    for steps in (3, 4):
        group, said = train(steps, lr=0.01, weight_decay=0.0)
        assert group["lr"] == 0.1
        assert 'state["optimizer"] lr 0.1 (`configure` built 0.01)' in said
        assert "--reset lr" in said
        assert "weight_decay" not in said

    group, said = train(5, "lr", lr=0.01, weight_decay=0.0)
    assert group["lr"] == 0.01
    assert 'state["optimizer"] lr 0.01 (0.1 in the checkpoint)' in said
    assert train(6, "lr", lr=0.01, weight_decay=0.0)[1] == ""


def test_one_setting_is_kept_and_another_is_not(train):
    train(2, lr=0.1, weight_decay=0.0)
    group, said = train(3, "weight_decay", lr=0.2, weight_decay=0.5)
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.5)
    assert "lr 0.1 (`configure` built 0.2)" in said
    assert "weight_decay 0.5 (0.0 in the checkpoint)" in said


def test_a_rate_that_the_class_itself_changes_is_no_difference(train):
    train(2, lr=0.1, own_schedule=True)
    group, said = train(3, "lr", lr=0.1, own_schedule=True)
    assert group["lr"] == pytest.approx(0.1 / 8)
    assert said == ""


def test_a_new_rate_applies_in_the_middle_of_a_schedule(train):
    train(2, lr=0.1, gamma=0.5)
    group, _ = train(4, "lr", lr=0.2, gamma=0.5)
    assert group["lr"] == pytest.approx(0.2 / 16)

    group, said = train(5, lr=0.2, gamma=0.1)
    assert group["lr"] == pytest.approx(0.2 / 32)
    assert 'state["schedule"] gamma 0.5 (`configure` built 0.1)' in said
    assert "--reset schedule" in said
    group, _ = train(6, "schedule", lr=0.2, gamma=0.1)
    assert group["lr"] == pytest.approx(0.2 / 32 * 0.1)


def test_schedules_in_sequence_take_the_new_rate_and_length(train):
    train(3, lr=0.1, total=3)
    group, said = train(6, "lr", "schedule", lr=1.0, total=100)
    assert "_schedulers.1.T_max 100 (3 in the checkpoint)" in said
    assert 0.2 < group["lr"] < 1.0


def test_a_setting_that_nothing_has_is_refused_at_the_start(train):
    with refusal(ContractError):
        train(1, "lrr", lr=0.1)
