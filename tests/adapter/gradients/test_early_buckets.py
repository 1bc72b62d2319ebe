"""Gradients that travel while backward runs are those that travel afterwards, whatever a trainer does in between."""

from __future__ import annotations

import pytest
import torch

from genlight.adapter.gradients.early_buckets import EXCHANGES_PER_MISTAKE, MOST_MISTAKES, Habit
from support import early_buckets_ranks as ranks
from support.rank_processes import run_ranks

SENT_EARLY = 7 * (ranks.STEPS - 1)
"""By a trainer of habits: all buckets but the last, in every step but the first."""


def test_a_trainer_is_believed_to_call_backward_less_often_once_it_did_so_twice():
    habit = Habit()
    seen = []
    for calls in (2, 4, 4, 1, 4, 3, 3):
        habit.learn(calls, repeated=False)
        seen.append(habit.calls)

    assert seen == [2, 4, 4, 4, 4, 4, 3]


def test_buckets_are_sent_early_again_long_after_the_mistakes():
    habit = Habit()
    trusted = []
    for exchange in range(EXCHANGES_PER_MISTAKE):
        habit.learn(1, repeated=exchange < MOST_MISTAKES)
        trusted.append(habit.is_trusted)

    assert trusted == [True] + [False] * (EXCHANGES_PER_MISTAKE - 2) + [True]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    run_ranks("early_buckets_ranks.py", folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.SCENARIOS)
def test_weights_are_those_of_gradients_averaged_by_hand_and_equal_on_both_ranks(two_ranks, name):
    first, second = (rank[name] for rank in two_ranks)
    for mine, its, expected in zip(first["weights"], second["weights"], first["expected"], strict=True):
        assert torch.equal(mine, its)
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.SCENARIOS)
def test_gradients_that_are_views_of_buckets_end_with_the_same_bits_and_leave_as_early(two_ranks, name):
    for rank in two_ranks:
        views, copies = rank[f"{name} with views"], rank[name]
        assert all(map(torch.equal, views["weights"], copies["weights"]))
        assert views["early"] == copies["early"]


@pytest.mark.slow
def test_buckets_leave_inside_of_the_last_backward_call_once_the_habit_is_known(two_ranks):
    assert [rank["one_call"]["early"] for rank in two_ranks] == [SENT_EARLY, SENT_EARLY]


@pytest.mark.slow
def test_a_rank_without_a_gradient_does_not_keep_the_other_from_sending_early(two_ranks):
    early = [rank["a_layer_that_one_rank_leaves_out"]["early"] for rank in two_ranks]

    assert early[0] == SENT_EARLY
    assert 0 < early[1] < SENT_EARLY


@pytest.mark.slow
@pytest.mark.parametrize("name", ["more_calls_and_fewer", "a_gradient_that_is_kept"])
def test_a_trainer_without_habits_is_no_longer_taken_at_its_word(two_ranks, name):
    assert all(0 < rank[name]["early"] < SENT_EARLY for rank in two_ranks)
