"""The helpers that trainer classes import."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
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
from support.messages import refusal


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
    bundle = build_default_adamw_bundle(module, lr=0.1, warmup_steps=2, max_steps=20)
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


@pytest.mark.parametrize(
    "value",
    [2, 2.0, torch.tensor(2), torch.tensor([[2.0]], requires_grad=True), np.float32(2), np.array([2]), np.array(2)],
)
def test_numbers_and_single_elements_become_a_float(value):
    result = to_float_scalar(value)
    assert type(result) is float
    assert result == 2.0
    assert math.isnan(to_float_scalar(torch.tensor(float("nan"))))


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        *((value, ValueError, r"one element, but received shape \(") for value in (torch.ones(2), np.zeros((0,)))),
        *((value, TypeError, "Expected a number") for value in ("2", None, [2.0], {"loss": 1}, b"2", 1j)),
    ],
)
def test_a_value_that_is_not_one_number_is_refused(value, error, said):
    with pytest.raises(error, match=said):
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
    with refusal(ValueError):
        build_default_adamw_bundle([])
    assert build_default_adamw_bundle(None, hyperparams={"max_steps": 3}) == (None, None)


@pytest.mark.parametrize("name", ["warmup_steps", "max_steps"])
def test_a_schedule_that_cannot_work_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"Invalid `{name}`"):
        build_default_adamw_bundle(nn.Linear(2, 2), **{name: -1})


def rates(hyperparams: dict[str, Any], steps: int = 6) -> list[float]:
    """The learning rate of each step."""
    bundle = build_default_adamw_bundle(nn.Linear(1, 1), hyperparams=hyperparams)
    seen = []
    for _ in range(steps):
        seen.append(bundle.optimizer.param_groups[0]["lr"])
        bundle.optimizer.step()
        if bundle.scheduler is not None:
            bundle.scheduler.step()
    return seen


@pytest.mark.parametrize(
    ("hyperparams", "expected"),
    [
        ({"learning_rate": 1, "max_steps": 6}, [1, 0.933, 0.75, 0.5, 0.25, 0.067]),
        ({"learning_rate": 1, "max_steps": 6, "warmup_steps": 2}, [0.1, 0.55, 1, 0.854, 0.5, 0.146]),
        ({"learning_rate": 1, "lr": 7, "max_steps": 2}, [1, 0.5, 0, 0, 0, 0]),
        ({"lr": "0.5"}, [0.5] * 6),
        ({}, [1e-4] * 6),
    ],
    ids=["cosine", "cosine after warm-up", "learning_rate before lr", "no max_steps, no decay", "defaults"],
)
def test_the_learning_rate_of_each_step(hyperparams: dict[str, Any], expected: list[float]) -> None:
    """Figures of the older runtime, whose cosine would rise again after `max_steps`."""
    assert rates(hyperparams) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_figures_are_those_of_torchs_own_schedulers_but_for_rounding(warmup: int) -> None:
    """It comes from the older runtime; a resumed run then trains at the rates of an uninterrupted one."""
    bundle = build_default_adamw_bundle(nn.Linear(1, 1), {"learning_rate": 1.0, "max_steps": 9, "warmup_steps": warmup})
    theirs = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=1.0, weight_decay=0.0)
    scheduler = older_scheduler(theirs, warmup, 9)
    for _ in range(9):
        assert bundle.optimizer.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12)
        for optimizer, schedule in ((bundle.optimizer, bundle.scheduler), (theirs, scheduler)):
            optimizer.step()
            schedule.step()


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_state_of_an_older_scheduler_is_taken_over(warmup: int) -> None:
    """A record of the older runtime may hold it, as JSON."""
    hyperparams = {"learning_rate": 1.0, "max_steps": 6, "warmup_steps": warmup}
    expected = rates(hyperparams)
    theirs = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = older_scheduler(theirs, warmup, 6)
    for _ in range(3):
        theirs.step()
        scheduler.step()
    bundle = build_default_adamw_bundle(nn.Linear(1, 1), hyperparams)
    bundle.scheduler.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    bundle.optimizer.step()
    bundle.scheduler.step()
    assert bundle.optimizer.param_groups[0]["lr"] == expected[4]
    again = build_default_adamw_bundle(nn.Linear(1, 1), hyperparams)
    again.scheduler.load_state_dict(bundle.scheduler.state_dict())
    assert again.scheduler.last_epoch == 4


def older_scheduler(optimizer: Any, warmup: int, total: int) -> Any:
    """The scheduler of the older runtime."""
    lrs = torch.optim.lr_scheduler
    if not warmup:
        return lrs.CosineAnnealingLR(optimizer, T_max=total)
    parts: list[Any] = [
        lrs.LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=warmup),
        lrs.CosineAnnealingLR(optimizer, T_max=total - warmup),
    ]
    return lrs.SequentialLR(optimizer, schedulers=parts, milestones=[warmup])


# the checkpoint of trainable parameters


def test_training_continues_from_a_checkpoint_bit_for_bit(trained, tmp_path):
    module, bundle = trained
    save_trainable_module_checkpoint(
        module, tmp_path, step=3, optimizer=bundle.optimizer, scheduler=bundle.scheduler, metadata={"base": "sd"}
    )
    torch.manual_seed(99)
    other = Adapted()
    other.base.load_state_dict(module.base.state_dict())
    other_bundle = build_default_adamw_bundle(other, lr=0.1, warmup_steps=2, max_steps=20)
    facts = load_trainable_module_checkpoint(
        module=other, optimizer=other_bundle.optimizer, scheduler=other_bundle.scheduler, checkpoint_dir=tmp_path
    )
    assert (facts["step"], facts["final"], facts["base"]) == (3, False, "sd")
    assert other_bundle.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for pair in (trained, (other, other_bundle)):
        train(*pair, 4)
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_frozen_parameters_are_neither_saved_nor_changed(trained, tmp_path):
    module, _ = trained
    save_trainable_module_checkpoint(module, tmp_path, step=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_meta.json", "lora.safetensors"]
    other = Adapted()
    base = other.base.weight.clone()
    load_trainable_module_checkpoint(other, tmp_path)
    assert torch.equal(other.base.weight, base)
    assert torch.equal(other.up.weight, module.up.weight)


@pytest.mark.parametrize("name", ["lora.safetensors", "optimizer.json", "checkpoint_meta.json"])
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
    "name",
    ["lora.safetensors", "optimizer/training_state.safetensors", "optimizer.json", "checkpoint_meta.json"],
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


def test_an_optimizer_of_other_parameters_is_refused_before_the_weights_change(trained, tmp_path):
    module, bundle = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3, optimizer=bundle.optimizer)
    other = Adapted()
    before = other.up.weight.clone()
    with refusal(CheckpointError):
        load_trainable_module_checkpoint(module, tmp_path, scheduler=bundle.scheduler)
    with refusal(CheckpointError):
        load_trainable_module_checkpoint(other, tmp_path, optimizer=torch.optim.AdamW([other.up.weight]))
    assert torch.equal(other.up.weight, before)


def test_a_module_without_trainable_parameters_has_nothing_to_save(tmp_path):
    with refusal(CheckpointError):
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
    with refusal(UnstorableStateError) as caught:
        save_trainable_module_checkpoint(module, tmp_path, step=4, scheduler=Odd({"cache": [1, object()]}))
    assert caught.value.path == 'scheduler["cache"][1]'
    with refusal(UnstorableStateError):
        save_trainable_module_checkpoint(module, tmp_path, step=4, metadata={"tensor": torch.ones(1)})
    assert (tmp_path / "checkpoint_meta.json").read_bytes() == before


def test_a_save_that_fails_half_way_over_an_old_checkpoint_leaves_none(trained, tmp_path, monkeypatch):
    module, bundle = trained
    save_trainable_module_checkpoint(module, tmp_path, step=3, optimizer=bundle.optimizer)
    write = module_checkpoint.write_bytes_durably

    def full_disk(path, data):
        if path.name == "lora.safetensors":
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(module_checkpoint, "write_bytes_durably", full_disk)
    with refusal(OSError):
        save_trainable_module_checkpoint(module, tmp_path, step=4, optimizer=bundle.optimizer)
    with refusal(CheckpointError):
        load_trainable_module_checkpoint(module, tmp_path)


def test_the_result_of_a_save_names_files_that_exist_and_the_meta_file_names_that_can_be_moved(
    trained, tmp_path: Path
) -> None:
    """`primary_path`, `optimizer_path`, `format`, and the caller's own facts."""
    module, bundle = trained
    optimizer = bundle.optimizer
    result = save_trainable_module_checkpoint(
        module=module,
        optimizer=optimizer,
        output_dir=str(tmp_path),
        step=4,
        final=True,
        model_name_or_path="base/model",
        metadata={"rank": 8},
        alpha=16,
    )
    meta = json.loads((tmp_path / "checkpoint_meta.json").read_text())
    for told in (result, meta):
        facts = {name: told[name] for name in ("format", "step", "final", "model_name_or_path", "rank", "alpha")}
        assert facts == {
            "format": "lora_safetensors_v1",
            "step": 4,
            "final": True,
            "model_name_or_path": "base/model",
            "rank": 8,
            "alpha": 16,
        }
    assert Path(result["primary_path"]).is_file()
    assert Path(result["optimizer_path"]).is_file()
    assert (meta["primary_path"], meta["optimizer_path"]) == ("lora.safetensors", "optimizer.json")
    assert load_trainable_module_checkpoint(module, tmp_path)["alpha"] == 16


def test_a_fact_by_which_the_checkpoint_is_read_is_refused_and_others_stand_in_for_it(trained, tmp_path: Path) -> None:
    module, _ = trained
    assert save_trainable_module_checkpoint(module, tmp_path, step=4, metadata={"step": 40})["step"] == 40
    with refusal(ValueError):
        save_trainable_module_checkpoint(module, tmp_path, step=4, metadata={"primary_path": "x"})


# checkpoints of the older runtime


def older_checkpoint(folder: Path, module: nn.Module, optimizer: Any, *, as_torch: bool = False) -> Path:
    """A folder as the older runtime wrote it, with paths of another machine."""
    folder.mkdir()
    weights = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    if as_torch:
        torch.save(weights, folder / "lora.pt")
    else:
        save_file(weights, folder / "lora.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    meta = {
        "format": "lora_torch_v1" if as_torch else "lora_safetensors_v1",
        "step": 3,
        "final": False,
        "primary_path": "/elsewhere/lora.safetensors",
        "model_name_or_path": "",
        "optimizer_path": "/elsewhere/optimizer.pt",
    }
    (folder / "checkpoint_meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("as_torch", [False, True], ids=["safetensors", "torch"])
def test_a_checkpoint_of_the_older_runtime_is_loaded_with_its_optimizer(
    trained, tmp_path: Path, as_torch: bool
) -> None:
    module, bundle = trained
    folder = older_checkpoint(tmp_path / "old", module, bundle.optimizer, as_torch=as_torch)
    other = Adapted()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    facts = load_trainable_module_checkpoint(module=other, optimizer=other_optimizer, checkpoint_dir=str(folder))
    assert facts["step"] == 3
    assert other_optimizer.param_groups[0]["lr"] == bundle.optimizer.param_groups[0]["lr"]
    for ours, theirs in ((other.up.weight, module.up.weight), (other.down.weight, module.down.weight)):
        assert torch.equal(ours, theirs)
        assert torch.equal(other_optimizer.state[ours]["exp_avg"], bundle.optimizer.state[theirs]["exp_avg"])


class Runs:
    """Unpickling an instance would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_an_older_optimizer_file_is_not_run(trained, tmp_path: Path) -> None:
    """It is read with `weights_only=True`, and nothing is changed."""
    module, bundle = trained
    folder = older_checkpoint(tmp_path / "old", module, bundle.optimizer)
    torch.save({"state": {}, "param_groups": [], "x": Runs(tmp_path / "ran")}, folder / "optimizer.pt")
    other = Adapted()
    before = other.up.weight.clone()
    with refusal(BrokenCheckpointError):
        load_trainable_module_checkpoint(other, folder, optimizer=build_default_adamw_bundle(other).optimizer)
    assert not (tmp_path / "ran").exists()
    assert torch.equal(other.up.weight, before)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda folder: (folder / "optimizer.pt").unlink(), CheckpointError, r"optimizer\.pt is missing"),
        (lambda folder: (folder / "lora.safetensors").unlink(), CheckpointError, r"lora\.safetensors is missing"),
        (lambda folder: (folder / "optimizer.pt").write_bytes(b"PK"), BrokenCheckpointError, r"optimizer\.pt cannot"),
        (lambda folder: torch.save([1], folder / "optimizer.pt"), BrokenCheckpointError, "does not hold a dictionary"),
        (lambda folder: torch.save({"x": 1}, folder / "optimizer.pt"), CheckpointError, "does not fit this one"),
    ],
    ids=["no optimizer", "no weights", "torn", "a list", "no groups"],
)
def test_an_incomplete_older_checkpoint_is_an_error_and_never_a_silent_return(
    trained, tmp_path: Path, spoil: Any, error: type[Exception], message: str
) -> None:
    """The older runtime returned, and training went on from fresh weights."""
    module, bundle = trained
    optimizer = bundle.optimizer
    folder = older_checkpoint(tmp_path / "old", module, optimizer)
    spoil(folder)
    with pytest.raises(error, match=message):
        load_trainable_module_checkpoint(module, folder, optimizer=optimizer)
