"""Batches that stand in the job itself."""

from __future__ import annotations

import itertools

import pytest

from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.feed import ArrowFeed, MockBatches


def test_mock_batches_are_one_pass_and_start_again_with_each_iteration():
    feed = MockBatches([1, 2, 3])
    assert list(feed) == list(feed.iter_batches()) == [1, 2, 3]
    assert len(feed) == 3


def test_mock_batches_go_on_after_the_position():
    feed = MockBatches([1, 2, 3])
    next(iter(feed))
    again = MockBatches([1, 2, 3])
    again.load_state_dict(feed.state_dict())
    assert list(again) == [2, 3]


def test_ranks_share_mock_batches_step_by_step_and_a_remainder_is_left_out_with_a_warning():
    with pytest.warns(UserWarning, match="last 1 mock batches are left out"):
        ranks = [list(MockBatches([1, 2, 3, 4, 5], rank=r, world_size=2)) for r in range(2)]
    assert ranks == [[1, 3], [2, 4]]


def test_fewer_mock_batches_than_ranks_are_refused():
    with pytest.raises(InputError, match="1 mock batches for 2 ranks"):
        MockBatches([1], world_size=2)


def test_mock_batches_resume_on_another_number_of_ranks():
    alone = MockBatches(list(range(7)))
    list(itertools.islice(alone, 3))
    ranks = [MockBatches(list(range(6)), rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(alone.state_dict())
    assert [list(rank) for rank in ranks] == [[3], [4]]


def test_a_position_of_another_kind_of_source_is_refused(rows_file):
    feed, arrow = MockBatches([1]), ArrowFeed(rows_file(3))
    with pytest.raises(InputError, match="another kind of source"):
        feed.load_state_dict(arrow.state_dict())
    with pytest.raises(InputError, match="another kind of source; it has taken, version"):
        arrow.load_state_dict(feed.state_dict())
