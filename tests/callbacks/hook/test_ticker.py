"""A hook is woken by the clock, once it is due and not before, from start to stop."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from genlight.callbacks import Hook
from genlight.callbacks.hook.cadence import NEVER
from genlight.callbacks.hook.ticker import SHORTEST_S, Ticker


def wait_for_tick(hook: Hook) -> None:
    while hook.next_due_step == NEVER:
        time.sleep(0.001)


def threads_of_tickers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "genlight-ticker"}


@pytest.fixture
def started():
    """A ticker that has begun, and its hook, which rests."""
    tickers = []

    def start(every_s, due_at):
        hook = Hook()
        tickers.append(Ticker(hook, every_s, due_at))
        tickers[-1].start()
        tickers[-1].rest()
        return tickers[-1], hook

    yield start
    for ticker in tickers:
        ticker.stop()


def test_a_hook_that_rests_is_woken_again_and_again(started):
    ticker, hook = started(SHORTEST_S, lambda: 0.0)
    for _ in range(3):
        ticker.rest()
        wait_for_tick(hook)
        assert hook.next_due_step == 0


def test_nobody_is_woken_before_it_is_due(started):
    asked = threading.Semaphore(0)
    due_at = [time.monotonic() + 3600]

    def ask():
        asked.release()
        return due_at[0] if len(asks) < 3 else 0.0

    asks = []
    _, hook = started(SHORTEST_S, lambda: (asks.append(1), ask())[1])
    assert asked.acquire(timeout=60)
    assert hook.next_due_step == NEVER


def test_a_moment_that_moves_on_is_waited_for(started, monkeypatch):
    """By a clock that stands still, so that no moment passes while a busy machine does something else."""
    monkeypatch.setattr("genlight.callbacks.hook.ticker.time", SimpleNamespace(monotonic=lambda: 1000.0))
    asked = []

    def due_at():
        asked.append(1)
        return 1000.02 if len(asked) < 4 else 1000.0

    _, hook = started(SHORTEST_S, due_at)
    wait_for_tick(hook)

    assert len(asked) >= 4


def test_what_is_due_more_often_than_a_thread_should_wake_does_not_rest(started):
    before = threads_of_tickers()
    _, hook = started(SHORTEST_S / 2, lambda: 0.0)
    assert hook.next_due_step == 0
    assert not threads_of_tickers() - before


def test_a_stop_does_not_wait_for_the_next_tick_and_ends_the_thread(started):
    before = threads_of_tickers()
    ticker, _ = started(3600.0, lambda: 0.0)
    assert len(threads_of_tickers() - before) == 1
    ticker.stop()
    ticker.stop()
    assert not threads_of_tickers() - before
