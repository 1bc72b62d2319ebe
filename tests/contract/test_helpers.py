"""Helpers that trainer classes of the older runtime import for AdamW and LoRA checkpoints: same call, same result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from genlight.adapter import (
    BrokenCheckpointError,
    CheckpointError,
    build_default_adamw_bundle,
    load_trainable_module_checkpoint,
    save_trainable_module_checkpoint,
)
from support.messages import refusal

pytestmark = pytest.mark.promise(name="old names")


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


def trained() -> tuple[nn.Module, torch.optim.AdamW]:
    """A module with a frozen base and one step behind it."""
    module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_the_result_of_a_save_names_files_that_exist_and_the_meta_file_names_that_can_be_moved(tmp_path: Path) -> None:
    """`primary_path`, `optimizer_path`, `format`, and the caller's own facts."""
    module, optimizer = trained()
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


def test_a_fact_by_which_the_checkpoint_is_read_is_refused_and_others_stand_in_for_it(tmp_path: Path) -> None:
    """`metadata` wins over `step`, as it did, and may not name the files."""
    module, _ = trained()
    assert save_trainable_module_checkpoint(module, tmp_path, step=4, metadata={"step": 40})["step"] == 40
    with refusal(ValueError):
        save_trainable_module_checkpoint(module, tmp_path, step=4, metadata={"primary_path": "x"})


def older_checkpoint(folder: Path, module: nn.Module, optimizer: Any, *, as_torch: bool = False) -> Path:
    """A folder as the older runtime wrote it, with paths of another machine."""
    from safetensors.torch import save_file

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
def test_a_checkpoint_of_the_older_runtime_is_loaded_with_its_optimizer(tmp_path: Path, as_torch: bool) -> None:
    """Weights and moments are equal afterwards."""
    module, optimizer = trained()
    folder = older_checkpoint(tmp_path / "old", module, optimizer, as_torch=as_torch)
    other = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    facts = load_trainable_module_checkpoint(module=other, optimizer=other_optimizer, checkpoint_dir=str(folder))
    assert facts["step"] == 3
    assert torch.equal(other[1].weight, module[1].weight)
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    for ours, theirs in zip(other[1].parameters(), module[1].parameters(), strict=True):
        assert torch.equal(other_optimizer.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])


class Runs:
    """Unpickling an instance would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_an_older_optimizer_file_is_not_run(tmp_path: Path) -> None:
    """It is read with `weights_only=True`, and nothing is changed."""
    module, optimizer = trained()
    folder = older_checkpoint(tmp_path / "old", module, optimizer)
    torch.save({"state": {}, "param_groups": [], "x": Runs(tmp_path / "ran")}, folder / "optimizer.pt")
    other, other_optimizer = trained()
    before = other[1].weight.clone()
    with refusal(BrokenCheckpointError):
        load_trainable_module_checkpoint(other, folder, optimizer=other_optimizer)
    assert not (tmp_path / "ran").exists()
    assert torch.equal(other[1].weight, before)


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
    tmp_path: Path, spoil: Any, error: type[Exception], message: str
) -> None:
    """The older runtime returned, and training went on from fresh weights."""
    module, optimizer = trained()
    folder = older_checkpoint(tmp_path / "old", module, optimizer)
    spoil(folder)
    with pytest.raises(error, match=message):
        load_trainable_module_checkpoint(module, folder, optimizer=optimizer)
