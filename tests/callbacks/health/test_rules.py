"""Rules that need more than one check, or more than one rank, on plain numbers."""

from __future__ import annotations

import pytest

from genlight.callbacks.health.faults import History, Limits, Reading
from genlight.callbacks.health.rules import find_faults


def kinds(history: History, **fields) -> list[str]:
    """The faults of a check with these fields, after which `history` knows it."""
    reading = Reading(step=100, **fields)
    found = [fault.kind for fault in find_faults(reading, history, Limits())]
    history.add(reading)
    return found


def test_a_rank_is_a_straggler_when_it_is_slow_at_two_checks_in_a_row() -> None:
    history = History()
    hosts = ["a", "b", "c"]
    slow = {"step_seconds": [0.01, 0.05, None], "hosts": hosts}
    other = {"step_seconds": [0.05, 0.01, None], "hosts": hosts}

    assert [kinds(history, **each) for each in (slow, other, slow, slow)] == [[], [], [], ["straggler"]]


@pytest.mark.parametrize("seconds", [[0.001, 0.0025], [0.01, 0.015], [None, 0.5], [0.5]])
def test_a_small_difference_or_a_rank_alone_is_no_straggler(seconds) -> None:
    history = History()

    assert [kinds(history, step_seconds=seconds, hosts=["a", "b"]) for _ in range(3)] == [[], [], []]


def test_a_gradient_explodes_against_what_was_usual_but_not_where_all_are_small() -> None:
    history = History()
    for _ in range(5):
        assert kinds(history, gradient_norms={"w": 0.5}) == []
    assert kinds(history, gradient_norms={"w": 60.0}) == ["exploding_gradients"]

    converged = History()
    for _ in range(5):
        kinds(converged, gradient_norms={"w": 1e-7})
    assert kinds(converged, gradient_norms={"w": 0.1}) == []


def test_a_rate_that_rises_after_it_fell_is_told_of_and_a_warm_up_is_not() -> None:
    rising = History()
    assert not any(kinds(rising, highest_rate=0.001 * step) for step in range(1, 33))

    falling = History()
    assert [kinds(falling, highest_rate=rate) for rate in (0.1, 0.2, 0.1, 0.1, 0.15)] == [
        *([], [], [], []),
        ["rising_learning_rate"],
    ]


def test_what_a_history_knows_is_plain_data_and_comes_back() -> None:
    history = History()
    kinds(history, gradient_norms={"w": 0.0, "v": 1.0}, losses=[(1, 2.0)], highest_rate=0.1, step_seconds=[0.1])

    other = History()
    other.load_state_dict({**history.state_dict(), "of a later version": 1})

    assert other.state_dict() == history.state_dict()
    assert other.losses.maxlen == history.losses.maxlen
