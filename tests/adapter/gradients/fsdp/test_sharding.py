"""Sharding on a mesh of one rank: replaced references, full tensors for the trainer, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from genlight.adapter.contract.exceptions import ContractError, StartupContractError
from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.fsdp import tensors
from genlight.adapter.gradients.fsdp.shard import Sharding, shard, whole_metrics
from genlight.adapter.gradients.fsdp.step import ShardedStep
from genlight.adapter.gradients.fsdp.strategy import FSDP2Strategy
from genlight.adapter.gradients.step_part import BackwardCall
from genlight.adapter.gradients.torch_internals import require_fsdp
from genlight.adapter.module.supported import check_strategy
from support.messages import refusal

pytestmark = pytest.mark.promise(name="ranks")


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


def test_existing_optimizer_state_is_sharded_with_its_parameter(mesh):
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
    ("units", "sharded"),
    [
        ((), [""]),
        (("Block",), ["", "0", "1"]),
        (("Block", "Linear"), ["", "0", "0.linear", "1", "1.linear", "2"]),
    ],
    ids=["whole", "class", "classes"],
)
def test_units_are_named_by_their_classes(mesh, units, sharded):
    state = trained({"model": network()})

    shard(discover(state), mesh, Sharding(units=units))

    assert [name for name, m in state["model"].named_modules() if isinstance(m, FSDPModule)] == sharded


def test_a_unit_with_a_tied_parameter_stays_with_its_parent(mesh):
    model = nn.Sequential(Block(), Block())
    model[1].linear.weight = model[0].linear.weight
    state = trained({"model": nn.Sequential(model, Block())})

    shard(discover(state), mesh, Sharding(units=["Block"]))

    assert [n for n, m in state["model"].named_modules() if isinstance(m, FSDPModule)] == ["", "1"]
    step(state)
    assert model[1].linear.weight is model[0].linear.weight


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (Sharding(units=["Blok"]), r"`units` has 'Blok', but no module has this class; the classes are Block, Linear"),
        (Sharding(forward_methods=["encode"]), r"`forward_methods` has 'encode', but no unit has it \(state\["),
        (
            Sharding(ignored=["head.*"]),
            r"`ignored` has 'head.\*', but no parameter has such a name; names are 0.l",
        ),
    ],
)
def test_settings_that_match_nothing_are_refused(mesh, sharding, message):
    with pytest.raises(ContractError, match=message):
        shard(discover(trained({"model": network()})), mesh, sharding)


def test_an_unknown_type_is_refused_when_it_is_set():
    with refusal(ValueError):
        Sharding(param_dtype="bf16")


def test_unused_parameters_are_refused_by_a_torch_that_cannot_reduce_them(mesh, monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    require_fsdp.cache_clear()
    message = r"torch .* cannot reduce gradients of parameters that a rank did not use.*install torch>=2\.13"

    with pytest.raises(ImportError, match=message):
        shard(discover(trained({"model": network()})), mesh, Sharding(unused_parameters=True))
    with pytest.raises(StartupContractError, match=f"FSDP2Strategy cannot host a trainer class: {message}"):
        check_strategy(FSDP2Strategy(unused_parameters=True))
    check_strategy(FSDP2Strategy())
    require_fsdp.cache_clear()


def test_modules_in_a_container_are_units_and_parameters_of_the_container_stay_full(mesh):
    container = nn.ModuleDict({"a": Block(), "many": nn.ModuleList([Block()])})
    container.scale = nn.Parameter(torch.ones(3))
    state = trained({"model": container})

    shard(discover(state), mesh)

    units = [name for name, m in state["model"].named_modules() if isinstance(m, FSDPModule)]
    assert units == ["a", "many.0"]
    assert type(container.scale) is nn.Parameter
    assert type(container["many"][0](torch.ones(2, 4))) is torch.Tensor
    assert all(isinstance(p, DTensor) for p in container["many"].parameters()), "outside of calls there are shards"


def test_named_parameters_and_numbers_stay_whole(mesh):
    model = network()
    model.scale = nn.Parameter(torch.ones(()))
    state = trained({"model": model})

    shard(discover(state), mesh, Sharding(ignored=["2.*"]))

    whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert whole == ["scale", "2.weight", "2.bias"]


def test_types_of_parameters_and_outputs_are_those_of_the_policy(mesh):
    state = trained({"model": network()})

    shard(discover(state), mesh, Sharding(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float64"))

    seen = []
    state["model"][2].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    assert state["model"](torch.ones(2, 4)).dtype is torch.float64
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    step(state)
    assert {p.dtype for p in state["model"].parameters()} == {torch.float32}
    assert {p.grad.dtype for p in state["model"].parameters()} == {torch.float32}


def test_a_method_of_a_unit_computes_with_whole_weights(mesh):
    class Coder(Block):
        def encode(self, x):
            return self.linear(x)

    state = trained({"model": Coder()})
    expected = state["model"].encode(torch.ones(2, 4))

    shard(discover(state), mesh, Sharding(forward_methods=["encode"]))

    torch.testing.assert_close(state["model"].encode(torch.ones(2, 4)), expected)


def test_ema_copies_are_sharded_like_their_model_and_teachers_are_not(mesh):
    model = network()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    state = trained({"model": model, "ema": copy.deepcopy(model), "averaged": averaged, "teacher": nn.Linear(4, 2)})

    shard(discover(state), mesh)

    assert all(isinstance(p, DTensor) for name in ("ema", "averaged") for p in state[name].parameters())
    assert not any(isinstance(p, DTensor) for p in state["teacher"].parameters())
    step(state)
    state["averaged"].update_parameters(state["model"])


def test_state_dicts_of_modules_parts_and_optimizers_have_full_tensors(mesh):
    state = trained({"model": network()})
    shapes = {name: tuple(t.shape) for name, t in state["model"].state_dict().items()}
    shard(discover(state), mesh, Sharding(units=["Block"]))
    step(state)

    whole, part = state["model"].state_dict(), state["model"][0].linear.state_dict()
    optimizer = state["opt"].state_dict()

    assert {name: tuple(t.shape) for name, t in whole.items()} == shapes
    assert all(type(t) is torch.Tensor for t in (*whole.values(), *part.values()))
    assert all(type(v) is torch.Tensor for entry in optimizer["state"].values() for v in entry.values())
    # The result is a copy: the optimizer keeps its shards.
    assert all(isinstance(entry["exp_avg"], DTensor) for entry in state["opt"].state.values())


def test_whole_state_dicts_load_into_sharded_modules_and_optimizers(mesh):
    source = trained({"model": network()})
    step(source)
    target = trained({"model": network()})
    shard(discover(target), mesh, Sharding(units=["Block"]))
    step(target)
    state_dict = source["model"].state_dict()

    target["model"].load_state_dict(state_dict)
    target["opt"].load_state_dict(copy.deepcopy(source["opt"].state_dict()))

    assert all(type(t) is torch.Tensor for t in state_dict.values()), "the caller's dict stays as it was"
    step(source)
    step(target)
    for mine, theirs in zip(target["model"].parameters(), source["model"].parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


def with_lbfgs(state):
    state["opt"] = torch.optim.LBFGS(state["model"].parameters())


def with_tuple_of_parameters(state):
    state["params"] = tuple(state["model"].parameters())


def with_hook(state):
    state["model"][2].weight.register_hook(lambda gradient: gradient * 2)


def with_ddp(state):
    state["model"] = nn.parallel.DistributedDataParallel(state["model"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_lbfgs, r'state\["opt"\]: LBFGS needs all parameters'),
        (with_tuple_of_parameters, r'state\["params"\]\[0\]: an object that cannot be changed holds a parameter'),
        (with_tuple_of_parameters, r"; and 1 more like these; or use `strategy: ddp`"),
        (with_hook, r'state\["model"\].2.weight: a parameter has a gradient hook'),
        (with_ddp, r'state\["model"\]: the class wraps this module in DistributedDataParallel'),
    ],
)
def test_objects_that_sharding_would_break_are_refused_by_path(mesh, spoil, message):
    state = trained({"model": network()})
    spoil(state)

    with pytest.raises(ContractError, match=message):
        shard(discover(state), mesh)


def test_dicts_by_parameter_follow_them(mesh):
    state = trained({"model": network()})
    state["rates"] = {p: i for i, p in enumerate(state["model"].parameters())}

    shard(discover(state), mesh)

    assert list(state["rates"].values()) == [*range(6)]
    assert all(a is b for a, b in zip(state["rates"], state["model"].parameters(), strict=True))


def test_modules_that_share_a_parameter_stay_full_and_are_logged(mesh, caplog):
    state = {"model": network(), "head": nn.Linear(4, 1), "other": network()}
    state["head"].weight = state["model"][2].weight
    state["opt"] = torch.optim.Adam(dict.fromkeys(p for m in state.values() for p in m.parameters()))

    shard(discover(state), mesh)

    assert not any(isinstance(p, DTensor) for name in ("model", "head") for p in state[name].parameters())
    assert all(isinstance(p, DTensor) for p in state["other"].parameters())
    assert 'state["model"] and state["head"] share parameters' in caplog.text


def test_weights_that_change_after_a_forward_without_backward_count_in_the_next(mesh):
    state = trained({"model": network()})
    shard(discover(state), mesh)
    x = torch.ones(2, 4)
    before = state["model"](x).detach()

    with torch.no_grad():
        for p in state["model"].parameters():
            p.mul_(2.0)
    doubled = state["model"](x).detach()
    for p in state["model"].parameters():
        p.data.mul_(0.5)

    assert not torch.equal(doubled, before)
    torch.testing.assert_close(state["model"](x).detach(), before)


@pytest.mark.promise(name="speed")
@pytest.mark.parametrize(
    ("setting", "units", "gathers"), [(None, (), 1), (False, (), 1), (True, (), 2), (None, ("Block",), 5)]
)
def test_a_step_gathers_the_weights_of_an_outermost_unit_once(mesh, monkeypatch, setting, units, gathers):
    state = trained({"model": network()})
    discovered = discover(state)
    shard(discovered, mesh, Sharding(reshard_after_forward=setting, units=units))
    gathered = []
    unsharded = FSDPParamGroup._to_unsharded
    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", lambda group: gathered.append(group) or unsharded(group))
    part = ShardedStep(discovered, [state["opt"]], several_ranks=False, group=None, device=torch.device("cpu"))
    call = BackwardCall((), (), create_graph=False)
    part.open()
    try:
        del gathered[:]
        part.begin(1)
        loss = state["model"](torch.ones(2, 4)).square().mean()
        part.before_backward(call)
        loss.backward()
        part.leave_backward(failed=False)
        part.after_backward()
        state["opt"].step()
        assert len(gathered) == gathers
        first = state["model"](torch.ones(2, 4)).detach()  # without a backward
        state["opt"].step()
        assert not torch.equal(state["model"](torch.ones(2, 4)).detach(), first), "an update changes the next forward"
        part.end()
        assert not any(group.is_unsharded for group in gathered)
        with torch.no_grad():
            state["model"](torch.ones(2, 4))
        assert not any(group.is_unsharded for group in gathered)
        state["model"](torch.ones(2, 4))  # of an evaluation with gradients
    finally:
        part.close()
    assert not any(group.is_unsharded for group in gathered)
    state["model"](torch.ones(2, 4))
    assert all(isinstance(p, DTensor) for p in state["model"].parameters())


class Agreement:
    """Records the operations on which ranks would agree, and those that they would only note."""

    compares_each = True

    def __init__(self):
        self.agreed, self.noted = [], []
        self.note = self.noted.append

    def __call__(self, what):
        self.agreed.append(what)


@pytest.fixture
def in_step():
    """Make tensors behave as in a training step."""
    own, agreement = DTensor.__dict__["__torch_function__"], Agreement()
    tensors.hold()
    tensors.begin_step(agreement)
    yield agreement
    tensors.release()
    assert DTensor.__dict__["__torch_function__"] is own


def test_within_a_step_state_dicts_are_the_weights_themselves(mesh, in_step):
    state = trained({"model": network(), "target": network().requires_grad_(False)})
    shard(discover(state), mesh)

    for name, value in state["target"].state_dict().items():
        value.copy_(state["model"].state_dict()[name])

    for mine, theirs in zip(state["target"].parameters(), state["model"].parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


def test_numbers_of_a_step_are_read_from_the_whole_tensor(mesh, in_step):
    state = trained({"model": network()})
    shard(discover(state), mesh)
    weight = state["model"][2].weight
    expected = weight.full_tensor().detach().norm()

    assert f"{weight.detach().norm():.4f}" == f"{expected:.4f}"
    assert float(weight.detach().norm()) == pytest.approx(float(expected))
    assert "compute `__float__` of a sharded tensor of shape ()" in in_step.agreed


def assign_half(p):
    p.data = p.data.half()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (torch.randn_like, "`randn_like` in `train_step`: random numbers in the shape of a shard"),
        (nn.init.normal_, "`normal_` in `train_step`: random numbers"),
        (nn.init.kaiming_uniform_, "random numbers in the shape of a shard"),
        (lambda p: p.register_hook(print), "`register_hook` in `train_step`: a parameter has a gradient hook"),
        (assign_half, "`.data` of a sharded parameter is set to a tensor of another shape or type"),
    ],
)
def test_unsupported_operations_on_shards_in_a_step_are_refused(mesh, in_step, use, message):
    state = trained({"model": network()})
    shard(discover(state), mesh)

    with pytest.raises(ContractError, match=message):
        use(state["model"][2].weight)


def test_writes_to_shards_are_noted_and_products_are_placed_as_they_are(mesh, in_step):
    state = trained({"model": network()})
    shard(discover(state), mesh)
    weight = state["model"][0].linear.weight
    before = weight.full_tensor().detach().clone()

    with torch.no_grad():
        weight.add_(weight.T @ weight)

    assert in_step.noted == ["add_ (4, 4)"]
    torch.testing.assert_close(weight.full_tensor().detach(), before + before.T @ before)


class Frozen:
    """A frozen object with slots that holds parameters."""

    __slots__ = ("weight",)

    def __setattr__(self, name, value):
        raise AttributeError(name)


def test_parameters_that_the_trainer_keeps_outside_of_modules_are_replaced(mesh):
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
