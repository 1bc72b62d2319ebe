"""Sending gradients during backward gives the same averages as sending them afterwards, whatever a trainer does."""

from __future__ import annotations

import pytest
import torch

from support import early_buckets_ranks as ranks
from support.rank_processes import run_ranks

pytestmark = pytest.mark.promise(name="ranks")

SENT_EARLY = 7 * ranks.STEPS
"""All buckets but the last one, in every step."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    run_ranks("early_buckets_ranks.py", folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.SCENARIOS)
def test_weights_equal_an_update_with_gradients_averaged_by_hand_on_both_ranks(two_ranks, name):
    first, second = (rank[name] for rank in two_ranks)
    for mine, its, expected in zip(first["weights"], second["weights"], first["expected"], strict=True):
        assert torch.equal(mine, its)
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_buckets_are_sent_during_the_last_backward_call(two_ranks):
    assert [rank["one_call"]["early"] for rank in two_ranks] == [SENT_EARLY, SENT_EARLY]


@pytest.mark.slow
def test_a_rank_without_a_gradient_does_not_keep_the_other_from_sending_early(two_ranks):
    early = [rank["a_layer_that_one_rank_leaves_out"]["early"] for rank in two_ranks]

    assert early[0] == SENT_EARLY
    assert 0 < early[1] < SENT_EARLY
