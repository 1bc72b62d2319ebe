"""The feeder of the older runtime."""

from __future__ import annotations

import pytest

from genlight.adapter import ParquetArrowBatchFeeder
from genlight.adapter.contract.types import ArrowFeedConfig

pytestmark = pytest.mark.promise(name="rows")


def test_the_old_feeder_makes_one_pass_in_order_each_time(rows_file, ids):
    paths = [rows_file(3, name="a"), rows_file(2, name="b", first_id=3)]
    feeder = ParquetArrowBatchFeeder(paths, ArrowFeedConfig(batch_size=2, readahead=0, columns=["id"]))
    assert ids(feeder.iter_batches()) == ids(feeder) == [[0, 1], [2, 3], [4]]
    assert feeder.config.batch_size == 2
