"""Feeds from a job spec, and the feeder of the older runtime."""

from __future__ import annotations

import pytest

from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.contract.types import ArrowFeedConfig
from genlight.adapter.feed import ParquetArrowBatchFeeder, build_feed


def test_a_job_without_epochs_repeats_its_data(rows_file, ids):
    feed = build_feed({"parquet_paths": [str(rows_file(3))], "batch_size": 2, "epochs": None})
    assert ids(feed, 5) == [[0, 1], [2], [0, 1], [2], [0, 1]]


def test_a_job_names_columns_seed_epochs_and_sharding(rows_file, ids):
    path = str(rows_file(8, 8))
    dataset = {"parquet_paths": path, "columns": ["id"], "shuffle": True, "seed": 5, "epochs": 1, "shard": "row_groups"}
    ranks = [build_feed({**dataset, "batch_size": 4}, rank=rank, world_size=2) for rank in range(2)]
    assert ranks[0].schema.names == ["id"]
    assert sorted(i for rank in ranks for batch in ids(rank) for i in batch) == list(range(16))


def test_the_default_batch_size_is_32(rows_file, ids):
    assert [len(batch) for batch in ids(build_feed({"parquet_paths": [str(rows_file(40))], "epochs": 1}))] == [32, 8]


def test_an_unknown_key_is_refused_by_name(rows_file):
    with pytest.raises(ValueError, match="'suffle'"):
        build_feed({"parquet_paths": [], "suffle": True})


def test_a_job_without_paths_is_an_input_error():
    with pytest.raises(InputError, match="No data files"):
        build_feed({}).check()


def test_the_old_feeder_makes_one_pass_in_order_each_time(rows_file, ids):
    paths = [rows_file(3, name="a"), rows_file(2, name="b", first_id=3)]
    feeder = ParquetArrowBatchFeeder(paths, ArrowFeedConfig(batch_size=2, readahead=0, columns=["id"]))
    assert ids(feeder.iter_batches()) == ids(feeder) == [[0, 1], [2, 3], [4]]
    assert feeder.config.batch_size == 2
