"""Checkpoints of several ranks: one consistent set, from which each rank restores its own part."""

import pytest
import torch

from genlight.callbacks.checkpoint import load, newest_valid
from support.rank_processes import run_ranks

pytestmark = pytest.mark.promise(name="resume")


def run(folder, directory, what, world_size=2):
    """Return the weights of each rank after one run, and the output of the ranks."""
    folder.mkdir()
    output = run_ranks("two_ranks.py", folder, directory, what, world_size=world_size)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)], output


@pytest.mark.slow
def test_two_ranks_resume_to_the_same_bits_and_one_rank_warns(tmp_path):
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

    _, output = run(tmp_path / "one", tmp_path / "c", "resume", world_size=1)
    assert "The checkpoint was saved by 2 ranks and is resumed by 1" in output
