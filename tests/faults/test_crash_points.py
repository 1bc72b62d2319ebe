"""A save that dies at any system call leaves the complete previous checkpoint or the complete new one."""

import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from genlight.adapter.contract.exceptions import BrokenCheckpointError
from genlight.adapter.plumbing.durable import make_directory
from genlight.callbacks.checkpoint import (
    CheckpointStore,
    RecordMeta,
    delete_checkpoint,
    load,
    memory_tier,
    newest_valid,
    save,
    storage,
    sweep,
    verify,
)
from genlight.callbacks.checkpoint.frozen import Frozen
from genlight.callbacks.checkpoint.storage import stage
from genlight.callbacks.rank_channel import RankGroups
from genlight.reporters.events.event_log import EventLog
from support.faulty_disk import Crash, RecordingDisk, fail_growth_from_here, fail_once, inject, recorded
from support.messages import refusal


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "global_step": step,
        "state_dict": {f"layer{i}.weight": torch.randn(40, generator=generator) for i in range(3)},
        "optimizer_states": [{"exp_avg": torch.randn(120, generator=generator), "step": step}],
        "genlight": {"state": {"step": step, "cache": torch.full((5,), float(step))}},
    }


def save_step(directory, step, name=None, with_files=False):
    path = Path(directory) / (name or f"step-{step:08d}")
    staging = None
    if with_files:
        staging = stage(path.with_name(f"{path.name}.json"))
        try:
            descriptor = os.open(staging.folder("trainer") / "lora.bin", os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, b"lora" * step)
            finally:
                os.close(descriptor)
        except OSError:
            staging.discard()
            raise
    return save(path, state(step), meta=RecordMeta(run_id="r"), staging=staging)


def save_steps(*steps, name=None, with_files=False):
    """Return an action that saves these steps in its directory."""
    return lambda directory: [save_step(directory, step, name, with_files) for step in steps]


def next_with_retention(directory):
    save_step(directory, 2)
    delete_checkpoint(directory / "step-00000001.json")


def next_in_parts(directory):
    """Save as a sharded run with one rank; other ranks write their parts in the same way."""
    parts = state(2)
    mesh = init_device_mesh("cpu", (1,))
    parts["state_dict"] = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in parts["state_dict"].items()}
    CheckpointStore().save(directory / "step-00000002", parts, RecordMeta(run_id="r"), groups=RankGroups())


def sweep_and_save(directory):
    sweep(directory)
    save_step(directory, 2)


BASE = torch.randn(1200, generator=torch.Generator().manual_seed(0))
"""A weight that no step changes, large enough to be shared."""


def share(directory, *steps, change_at=None):
    """Save steps of a run with frozen weights; from step `change_at` on, half of them change."""
    store, base = CheckpointStore(), {"base.0": BASE.clone(), "base.1": BASE.clone()}
    directory.mkdir(exist_ok=True)
    store.begin(directory, Frozen(base))
    for step in steps:
        if step == change_at:
            base["base.1"].data.add_(1)
        saved = state(step)
        saved["state_dict"] |= base
        store.save(directory / f"step-{step:08d}", saved, RecordMeta(run_id="r"))


def share_and_retain(directory):
    share(directory, 2, 3, change_at=3)
    delete_checkpoint(directory / "step-00000001.json")
    delete_checkpoint(directory / "step-00000002.json")


def save_in_memory(directory):
    """Save two steps in the memory of the node, and end the training: the newest goes to the disk."""
    memory_tier.ROOT.mkdir(exist_ok=True)
    folder = memory_tier.open_memory(directory, "r", 1, None)
    for step in (2, 3):
        save_step(folder, step)
    delete_checkpoint(folder / "step-00000002.json")
    memory_tier.retire_memory(directory)


def prepare_link(directory):
    save_step(directory, 1, name="best.ckpt")
    os.symlink("best.ckpt", directory / "last.ckpt")


def prepare_debris(directory):
    save_step(directory, 1)
    save_step(directory, 5)
    (directory / "step-00000005.json").rename(directory / "step-00000005" / ".tmp-step-00000005.json-1-00")
    (directory / ".tmp-step-00000006-1-00").mkdir()
    (directory / ".tmp-step-00000006-1-00" / "model.safetensors").write_bytes(b"half")
    (directory / ".tmp-step-00000007.json-1-00").write_bytes(b"{")


PREVIOUS, LAST = save_steps(1), save_steps(1, name="last")
SCENARIOS = {
    "first": (Path.mkdir, save_steps(2), {None, 2}),
    "first-in-a-new-folder": (lambda _: None, save_steps(2), {None, 2}),  # the folder's name has to be durable too
    "next-with-retention": (PREVIOUS, next_with_retention, {1, 2}),
    "next-with-files": (PREVIOUS, save_steps(2, with_files=True), {1, 2}),
    "next-in-parts": (PREVIOUS, next_in_parts, {1, 2}),
    "replace-in-place": (LAST, save_steps(2, name="last"), {1, 2}),
    "replace-twice": (LAST, save_steps(2, 3, name="last"), {1, 2, 3}),
    "replace-a-link": (prepare_link, save_steps(2, name="last.ckpt"), {1, 2}),
    "share": (lambda directory: share(directory, 1), share_and_retain, {1, 2, 3}),
    "memory": (PREVIOUS, save_in_memory, {1, 2, 3}),
    "sweep-and-save": (prepare_debris, sweep_and_save, {1, 2}),
}


@pytest.fixture(params=sorted(SCENARIOS))
def scenario(request):
    return SCENARIOS[request.param]


@pytest.fixture(params=["memory", "disk"])
def base(request, scenario, memory, tmp_path, is_long):
    """A folder in memory for every scenario, and on disk for one; in the long run, on disk for all."""
    if request.param == "disk" and not is_long and scenario is not SCENARIOS["first"]:
        pytest.skip("the long run does this on disk too")
    return (memory if request.param == "memory" else tmp_path) / "c"


pytestmark = [pytest.mark.promise(name="checkpoint"), pytest.mark.timeout(7200)]


@pytest.fixture(autouse=True)
def process_group():
    """A process group for the sharded tensors of one scenario."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def shm(memory, monkeypatch):
    """A folder in place of ``/dev/shm``, of which a power cut leaves nothing."""
    monkeypatch.setattr(memory_tier, "ROOT", memory / "shm")


@pytest.fixture(autouse=True)
def small_writes(monkeypatch):
    """Write in small chunks, so that there are many points to crash at."""
    monkeypatch.setattr(storage, "_WRITE_CHUNK", 400)
    monkeypatch.setattr(storage, "_live", set())


def forget_this_process():
    storage._live.clear()


def assert_complete(directory, allowed):
    """Check that the newest valid checkpoint is one of `allowed` and has exactly its values; return its step."""
    record, _ = newest_valid(directory)
    step = None if record is None else record.step
    assert step in allowed
    for path in directory.glob("*.json"):
        verify(path)
    if record is not None:
        loaded, expected = load(record.path), state(step)
        assert loaded["genlight"]["state"]["step"] == step
        assert all(torch.equal(loaded["state_dict"][k], v) for k, v in expected["state_dict"].items())
        assert torch.equal(loaded["optimizer_states"][0]["exp_avg"], expected["optimizer_states"][0]["exp_avg"])
        if "base.0" in loaded["state_dict"]:
            changed = torch.equal(loaded["state_dict"]["base.1"], BASE + 1)
            assert torch.equal(loaded["state_dict"]["base.0"], BASE)
            assert torch.equal(loaded["state_dict"]["base.1"], BASE) or (changed and step == 3)
    return step


def assert_recovers(directory):
    """Check that the next run removes debris and can save again."""
    forget_this_process()
    sweep(directory)
    known = {path.name for path in directory.glob("*")}
    assert not any(name.startswith(".tmp-") for name in known)
    save_step(directory, 9)
    assert assert_complete(directory, {9}) == 9
    folders = {path.name for path in directory.iterdir() if path.is_dir()}
    records = [path for path in directory.iterdir() if path.suffix in (".json", ".ckpt") and not path.is_symlink()]
    assert len(folders) == len(records)
    for path in records:
        verify(path)


def test_a_killed_save_leaves_a_complete_checkpoint(base, scenario, crash):
    """The process dies before or after every call, or in the middle of a write."""
    prepare, act, allowed = scenario
    for point in itertools.count(1):
        shutil.rmtree(base, ignore_errors=True)
        prepare(base)
        forget_this_process()
        with inject(crash, point) as injector:
            try:
                act(base)
            except Crash:
                pass
            else:
                break
        assert_complete(base, allowed)
        assert_recovers(base)
    assert assert_complete(base, allowed) == max(step for step in allowed if step)
    assert injector.calls >= 20


def test_a_power_cut_leaves_a_complete_checkpoint(memory, scenario, is_long):
    """Unsynced writes and names are lost, torn, zeroed or kept after every call, in any combination."""
    prepare, act, allowed = scenario
    prepare(memory / "c")
    after = memory / "after"
    cuts = 0

    def cut_power():
        nonlocal cuts
        cuts += 1
        for seed in range(40 if is_long else 3):
            undo.undo()
            disk.materialise(after, None if seed == 0 else random.Random(cuts * 1000 + seed))
            shutil.rmtree(after / "shm", ignore_errors=True)
            memory_tier.ROOT = after / "shm"
            step = assert_complete(after / "c" if (after / "c").exists() else after, allowed | base_allowed)
            memory_tier.ROOT = memory / "shm"
            assert act is not save_in_memory or step != 2
            disk.install(undo)

    base_allowed = {None} if None in allowed else set()
    undo = pytest.MonkeyPatch()
    disk = RecordingDisk(memory, cut_power)
    disk.install(undo)
    try:
        act(memory / "c")
    finally:
        undo.undo()
    for seed in range(20):
        disk.materialise(after, None if seed == 0 else random.Random(seed))
        assert assert_complete(after / "c", allowed) == max(step for step in allowed if step)
    assert cuts >= 20


def test_a_power_cut_leaves_the_folders_of_a_run(memory):
    """These folders contain everything that a run acknowledges."""
    with recorded(memory) as disk:
        make_directory(memory / "runs" / "r" / "checkpoints")
        make_directory(memory / "runs" / "r" / "metrics", shared=True)
        EventLog(memory / "fit" / "metrics" / "events.jsonl", run_id="r").close()
    disk.materialise(memory / "after", None)
    assert (memory / "after" / "runs" / "r" / "checkpoints").is_dir()
    assert (memory / "after" / "runs" / "r" / "metrics").is_dir()
    assert (memory / "after" / "fit" / "metrics").is_dir()


def test_a_failing_call_fails_the_save_and_loses_nothing(memory, scenario, error_code):
    prepare, act, allowed = scenario
    directory = memory / "c"
    for point in itertools.count(1):
        shutil.rmtree(directory, ignore_errors=True)
        prepare(directory)
        forget_this_process()
        with inject(fail_once(error_code), point) as injector:
            try:
                act(directory)
            except OSError as error:
                assert error.errno == error_code  # noqa: PT017 - the call may also succeed
        if injector.calls < point:
            break
        assert_complete(directory, allowed)
        assert_recovers(directory)


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_debris(memory, error_code):
    directory = memory / "c"
    for point in itertools.count(1):
        shutil.rmtree(directory, ignore_errors=True)
        PREVIOUS(directory)
        with inject(fail_growth_from_here(error_code), point) as injector:
            try:
                save_step(directory, 2, with_files=True)
            except OSError as error:
                assert error.errno == error_code  # noqa: PT017 - the call may also succeed
            else:
                break
        step = assert_complete(directory, {1, 2})
        names = ["step-00000001", "step-00000001.json"]
        # Only if the very last sync fails, the new one exists: nobody knows whether it would survive a power cut.
        names += ["step-00000002", "step-00000002.json"] if step == 2 else []
        assert sorted(os.listdir(directory)) == names
        assert step == 1 or injector.names[-1] == "fsync"


def test_a_file_that_reads_back_differently_is_never_committed(tmp_path, monkeypatch):
    PREVIOUS(tmp_path / "c")
    real = os.write

    def flip(descriptor, part):
        data = bytearray(part)
        data[len(data) // 2] ^= 1
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", flip)
    with refusal(BrokenCheckpointError):
        save_step(tmp_path / "c", 2)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path / "c")) == ["step-00000001", "step-00000001.json"]
