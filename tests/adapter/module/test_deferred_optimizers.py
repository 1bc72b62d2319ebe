"""A trainer that adds a group of parameters to its optimizer while it trains, as gradual unfreezing does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genlight.adapter import ContractError
from genlight.adapter.contract.exceptions import CheckpointError
from support.resumed_fit import STEPS, ChangesAtStepThree, fit


class Unfreezing(ChangesAtStepThree):
    """The first layer joins at the third step."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        net[0].requires_grad_(False)
        return {"net": net, "optimizer": torch.optim.Adam(net[2].parameters(), lr=0.1), "step": 0}

    def change(self, state: Any) -> None:
        state["net"][0].requires_grad_(True)
        state["optimizer"].add_param_group({"params": list(state["net"][0].parameters()), "lr": 0.05})


class UnfreezingOnce(Unfreezing):
    adds_in_load = False


@pytest.mark.parametrize("stop", [2, 4])
def test_groups_that_load_state_dict_adds_get_the_state_they_had(tmp_path: Path, stop: int) -> None:
    whole = fit(tmp_path / "whole", Unfreezing(), STEPS)
    fit(tmp_path / "parts", Unfreezing(), stop)
    resumed = fit(tmp_path / "parts", Unfreezing(), STEPS, ckpt_path=str(tmp_path / "parts" / "final.json"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_groups_that_nobody_adds_are_told_with_the_path_of_their_optimizer(tmp_path: Path) -> None:
    fit(tmp_path, Unfreezing(), 4)
    said = r'state\["optimizer"\] had groups of \[2, 2\] parameters .* has groups of \[2\]'
    with pytest.raises(ContractError, match=said):
        fit(tmp_path, UnfreezingOnce(), STEPS, ckpt_path=str(tmp_path / "final.json"))


class WithSGD(Unfreezing):
    def configure(self, ctx: Any) -> dict[str, Any]:
        state = super().configure(ctx)
        state["optimizer"] = torch.optim.SGD(state["net"][2].parameters(), lr=0.1, momentum=0.9)
        return state


@pytest.mark.parametrize(("before", "now"), [(Unfreezing, WithSGD), (WithSGD, Unfreezing)])
def test_another_kind_of_optimizer_is_told_before_a_step_fails_of_it(
    tmp_path: Path, before: type[Unfreezing], now: type[Unfreezing]
) -> None:
    fit(tmp_path, before(), 2)
    name = {Unfreezing: "Adam, with amsgrad, betas", WithSGD: "SGD, with dampening, momentum"}[now]
    with pytest.raises(CheckpointError, match=rf'state\["optimizer"\] is now {name}.*as it was.*--fresh'):
        fit(tmp_path, now(), STEPS, ckpt_path=str(tmp_path / "final.json"))


class WithOlderAdam(Unfreezing):
    def configure(self, ctx: Any) -> dict[str, Any]:
        def leave_out(optimizer: Any, saved: dict[str, Any]) -> None:
            for group in saved["param_groups"]:
                del group["decoupled_weight_decay"]

        state = super().configure(ctx)
        state["optimizer"].register_state_dict_post_hook(leave_out)
        return state


def test_a_setting_that_a_later_torch_added_makes_no_other_kind(tmp_path: Path) -> None:
    fit(tmp_path, WithOlderAdam(), 2)
    fit(tmp_path, Unfreezing(), STEPS, ckpt_path=str(tmp_path / "final.json"))
