"""The order of an epoch: reproducible, complete, and as random as the window allows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from genlight.adapter import ArrowFeed
from genlight.adapter.feed import batching
from genlight.adapter.feed.position import Order, permutation

pytestmark = pytest.mark.promise(name="rows")


def test_a_permutation_never_changes_between_releases_of_numpy_or_of_ours():
    assert permutation(10, (7, 1, 2)).tolist() == [3, 4, 7, 6, 9, 1, 5, 8, 2, 0]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.data())
def test_the_pieces_of_a_span_cover_its_rows_without_gap_or_overlap(groups, data):
    order = Order(tuple(groups), seed=3, shuffle=True)
    first = data.draw(st.integers(0, order.rows))
    end = data.draw(st.integers(first, order.rows))
    pieces = list(order.pieces((1, first, end), lambda group: groups[group]))
    assert sum(piece.end - piece.first for piece in pieces) == end - first
    assert all(0 <= piece.first < piece.end <= groups[piece.group] for piece in pieces)
    rows = [(piece.group, i) for piece in pieces for i in range(piece.first, piece.end)]
    assert len(set(rows)) == len(rows)


def test_each_epoch_and_each_seed_has_its_own_order(rows_file, ids):
    path = rows_file(*[10] * 10)

    def orders_of(seed):
        return ids(ArrowFeed(path, batch_size=100, shuffle=True, seed=seed, epochs=2).iter_batches())

    feeds = {seed: orders_of(seed) for seed in (0, 1)}
    orders = [tuple(epoch) for epochs in feeds.values() for epoch in epochs]
    assert len(set(orders)) == 4
    assert feeds[1] == orders_of(1)


def test_rows_move_only_within_their_window_of_their_row_group(rows_file, ids):
    feed = ArrowFeed(rows_file(20, 20), batch_size=5, shuffle=True, shuffle_window=5, epochs=1)
    assert {tuple(sorted(batch)) for batch in ids(feed)} == {tuple(range(i, i + 5)) for i in range(0, 40, 5)}


def test_a_window_as_large_as_a_row_group_places_every_row_anywhere_in_it(rows_file, ids):
    feed = ArrowFeed(rows_file(50), batch_size=50, shuffle=True, epochs=150)
    places = np.array(ids(feed.iter_batches()))
    # Uniform: the mean place of each row is near the middle; 150 draws have a standard error of 1.2.
    assert np.abs(np.argsort(places, axis=1).mean(axis=0) - 24.5).max() < 6
    # No pair of neighbours stays together more often than chance has it (2 in 50, of which one direction).
    assert (np.diff(places, axis=1) == 1).mean() < 0.04


def test_row_groups_come_in_random_order(ids):
    tables = [pa.table({"id": [i]}) for i in range(50)]
    feed = ArrowFeed(tables, batch_size=50, shuffle=True, epochs=150)
    places = np.array(ids(feed.iter_batches()))
    assert np.abs(np.argsort(places, axis=1).mean(axis=0) - 24.5).max() < 6


def test_the_size_of_decoded_chunks_does_not_change_the_order(rows_file, ids, monkeypatch):
    path = rows_file(40, 3, 60)
    options = {"batch_size": 7, "shuffle": True, "shuffle_window": 16, "epochs": 1}
    whole = ids(ArrowFeed(path, **options))
    monkeypatch.setattr(batching, "CHUNK_BYTES", 100)
    assert ids(ArrowFeed(path, **options)) == whole
