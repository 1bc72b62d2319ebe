"""The feed as its users see it: batches, order, shares of the ranks, position."""

from __future__ import annotations

import json

import pytest

from genlight.adapter import ArrowFeed
from support.messages import refusal

pytestmark = pytest.mark.promise(name="rows")


def flat(batches):
    return [i for batch in batches for i in batch]


def test_batches_have_exactly_the_size_asked_for_whatever_the_row_groups(rows_file, ids):
    feed = ArrowFeed(rows_file(5, 1, 7, 0, 3), batch_size=4, epochs=1)
    assert ids(feed) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_the_last_batch_of_an_epoch_is_short_and_never_mixed_with_the_next_epoch(rows_file, ids):
    feed = ArrowFeed(rows_file(6), batch_size=4)
    assert ids(feed.iter_batches(), 4) == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("shard", ["rows", "row_groups"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_feed_goes_on_after_the_last_batch_handed_out(rows_file, ids, shard, shuffle):
    options = {"batch_size": 4, "epochs": 2, "shard": shard, "shuffle": shuffle, "shuffle_window": 5, "world_size": 2}
    path = rows_file(11, 2, 20, 9)
    whole = ids(ArrowFeed(path, **options).iter_batches())
    for steps in range(len(whole) + 1):
        feed = ArrowFeed(path, **options)
        iterator = feed.iter_batches()
        assert ids(iterator, steps) == whole[:steps]
        state = json.loads(json.dumps(feed.state_dict()))
        iterator.close()
        again = ArrowFeed(path, **options)
        again.load_state_dict(state)
        assert ids(again.iter_batches()) == whole[steps:]


def test_one_iteration_is_one_epoch(rows_file, ids):
    feed = ArrowFeed(rows_file(5), batch_size=2, shuffle=True)
    first, second = ids(feed), ids(feed)
    assert len(feed) == len(first) == 3
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(5))
    assert first != second


def test_all_epochs_start_at_the_first_row_each_time_they_are_asked_for(rows_file, ids):
    feed = ArrowFeed(rows_file(5), batch_size=2, epochs=2)
    assert ids(feed.iter_batches(), 2) == [[0, 1], [2, 3]]
    assert ids(feed.iter_batches()) == [[0, 1], [2, 3], [4]] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_is_overtaken_by_another_fails_instead_of_mixing_rows(rows_file, ids, workers):
    feed = ArrowFeed(rows_file(30), batch_size=4, epochs=1, workers=workers)
    first = iter(feed)
    assert ids(first, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    second = iter(feed)
    assert ids(second, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with refusal(RuntimeError):
        next(first)
    assert ids(second, 1) == [[8, 9, 10, 11]]
    feed.close()
    with refusal(RuntimeError):
        next(second)
