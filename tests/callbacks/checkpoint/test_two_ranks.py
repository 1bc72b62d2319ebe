"""Checkpoints of several ranks: one consistent set, from which each rank gets its own part back."""

import os
import subprocess
import sys

import pytest
import torch

from genlight.callbacks.checkpoint import load, newest_valid
from support import SUPPORT

PROGRAM = SUPPORT / "two_ranks.py"


def run(folder, directory, what, world_size=2):
    """Weights of each rank after one run, and what the ranks wrote to their terminals."""
    folder.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(world_size), str(folder), str(directory), what],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world_size, "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)], "".join(outputs)


@pytest.mark.slow
def test_two_ranks_resume_to_the_same_bits_and_one_rank_keeps_what_it_can(tmp_path):
    expected, _ = run(tmp_path / "reference", tmp_path / "unused", "train")
    run(tmp_path / "killed", tmp_path / "c", "kill")

    record, warnings = newest_valid(tmp_path / "c")
    assert (record.step, record.world_size, warnings) == (3, 2, [])
    rng = load(record.path)["genlight"]["rng"]
    assert len(rng) == 2
    assert not torch.equal(rng[0]["torch"], rng[1]["torch"])

    resumed, output = run(tmp_path / "resumed", tmp_path / "c", "resume")
    for rank in range(2):
        assert all(torch.equal(resumed[rank][name], tensor) for name, tensor in expected[rank].items())
    assert "saved by" not in output

    _, output = run(tmp_path / "alone", tmp_path / "c", "resume", world_size=1)
    assert "The checkpoint was saved by 2 ranks and is resumed by 1" in output
