"""Frozen weights of several ranks are written once, by rank zero, unless the ranks hold different parts of them."""

import pytest
import torch

from genlight.callbacks.checkpoint import list_checkpoints, load_weights, verify
from genlight.callbacks.checkpoint.contents import check_contents
from support.adapted_model import Adapted
from support.rank_processes import run_ranks

pytestmark = pytest.mark.promise(name="checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize(("what", "weights"), [("ddp", "trained"), ("sharded", "all")])
def test_ranks_share_frozen_weights_and_resume(tmp_path, what, weights):
    ended = []
    for attempt in ("first", "second"):
        (tmp_path / attempt).mkdir()
        run_ranks("adapted_ranks.py", tmp_path / attempt, tmp_path / "c", what, weights)
        ended.append([torch.load(tmp_path / attempt / f"rank{rank}.pt", weights_only=True) for rank in range(2)])

    records = [listed.record for listed in list_checkpoints(tmp_path / "c")]
    base = Adapted().state_dict()
    assert [record.step for record in records] == [2, 4, 6, 6]
    for record in records:
        check_contents(verify(record.path))
        found = load_weights(record.path, base=base)
        assert all(torch.equal(found[key], base[key]) for key in base if key.startswith("base.") or key == "table")
        sharded = {"base.3.weight", "base.3.bias"} if what == "sharded" else set()
        frozen = {key for key in base if key.startswith("base.")}
        assert {left.key for left in record.left_out} == (frozen - sharded if weights == "trained" else set())
    inodes = {path.stat().st_ino for path in (tmp_path / "c").glob("*/frozen.safetensors")}
    assert len(inodes) == (1 if weights == "all" else 0)
    for rank in range(2):
        found = load_weights(tmp_path / "c" / "final.json", base=base)
        assert all(torch.equal(found[key], value) for key, value in ended[1][rank].items())
