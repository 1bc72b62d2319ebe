"""ContractModule registers, saves and restores more than Lightning does, and refuses what it cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from genlight.adapter import ContractError, ContractModule, StepResult, TrainingJobSpec
from genlight.adapter.module.hosted_trainer import BareParameters
from genlight.adapter.module.state import ConfiguredState
from genlight.callbacks import Checkpoint
from support.messages import refusal
from support.trainer_class import Stateless
from support.trainers import quiet_trainer


class TwoSchedulers(Stateless):
    """One optimizer with two schedulers, the trainer's own scaler, a loose parameter and a frozen teacher."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(2, 1)
        alpha = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([*self.net.parameters(), alpha], lr=1.0)
        teacher = torch.nn.Linear(2, 1).eval().requires_grad_(False)
        return {
            "alpha": alpha,
            "teacher": teacher,
            "optimizer": optimizer,
            "warmup": torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10),
            "decay": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
        }

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        loss = (self.net(batch) - state["teacher"](batch) + state["alpha"]).pow(2).mean()
        state["optimizer"].zero_grad()
        state["scaler"].scale(loss).backward()
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()
        state["warmup"].step()
        state["decay"].step()
        return StepResult(metrics={"loss": loss})


def fit(tmp_path: Path, plugin: Any, steps: int, *, precision: Any = None, **options: Any) -> ContractModule:
    """Train on the same batches every time."""
    trainer = quiet_trainer(
        Checkpoint(tmp_path / "c", every_n_steps=3, keep_last=None, save_final=False, asynchronous=False),
        max_steps=steps,
        precision=precision,
        default_root_dir=tmp_path,
    )
    module = ContractModule(plugin, TrainingJobSpec("module", steps))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 2, generator=generator) for _ in range(8)]
    trainer.fit(module, DataLoader(batches, batch_size=None), **options)
    return module


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_whatever_the_trainer_keeps_is_saved_and_restored(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", TwoSchedulers(), 3).contract_state
    resumed = fit(
        tmp_path / "again", TwoSchedulers(), 3, ckpt_path=str(tmp_path / "whole" / "c" / "step-00000003.json")
    )
    state = resumed.contract_state
    assert state["decay"].state_dict() == whole["decay"].state_dict()
    assert state["warmup"].state_dict() == whole["warmup"].state_dict()
    assert state["scaler"].state_dict() == whole["scaler"].state_dict()
    assert torch.equal(state["alpha"], whole["alpha"])
    assert bool(state["alpha"].detach() != 0)


def test_modules_of_state_and_trainer_are_registered_under_their_paths(tmp_path: Path) -> None:
    """State dicts, summaries and device moves include them; a frozen teacher causes no warning."""
    module = fit(tmp_path, TwoSchedulers(), 1)
    assert {name.split(".")[0] for name in module.state_dict()} == {"net", "teacher", "loose"}


def test_a_trainer_may_keep_its_context(fit, counting_trainer):
    class Keeps(counting_trainer):
        def setup(self, ctx):
            self.ctx, self.is_canceled = ctx, ctx.is_canceled

        def configure(self, ctx):
            return {**super().configure(ctx), "model": torch.nn.Linear(2, 1), "ctx": ctx, "stop": ctx.is_canceled}

        def state_dict(self, state):
            return {"stopped": self.ctx.is_canceled() or self.is_canceled() or state["stop"]()}

    _, module = fit(Keeps(), steps=2)

    assert [name for name, _ in module.named_children()] == ["model"]
    assert module.hosted_trainer.state.payload() == {"stopped": False}


def test_the_search_for_new_modules_runs_once_in_many_steps_and_not_in_each_epoch(tmp_path: Path, monkeypatch) -> None:
    """A rollout is an epoch of a few steps, and a search takes as long as some of them."""
    from genlight.adapter.module import epoch_loop

    from .test_phases import Actor, fit as fit_actor

    searches: list[int] = []
    find = ConfiguredState.check_unchanged
    monkeypatch.setattr(
        ConfiguredState,
        "check_unchanged",
        lambda self: (searches.append(self.module.trainer.global_step), find(self))[1],
    )
    fit_actor(tmp_path, Actor(), steps=40)  # in seven phases
    assert searches == [1]

    monkeypatch.setattr(epoch_loop, "CHECK_EVERY_N_STEPS", 10)
    late = Actor()
    late.at_step = lambda ctx: setattr(late, "late", torch.nn.Linear(1, 1)) if len(searches) == 3 else None
    with refusal(ContractError):
        fit_actor(tmp_path, late, steps=40)
    assert searches == [1, 1, 13, 25]


def test_a_move_or_cast_keeps_the_object_and_its_place_in_the_optimizer():
    alpha = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([alpha], lr=0.5)
    module = BareParameters({"alpha": alpha})
    alpha.sum().backward()

    module.to(torch.float64)
    optimizer.step()

    assert alpha.dtype is alpha.grad.dtype is torch.float64
    assert alpha.item() == 0.5
    assert alpha.requires_grad
    assert alpha.is_leaf


def test_state_dicts_of_the_module_and_of_its_parent_hold_the_tensors():
    alpha = torch.full((2,), 3.0, requires_grad=True)
    parent = torch.nn.Module()
    parent.loose = BareParameters({"alpha": alpha})
    saved = {k: v.clone() for k, v in parent.state_dict().items()}
    with torch.no_grad():
        alpha.zero_()

    parent.load_state_dict(saved)

    assert list(saved) == ["loose.alpha"]
    assert alpha.tolist() == [3.0, 3.0]
