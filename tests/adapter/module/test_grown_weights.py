"""Trainers whose modules get layers, rows and buffers while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from genlight.adapter import ContractError, ContractModule, TrainingJobSpec
from genlight.adapter.module.grown_weights import changed_names, load_grown, set_aside_grown, shapes_of
from support.resumed_fit import STEPS, ChangesAtStepThree, fit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.added, self.last = nn.Linear(2, 4), nn.ModuleList(), nn.Linear(4, 1)
        self.register_buffer("mean", None)
        self.register_buffer("history", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for layer in self.added:
            x = x + layer(x).tanh()
        return self.last(x)


class Growing(ChangesAtStepThree):
    """A layer joins at the third step, a buffer gets its first value in the first, another a row in each."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        net = Net()
        return {"net": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.1), "step": 0}

    def change(self, state: Any) -> None:
        torch.manual_seed(3)
        layer = nn.Linear(4, 4)
        state["net"].added.append(layer)
        state["optimizer"].add_param_group({"params": list(layer.parameters()), "lr": 0.05})

    def outputs(self, batch: Any, state: Any) -> torch.Tensor:
        net, mean = state["net"], batch.mean(0)
        net.mean = mean if net.mean is None else 0.9 * net.mean + 0.1 * mean
        net.history = torch.cat([net.history, net.first.bias.detach()[None]])
        return super().outputs(batch - net.mean, state)


class GrowingOnce(Growing):
    adds_in_load = False


@pytest.mark.parametrize("stop", [2, 4])
def test_layers_that_load_state_dict_adds_get_the_weights_they_had(tmp_path: Path, stop: int) -> None:
    whole = fit(tmp_path / "whole", Growing(), STEPS)
    fit(tmp_path / "parts", Growing(), stop)
    resumed = fit(tmp_path / "parts", Growing(), STEPS, ckpt_path=str(tmp_path / "parts" / "final.json"))

    assert whole.keys() == resumed.keys()
    assert len(whole["net.history"]) == STEPS
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_class_alone_gets_layers_that_were_added(tmp_path: Path) -> None:
    weights = fit(tmp_path, Growing(), 4)
    job = TrainingJobSpec("alone", 4)
    alone = ContractModule.load_from_checkpoint(tmp_path / "final.json", plugin=Growing(), job=job)

    assert all(torch.equal(weights[name], value) for name, value in alone.state_dict().items())
    assert len(alone.state_dict()) == len(weights)


def test_layers_that_nobody_adds_are_named_with_the_way_out(tmp_path: Path) -> None:
    fit(tmp_path, GrowingOnce(), 4)
    with pytest.raises(ContractError, match=r"no place: net\.added\.0\.weight \(4, 4\), .* `load_state_dict`"):
        fit(tmp_path, GrowingOnce(), STEPS, ckpt_path=str(tmp_path / "final.json"))


def test_a_weight_in_place_of_another_waits_and_the_other_stays_as_built() -> None:
    saved, built = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    before = shapes_of(saved)
    torch.nn.utils.prune.random_unstructured(saved[0], "weight", amount=0.5)
    changed, weights = changed_names(saved, before), dict(saved.state_dict())

    waiting = set_aside_grown(weights, built, changed)
    built.load_state_dict(weights)
    with pytest.raises(ContractError, match=r"0\.weight_orig \(2, 2\)"):
        load_grown(built, waiting)
    torch.nn.utils.prune.identity(built[0], "weight")
    load_grown(built, waiting)

    assert sorted(changed) == ["0.weight", "0.weight_mask", "0.weight_orig"]
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in built.state_dict().items())


def test_what_did_not_change_while_training_must_fit() -> None:
    saved, built = nn.Linear(2, 3), nn.Linear(2, 2)
    weights = dict(saved.state_dict())

    assert not set_aside_grown(weights, built, changed_names(saved, shapes_of(saved)))
    with pytest.raises(RuntimeError, match="size mismatch"):
        built.load_state_dict(weights)
