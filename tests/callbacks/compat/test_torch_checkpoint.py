"""A ``.pt`` checkpoint is complete or absent, verified before it is renamed, and read without running code."""

import enum
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from genlight.adapter import BrokenCheckpointError, CheckpointError
from genlight.callbacks.compat import load_checkpoint, save_checkpoint
from support.forked import run_forked
from support.messages import refusal

COMPLETE = {"model_state_dict": {"weight": torch.ones(3)}, "optimizer_state_dict": {}, "global_step": 3}


class Kind(enum.StrEnum):
    SMALL = "small"


def test_a_checkpoint_is_read_again_without_pickle(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    config = {"path": Path("/x"), "kind": Kind.SMALL, "rate": np.float32(0.5), "betas": (0.9, 0.99), "odd": object}

    save_checkpoint(
        tmp_path / "a" / "x.pt",
        {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "global_step": 1,
         "config": config, "best_loss": float("inf")},
    )  # fmt: skip

    loaded = load_checkpoint(tmp_path / "a" / "x.pt")
    assert torch.equal(loaded["model_state_dict"]["weight"], model.weight)
    assert loaded["config"]["path"] == "/x"
    assert type(loaded["config"]["kind"]) is str
    assert (loaded["config"]["rate"], loaded["config"]["betas"]) == (0.5, [0.9, 0.99])
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).load_state_dict(loaded["optimizer_state_dict"])
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x.pt"]


def test_an_incomplete_file_is_neither_written_nor_read(tmp_path: Path) -> None:
    with refusal(CheckpointError):
        save_checkpoint(tmp_path / "x.pt", {"model_state_dict": {}})
    assert list(tmp_path.iterdir()) == []

    torch.save({"model_state_dict": {}}, tmp_path / "y.pt")
    with refusal(BrokenCheckpointError):
        load_checkpoint(tmp_path / "y.pt")


def test_a_file_that_could_run_code_is_refused_without_running_it(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({**COMPLETE, "config": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(), protocol=2))

    for name in ("evil.pt", "plain.pt"):
        with pytest.raises(BrokenCheckpointError, match=r"could run code|cannot be read"):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x.pt", COMPLETE)
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[: len(data) // 2])

    with refusal(BrokenCheckpointError):
        load_checkpoint(tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "absent.pt")


def test_a_full_disk_leaves_only_the_old_file(tmp_path: Path) -> None:
    script = (
        "import resource, sys, torch\n"
        "from genlight.callbacks.compat import save_checkpoint\n"
        "whole = {'model_state_dict': {'w': torch.ones(3)}, 'optimizer_state_dict': {}, 'global_step': 3}\n"
        "save_checkpoint(sys.argv[1], whole)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "try:\n    save_checkpoint(sys.argv[1], {**whole, 'model_state_dict': {'w': torch.ones(100_000)}})\n"
        "except Exception as error:\n    print(type(error).__name__, str(error).splitlines()[0])\n"
    )
    target = tmp_path / "c" / "x.pt"
    (program := tmp_path / "full.py").write_text(script)
    done = run_forked(target, folder=tmp_path, program=str(program))

    assert done.stdout.startswith(f"CheckpointError the checkpoint {target} could not be written"), done.stderr
    assert [path.name for path in target.parent.iterdir()] == ["x.pt"]
    assert load_checkpoint(target)["global_step"] == 3
