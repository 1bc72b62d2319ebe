"""Checkpoints in the memory of three nodes: real processes with separate folders for it, and real kills."""

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from genlight.adapter.plumbing.devices import host_group
from genlight.callbacks import Checkpoint, Recover
from genlight.callbacks.checkpoint import memory_tier
from genlight.callbacks.checkpoint.listing import list_checkpoints
from genlight.callbacks.checkpoint.memory_tier import memory_folder
from genlight.callbacks.checkpoint.peers import _Link
from support.plain_module import Fits
from support.rank_processes import on_ranks, run_ranks
from support.recovered import Batches, fit_fragile

pytestmark = [pytest.mark.promise(name="resume"), pytest.mark.slow]

NODES = 3
NEWEST, ON_LAST_NODE, ON_DISK = 7, 6, 4
"""Steps of the checkpoints that a killed run leaves: on the first two nodes, on the third, and on the disk."""


class Net(Fits):
    def __init__(self):
        super().__init__(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)))
        self.frozen = torch.nn.Linear(64, 64).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return super().training_step(torch.randn(4, 4), batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.body.parameters(), lr=0.01)


class Dies(pl.Callback):
    def __init__(self, directory, step):
        self.directory, self.step = directory, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step in (ON_LAST_NODE, NEWEST):
            newest = [min(self.step, trainer.global_step)]
            # A node that receives copies keeps only the newest, unless its disk hangs before it can remove the others.
            keeps_one = 0 < trainer.global_rank < NODES - 1
            while (steps(self.directory) if keeps_one else steps(self.directory)[-1:]) != newest:
                time.sleep(0.01)
            dist.barrier()
        if trainer.global_step == NEWEST:
            os.kill(os.getpid(), signal.SIGKILL)


class BecomesFull(pl.Callback):
    """Has room in memory until training begins; before step 12, training waits until a copy has arrived."""

    def __init__(self):
        self.begins, self.arrived = True, threading.Event()

    def room(self):
        if self.begins:
            self.begins = False
            return 1 << 40
        self.arrived.set()
        return 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 11:
            self.arrived.wait()


def steps(directory):
    folder = memory_folder(directory)
    return [] if folder is None else [each.record.step for each in list_checkpoints(folder) if each.record]


def fit(rank, directory, *callbacks, path=None, takes_newest=False, max_steps=10, **options):
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(rank.number)
    options = {"every_n_steps": 4, "memory_every_n_steps": 1, "peer_copies": True, "keep_last": None} | options
    saver = Checkpoint(directory, **options)
    saver.takes_newest = takes_newest
    # DDP otherwise rebuilds its buckets after the first step of a resumed run, and sums in another order.
    strategy = rank.strategy(find_unused_parameters=True)
    trainer = rank.trainer(*callbacks, saver, strategy=strategy, max_steps=max_steps)
    trainer.fit(net, [torch.ones(1)] * 20, ckpt_path=path)
    return net.state_dict(), saver._store.loaded


def memory_of(rank, folder):
    memory_tier.ROOT = Path(folder, f"shm{rank.number}")
    memory_tier.ROOT.mkdir(exist_ok=True)
    return memory_tier.ROOT


def block_copies(event, is_blocked):
    """Let the disk of this node hang, for the thread that receives copies."""
    real = os.fsync

    def fsync(descriptor):
        if threading.current_thread().name == "genlight-peer-copy" and is_blocked():
            event.wait()
        real(descriptor)

    os.fsync = fsync


def killed(rank, folder):
    memory_of(rank, folder)
    directory, is_last = Path(folder, "c"), rank.number == NODES - 1
    if is_last:  # its copy of the seventh step is never complete
        block_copies(threading.Event(), lambda: steps(directory)[-1:] == [ON_LAST_NODE])
    with rank.group("killed"):
        fit(rank, directory, Dies(directory, ON_LAST_NODE if is_last else NEWEST))


def stuck(rank, folder):
    root, directory, event = memory_of(rank, folder), Path(folder, "c"), threading.Event()
    if rank.number == 1:
        block_copies(event, lambda: steps(directory)[-1:] == [2])
    with rank.group("stuck"):
        expected, _ = fit(rank, Path(folder, "unbroken"), memory_every_n_steps=0)
        weights, _ = fit(rank, directory)
        left = len(list(root.iterdir()))
        event.set()
        for thread in threading.enumerate():
            if thread.name == "genlight-peer-copy":
                thread.join()
        dist.barrier()
        callbacks = [BecomesFull()] if rank.number == NODES - 1 else []
        for callback in callbacks:
            memory_tier._room = callback.room
        fit(rank, directory, *callbacks, path=str(directory), max_steps=12)
        dist.barrier()
    is_equal = all(torch.equal(weights[key], value) for key, value in expected.items())
    return is_equal, left, os.listdir(root), (directory / memory_tier.POINTER).exists()


def send_too_much(rank):
    """Return what the receiver of a message says that is larger than it may be."""
    link = _Link(host_group(), 1 - rank.number, tag=7)
    if rank.number == 0:
        with contextlib.suppress(RuntimeError):
            link.put(b"12345")  # waits until the receiver closes the connection
    elif rank.number == 1:
        try:
            link.get(4)
        except RuntimeError as error:
            link.break_off()
            return str(error)
    return ""


def rolled_back(rank, folder):
    memory_of(rank, folder)
    directory, seen = Path(folder, "r", "checkpoints"), []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            while trainer.global_step == 22 and not steps(directory):
                time.sleep(0.01)
            seen.append((trainer.global_step, steps(directory)))

    saver = Checkpoint(directory, every_n_steps=5, memory_every_n_steps=1, peer_copies=True)
    batches = Batches((16,) if rank.number == 1 else (), seed=rank.number)
    options = {"callbacks": [Looks(), saver], "devices": NODES, "strategy": rank.strategy()}
    with rank.group("rolled back"):
        refusal = send_too_much(rank)
        fit_fragile(Path(folder, "r"), Recover(["roll_back"], good_steps=4), batches, steps=24, every=0, **options)
    return seen, len(list(memory_tier.ROOT.iterdir())), refusal


def lie(folder):
    file = folder / f"step-{NEWEST:08}" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")


def tear(folder):
    (folder / f"step-{NEWEST:08}" / "training_state.json").unlink()


def belong_to_another_run(folder):
    (folder / memory_tier._NOTE).write_bytes(b"1")


CASES = {
    # Nodes that have lost their memory, the fault of the copy on the second, and the step of the resume.
    "the first node is replaced": ({0}, None, NEWEST),
    "the second node is replaced": ({1}, None, NEWEST),
    "two neighbors are replaced": ({0, 1}, None, ON_LAST_NODE),
    "all are replaced": ({0, 1, 2}, None, ON_DISK),
    "the copy differs": ({0}, lie, ON_LAST_NODE),
    "the copy is torn": ({0}, tear, ON_LAST_NODE),
    "the copy belongs to another run": ({0}, belong_to_another_run, ON_LAST_NODE),
    "nothing is on disk": ({0}, None, NEWEST),
    "the disk is newer": (set(), None, 8),
    "another checkpoint is named": (set(), None, ON_DISK),
}


def resumed(rank, folder):
    root, directory = memory_of(rank, folder), Path(folder, "c")
    shutil.copytree(root, backup := Path(folder, f"backup{rank.number}"))
    if rank.number == 0:
        shutil.copytree(directory, Path(folder, "disk"))
    with rank.group("resumed"):
        expected, _ = fit(rank, Path(folder, "unbroken"), memory_every_n_steps=0)
        results = {}
        for name, (lost, happen, _) in CASES.items():
            shutil.rmtree(root)
            shutil.copytree(backup, root)
            if rank.number == 0:
                for file in directory.iterdir():
                    shutil.rmtree(file) if file.is_dir() else file.unlink()
                if name != "nothing is on disk":
                    shutil.copytree(Path(folder, "disk"), directory, dirs_exist_ok=True)
                if name == "the disk is newer":
                    shutil.copytree(Path(folder, "unbroken"), directory, dirs_exist_ok=True)
                    (directory / "final.json").unlink()
                shutil.copy(Path(folder, "disk", memory_tier.POINTER), directory)
            dist.barrier()
            if rank.number in lost:
                shutil.rmtree(root)
                root.mkdir()
            elif happen is not None and rank.number == 1:
                happen(memory_folder(directory))
            dist.barrier()
            if name == "nothing is on disk":
                weights, loaded = fit(rank, directory, takes_newest=True)
            else:
                is_named = name == "another checkpoint is named"
                path = directory / f"step-{ON_DISK:08}.json" if is_named else directory
                weights, loaded = fit(rank, directory, path=str(path))
            is_equal = all(torch.equal(weights[key], value) for key, value in expected.items())
            results[name] = (loaded.step, is_equal, len(list(root.iterdir())))
    return results


def test_a_run_on_three_nodes_continues_from_the_newest_intact_copy(tmp_path):
    environ = {"GROUP_WORLD_SIZE": str(NODES)}
    place = (tmp_path, __file__, killed.__name__)
    run_ranks("on_rank.py", *place, tmp_path, world_size=NODES, code=-signal.SIGKILL, environ=environ)
    ranks, output = on_ranks(resumed, tmp_path, tmp_path, world_size=NODES, environ=environ)
    for number, results in enumerate(ranks):
        for name, (step, is_equal, left) in results.items():
            is_left = name == "the copy belongs to another run" and number == 1
            assert (name, step, is_equal, left) == (name, CASES[name][2], True, is_left), output
    assert "is not used" in output


def test_training_does_not_wait_for_a_node_that_takes_no_copies(tmp_path):
    environ = {"GROUP_WORLD_SIZE": str(NODES)}
    ranks, output = on_ranks(stuck, tmp_path, tmp_path, world_size=NODES, environ=environ)
    assert [is_equal for is_equal, *_ in ranks] == [True] * NODES
    assert "is not copied to the next node" in output
    assert "is not copied to this node" in output
    # The end of the ring cannot pass the second node. Copies on it and on the third stay for the next start.
    assert [left for _, left, *_ in ranks] == [0, 1, 1]
    assert [tuple(after) for _, _, *after in ranks] == [([], False)] * NODES


def test_a_rollback_removes_later_steps_from_the_memory_of_all_nodes(tmp_path):
    environ = {"GROUP_WORLD_SIZE": str(NODES)}
    ranks, output = on_ranks(rolled_back, tmp_path, tmp_path, world_size=NODES, environ=environ)
    for seen, left, _ in ranks:
        numbers = [number for number, _ in seen]
        assert numbers != sorted(numbers), output
        assert all(step <= number for number, held in seen for step in held), seen
        assert left == 0
    assert [refusal for *_, refusal in ranks] == ["", "rank 0 sends 5 bytes in place of at most 4", ""]
