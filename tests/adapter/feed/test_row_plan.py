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
def test_the_steps_hand_out_each_usable_row_exactly_once(share):
    trained = [i for step in range(share.steps) for i in rows_of(share, step)]
    assert sorted(trained) == list(range(share.usable))


@given(shares)
def test_only_drop_last_and_batches_of_one_row_leave_rows_out(share):
    if not share.drop_last and share.total >= share.world_size and share.batch_size > 1:
        assert share.usable == share.total
    assert share.total - share.usable < (share.step_rows if share.drop_last else share.world_size)


@given(shares)
def test_no_rank_gets_a_batch_without_rows_and_sizes_differ_by_one_at_most(share):
    for step in range(share.steps):
        sizes = [end - start for start, end in (share.interval(step, r) for r in range(share.world_size))]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= share.batch_size
        if step < share.full_steps:
            assert set(sizes) == {share.batch_size}


@given(shares)
def test_an_epoch_has_the_steps_of_one_process_with_the_batches_together(share):
    alone = Share(share.total, share.step_rows, drop_last=share.drop_last)
    if share.batch_size > 1 and share.total >= share.world_size:
        assert share.steps == alone.steps
        assert share.full_steps >= alone.full_steps - 1


@given(shares)
def test_rows_are_the_next_rows_of_the_epoch_in_rank_order(share):
    if share.shard == "rows":
        trained = [i for step in range(share.steps) for i in rows_of(share, step)]
        assert trained == list(range(share.usable))


@given(shares)
def test_with_row_groups_a_rank_owns_one_contiguous_block(share):
    if share.shard == "row_groups":
        for rank in range(share.world_size):
            mine = [i for step in range(share.steps) for i in range(*share.interval(step, rank))]
            assert mine == list(range(*share.block(rank)))


@given(shares, st.integers(0, 60))
def test_what_is_left_after_some_steps_is_what_they_did_not_train(share, steps):
    steps = min(steps, share.steps)
    trained = {i for step in range(steps) for i in rows_of(share, step)}
    left = [i for start, end in share.rest(steps) for i in range(start, end)]
    assert left == sorted(set(range(share.total)) - trained)


@given(shares, st.integers(0, 60))
def test_consumed_counts_the_rows_of_the_first_steps(share, steps):
    steps = min(steps, share.steps)
    assert share.consumed(steps) == sum(len(rows_of(share, step)) for step in range(steps))


@given(shares, st.integers(0, 60), st.integers(0, 60), st.integers(0, 5))
def test_the_intervals_of_a_rank_are_those_of_its_steps(share, first, count, rank):
    rank, first = rank % share.world_size, min(first, share.steps)
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
