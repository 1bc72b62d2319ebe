"""Optimizer state that is shaped differently from its sharded parameter is loaded as saved, or refused at the save."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from genlight.adapter.contract.exceptions import UnstorableStateError
from genlight.callbacks.checkpoint.sharded.optimizer_placements import KEY, complete_state, place_state, with_placements
from genlight.callbacks.checkpoint.sharded.slices import whole
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


@pytest.fixture
def optimizer(mesh):
    layer = nn.Linear(4, 6, bias=False)
    fully_shard(layer, mesh=mesh)
    return torch.optim.SGD(layer.parameters(), lr=0.1)


def stored(optimizer):
    parameters = list(optimizer.param_groups[0]["params"])
    state_dict = with_placements(parameters, optimizer.state_dict())
    return parameters, {**state_dict, "state": torch.utils._pytree.tree_map(whole, state_dict["state"])}


STATES = {
    "as the parameter": (lambda p: {"moment": torch.zeros_like(p)}, False),
    "a number for each row": (lambda p: {"rows": torch.zeros_like(p).mean(-1, keepdim=True)}, True),
    "a column in a tuple": (lambda p: {"factors": ({"columns": p.new_zeros(4)}, 3)}, True),
    "turned": (lambda p: {"turned": torch.zeros_like(p).mT}, True),
    "not sharded": (lambda p: {"step": torch.zeros(()), "mask": torch.ones(6)}, False),
}


@pytest.mark.parametrize(("state", "has_placements"), STATES.values(), ids=STATES)
def test_state_is_placed_as_it_was(optimizer, state, has_placements):
    p = optimizer.param_groups[0]["params"][0]
    optimizer.state[p] = state(p)
    expected = torch.utils._pytree.tree_flatten(optimizer.state[p])[0]

    parameters, state_dict = stored(optimizer)
    placed = place_state(parameters, state_dict)

    assert (KEY in state_dict) is has_placements
    assert KEY not in placed
    for actual, before in zip(torch.utils._pytree.tree_flatten(placed["state"][0])[0], expected, strict=True):
        assert type(actual) is type(before)
        assert getattr(actual, "placements", None) == getattr(before, "placements", None)
        assert torch.equal(torch.as_tensor(whole(actual)), torch.as_tensor(whole(before)))


def test_a_list_without_a_parameter_is_placed_too(optimizer):
    p = optimizer.param_groups[0]["params"][0]
    optimizer.state["rows"] = [torch.zeros_like(p).sum(-1)]

    parameters, state_dict = stored(optimizer)

    assert place_state(parameters, state_dict)["state"]["rows"][0].placements == (Shard(0),)


def test_parts_of_a_sum_are_added_up_at_a_save(optimizer, mesh):
    p = optimizer.param_groups[0]["params"][0]
    part = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    optimizer.state[p] = {"norm": part, "nested": [part]}

    complete_state(optimizer)

    assert optimizer.state[p]["norm"].placements == optimizer.state[p]["nested"][0].placements == (Replicate(),)


def test_state_on_another_mesh_is_refused_at_the_save(optimizer):
    p = optimizer.param_groups[0]["params"][0]
    other = init_device_mesh("cpu", (1, 1))
    optimizer.state[p] = {"rows": distribute_tensor(torch.ones(6), other, [Replicate(), Shard(0)])}

    with refusal(UnstorableStateError):
        complete_state(optimizer)
