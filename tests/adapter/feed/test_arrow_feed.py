"""The feed as its users see it: batches, order, shares of the ranks, position, options."""

import logging

import pyarrow as pa
import pytest

from genlight.adapter import ArrowDataModule, ArrowFeed, ParquetArrowBatchFeeder
from genlight.adapter.contract.types import ArrowFeedConfig
from support.messages import refusal


def test_an_epoch_that_a_loop_sets_applies_unless_a_position_was_loaded(rows_file, ids):
    path = rows_file(5)
    feed = ArrowFeed(path, batch_size=2)
    assert ids(feed) == [[0, 1], [2, 3], [4]]
    assert ids(feed, 1) == [[0, 1]]
    again = ArrowFeed(path, batch_size=2)
    again.load_state_dict(feed.state_dict())
    again.set_epoch(0)
    assert ids(again) == [[2, 3], [4]]
    again.set_epoch(0)
    assert next(iter(again)).column("id").to_pylist() == [0, 1]
    assert again.state_dict()["position"]["epoch"] == 0


def test_all_epochs_start_at_the_first_row_each_time_they_are_asked_for(rows_file, ids):
    feed = ArrowFeed(rows_file(3, 0, 2), batch_size=2, epochs=2)
    assert len(feed) == 3
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


def test_the_old_feeder_makes_one_pass_in_order_each_time(rows_file, ids):
    paths = [rows_file(3, name="a"), rows_file(2, name="b", first_id=3)]
    feeder = ParquetArrowBatchFeeder(paths, ArrowFeedConfig(batch_size=2, readahead=0, columns=["id"]))
    assert ids(feeder.iter_batches()) == ids(feeder) == [[0, 1], [2, 3], [4]]
    assert feeder.config.batch_size == 2


@pytest.mark.parametrize("make", [ArrowDataModule, ArrowFeed])
def test_options_that_cannot_be_used_are_named_together_where_they_are_given(make):
    """A data module that complained in `setup` alone would do so after the ranks have met."""
    with refusal(ValueError):
        make("rows.parquet", batch_size=0, workers=-1, shard="q")
    with refusal(ValueError):
        make("rows.parquet", batch_size="3")
    with refusal(ValueError):
        make("rows.parquet", collate="os:nope")
    with refusal(TypeError):
        make("rows.parquet", collate="torhc")


@pytest.mark.parametrize(
    ("options", "level", "said"),
    [
        ({"batch_size": 4}, logging.INFO, "2 steps of 4 rows; the last 2 rows"),
        ({"batch_size": 4, "world_size": 2}, logging.INFO, "1 steps of 8 rows; the last 2 rows"),
        ({"batch_size": 16}, logging.WARNING, "0 steps of 16 rows; the last 10 rows"),
        ({"batch_size": 1, "world_size": 3}, logging.INFO, "3 steps of 3 rows; the last 1 rows"),
        ({"batch_size": 5}, None, ""),
        ({"batch_size": 4, "drop_last": True}, None, ""),
        ({"batch_size": 4, "world_size": 2, "rank": 1}, None, ""),
    ],
)
def test_a_step_with_fewer_rows_than_asked_is_said_once(caplog, options, level, said):
    caplog.set_level(logging.INFO, logger="genlight")
    feed = ArrowFeed(pa.table({"x": list(range(10))}), **options)
    for _ in range(2):
        next(iter(feed))
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [number for number, _ in told] == ([] if level is None else [level])
    assert all(message.startswith(f"an epoch of 10 rows has {said} make smaller steps") for _, message in told), told
