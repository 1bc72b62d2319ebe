"""The helpers that trainer classes import."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from genlight.adapter.contract.exceptions import BrokenCheckpointError, CheckpointError, UnstorableStateError
from genlight.adapter.helpers import (
    OptimizerBundle,
    build_default_adamw_bundle,
    load_trainable_module_checkpoint,
    lora_checkpoint as module_checkpoint,
    save_trainable_module_checkpoint,
    seed_everything,
    to_float_scalar,
)


def draw_everywhere() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


@pytest.fixture(autouse=True)
def _keep_random_state():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


class Adapted(nn.Module):
    """A frozen base with a trainable low-rank part."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Linear(4, rank, bias=False)
        self.up = nn.Linear(rank, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def train(module, bundle, steps):
    for step in range(steps):
        x = torch.linspace(-1, 1, 8).reshape(2, 4) * (step + 1)
        bundle.optimizer.zero_grad()
        module(x).square().mean().backward()
        bundle.optimizer.step()
        bundle.scheduler.step()


@pytest.fixture
def trained():
    torch.manual_seed(0)
    module = Adapted()
    bundle = build_default_adamw_bundle(module, lr=0.1, warmup_steps=2, max_steps=20, lr_schedule="cosine")
    train(module, bundle, 3)
    return module, bundle


def test_importing_the_helpers_imports_neither_torch_nor_lightning():
    code = "import sys, genlight.adapter.helpers; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# seeds and scalars


def test_the_same_seed_gives_the_same_draws_of_python_numpy_and_torch():
    assert seed_everything(7) == 7
    first = draw_everywhere()
    seed_everything(np.int64(7))
    assert draw_everywhere() == first
    seed_everything(seed=8)
    assert all(a != b for a, b in zip(draw_everywhere(), first, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_cannot_take_is_refused_before_anything_is_seeded(seed):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"Invalid `seed`.*received {seed}"):
        seed_everything(seed)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_that_is_no_integer_is_refused():
    with pytest.raises(TypeError):
        seed_everything(0.5)


@pytest.mark.parametrize(
    "value",
    [2, 2.0, torch.tensor(2), torch.tensor([[2.0]], requires_grad=True), np.float32(2), np.array([2]), np.array(2)],
)
def test_numbers_and_single_elements_become_a_float(value):
    result = to_float_scalar(value)
    assert type(result) is float
    assert result == 2.0


def test_a_value_that_is_not_finite_stays_what_it_is():
    assert math.isnan(to_float_scalar(torch.tensor(float("nan"))))
    assert to_float_scalar(float("-inf")) == -math.inf


@pytest.mark.parametrize("value", [torch.ones(2), np.zeros((0,)), np.ones((2, 1))])
def test_several_elements_or_none_are_no_scalar(value):
    with pytest.raises(ValueError, match=r"Expected one element, but received shape \("):
        to_float_scalar(value)


@pytest.mark.parametrize("value", ["2", None, [2.0], {"loss": 1}, b"2", 1j])
def test_what_is_no_number_is_no_scalar(value):
    with pytest.raises(TypeError, match="Expected a number"):
        to_float_scalar(value)


# AdamW


def test_the_bundle_has_a_name_for_each_part_and_unpacks_as_a_pair():
    bundle = build_default_adamw_bundle(nn.Linear(2, 2))
    optimizer, scheduler = bundle
    assert scheduler is None
    assert isinstance(bundle, OptimizerBundle)
    assert (bundle.optimizer, bundle.scheduler) == (optimizer, scheduler)
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (1e-4, 0.0, (0.9, 0.999), 1e-8)


def test_hyperparams_give_the_settings_and_arguments_overrule_them():
    hyperparams = {"learning_rate": 0.5, "weight_decay": 0.2, "betas": [0.8, 0.9], "width": 128}
    group = build_default_adamw_bundle(nn.Linear(2, 2), hyperparams).optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.2, (0.8, 0.9))
    group = build_default_adamw_bundle(nn.Linear(2, 2), hyperparams, lr=0.25, weight_decay=0).optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.25, 0)


def test_all_parameters_are_optimized_so_that_frozen_ones_may_be_unfrozen_later():
    module = Adapted()
    for parameters in (module, module.parameters(), list(module.parameters())):
        kept = build_default_adamw_bundle(parameters).optimizer.param_groups[0]["params"]
        assert {id(p) for p in kept} == {id(p) for p in module.parameters()}


def test_parameter_groups_keep_their_own_settings_and_are_not_changed():
    module = Adapted()
    groups = [{"params": module.parameters(), "lr": 0.5}, {"params": nn.Parameter(torch.ones(2))}]
    optimizer = build_default_adamw_bundle(groups, lr=0.1).optimizer
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(0.5, 4), (0.1, 1)]
    assert "betas" not in groups[0]


def test_no_parameters_are_an_error_and_none_gives_an_empty_bundle():
    with pytest.raises(ValueError, match="empty parameter list"):
        build_default_adamw_bundle([])
    assert build_default_adamw_bundle(None, hyperparams={"max_steps": 3}) == (None, None)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.1, 0.55, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.1, 0.55, 1.0, 0.5, 0.0, 0.0]),
        ("cosine", [0.1, 0.55, 1.0, 0.5, 0.0, 0.0]),
    ],
)
def test_the_rate_warms_up_and_then_follows_the_schedule(schedule, rates):
    optimizer, scheduler = build_default_adamw_bundle(
        nn.Linear(2, 2), lr=1.0, warmup_steps=2, max_steps=4, lr_schedule=schedule
    )
    seen = []
    for _ in rates:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize(
    ("settings_", "name"),
    [
        ({"lr_schedule": "cosine"}, "max_steps"),
        ({"lr_schedule": "polynomial", "max_steps": 5}, "lr_schedule"),
        ({"warmup_steps": -1}, "warmup_steps"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_by_name(settings_, name):
    with pytest.raises(ValueError, match=f"Invalid `{name}`"):
        build_default_adamw_bundle(nn.Linear(2, 2), **settings_)


# the checkpoint of trainable parameters


def test_training_goes_on_from_a_checkpoint_bit_for_bit(trained, tmp_path):
    module, bundle = trained
    save_trainable_module_checkpoint(
        module, tmp_path, step=3, optimizer=bundle.optimizer, scheduler=bundle.scheduler, metadata={"base": "sd"}
    )
    torch.manual_seed(99)
    other = Adapted()
    other.base.load_state_dict(module.base.state_dict())
    other_bundle = build_default_adamw_bundle(other, lr=0.1, warmup_steps=2, max_steps=20, lr_schedule="cosine")
    facts = load_trainable_module_checkpoint(
        module=other, optimizer=other_bundle.optimizer, scheduler=other_bundle.scheduler, checkpoint_dir=tmp_path
    )
    assert (facts["step"], facts["final"], facts["base"]) == (3, False, "sd")
    assert facts["trainable"] == ["down.weight", "up.weight"]
    assert other_bundle.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for pair in (trained, (other, other_bundle)):
        train(*pair, 4)
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_the_result_names_the_weights_and_every_file(trained, tmp_path):
    module, bundle = trained
    result = save_trainable_module_checkpoint(
        module=module, output_dir=str(tmp_path / "new" / "dir"), step=3, optimizer=bundle.optimizer, final=True
    )
    written = sorted(path.name for path in (tmp_path / "new" / "dir").iterdir())
    assert result["primary_path"] == str(tmp_path / "new" / "dir" / "lora.safetensors")
    assert result["optimizer_path"] == str(tmp_path / "new" / "dir" / "optimizer.safetensors")
    assert (result["step"], result["final"]) == (3, True)
    assert written == sorted(result["files"])
    assert written == ["checkpoint_meta.json", "lora.safetensors", "optimizer.json", "optimizer.safetensors"]


def test_frozen_parameters_are_left_out_and_left_alone(trained, tmp_path):
    module, _ = trained
    save_trainable_module_checkpoint(module, tmp_path, step=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_meta.json", "lora.safetensors"]
    other = Adapted()
    base = other.base.weight.clone()
    load_trainable_module_checkpoint(other, tmp_path)
    assert torch.equal(other.base.weight, base)
    assert torch.equal(other.up.weight, module.up.weight)


@pytest.mark.parametrize(
    "name", ["lora.safetensors", "optimizer.safetensors", "optimizer.json", "checkpoint_meta.json"]
)
def test_a_missing_file_is_an_error_that_names_it_and_changes_nothing(trained, tmp_path, name):
    module, bundle = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3, optimizer=bundle.optimizer)
    (tmp_path / name).unlink()
    other = Adapted()
    before = other.up.weight.clone()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_trainable_module_checkpoint(other, tmp_path, optimizer=build_default_adamw_bundle(other).optimizer)
    assert torch.equal(other.up.weight, before)


@pytest.mark.parametrize(
    "name", ["lora.safetensors", "optimizer.safetensors", "optimizer.json", "checkpoint_meta.json"]
)
def test_a_cut_off_file_is_broken(trained, tmp_path, name):
    module, bundle = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3, optimizer=bundle.optimizer)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(BrokenCheckpointError, match=name):
        load_trainable_module_checkpoint(module, tmp_path, optimizer=bundle.optimizer)


def test_every_parameter_that_does_not_fit_is_named_at_once(trained, tmp_path):
    module, _ = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3)
    other = Adapted(rank=3)
    other.base.bias.requires_grad_(True)
    other.up.weight.requires_grad_(False)
    with pytest.raises(CheckpointError) as caught:
        load_trainable_module_checkpoint(other, tmp_path)
    for words in (
        "base.bias is missing there",
        "up.weight is not trainable in this module",
        "down.weight has shape (2, 4) there and (3, 4) here",
    ):
        assert words in str(caught.value)


def test_asking_for_a_state_that_was_not_saved_is_an_error(trained, tmp_path):
    module, bundle = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3, optimizer=bundle.optimizer)
    with pytest.raises(CheckpointError, match="holds no scheduler"):
        load_trainable_module_checkpoint(module, tmp_path, scheduler=bundle.scheduler)


def test_an_optimizer_of_other_parameters_is_refused_before_the_weights_change(trained, tmp_path):
    module, bundle = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3, optimizer=bundle.optimizer)
    other = Adapted()
    before = other.up.weight.clone()
    with pytest.raises(CheckpointError, match=r"\[4\] parameters in its groups; this one has \[1\]"):
        load_trainable_module_checkpoint(other, tmp_path, optimizer=torch.optim.AdamW([other.up.weight]))
    assert torch.equal(other.up.weight, before)


def test_a_tensor_that_the_description_refers_to_must_be_there(trained, tmp_path):
    module, bundle = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3, optimizer=bundle.optimizer)
    text = (tmp_path / "optimizer.json").read_text()
    (tmp_path / "optimizer.json").write_text(text.replace("exp_avg_sq", "gone"))
    with pytest.raises(BrokenCheckpointError, match=r'lacks .optimizer\["state"\]\[2\]\["gone"\]'):
        load_trainable_module_checkpoint(module, tmp_path, optimizer=bundle.optimizer)


def test_a_module_without_trainable_parameters_has_nothing_to_save(tmp_path):
    with pytest.raises(CheckpointError, match="Linear has no parameter with requires_grad"):
        save_trainable_module_checkpoint(nn.Linear(2, 2).requires_grad_(False), tmp_path, step=0)
    assert list(tmp_path.iterdir()) == []


class Odd:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded = state


def test_a_value_that_cannot_be_stored_is_named_and_the_old_checkpoint_stays(trained, tmp_path):
    module, _ = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3)
    before = (tmp_path / "checkpoint_meta.json").read_bytes()
    with pytest.raises(UnstorableStateError, match=r'scheduler\["cache"\]\[1\]: object') as caught:
        save_trainable_module_checkpoint(module, tmp_path, step=4, scheduler=Odd({"cache": [1, object()]}))
    assert caught.value.path == 'scheduler["cache"][1]'
    with pytest.raises(UnstorableStateError, match="tensor"):
        save_trainable_module_checkpoint(module, tmp_path, step=4, metadata={"tensor": torch.ones(1)})
    assert (tmp_path / "checkpoint_meta.json").read_bytes() == before


def test_a_save_that_fails_half_way_over_an_old_checkpoint_leaves_none(trained, tmp_path, monkeypatch):
    module, bundle = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3, optimizer=bundle.optimizer)
    write = module_checkpoint.write_bytes_durably

    def full_disk(path, data):
        if path.name == "optimizer.json":
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(module_checkpoint, "write_bytes_durably", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_trainable_module_checkpoint(module, tmp_path, step=4, optimizer=bundle.optimizer)
    with pytest.raises(CheckpointError, match=r"checkpoint_meta\.json is missing"):
        load_trainable_module_checkpoint(module, tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
        lambda p: torch.optim.LBFGS(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_other_optimizers_come_back_as_they_were(make, tmp_path):
    module = nn.Linear(3, 1)

    def step(owner, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = owner(torch.linspace(0, 1, 6).reshape(2, 3)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    optimizer = make(module.parameters())
    step(module, optimizer)
    save_trainable_module_checkpoint(module, tmp_path, step=1, optimizer=optimizer)
    other = nn.Linear(3, 1)
    other_optimizer = make(other.parameters())
    load_trainable_module_checkpoint(other, tmp_path, optimizer=other_optimizer)
    step(module, optimizer)
    step(other, other_optimizer)
    assert torch.equal(module.weight, other.weight)


def test_schedulers_with_keys_that_are_no_text_and_infinite_values_come_back(tmp_path):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    for index, scheduler in enumerate(schedulers):
        expected = dict(scheduler.state_dict())
        save_trainable_module_checkpoint(module, tmp_path / str(index), step=0, scheduler=scheduler)
        odd = Odd({})
        load_trainable_module_checkpoint(module, tmp_path / str(index), scheduler=odd)
        assert odd.loaded == expected
