"""A move of checkpoints that is killed at any moment leaves each of them complete, under its old or its new name."""

import contextlib
import itertools
import os
import random

import pytest
import torch

from genlight.adapter.run.start import move_checkpoints_aside
from genlight.callbacks.checkpoint import save, verify
from support.faulty_disk import Crash, inject, recorded

pytestmark = pytest.mark.promise(name="checkpoint")

STEPS = (1, 2, 3)


def steps_in(folder):
    return {verify(record).step for record in folder.glob("step-*.json") if (folder / record.stem).is_dir()}


def complete_steps(directory):
    """Return the steps of the checkpoints in the directory and in the folders that they were moved to."""
    return steps_in(directory).union(*map(steps_in, directory.glob("before-*/checkpoints")))


def test_each_checkpoint_stays_complete_if_a_move_is_killed(tmp_path, crash):
    for at in itertools.count(1):
        directory = tmp_path / str(at) / "checkpoints"
        for step in STEPS:
            save(directory / f"step-{step:08d}", {"global_step": step, "state_dict": {"w": torch.ones(3)}})
        with inject(crash, at) as injector, contextlib.suppress(Crash):
            move_checkpoints_aside(directory)
        assert complete_steps(directory) == set(STEPS), (at, injector.names)
        if injector.calls < at:
            break

        move_checkpoints_aside(directory)  # as the next start does
        assert complete_steps(directory) == set(STEPS), (at, injector.names)
        assert [name for name in os.listdir(directory) if name.startswith("step-")] == []
    assert at > 2 * len(STEPS)


def test_a_power_cut_after_a_move_leaves_each_checkpoint_complete(memory):
    directory = memory / "checkpoints"
    for step in STEPS:
        save(directory / f"step-{step:08d}", {"global_step": step, "state_dict": {"w": torch.ones(3)}})
    with recorded(memory) as disk:
        move_checkpoints_aside(directory)
    for seed in range(5):
        disk.materialise(memory / "after", None if seed == 0 else random.Random(seed))
        assert complete_steps(memory / "after" / "checkpoints") == set(STEPS)
