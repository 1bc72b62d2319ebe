"""Files of others in a directory of checkpoints stay when checkpoints are saved, removed, swept or moved."""

import os
import shutil

import pytest
import torch

from genlight.adapter.contract.exceptions import CheckpointError
from genlight.callbacks.checkpoint import (
    Checkpoint,
    DurableCheckpointIO,
    RecordMeta,
    delete_checkpoint,
    save,
    sweep,
    verify,
)
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


def checkpoint_of(step):
    return {"global_step": step, "state_dict": {"w": torch.full((3,), float(step))}}


def tree(directory):
    """Map every name below a directory to the content of a file, the target of a link, or None for a folder."""
    entries = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            entries[name] = ("link", os.readlink(path))
        else:
            entries[name] = None if path.is_dir() else path.read_bytes()
    return entries


@pytest.mark.parametrize("name", ["final.json", "last.ckpt", "a"])
def test_a_file_that_is_not_a_checkpoint_is_neither_replaced_nor_removed(tmp_path, name, caplog):
    record = tmp_path / (name if "." in name else f"{name}.json")
    record.write_text('{"learning_rate": 0.1}')
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=f"{record.name} is not a checkpoint and is not overwritten; move"):
        save(tmp_path / name, checkpoint_of(1))
    with refusal(CheckpointError):
        delete_checkpoint(record)
    DurableCheckpointIO().remove_checkpoint(record)
    assert "is not a checkpoint and is not removed" in caplog.text
    sweep(tmp_path)
    assert tree(tmp_path) == before


def test_data_behind_a_link_outlives_the_checkpoint(tmp_path):
    save(tmp_path / "c" / "a", checkpoint_of(1))
    moved = (tmp_path / "c" / "a").rename(tmp_path / "moved")
    os.symlink(moved, tmp_path / "c" / "a")
    before = tree(moved)
    delete_checkpoint(tmp_path / "c" / "a")
    assert tree(moved) == before
    assert tree(tmp_path / "c") == {"a": ("link", str(moved))}


def test_a_renamed_record_keeps_its_data(tmp_path):
    save(tmp_path / "a", checkpoint_of(1))
    os.rename(tmp_path / "a.json", tmp_path / "best.json")
    save(tmp_path / "a", checkpoint_of(2))
    delete_checkpoint(tmp_path / "a")
    sweep(tmp_path)
    assert verify(tmp_path / "best").step == 1


def test_a_copied_record_keeps_its_data(tmp_path):
    save(tmp_path / "a", checkpoint_of(1))
    shutil.copy(tmp_path / "a.json", tmp_path / "b.json")
    delete_checkpoint(tmp_path / "a")
    assert verify(tmp_path / "b").step == 1


def test_retention_removes_only_checkpoints_of_this_callback_and_run(tmp_path, train_net):
    save(tmp_path / "step-00000001", checkpoint_of(1), meta=RecordMeta(run_id="another", writer="Checkpoint"))
    save(tmp_path / "step-00000002", checkpoint_of(2))  # by hand
    save(tmp_path / "step-00000003", checkpoint_of(3), meta=RecordMeta(writer="Checkpoint"))
    save(tmp_path / "step-00000004", checkpoint_of(4), meta=RecordMeta(writer="Checkpoint"))
    save(tmp_path / "mine", checkpoint_of(4))
    save(tmp_path / "step-00000005", checkpoint_of(5), meta=RecordMeta(writer="Checkpoint"))
    os.symlink("step-00000005.json", tmp_path / "good.json")
    save(tmp_path / "step-00000006", checkpoint_of(6), meta=RecordMeta(writer="Checkpoint"))
    os.symlink("step-00000006", tmp_path / "good")

    checkpoint = Checkpoint(tmp_path, every_n_steps=10, keep_last=1, replace_existing=True)
    train_net(checkpoint, max_epochs=2)

    kept = ["final", "good", "mine", *(f"step-{step:08d}" for step in (1, 2, 5, 6, 20))]
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == kept
    for name in kept:
        verify(tmp_path / f"{name}.json")


def test_a_resumed_training_renames_files_in_its_way_and_keeps_earlier_ones(tmp_path, train_net, caplog):
    first = Checkpoint(tmp_path / "c", every_n_steps=2, keep_last=None)
    train_net(first, max_steps=2)
    (tmp_path / "c" / "final.json").unlink()
    (tmp_path / "c" / "final.json").write_bytes(b"")
    (tmp_path / "c" / "final.json.not-a-checkpoint-1").write_text("of an earlier start")
    again = Checkpoint(tmp_path / "c", every_n_steps=2, keep_last=None)
    train_net(again, max_steps=4, ckpt_path=tmp_path / "c" / "step-00000002.json")
    assert "final.json -> final.json.not-a-checkpoint-2" in caplog.text
    assert verify(tmp_path / "c" / "final.json").step == 4
    assert (tmp_path / "c" / "final.json.not-a-checkpoint-1").read_text() == "of an earlier start"
