"""Checkpoints in the memory of the node."""

import os
import shutil
import stat
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter.cli.checkpoints import checkpoint_facts
from genlight.adapter.contract.exceptions import CheckpointError
from genlight.adapter.plumbing.durable import temporary_name
from genlight.adapter.run.start import move_checkpoints_aside
from genlight.callbacks import Checkpoint
from genlight.callbacks.checkpoint import RecordMeta, find_checkpoint, load, memory_tier, newest_valid, save, verify
from genlight.callbacks.checkpoint.listing import list_checkpoints
from genlight.callbacks.checkpoint.memory_tier import POINTER, is_in_memory, list_tiers, memory_folder
from support.jobs import run, write_job

pytestmark = pytest.mark.promise(name="checkpoint")


@pytest.fixture(autouse=True)
def shm(tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(memory_tier, "ROOT", folder)
    return folder


class Fails(pl.Callback):
    """Ends a training before a step, as a kill does if `is_killed`: then memory stays as it is."""

    def __init__(self, step, *, is_killed=True):
        self.step, self.is_killed = step, is_killed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            for saver in (each for each in trainer.callbacks if isinstance(each, Checkpoint)):
                saver._memory.store.background.finish()
                saver._keeps_memory = self.is_killed
            raise RuntimeError("it fails here")


@pytest.fixture
def train(train_net, tmp_path):
    """Train ten steps, with a checkpoint on disk after the fourth and eighth, in memory after each."""

    def run(*callbacks, resume=False, dirpath="c", **options):
        saver = Checkpoint(tmp_path / dirpath, **{"every_n_steps": 4, "memory_every_n_steps": 1} | options)
        path = str(tmp_path / dirpath) if resume else None
        return train_net(saver, *callbacks, ckpt_path=path).lightning_module.state_dict()

    return run


@pytest.fixture
def killed(train, tmp_path):
    with pytest.raises(RuntimeError, match="here"):
        train(Fails(7))
    return tmp_path / "c", memory_folder(tmp_path / "c")


def steps(directory):
    return [each.record.step for each in list_checkpoints(directory)]


def assert_equal(weights, expected):
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_killed_training_continues_from_memory_with_the_same_bits(killed, train, shm, tmp_path):
    directory, folder = killed
    assert (steps(directory), steps(folder)) == ([4], [7])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert newest_valid(directory)[0].path.parent == folder
    assert is_in_memory(find_checkpoint(directory))
    assert not is_in_memory(shm / "checkpoints-of-a-user" / "step-00000007.json")
    assert_equal(train(resume=True), train(dirpath="whole", memory_every_n_steps=0))
    assert list(shm.iterdir()) == []
    assert not (directory / POINTER).exists()


def test_a_start_from_memory_needs_room_only_for_the_next_checkpoint(killed, monkeypatch):
    directory, folder = killed
    record, _ = newest_valid(directory)
    left_by_a_kill = folder / temporary_name("step-00000008")
    left_by_a_kill.mkdir()
    monkeypatch.setattr(memory_tier, "_room", lambda: 100)
    assert memory_tier.open_memory(directory, "r", 100, record) == folder
    assert not left_by_a_kill.exists()
    with pytest.raises(CheckpointError):
        memory_tier.open_memory(directory, "r", 100, None)


def test_what_is_newer_than_the_start_of_a_training_is_removed(killed, train, train_net):
    directory, folder = killed
    saver = Checkpoint(directory, every_n_steps=4, memory_every_n_steps=20)
    with pytest.raises(RuntimeError, match="here"):
        train_net(saver, Fails(5), ckpt_path=directory / "step-00000004.json")
    assert steps(folder) == []


def test_a_training_that_fails_moves_its_newest_checkpoint_to_the_disk(train, shm, tmp_path):
    with pytest.raises(RuntimeError, match="here"):
        train(Fails(7, is_killed=False))
    assert list(shm.iterdir()) == []
    assert steps(tmp_path / "c") == [4, 7]
    verify(tmp_path / "c" / "step-00000007")
    assert_equal(train(resume=True), train(dirpath="whole", memory_every_n_steps=0))


def test_without_room_on_the_disk_it_stays_in_memory(killed, monkeypatch, caplog):
    directory, folder = killed
    monkeypatch.setattr(os, "mkdir", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    memory_tier.retire_memory(directory)
    monkeypatch.undo()
    assert "stays in" in caplog.text
    assert list(folder.glob("*.json"))


def damage(folder):
    (folder / "step-00000007" / "model.safetensors").write_bytes(b"")


def test_a_broken_checkpoint_in_memory_is_passed_over(killed, train, caplog):
    directory, folder = killed
    damage(folder)
    record, warnings = newest_valid(directory)
    assert (record.step, len(warnings)) == (4, 1)
    memory_tier.retire_memory(directory)
    assert "is lost" in caplog.text
    assert steps(directory) == [4]


def test_after_a_power_cut_the_disk_has_everything_that_was_acknowledged(killed, train, shm):
    directory, folder = killed
    shutil.rmtree(folder)
    assert newest_valid(directory)[0].step == 4
    assert_equal(train(resume=True), train(dirpath="whole", memory_every_n_steps=0))
    assert list(shm.iterdir()) == []


def link(folder, directory):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def open_to_all(folder, directory):
    folder.chmod(0o777)


def give_away(folder, directory):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(folder, 12345, 12345)


def copy_of_the_run(folder, directory):
    shutil.copytree(directory, directory.with_name("copy"))
    shutil.rmtree(directory)
    directory.with_name("copy").rename(directory)


def note_is_a_link(folder, directory):
    note = folder / memory_tier._NOTE
    note.rename(folder / "note")
    note.symlink_to("note")


def points_outside(folder, directory):
    (directory / POINTER).write_text(f"../shm/{folder.name}")


@pytest.mark.parametrize("spoil", [link, open_to_all, give_away, copy_of_the_run, note_is_a_link, points_outside])
def test_a_folder_that_may_be_of_others_is_neither_used_nor_touched(spoil, killed, train, caplog, shm):
    directory, folder = killed
    spoil(folder, directory)
    before = sorted(shm.rglob("*"))
    assert newest_valid(directory)[0].step == 4
    train(resume=True)
    assert caplog.text.count("not used") == int(spoil is not points_outside)
    assert sorted(shm.rglob("*")) == before
    assert steps(directory) == [4, 8, 10]


def test_a_start_over_removes_it(killed, shm):
    directory, _ = killed
    aside = move_checkpoints_aside(directory)
    assert list(shm.iterdir()) == []
    assert newest_valid(directory) == (None, [])
    assert [path.name for path in aside.rglob("step*.json")] == ["step-00000004.json"]


def test_a_move_of_the_folder_keeps_its_memory(killed):
    directory, folder = killed
    moved = directory.rename(directory.with_name("moved"))
    assert memory_folder(moved) == folder


@pytest.mark.parametrize("fault", ["none", "none, on several nodes", "small"])
def test_without_room_a_training_says_so_once_and_goes_on(fault, train, shm, tmp_path, monkeypatch, caplog):
    if "none" in fault:
        shm.rmdir()
        monkeypatch.setenv("SLURM_NNODES", str(1 + ("nodes" in fault)))
    else:
        monkeypatch.setattr(memory_tier, "_room", lambda: 1000)
    train()
    assert caplog.text.count("not saved in memory") == 1
    assert steps(tmp_path / "c") == [4, 8, 10]


def test_the_memory_of_a_container_limits_the_room(tmp_path, monkeypatch):
    for name, text in {"stat": "anon 1\ninactive_file 10\n", "max": "100\n", "current": "50\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory_tier, "_CGROUP", tmp_path)
    memory_tier.require_room(60, "checkpoints")
    with pytest.raises(CheckpointError):
        memory_tier.require_room(61, "checkpoints")


def test_on_several_nodes_a_resume_saves_the_newest_of_memory_on_the_disk_first(killed, train, shm, monkeypatch):
    directory, _ = killed
    monkeypatch.setenv("SLURM_NNODES", "2")
    expected = train(dirpath="whole", memory_every_n_steps=0)
    with pytest.raises(RuntimeError, match="here"):
        train(Fails(9, is_killed=False), resume=True, memory_every_n_steps=20)
    assert steps(directory) == [7, 8]
    assert_equal(train(resume=True), expected)
    assert list(shm.iterdir()) == []


def test_a_run_whose_ranks_share_one_memory_sends_no_copies(train, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_NNODES", "2")
    train(peer_copies=True)
    assert "all ranks of the run share one memory" in caplog.text


@pytest.mark.parametrize(
    ("environ", "spans"),
    [
        ({}, False),
        ({"NODE_RANK": "0", "LOCAL_RANK": "1"}, False),  # Lightning sets it for the ranks that it starts
        ({"NODE_RANK": "1"}, True),
        ({"GROUP_WORLD_SIZE": "1", "SLURM_NNODES": "2"}, False),
        ({"GROUP_WORLD_SIZE": "2"}, True),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2"}, False),
        ({"SLURM_NNODES": "2"}, True),
    ],
)
def test_a_run_on_several_nodes_is_known_by_its_launcher(environ, spans):
    assert memory_tier.spans_nodes(environ) == spans


def test_memory_that_becomes_full_ends_only_the_saves_there(train, shm, tmp_path, monkeypatch, caplog):
    class Fills(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            real = os.write
            full = OSError(28, "No space left on device")

            def write(descriptor, data):
                if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(shm) and trainer.global_step > 4:
                    raise full
                return real(descriptor, data)

            if batch_idx == 0:
                monkeypatch.setattr(os, "write", write)

    train(Fills())
    assert caplog.text.count("From now on no checkpoint is saved in memory") == 1
    assert steps(tmp_path / "c") == [4, 8, 10]
    assert list(shm.iterdir()) == []


def test_weights_that_are_not_finite_are_not_taken_from_memory(killed, train, monkeypatch):
    directory, folder = killed
    (record,) = (each.record for each in list_checkpoints(folder))
    saved = load(record.path)
    saved["state_dict"]["body.0.weight"][0, 0] = float("nan")
    shutil.rmtree(record.data_path)
    record.path.unlink()

    save(record.path, saved, meta=RecordMeta(step=7, parameters=frozenset(["body.0.weight"])))
    assert newest_valid(directory)[0].step == 4
    memory_tier.retire_memory(directory)
    assert steps(directory) == [4]


def test_a_listing_says_which_checkpoints_are_in_memory(killed):
    directory, _ = killed
    facts = [checkpoint_facts(each, proves=True) for each in list_tiers(directory)]
    assert [(each["step"], each["tier"], each["state"]) for each in facts] == [
        (4, "disk", "intact"),
        (7, "memory", "intact, in memory"),
    ]


def test_what_a_kill_after_the_final_checkpoint_leaves_is_removed(train, shm, tmp_path):
    train()
    memory_tier.open_memory(tmp_path / "c", "r", 1, None)
    train(resume=True)
    assert list(shm.iterdir()) == []

    job = write_job(tmp_path, checkpoint_every=2)
    assert run(job) == 0
    memory_tier.open_memory(tmp_path / "out" / "checkpoints", "r", 1, None)
    assert run(job, "resume_from_latest=true") == 0
    assert list(shm.iterdir()) == []
