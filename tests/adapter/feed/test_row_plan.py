"""The arithmetic of steps and shares, for any counts."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from genlight.adapter.feed.row_plan import Share, cut

pytestmark = pytest.mark.promise(name="rows")

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


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 10)), max_size=4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4),
)
def test_cut_selects_from_spans_as_indexing_does_from_their_rows(raw, ranges):
    spans = [(epoch, first, first + length) for epoch, first, length in raw]
    rows = [(epoch, i) for epoch, first, end in spans for i in range(first, end)]
    expected = [row for start, end in ranges for row in rows[start:end]]
    assert [(epoch, i) for epoch, first, end in cut(spans, ranges) for i in range(first, end)] == expected
