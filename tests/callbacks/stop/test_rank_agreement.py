"""Ranks agree on a number after the same step, seldom, and without waiting for each other's clocks."""

import itertools
import math
import threading

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from genlight.callbacks.hook.cadence import steps_within
from genlight.callbacks.stop.stop_requests import MOST_STEPS, ROUND_S, Agreement

STEP_S = (1 / 1024, 1 / 128)
"""Duration of a step on each of two ranks, by its own clock."""
APART = math.ceil(ROUND_S / max(STEP_S))
"""Steps from one round to the next, once they have found it."""


class Rank:
    """One rank of a process group that lives in a thread."""

    def __init__(self, number, store, step_s):
        self.number = number
        self.step_s = step_s
        self.group = dist.ProcessGroupGloo(store, number, len(STEP_S))
        self.now = 0.0
        self.rounds = []
        self.step = 0
        self.agreed = None
        self.agreement = Agreement(self, clock=lambda: self.now)

    def allreduce(self, *arguments):
        """The collective that the agreement uses."""
        self.rounds.append(self.step)
        return self.group.allreduce(*arguments)

    def train(self, steps, says_at=None):
        """Train until the ranks agree on a number, then set `agreed` to it and the step; send 2 from `says_at` on."""
        for self.step in range(1, steps + 1):
            self.now += self.step_s
            number = 2 if says_at is not None and self.step >= says_at else 0
            agreed = self.agreement.after_step(self.step, lambda number=number: number)
            if agreed:
                self.agreed = agreed, self.step
                break
        self.agreement.leave()


@pytest.fixture
def ranks():
    """Let two ranks do something at the same time, each in a separate thread."""

    def run(action, step_s=STEP_S):
        store, made, errors = dist.HashStore(), [None] * len(STEP_S), []

        def rank(number):
            try:
                made[number] = Rank(number, store, step_s[number])
                action(made[number])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(len(STEP_S))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
        assert not errors
        return made

    return run


def apart(steps):
    """How many steps lie between one round and the next."""
    return [after - before for before, after in itertools.pairwise(steps)]


def test_ranks_of_different_speed_begin_the_same_rounds_and_not_more_often_than_the_slowest_needs(ranks):
    fast, slow = ranks(lambda rank: rank.train(1000))

    assert fast.rounds == slow.rounds
    in_steps = [step for step in slow.rounds if step < 1000]
    assert in_steps[:3] == [1, 3, 7]
    assert len(in_steps) <= 4 + 1000 / APART
    assert max(apart(in_steps)) == APART


@pytest.mark.parametrize("told", range(len(STEP_S)))
@pytest.mark.parametrize("says_at", [1, 2, 3, 37, 500])
def test_all_ranks_learn_a_number_after_the_same_step_within_one_round(ranks, told, says_at):
    fast, slow = ranks(lambda rank: rank.train(1000, says_at if rank.number == told else None))

    assert fast.agreed == slow.agreed
    assert fast.rounds == slow.rounds
    number, step = fast.agreed
    assert fast.rounds[-1] == step - 1, "no round begins after an agreement"
    assert number == 2
    assert says_at < step <= says_at + min(says_at, APART) + 1


def test_the_next_round_adapts_to_steps_that_become_slow(ranks):
    def train(rank):
        for rank.step in range(1, 400):
            rank.now += 0.0005 if rank.step <= 200 else 10.0
            rank.agreement.after_step(rank.step, lambda: 0)
        rank.agreement.leave()

    fast, _ = ranks(train)
    late = [step for step in fast.rounds if step > 200]
    assert late[0] <= 200 + MOST_STEPS
    assert apart(late)[1:10] == [1] * 9


@pytest.mark.parametrize("early", range(len(STEP_S)))
@pytest.mark.parametrize("says_at", [None, 300])
def test_a_rank_that_ends_early_lets_the_others_continue(ranks, early, says_at):
    made = ranks(lambda rank: rank.train(*((7,) if rank.number == early else (400, says_at))))

    assert made[early].step == 7
    assert made[1 - early].step == 400 if says_at is None else made[1 - early].agreed[0] == 2


def test_ranks_that_go_back_agree_from_there_on(ranks):
    def train(rank):
        for step in [*range(1, 300), *range(100, 120)]:
            if step == 100 and rank.rounds and rank.rounds[-1] > 100:
                rank.agreement.rewind(99)
            rank.step = step
            rank.now += 0.0005
            rank.agreement.after_step(step, lambda: 0)
        rank.agreement.leave()

    fast, slow = ranks(train)
    assert fast.rounds == slow.rounds
    assert any(after < before for before, after in itertools.pairwise(fast.rounds))


def test_ranks_can_agree_at_once_and_the_first_round_comes_after_the_first_step(ranks):
    def train(rank):
        rank.agreed = rank.agreement.now(-rank.number), rank.agreement.now(0)
        rank.train(3)

    assert [(rank.agreed, rank.rounds[:4]) for rank in ranks(train)] == [((0, 0), [0, 0, 1, 3])] * 2


SECONDS = st.floats(0, 1000)


@given(seconds=SECONDS, steps=st.integers(1, 64), took_s=SECONDS, most=st.integers(1, 64))
def test_so_many_steps_fit_as_the_pace_says_but_no_more_than_twice_as_many_as_were_seen(seconds, steps, took_s, most):
    fitting = steps_within(seconds, steps=steps, took_s=took_s, most=most)

    assert 1 <= fitting <= min(most, 2 * steps)
    if fitting > 1:
        assert (fitting - 1) * took_s <= seconds * steps * (1 + 1e-9)
