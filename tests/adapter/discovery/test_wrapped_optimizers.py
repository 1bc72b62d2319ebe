"""State of optimizers that wrap others."""

from __future__ import annotations

import pytest
import torch

from genlight.adapter.discovery.discover import discover
from genlight.adapter.discovery.wrapped_optimizers import kept_by_wrappers

pytestmark = pytest.mark.promise(name="equal")


class Scaled(torch.optim.Optimizer):
    """Keeps its own entry in the state of the wrapped optimizer, and saves and loads it (as TRAC does)."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        super().__init__([p for group in wrapped.param_groups for p in group["params"]], {})
        self.wrapped = wrapped
        self.param_groups, self.state = wrapped.param_groups, wrapped.state
        self.state["scale"] = torch.ones(1)


def test_an_entry_of_no_parameter_keeps_the_value_of_the_wrappers_load_state_dict():
    def build() -> Scaled:
        return Scaled(torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1, momentum=0.9))

    ran, fresh = build(), build()
    parameter = ran.param_groups[0]["params"][0]
    parameter.grad = torch.ones(2)
    ran.wrapped.step()
    saved = [kept.state_dict() for kept in kept_by_wrappers(discover(ran).optimizers)]
    fresh.state["scale"].fill_(3)  # as load_state_dict of the wrapper does, which is called first
    for kept, state in zip(kept_by_wrappers(discover(fresh).optimizers), saved, strict=True):
        kept.load_state_dict(state)

    assert fresh.state["scale"].item() == 3
    assert fresh.state[fresh.param_groups[0]["params"][0]]["momentum_buffer"].tolist() == [1, 1]
