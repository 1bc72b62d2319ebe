"""Setting checkpoints aside for a new start, killed at any moment, leaves each of them whole in one place."""

import contextlib
import itertools
import os

import torch

from genlight.adapter.run.resume import move_checkpoints_aside
from genlight.callbacks.checkpoint import save, verify

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
