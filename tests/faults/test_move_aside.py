"""Moving checkpoints, killed at any moment, leaves each of them whole in one place: aside, or to the name of a step."""

import contextlib
import itertools
import os

import pytest
import torch

from genlight.adapter.run.start import move_checkpoints_aside
from genlight.callbacks.checkpoint import RecordMeta, save, storage, sweep, verify

STEPS = (1, 2, 3)


def steps_in(folder):
    return {verify(record).step for record in folder.glob("step-*.json") if (folder / record.stem).is_dir()}


def whole_steps(directory):
    """Of checkpoints in the directory, or in a folder that they were moved to."""
    return steps_in(directory).union(*map(steps_in, directory.glob("before-*/checkpoints")))


def test_each_checkpoint_stays_whole_whenever_a_move_is_killed(tmp_path, inject, crash, crash_type):
    for at in itertools.count(1):
        directory = tmp_path / str(at) / "checkpoints"
        for step in STEPS:
            save(directory / f"step-{step:08d}", {"global_step": step, "state_dict": {"w": torch.ones(3)}})
        with inject(crash, at) as injector, contextlib.suppress(crash_type):
            move_checkpoints_aside(directory)
        assert whole_steps(directory) == set(STEPS), (at, injector.names)
        if injector.calls < at:
            break

        move_checkpoints_aside(directory)  # by the next start
        assert whole_steps(directory) == set(STEPS), (at, injector.names)
        assert [name for name in os.listdir(directory) if name.startswith("step-")] == []
    assert at > 2 * len(STEPS)


def test_a_power_cut_after_a_move_leaves_each_checkpoint_whole(memory, recording_disk, seeded):
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
        assert whole_steps(memory / "after" / "checkpoints") == set(STEPS)


def save_final(directory, step, run_id="r"):
    value = {"global_step": step, "state_dict": {"w": torch.full((3,), float(step))}}
    save(directory / "final", value, meta=RecordMeta(run_id=run_id, final=True))


def whole(directory):
    """The step of each whole checkpoint, by name."""
    return {record.stem: verify(record).step for record in directory.glob("*.json")}


def test_the_older_final_is_whole_under_one_of_its_names_whenever_the_move_is_killed(
    memory, inject, crash, crash_type, monkeypatch
):
    monkeypatch.setattr(storage, "_live", set())
    for at in itertools.count(1):
        directory = memory / str(at)
        save_final(directory, 1)
        with inject(crash, at) as injector, contextlib.suppress(crash_type):
            save_final(directory, 2)
        assert 1 in whole(directory).values(), (at, injector.names)
        if injector.calls < at:
            break

        storage._live.clear()
        sweep(directory)
        if whole(directory).get("final") != 2:
            save_final(directory, 2)  # by the next start
        assert whole(directory) == {"final": 2, "step-00000001": 1}, (at, injector.names)
        assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["final", "step-00000001"]
    assert at > 30


def test_a_checkpoint_of_the_step_stays_and_one_of_another_run_or_of_a_later_step_is_replaced(tmp_path):
    save_final(tmp_path, 1)
    save(
        tmp_path / "step-00000001", {"global_step": 1, "state_dict": {"w": torch.ones(3)}}, meta=RecordMeta(run_id="r")
    )
    before = (tmp_path / "step-00000001.json").read_bytes()
    save_final(tmp_path, 2)
    assert (tmp_path / "step-00000001.json").read_bytes() == before
    save_final(tmp_path, 1)
    save_final(tmp_path, 3, run_id="other")
    assert whole(tmp_path) == {"final": 3, "step-00000001": 1}


def test_what_cannot_be_moved_is_replaced_with_a_warning(tmp_path, caplog):
    save_final(tmp_path, 1)
    own = tmp_path / "step-00000001.json"
    own.write_text("{}")
    save_final(tmp_path, 2)
    assert verify(tmp_path / "final.json").step == 2
    assert own.read_text() == "{}"
    assert "could not be renamed to" in caplog.text
