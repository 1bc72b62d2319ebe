"""Sharding on a mesh of one rank: what it re-points, keeps whole for the trainer, and refuses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.fsdp import values as sharded_values
from genlight.adapter.gradients.fsdp.sharding import shard, whole_metrics


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


def network() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


def trained(state):
    state["opt"] = torch.optim.Adam(state["model"].parameters(), lr=0.01)
    return state


def step(state) -> None:
    state["opt"].zero_grad()
    state["model"](torch.ones(2, 4)).square().mean().backward()
    state["opt"].step()


def test_optimizers_hold_the_sharded_parameters_in_their_places(mesh):
    state = trained({"model": network()})
    model = state["model"]

    shard(discover(state), mesh)

    assert state["model"] is model
    held = state["opt"].param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert all(isinstance(p, DTensor) for p in held)


def test_state_that_an_optimizer_had_before_goes_with_its_parameter(mesh):
    state = trained({"model": network()})
    step(state)
    twin = copy.deepcopy(state)

    shard(discover(state), mesh)

    assert len(state["opt"].state) == 6
    moments = [entry["exp_avg"] for entry in state["opt"].state.values()]
    assert all(isinstance(m, DTensor) for m in moments)
    step(state)
    step(twin)
    for mine, theirs in zip(state["model"].parameters(), twin["model"].parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


@pytest.mark.parametrize(
    ("policy", "units"),
    [
        ("whole", [""]),
        ("Block", ["", "0", "1"]),
        (["Block", "Linear"], ["", "0", "0.linear", "1", "1.linear", "2"]),
        (lambda name, module: name == "2", ["", "2"]),
    ],
    ids=["whole", "class", "classes", "callable"],
)
def test_the_policy_names_the_units(mesh, policy, units):
    state = trained({"model": network()})

    shard(discover(state), mesh, policy)

    assert [name for name, m in state["model"].named_modules() if isinstance(m, FSDPModule)] == units


def test_a_unit_with_a_tied_parameter_stays_with_its_parent(mesh):
    model = nn.Sequential(Block(), Block())
    model[1].linear.weight = model[0].linear.weight
    state = trained({"model": nn.Sequential(model, Block())})

    shard(discover(state), mesh, "Block")

    assert [n for n, m in state["model"].named_modules() if isinstance(m, FSDPModule)] == ["", "1"]
    step(state)
    assert model[1].linear.weight is model[0].linear.weight


def test_a_policy_that_matches_nothing_is_refused(mesh):
    with pytest.raises(ContractError, match=r'\'Blok\' matches none in state\["model"\]'):
        shard(discover(trained({"model": network()})), mesh, "Blok")


def test_a_container_that_nobody_calls_is_gathered_as_one_by_a_call_of_any_part(mesh):
    state = trained({"model": nn.ModuleDict({"a": Block(), "many": nn.ModuleList([Block()])})})

    shard(discover(state), mesh)

    assert all(isinstance(p, DTensor) for p in state["model"].parameters())
    assert type(state["model"]["many"][0](torch.ones(2, 4))) is torch.Tensor
    assert all(isinstance(p, DTensor) for p in state["model"].parameters()), "outside of calls there are shards"


def test_ema_copies_are_sharded_like_their_model_and_teachers_are_not(mesh):
    model = network()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    state = trained({"model": model, "ema": copy.deepcopy(model), "averaged": averaged, "teacher": nn.Linear(4, 1)})

    shard(discover(state), mesh)

    assert all(isinstance(p, DTensor) for name in ("ema", "averaged") for p in state[name].parameters())
    assert not any(isinstance(p, DTensor) for p in state["teacher"].parameters())
    step(state)
    state["averaged"].update_parameters(state["model"])


def test_state_dicts_are_whole_of_modules_of_their_parts_and_of_optimizers(mesh):
    state = trained({"model": network()})
    shapes = {name: tuple(t.shape) for name, t in state["model"].state_dict().items()}
    shard(discover(state), mesh, "Block")
    step(state)

    whole, part = state["model"].state_dict(), state["model"][0].linear.state_dict()
    optimizer = state["opt"].state_dict()

    assert {name: tuple(t.shape) for name, t in whole.items()} == shapes
    assert all(type(t) is torch.Tensor for t in (*whole.values(), *part.values()))
    assert all(type(v) is torch.Tensor for entry in optimizer["state"].values() for v in entry.values())
    # What was given out is a copy: the optimizer goes on with its shards.
    assert all(isinstance(entry["exp_avg"], DTensor) for entry in state["opt"].state.values())


def test_whole_state_dicts_load_into_sharded_modules_and_optimizers(mesh):
    source = trained({"model": network()})
    step(source)
    target = trained({"model": network()})
    shard(discover(target), mesh, "Block")
    step(target)
    given = source["model"].state_dict()

    target["model"].load_state_dict(given)
    target["opt"].load_state_dict(copy.deepcopy(source["opt"].state_dict()))

    assert all(type(t) is torch.Tensor for t in given.values()), "the caller's dict stays as it was"
    step(source)
    step(target)
    for mine, theirs in zip(target["model"].parameters(), source["model"].parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


def with_lbfgs(state):
    state["opt"] = torch.optim.LBFGS(state["model"].parameters())


def with_tuple_of_parameters(state):
    state["params"] = tuple(state["model"].parameters())


def with_average_in_a_tuple(state):
    state["average"] = tuple(p.detach().clone() for p in state["model"].parameters())


def with_ddp(state):
    state["model"] = nn.parallel.DistributedDataParallel(state["model"])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (with_lbfgs, r'state\["opt"\] is LBFGS'),
        (with_tuple_of_parameters, r'state\["params"\]\[0\] is a parameter of state\["model"\].0.linear.weight'),
        (with_tuple_of_parameters, r"weight, which sharding .*; and 1 more like these"),
        (with_average_in_a_tuple, r'state\["average"\]\[0\] is a copy of a parameter in a tuple'),
        (with_ddp, r'state\["model"\] is a DistributedDataParallel of its own'),
    ],
)
def test_what_sharding_would_break_is_refused_by_its_path(mesh, spoil, said):
    state = trained({"model": network()})
    spoil(state)

    with pytest.raises(ContractError, match=said):
        shard(discover(state), mesh)


def test_dicts_by_parameter_and_copies_of_parameters_follow_them(mesh):
    state = trained({"model": network()})
    state["rates"] = {p: i for i, p in enumerate(state["model"].parameters())}
    state["average"] = {name: p.detach().clone() for name, p in state["model"].named_parameters()}

    shard(discover(state), mesh)

    assert list(state["rates"].values()) == [*range(6)]
    assert all(a is b for a, b in zip(state["rates"], state["model"].parameters(), strict=True))
    assert all(isinstance(t, DTensor) for t in state["average"].values())


def test_modules_that_share_a_parameter_are_one_unit_and_go_on_sharing_it(mesh):
    state = {"model": network(), "head": nn.Linear(4, 1)}
    state["head"].weight = state["model"][2].weight
    trained(state)

    shard(discover(state), mesh)

    state["head"](state["model"][0](torch.ones(2, 4))).sum().backward()
    assert state["head"].weight is state["model"][2].weight
    assert isinstance(state["head"].weight.grad, DTensor)


def test_weights_that_change_after_a_forward_without_backward_count_in_the_next(mesh):
    state = trained({"model": network()})
    shard(discover(state), mesh)
    x = torch.ones(2, 4)
    before = state["model"](x).detach()

    with torch.no_grad():
        for p in state["model"].parameters():
            p.mul_(2.0)
    doubled = state["model"](x).detach()
    for value in state["model"].state_dict().values():
        value.data.mul_(0.5)

    assert not torch.equal(doubled, before)
    torch.testing.assert_close(state["model"](x).detach(), before)


def test_sharded_values_read_and_compute_like_whole_ones_while_held(mesh):
    state = trained({"model": network()})
    shard(discover(state), mesh)
    weight = state["model"][2].weight
    own = DTensor.__torch_function__
    sharded_values.hold(mesh)
    try:
        torch.manual_seed(3)
        nn.init.normal_(weight)
        torch.manual_seed(3)
        expected = nn.init.normal_(torch.empty(1, 4))
        with torch.no_grad():
            weight.add_(torch.ones(1, 4))
        weight.data = weight.data - 1
        texts = f"{weight.detach().norm():.4f}", f"{float(weight.detach().max()):.4f}"
    finally:
        sharded_values.release(mesh)

    torch.testing.assert_close(weight.full_tensor(), expected)
    assert texts == (f"{expected.norm():.4f}", f"{float(expected.max()):.4f}")
    assert DTensor.__torch_function__ == own


class Frozen:
    """A frozen object with slots, which keeps parameters by themselves."""

    __slots__ = ("weight",)

    def __setattr__(self, name, value):
        raise AttributeError(name)


def test_parameters_that_the_trainer_keeps_by_themselves_are_replaced_there(mesh):
    state = trained({"model": network()})
    weight = state["model"][2].weight
    kept = Frozen()
    object.__setattr__(kept, "weight", weight)
    state |= {"params": list(state["model"].parameters()), "by_name": {"w": weight}, "kept": kept}
    state["clip"] = lambda: nn.utils.clip_grad_norm_([weight], 0.1)

    shard(discover(state), mesh)
    step(state)

    now = state["model"][2].weight
    assert all(a is b for a, b in zip(state["params"], state["model"].parameters(), strict=True))
    assert state["by_name"]["w"] is state["kept"].weight is now
    assert isinstance(state["clip"](), DTensor)


def test_a_recurrent_network_trains_sharded_as_it_does_whole(mesh):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x):
            return self.lstm(x)[0].tanh()

    state = trained({"model": Recurrent()})
    twin = copy.deepcopy(state)

    shard(discover(state), mesh)
    step(state)
    step(twin)

    for mine, theirs in zip(state["model"].parameters(), twin["model"].parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


def test_parameters_in_a_container_without_forward_stay_whole(mesh):
    state = trained({"model": nn.ParameterDict({"a": torch.ones(2, 2)})})

    shard(discover(state), mesh)

    assert type(state["model"]["a"]) is nn.Parameter


def test_metrics_of_sharded_values_are_whole_and_others_are_left_alone(mesh):
    state = trained({"model": network()})
    shard(discover(state), mesh)
    state["model"](torch.ones(2, 4)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
    plain = {"loss": torch.ones(())}

    metrics = whole_metrics({**plain, "norm": norm, "n": 3})

    assert type(metrics["norm"]) is torch.Tensor
    assert metrics["n"] == 3
    assert whole_metrics(plain) is plain
