"""Batches that hold fewer rows than asked are said once, when the feed is opened."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest

from genlight.adapter import ArrowFeed


@pytest.mark.parametrize(
    ("options", "level", "said"),
    [
        (
            {"batch_size": 4},
            logging.INFO,
            "the last step of each epoch has 2 rows, the others 4; `drop_last` leaves out the last 2",
        ),
        (
            {"batch_size": 4, "world_size": 2},
            logging.INFO,
            "the last step of each epoch has 2 rows, the others 8 of 2 ranks",
        ),
        (
            {"batch_size": 16},
            logging.WARNING,
            "the data has 10 rows, fewer than the 16 of a step: each step has them all",
        ),
        (
            {"batch_size": 2, "world_size": 3},
            logging.INFO,
            "the last step of each epoch has 4 rows, the others 6 of 3 ranks; there some ranks have a row more",
        ),
        (
            {"batch_size": 3, "world_size": 3},
            logging.INFO,
            "the last steps of each epoch have 7 and 3 rows, the others 9 of 3 ranks; there some ranks have a row more",
        ),
        (
            {"batch_size": 1, "world_size": 3},
            logging.INFO,
            "1 rows of each epoch are too few for 3 ranks: they come before the rows of the next epoch",
        ),
        ({"batch_size": 5}, None, ""),
        ({"batch_size": 4, "drop_last": True}, None, ""),
        ({"batch_size": 4, "world_size": 2, "rank": 1}, None, ""),
    ],
)
def test_a_step_with_fewer_rows_than_asked_is_said_once(caplog, options, level, said):
    caplog.set_level(logging.INFO, logger="genlight")
    feed = ArrowFeed(pa.table({"x": list(range(10))}), epochs=2, **options)
    next(iter(feed))
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [number for number, _ in told] == ([] if level is None else [level])
    assert all(message.startswith(said) for _, message in told), told
