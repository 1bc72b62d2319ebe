"""Feeds over batches that somebody else makes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.feed import ArrowFeed, BatchFeed, IterableFeed, MockBatches, as_feed


class Stateful:
    """A source that knows its own position."""

    def __init__(self) -> None:
        self.place = 0

    def iter_batches(self):
        while self.place < 5:
            self.place += 1
            yield self.place

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


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


def test_a_data_loader_resumes_by_dropping_what_was_taken_and_says_so():
    loader = DataLoader(torch.arange(6), batch_size=2)
    feed = IterableFeed(loader)
    list(itertools.islice(feed, 2))
    again = IterableFeed(loader)
    with pytest.warns(UserWarning, match="2 batches are read and dropped"):
        again.load_state_dict(feed.state_dict())
    assert [batch.tolist() for batch in again] == [[4, 5]]
    assert len(again) == 3


def test_a_source_with_a_state_of_its_own_keeps_the_position():
    feed = IterableFeed(Stateful())
    assert list(itertools.islice(feed, 2)) == [1, 2]
    again = IterableFeed(Stateful())
    again.load_state_dict(feed.state_dict())
    assert list(again) == [3, 4, 5]


def test_a_source_that_cannot_be_resumed_says_so():
    feed = IterableFeed(iter([1, 2]), resumable=False)
    with pytest.raises(InputError, match="has no position"):
        feed.load_state_dict({"taken": 1})


def test_waiting_for_a_slow_source_is_measured():
    feed = IterableFeed(iter([1, 2]))
    assert feed.wait_seconds == 0
    list(feed)
    assert feed.wait_seconds > 0


def test_anything_with_batches_becomes_a_feed(rows_file):
    arrow = ArrowFeed(rows_file(3))
    assert as_feed(arrow) is arrow
    assert isinstance(as_feed([1, 2]), MockBatches)
    assert isinstance(as_feed(range(3)), IterableFeed)
    assert isinstance(as_feed(Stateful()), IterableFeed)
    assert all(isinstance(feed, BatchFeed) for feed in (arrow, MockBatches([1]), IterableFeed([])))


def test_what_has_no_batches_is_refused():
    with pytest.raises(TypeError, match="Invalid `source`"):
        as_feed(3)


def test_mock_batches_resume_on_another_number_of_ranks():
    alone = MockBatches(list(range(7)))
    list(itertools.islice(alone, 3))
    ranks = [MockBatches(list(range(6)), rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(alone.state_dict())
    assert [list(rank) for rank in ranks] == [[3], [4]]


@pytest.mark.parametrize("feed", [MockBatches([1]), IterableFeed([1])])
def test_a_position_of_another_kind_of_source_is_refused(rows_file, feed):
    arrow = ArrowFeed(rows_file(3))
    with pytest.raises(InputError, match="another kind of source"):
        feed.load_state_dict(arrow.state_dict())
    with pytest.raises(InputError, match="another kind of source; it has taken, version"):
        arrow.load_state_dict(feed.state_dict())
