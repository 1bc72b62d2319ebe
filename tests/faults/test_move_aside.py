"""A move of checkpoints that is killed at any moment leaves each of them complete, under its old or its new name."""

import contextlib
import itertools
import os

import pytest
import torch

from genlight.adapter.run.start import move_checkpoints_aside
from genlight.callbacks.checkpoint import RecordMeta, save, storage, sweep, verify

pytestmark = pytest.mark.promise(name="checkpoint")

STEPS = (1, 2, 3)


def steps_in(folder):
    return {verify(record).step for record in folder.glob("step-*.json") if (folder / record.stem).is_dir()}


def complete_steps(directory):
    """Return the steps of the checkpoints in the directory and in the folders that they were moved to."""
    return steps_in(directory).union(*map(steps_in, directory.glob("before-*/checkpoints")))


def test_each_checkpoint_stays_complete_if_a_move_is_killed(tmp_path, inject, crash, crash_type):
    for at in itertools.count(1):
        directory = tmp_path / str(at) / "checkpoints"
        for step in STEPS:
            save(directory / f"step-{step:08d}", {"global_step": step, "state_dict": {"w": torch.ones(3)}})
        with inject(crash, at) as injector, contextlib.suppress(crash_type):
            move_checkpoints_aside(directory)
        assert complete_steps(directory) == set(STEPS), (at, injector.names)
        if injector.calls < at:
            break

        move_checkpoints_aside(directory)  # as the next start does
        assert complete_steps(directory) == set(STEPS), (at, injector.names)
        assert [name for name in os.listdir(directory) if name.startswith("step-")] == []
    assert at > 2 * len(STEPS)


def test_a_power_cut_after_a_move_leaves_each_checkpoint_complete(memory, recording_disk, seeded):
    directory = memory / "checkpoints"
    for step in STEPS:
        save(directory / f"step-{step:08d}", {"global_step": step, "state_dict": {"w": torch.ones(3)}})
    undo, disk = pytest.MonkeyPatch(), recording_disk(memory, lambda: None)
    disk.install(undo)
    try:
        move_checkpoints_aside(directory)
    finally:
        undo.undo()
    for seed in range(5):
        disk.materialise(memory / "after", None if seed == 0 else seeded(seed))
        assert complete_steps(memory / "after" / "checkpoints") == set(STEPS)


def save_final(directory, step, run_id="r"):
    value = {"global_step": step, "state_dict": {"w": torch.full((3,), float(step))}}
    save(directory / "final", value, meta=RecordMeta(run_id=run_id, final=True))


def steps_by_name(directory):
    """Return the step of each checkpoint by name, after verifying it."""
    return {record.stem: verify(record).step for record in directory.glob("*.json")}


def test_the_older_final_stays_complete_if_its_move_is_killed(memory, inject, crash, crash_type, monkeypatch):
    monkeypatch.setattr(storage, "_live", set())
    for at in itertools.count(1):
        directory = memory / str(at)
        save_final(directory, 1)
        with inject(crash, at) as injector, contextlib.suppress(crash_type):
            save_final(directory, 2)
        assert 1 in steps_by_name(directory).values(), (at, injector.names)
        if injector.calls < at:
            break

        storage._live.clear()
        sweep(directory)
        if steps_by_name(directory).get("final") != 2:
            save_final(directory, 2)  # as the next start does
        assert steps_by_name(directory) == {"final": 2, "step-00000001": 1}, (at, injector.names)
        assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["final", "step-00000001"]
    assert at > 30


def test_a_final_is_moved_unless_its_step_exists_or_it_is_of_another_run_or_a_later_step(tmp_path):
    save_final(tmp_path, 1)
    save(
        tmp_path / "step-00000001", {"global_step": 1, "state_dict": {"w": torch.ones(3)}}, meta=RecordMeta(run_id="r")
    )
    before = (tmp_path / "step-00000001.json").read_bytes()
    save_final(tmp_path, 2)
    assert (tmp_path / "step-00000001.json").read_bytes() == before
    save_final(tmp_path, 1)
    save_final(tmp_path, 3, run_id="other")
    assert steps_by_name(tmp_path) == {"final": 3, "step-00000001": 1}


def test_a_final_that_cannot_be_moved_is_replaced_with_a_warning(tmp_path, caplog):
    save_final(tmp_path, 1)
    own = tmp_path / "step-00000001.json"
    own.write_text("{}")
    save_final(tmp_path, 2)
    assert verify(tmp_path / "final.json").step == 2
    assert own.read_text() == "{}"
    assert "could not be renamed to" in caplog.text
