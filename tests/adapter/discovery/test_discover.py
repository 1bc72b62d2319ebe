"""Discovery finds each object of a trainer once, wherever it is, and in the same order on every rank."""

import copy
import dataclasses
import functools
from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.contract.types import StepContext, TrainingJobSpec
from genlight.adapter.discovery.children import SEARCHED_ITEMS
from genlight.adapter.discovery.discover import check_devices, check_unchanged, discover
from genlight.adapter.discovery.wrapped_optimizers import kept_by_wrappers
from support.messages import refusal

pytestmark = pytest.mark.promise(name="equal")


def adam(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for m in modules for p in m.parameters()])


def names(found) -> list[str]:
    return [f.name for f in found]


def paths(found) -> list[str]:
    return [f.path for f in found]


def test_a_dict_of_everything_is_found_by_path_and_name():
    model = nn.Linear(2, 2)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"model": model, "optimizer": optimizer, "sched": scheduler, "scaler": torch.amp.GradScaler("cpu"), "n": 3}

    found = discover(state)

    assert [(f.path, f.name, f.value) for f in found.modules] == [('state["model"]', "model", model)]
    assert [(f.path, f.name, f.value) for f in found.optimizers] == [('state["optimizer"]', "optimizer", optimizer)]
    assert names(found.schedulers) == ["sched"]
    assert names(found.scalers) == ["scaler"]


@dataclasses.dataclass
class Record:
    net: nn.Module


class Slotted:
    __slots__ = ("__hidden", "net")

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.__hidden = nn.Linear(1, 1)


class Child(Slotted):
    __slots__ = ("unset",)


class Plain:
    def __init__(self, net: nn.Module) -> None:
        self.net = net

    @property
    def explosive(self) -> nn.Module:
        raise AssertionError("a property must not be called")

    def method(self) -> None: ...


Pair = namedtuple("Pair", "net other")

WRAPPERS = [
    lambda net: {"net": net},
    lambda net: [net],
    lambda net: (net,),
    lambda net: {net},
    lambda net: frozenset([net]),
    lambda net: deque([net]),
    lambda net: OrderedDict(net=net),
    lambda net: Record(net),
    lambda net: Child(net),
    lambda net: Plain(net),
    lambda net: Plain(net).method,
    lambda net: Pair(net, None),
    lambda net: SimpleNamespace(net=net),
    lambda net: functools.partial(print, net, key=1),
    lambda net: {3: {"deep": [Record(Plain(net))]}},
]


@given(st.lists(st.sampled_from(WRAPPERS), max_size=5))
@settings(max_examples=60)
def test_a_module_is_found_through_any_nesting_of_containers(wrappers):
    net = nn.Linear(3, 1)
    state = net
    for wrap in wrappers:
        state = wrap(state) if not _unhashable(state) or wrap not in WRAPPERS[3:5] else [state]

    found = discover(state)

    assert any(f.value is net for f in found.modules)
    assert all(name.isidentifier() for name in names(found.modules))


def _unhashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return True
    return False


def test_attrs_classes_are_searched():
    attrs = pytest.importorskip("attrs")
    net = nn.Linear(1, 1)

    @attrs.define
    class State:
        net: nn.Module

    assert [f.value for f in discover(State(net)).modules] == [net]


def test_a_chain_of_thousands_of_objects_is_followed():
    head = SimpleNamespace(net=nn.Linear(1, 1))
    for _ in range(5000):
        head = SimpleNamespace(next=head)

    assert len(discover(head).modules) == 1


def test_shared_modules_and_parts_of_found_modules_are_listed_once():
    encoder = nn.Linear(2, 2)
    model = nn.Sequential(encoder, nn.Linear(2, 1))

    found = discover({"encoder": encoder, "model": model, "again": model}, SimpleNamespace(net=model))

    assert paths(found.modules) == ['state["model"]']


def test_names_of_state_and_trainer_do_not_collide_and_reserved_names_are_avoided():
    a, b, c, d = (nn.Linear(1, 1) for _ in range(4))

    found = discover({"net": a, "nets": {"gen": b}, "trainer": c}, SimpleNamespace(net=d), reserved=["trainer"])

    assert names(found.modules) == ["net", "nets_gen", "trainer_2", "trainer_net"]


def test_paths_read_as_the_author_would_write_them():
    trainer = SimpleNamespace(nets=[nn.Linear(1, 1)], _model=nn.Linear(1, 1))

    found = discover(None, trainer)

    assert paths(found.modules) == ["trainer.nets[0]", "trainer._model"]
    assert names(found.modules) == ["nets_0", "model"]


def test_a_compiled_module_is_represented_by_its_original():
    model = nn.Linear(1, 1)

    found = discover({"compiled": torch.compile(model, backend="eager"), "model": model})

    assert [(f.path, f.value) for f in found.modules] == [('state["compiled"]', model)]


def test_an_optimizer_inside_a_module_or_only_in_a_scheduler_is_found():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1)
            self.optimizer = adam(self.net)

    other = nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(adam(other), 1)

    found = discover({"agent": Agent(), "other": other, "scheduler": scheduler})

    assert paths(found.optimizers) == ['state["agent"].optimizer', 'state["scheduler"].optimizer']


def test_ema_copies_and_teachers_are_untrained():
    model = nn.Linear(2, 2)
    state = {"model": model, "ema": copy.deepcopy(model), "teacher": nn.Linear(1, 1), "opt": adam(model)}

    found = discover(state)

    assert names(found.trained) == ["model"]
    assert names(found.untrained) == ["ema", "teacher"]


def test_tensors_that_an_optimizer_holds_and_no_module_does_are_named():
    alpha, hidden = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    state = {"alpha": alpha, "opt": torch.optim.Adam([alpha, hidden]), "constant": torch.ones(1)}

    found = discover(state)

    assert paths(found.parameters) == ['state["alpha"]', 'state["opt"].param_groups[0]["params"][1]']
    assert paths(found.tensors) == ['state["constant"]']


def test_references_to_parameters_outside_of_their_module_are_named():
    model = nn.Linear(1, 1)

    assert paths(discover({"params": list(model.parameters()), "model": model}).aliases) == [
        'state["params"][0]',
        'state["params"][1]',
    ]


def test_modules_and_optimizers_that_only_functions_close_over_are_found():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        model(x).backward()
        optimizer.step()
        return later

    found = discover({"step": step})
    later = None

    assert paths(found.modules) == ['state["step"].<closure>.model']
    assert paths(found.optimizers) == ['state["step"].<closure>.optimizer']
    assert found.modules[0].name == "step_closure_model"


def test_attributes_of_a_class_are_found():
    class Trainer:
        net = nn.Linear(1, 1)
        heads = (nn.Linear(1, 1),)

    trainer = Trainer()
    trainer.heads = [nn.Linear(2, 1)]

    assert paths(discover(None, trainer).modules) == ["trainer.heads[0]", "trainer.net"]


@pytest.mark.parametrize("kept", ["Trainer", "callback of its own", "module"])
def test_objects_of_the_run_that_hosts_a_trainer_are_skipped(kept):
    import lightning.pytorch as pl

    class Mine(pl.Callback):
        def __init__(self, module):
            self.module = module

    host, model = pl.LightningModule(), nn.Linear(1, 1)
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    trainer.strategy.connect(host)
    keeps = {"Trainer": trainer, "callback of its own": Mine(host), "module": host}

    found = discover({"kept": keeps[kept], "model": model}, host=host)

    assert paths(found.modules) == ['state["model"]']


def test_without_optimizers_everything_that_requires_a_gradient_is_updated():
    model, loose = nn.Linear(1, 1), torch.ones(1, requires_grad=True)
    model.bias.requires_grad_(False)
    state = {"model": model, "loose": loose, "derived": loose * 2, "constant": torch.ones(1)}

    assert [id(t) for t in discover(state).updated()] == [id(model.weight), id(loose)]
    state["opt"] = torch.optim.SGD([loose], lr=0.1)
    assert [id(t) for t in discover(state).updated()] == [id(loose)]


def test_a_parameter_as_a_key_is_not_printed_in_a_path():
    weight = nn.Parameter(torch.ones(3, 2))

    (found,) = discover({"net": nn.Linear(1, 1), "by_weight": {weight: nn.Linear(2, 2)}}).modules[1:]

    assert found.path == 'state["by_weight"][Parameter(3, 2)]'


def test_a_set_of_modules_is_refused_and_one_of_values_is_not():
    assert discover({"seen": {(1, 2), (0, 1)}, "files": {Path("a"), Path("b")}, "nets": {nn.Linear(1, 1)}}).modules
    with refusal(ContractError):
        discover({"nets": {nn.Linear(1, 1), nn.Linear(2, 1)}})


def test_large_containers_are_data_and_are_not_searched():
    net = nn.Linear(1, 1)

    assert not discover({"buffer": [net] * (SEARCHED_ITEMS + 1)}).modules
    assert discover({"buffer": [net] * SEARCHED_ITEMS}).modules


@pytest.mark.parametrize("where", ["state", "trainer"])
def test_a_module_or_optimizer_that_appears_later_is_an_error_that_says_configure(where):
    state, trainer = SimpleNamespace(model=nn.Linear(1, 1)), SimpleNamespace()
    before = discover(state, trainer)
    check_unchanged(before, state, trainer)
    {"state": state, "trainer": trainer}[where].late = nn.Linear(1, 1)
    {"state": state, "trainer": trainer}[where].opt = adam(nn.Linear(1, 1))

    with pytest.raises(ContractError, match=rf"{where}\.late, {where}\.opt appeared after `configure`.*in `configure`"):
        check_unchanged(before, state, trainer)


def test_a_later_reference_to_a_part_of_a_known_module_is_allowed():
    state = SimpleNamespace(model=nn.Sequential(nn.Linear(1, 1)))
    before = discover(state)
    state.part = state.model[0]

    check_unchanged(before, state)


class ElsewhereTensor(torch.Tensor):
    """A tensor that claims to be on a GPU, on a machine that has none."""

    device = torch.device("cuda:1")


def test_a_cuda_tensor_on_a_cpu_run_is_named_by_its_path():
    state = {"cache": [torch.ones(1).as_subclass(ElsewhereTensor)]}

    with refusal(ContractError):
        check_devices(discover(state), "cpu")


def test_a_tensor_on_the_device_of_another_rank_is_named_by_its_path():
    state = {"noise": torch.ones(1).as_subclass(ElsewhereTensor)}

    with refusal(ContractError):
        check_devices(discover(state), "cuda:0")
    check_devices(discover(state), "cuda:1")
    check_devices(discover(state), "cuda")


def test_a_view_of_a_parameter_that_moves_to_a_device_is_refused_by_both_names():
    model, elsewhere = nn.Linear(2, 2), nn.Linear(2, 2)
    model.weight.grad = torch.zeros(2, 2)
    state = {"model": model, "other": elsewhere, "gradients": model.weight.grad.view(-1)}

    check_devices(discover(state), "cpu")
    names = r'state\["gradients"\] and state\["model"\].weight.grad are views of the same memory.*ctx.device'
    with pytest.raises(ContractError, match=names):
        check_devices(discover(state), "cuda:0")
    state["gradients"] = state["gradients"].clone()
    check_devices(discover(state), "cuda:0")


def test_a_module_in_memory_shared_with_another_process_is_refused_on_several_ranks():
    model = nn.Linear(1, 1).share_memory()

    check_devices(discover({"model": model}), "cpu")
    with refusal(ContractError):
        check_devices(discover({"model": model}), "cpu", world_size=2)


def test_the_dataset_in_a_context_that_a_trainer_keeps_is_skipped():
    handles, encoder = {"base": nn.Linear(1, 1)}, nn.Linear(1, 1)
    job = TrainingJobSpec("r", max_steps=1)
    context = StepContext(job=job, model_handles=handles, dataset=[{"encoder": encoder, "x": torch.ones(1)}])
    trainer = SimpleNamespace(ctx=context)

    found = discover({}, trainer)

    assert [module.value for module in found.modules] == [handles["base"]]
    assert found.tensors == ()


def test_a_module_completely_on_the_meta_device_is_skipped():
    model = nn.Linear(2, 2)
    state = {"model": model, "skeleton": copy.deepcopy(model).to("meta"), "optimizer": adam(model)}

    assert paths(discover(state).modules) == ['state["model"]']


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_module_with_a_part_without_values_is_refused_by_name(is_trained):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    state = {"model": model, "optimizer": adam(model) if is_trained else None}

    with refusal(ContractError):
        check_devices(discover(state), "cpu")
    if is_trained:
        with refusal(ContractError):
            check_devices(discover({"model": model[1], "optimizer": adam(model[1])}), "cpu")


def test_a_container_that_counts_in_its_own_way_is_searched():
    class Irreps(tuple):  # like e3nn's class; it refuses `len`
        def __len__(self):
            raise NotImplementedError

    found = discover({"irreps": Irreps((nn.Linear(1, 1),))})

    assert [each.path for each in found.modules] == ['state["irreps"][0]']


def test_a_tensor_that_replaced_another_is_found_wherever_it_is():
    trainer = SimpleNamespace(scale=torch.ones(1))
    state = {"params": {"w.a": torch.zeros(2), "b": torch.zeros(3)}, "list": [torch.zeros(4)], "gone": torch.zeros(5)}
    discovered = discover(state, trainer)
    state["params"] = {key: value + 1 for key, value in state["params"].items()}  # the dict is replaced, too
    state["list"][0] = torch.ones(6)
    trainer.scale = trainer.scale * 2
    state["gone"] = None
    now = discovered.current(discovered.tensors)

    assert [(each.path, each.value.sum().item()) for each in now] == [
        ('state["params"]["w.a"]', 2),
        ('state["params"]["b"]', 3),
        ('state["list"][0]', 6),
        ('state["gone"]', 0),
        ("trainer.scale", 2),
    ]
    assert [each.name for each in now] == [each.name for each in discovered.tensors]


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
