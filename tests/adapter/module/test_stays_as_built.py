"""Layers and groups of `configure` must not change while training; buffers may be resized."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from genlight.adapter import ContractError, ContractModule, TrainingJobSpec
from genlight.adapter.contract.exceptions import CheckpointError
from support.messages import refusal
from support.resumed_fit import STEPS, ChangesAtStepThree, Trains, fit

pytestmark = pytest.mark.promise(name="resume")


class Unfreezes(ChangesAtStepThree):
    """The first layer joins at the third step, in a separate group."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        net[0].requires_grad_(False)
        return {"net": net, "optimizer": torch.optim.Adam(net[2].parameters(), lr=0.1), "step": 0}

    def change(self, state: Any) -> None:
        state["net"][0].requires_grad_(True)
        state["optimizer"].add_param_group({"params": list(state["net"][0].parameters()), "lr": 0.05})


class UnfreezesWhatTheOptimizerHas(Unfreezes):
    """The way out: the group exists from the beginning."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        state = super().configure(ctx)
        super().change(state)
        state["net"][0].requires_grad_(False)
        return state

    def change(self, state: Any) -> None:
        state["net"][0].requires_grad_(True)


class Grows(Unfreezes):
    """A layer is added at the third step."""

    def change(self, state: Any) -> None:
        state["net"].append(nn.Linear(1, 1))


class Shrinks(Unfreezes):
    def change(self, state: Any) -> None:
        del state["net"][1:]
        state["net"][0].requires_grad_(True)


class Widens(Unfreezes):
    def change(self, state: Any) -> None:
        state["net"][2].weight = nn.Parameter(torch.ones(2, 4))


@pytest.mark.parametrize("cls", [Unfreezes, Grows, Shrinks, Widens])
def test_layers_and_groups_that_change_while_training_are_refused_at_the_first_checkpoint(
    tmp_path: Path, cls: type[Unfreezes]
) -> None:
    fit(tmp_path, cls(), 2)
    with refusal(ContractError):
        fit(tmp_path, cls(), 4)


@pytest.mark.parametrize("stop", [2, 4])
def test_layers_may_be_frozen_and_unfrozen(tmp_path: Path, stop: int) -> None:
    whole = fit(tmp_path / "whole", UnfreezesWhatTheOptimizerHas(), STEPS)
    fit(tmp_path / "parts", UnfreezesWhatTheOptimizerHas(), stop)
    path = str(tmp_path / "parts" / "final.json")
    resumed = fit(tmp_path / "parts", UnfreezesWhatTheOptimizerHas(), STEPS, ckpt_path=path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


class WithSGD(Unfreezes):
    def configure(self, ctx: Any) -> dict[str, Any]:
        state = super().configure(ctx)
        state["optimizer"] = torch.optim.SGD(state["net"][2].parameters(), lr=0.1, momentum=0.9)
        return state


@pytest.mark.parametrize(("before", "now"), [(Unfreezes, WithSGD), (WithSGD, Unfreezes)])
def test_another_kind_of_optimizer_is_refused_before_a_step_fails(
    tmp_path: Path, before: type[Unfreezes], now: type[Unfreezes]
) -> None:
    fit(tmp_path, before(), 2)
    with refusal(CheckpointError):
        fit(tmp_path, now(), STEPS, ckpt_path=str(tmp_path / "final.json"))


def test_other_groups_than_in_the_checkpoint_are_refused_with_the_path_of_their_optimizer(tmp_path: Path) -> None:
    fit(tmp_path, UnfreezesWhatTheOptimizerHas(), 2)
    with refusal(CheckpointError):
        fit(tmp_path, Unfreezes(), STEPS, ckpt_path=str(tmp_path / "final.json"))


class WithOlderAdam(Unfreezes):
    def configure(self, ctx: Any) -> dict[str, Any]:
        def leave_out(optimizer: Any, saved: dict[str, Any]) -> None:
            for group in saved["param_groups"]:
                del group["decoupled_weight_decay"]

        state = super().configure(ctx)
        state["optimizer"].register_state_dict_post_hook(leave_out)
        return state


def test_a_setting_that_a_later_torch_added_is_accepted(tmp_path: Path) -> None:
    fit(tmp_path, WithOlderAdam(), 2)
    fit(tmp_path, Unfreezes(), 2, ckpt_path=str(tmp_path / "final.json"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)
        self.register_buffer("mean", None)
        self.register_buffer("history", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.first(x).tanh())
        return outputs


class ResizesBuffers(Trains):
    """A buffer gets its first value in the first step, another a row in each, and a third appears."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        net = Net()
        return {"net": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.1)}

    def outputs(self, batch: Any, state: Any) -> torch.Tensor:
        net, mean = state["net"], batch.mean(0)
        net.mean = mean if net.mean is None else 0.9 * net.mean + 0.1 * mean
        net.history = torch.cat([net.history, net.first.bias.detach()[None]])
        net.register_buffer("last_mean", mean)
        return super().outputs(batch - net.mean, state)


def test_buffers_get_the_shapes_that_they_had(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", ResizesBuffers(), STEPS)
    stopped = fit(tmp_path / "parts", ResizesBuffers(), 4)
    path = tmp_path / "parts" / "final.json"
    job = TrainingJobSpec("alone", 4)
    alone = ContractModule.load_from_checkpoint(path, plugin=ResizesBuffers(), job=job).state_dict()
    resumed = fit(tmp_path / "parts", ResizesBuffers(), STEPS, ckpt_path=str(path))

    assert whole.keys() == resumed.keys() == alone.keys()
    assert len(whole["net.history"]) == STEPS
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert all(torch.equal(stopped[name], alone[name]) for name in alone)


def test_a_weight_that_did_not_change_while_training_must_fit(tmp_path: Path) -> None:
    class Wider(Unfreezes):
        def configure(self, ctx: Any) -> dict[str, Any]:
            net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
            return {"net": net, "optimizer": torch.optim.Adam(net[2].parameters(), lr=0.1), "step": 0}

    fit(tmp_path, Unfreezes(), 2)
    with refusal(RuntimeError):
        fit(tmp_path, Wider(), STEPS, ckpt_path=str(tmp_path / "final.json"))
