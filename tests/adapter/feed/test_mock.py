"""Batches that stand in the job itself."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest

from genlight.adapter import MockDataModule
from genlight.adapter.contract.exceptions import InputError
from support.messages import refusal

pytestmark = pytest.mark.promise(name="rows")


def mock(batches, rank=0, world_size=1):
    data = MockDataModule(batches)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    return data.train_dataloader()


def test_each_iteration_is_one_pass_and_a_batch_can_be_asked_for_by_number():
    feed = mock([{"x": 1}, None, "three"])
    assert list(feed) == list(feed) == [{"x": 1}, None, "three"]
    assert (len(feed), feed[2]) == (3, "three")


def test_ranks_share_mock_batches_step_by_step_and_a_remainder_is_said(caplog):
    caplog.set_level(logging.INFO, logger="genlight")
    feeds = [mock([1, 2, 3, 4, 5], r, 2) for r in range(2)]
    assert [list(feed) for feed in feeds] == [[1, 3], [2, 4]]
    assert [feed[1] for feed in feeds] == [3, 4]
    assert "the last 1 rows" in caplog.text


def test_fewer_mock_batches_than_ranks_are_refused():
    with refusal(InputError):
        list(mock([1], 0, 2))


def test_mock_batches_resume_on_another_number_of_ranks():
    alone = mock(list(range(6)))
    list(itertools.islice(alone, 3))
    ranks = [mock(list(range(6)), rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(alone.state_dict())
    assert [list(rank) for rank in ranks] == [[3], [4]]
