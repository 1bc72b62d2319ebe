"""Tensors without a module are moved and saved, and stay the same objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from genlight.adapter.module.hosted_trainer import BareParameters

pytestmark = pytest.mark.promise(name="equal")


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
    parent = nn.Module()
    parent.loose = BareParameters({"alpha": alpha})
    saved = {k: v.clone() for k, v in parent.state_dict().items()}
    with torch.no_grad():
        alpha.zero_()

    parent.load_state_dict(saved)

    assert list(saved) == ["loose.alpha"]
    assert alpha.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "Missing key.*loose.alpha"),
        ({"loose.alpha": torch.ones(3)}, r"loose.alpha: .*shape torch.Size\(\[3\]\)"),
        ({"loose.alpha": torch.ones(2), "loose.beta": torch.ones(2)}, "Unexpected key.*loose.beta"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(state, said):
    parent = nn.Module()
    parent.loose = BareParameters({"alpha": torch.zeros(2)})

    with pytest.raises(RuntimeError, match=said):
        parent.load_state_dict(state)
