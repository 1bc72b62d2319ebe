"""Batches that hold fewer rows than asked are said once, when the feed is opened."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest

from genlight.adapter import ArrowFeed

pytestmark = pytest.mark.promise(name="rows")


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
