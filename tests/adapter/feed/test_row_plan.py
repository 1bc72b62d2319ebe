"""The arithmetic of steps and shares, for any counts."""

import numpy as np
from hypothesis import given, strategies as st

from genlight.adapter import ArrowFeed
from genlight.adapter.feed import batching
from genlight.adapter.feed.position import permutation
from genlight.adapter.feed.row_plan import Share

shares = st.builds(
    Share,
    total=st.integers(0, 200),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 6),
    shard=st.sampled_from(["rows", "row_groups"]),
    drop_last=st.booleans(),
)


def rows_of(share: Share, step: int) -> list[int]:
    return [i for rank in range(share.world_size) for i in range(*share.interval(step, rank))]


@given(shares)
def test_the_steps_hand_out_each_usable_row_once_in_batches_of_equal_size(share):
    trained = []
    for step in range(share.steps):
        sizes = [end - start for start, end in (share.interval(step, r) for r in range(share.world_size))]
        assert max(sizes) - 1 <= min(sizes)
        assert 1 <= min(sizes) <= max(sizes) <= share.batch_size
        assert step >= share.full_steps or set(sizes) == {share.batch_size}
        trained += rows_of(share, step)
    # Rows come in rank order; with row groups each rank has one contiguous block.
    assert (trained if share.shard == "rows" else sorted(trained)) == list(range(share.usable))
    for rank in range(share.world_size if share.shard == "row_groups" else 0):
        mine = [i for step in range(share.steps) for i in range(*share.interval(step, rank))]
        assert mine == list(range(*share.block(rank)))


@given(shares)
def test_an_epoch_has_the_steps_of_one_process_and_leaves_out_few_rows(share):
    assert share.total - share.usable < (share.step_rows if share.drop_last else share.world_size)
    if share.batch_size > 1 and share.total >= share.world_size:
        alone = Share(share.total, share.step_rows, drop_last=share.drop_last)
        assert share.drop_last or share.usable == share.total
        assert share.steps == alone.steps
        assert share.full_steps >= alone.full_steps - 1


@given(shares, st.integers(0, 60), st.integers(0, 60), st.integers(0, 5))
def test_rows_consumed_rows_left_and_intervals_agree_with_the_steps(share, first, count, rank):
    rank, first = rank % share.world_size, min(first, share.steps)
    trained = [i for step in range(first) for i in rows_of(share, step)]
    left = [i for start, end in share.rest(first) for i in range(start, end)]
    assert share.consumed(first) == len(trained)
    assert left == sorted(set(range(share.total)) - set(trained))
    steps = range(first, min(first + count, share.steps))
    assert list(share.intervals(steps.start, steps.stop, rank)) == [share.interval(step, rank) for step in steps]


def test_a_permutation_never_changes_between_releases_of_numpy_or_of_ours():
    assert permutation(10, (7, 1, 2)).tolist() == [3, 4, 7, 6, 9, 1, 5, 8, 2, 0]


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


def test_the_size_of_decoded_chunks_does_not_change_the_order(rows_file, ids, monkeypatch):
    path = rows_file(40, 3, 60)
    options = {"batch_size": 7, "shuffle": True, "shuffle_window": 16, "epochs": 1}
    whole = ids(ArrowFeed(path, **options))
    monkeypatch.setattr(batching, "CHUNK_BYTES", 100)
    assert ids(ArrowFeed(path, **options)) == whole
