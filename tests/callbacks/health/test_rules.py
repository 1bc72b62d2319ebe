"""Rules that need more than one check, or more than one rank, on plain numbers."""

import math

import pytest

from genlight.callbacks.health.rules import Case, History, Reading, find_faults


def kinds(history: History, **fields) -> list[str]:
    """Return the faults of a check with these fields, and add the check to `history`."""
    reading = Reading(step=100, **fields)
    found = [fault.kind for fault in find_faults(Case(reading, history))]
    history.add(reading)
    return found


def test_a_rank_is_a_straggler_if_it_is_slow_at_two_checks_in_a_row() -> None:
    history = History()
    slow = {"ranks": [("a", 0.01), ("b", 0.05), ("c", math.nan)]}
    other = {"ranks": [("a", 0.05), ("b", 0.01), ("c", math.nan)]}

    assert [kinds(history, **each) for each in (slow, other, slow, slow)] == [[], [], [], ["straggler"]]


@pytest.mark.parametrize("seconds", [[0.001, 0.0025], [0.01, 0.015], [math.nan, 0.5], [0.5]])
def test_a_small_difference_or_a_single_rank_is_no_straggler(seconds) -> None:
    history = History()

    assert [kinds(history, ranks=[("a", each) for each in seconds]) for _ in range(3)] == [[], [], []]


def test_a_gradient_explodes_compared_with_earlier_ones_unless_all_are_small() -> None:
    history = History()
    for _ in range(5):
        assert kinds(history, gradient_norms={"w": 0.5}) == []
    assert kinds(history, gradient_norms={"w": 60.0}) == ["exploding_gradients"]

    converged = History()
    for _ in range(5):
        kinds(converged, gradient_norms={"w": 1e-7})
    assert kinds(converged, gradient_norms={"w": 0.1}) == []


def test_a_rate_that_rises_after_it_fell_is_a_fault_and_a_warm_up_is_not() -> None:
    rising = History()
    assert not any(kinds(rising, rate=0.001 * step) for step in range(1, 33))

    falling = History()
    assert [kinds(falling, rate=rate) for rate in (0.1, 0.2, 0.1, 0.1, 0.15)] == [
        *([], [], [], []),
        ["rising_learning_rate"],
    ]
