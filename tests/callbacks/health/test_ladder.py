"""Which rung follows a fault, and when the ladder begins anew."""

from __future__ import annotations

import json

from genlight.callbacks.health.recover import Ladder


def climbed(ladder: Ladder, *steps: int) -> list[str]:
    return [attempt.rung for step in steps if (attempt := ladder.climb(step, "broken")) is not None]


def test_each_fault_takes_the_next_rung_and_the_last_one_is_taken_again():
    ladder = Ladder(("skip", "lower_lr", "roll_back"), 5, 10)
    assert climbed(ladder, 1, 2, 3, 4, 5, 6) == ["skip", "lower_lr", "roll_back", "roll_back", "roll_back"]
    assert ladder.climb(7, "broken") is None
    assert ladder.taken == {"skip": 1, "lower_lr": 1, "roll_back": 3}


def test_it_begins_anew_after_good_steps_beyond_the_furthest_fault():
    ladder = Ladder(("skip", "roll_back"), 3, 4)
    climbed(ladder, 10, 12)
    assert ladder.good_step(15) == ()
    assert [attempt.step for attempt in ladder.good_step(16)] == [10, 12]
    assert ladder.good_step(17) == ()  # an incident ends once
    assert climbed(ladder, 18) == ["skip"]


def test_a_roll_back_has_to_come_as_far_again_so_that_a_run_cannot_go_in_circles():
    ladder = Ladder(("roll_back",), 3, 4)
    climbed(ladder, 20)
    for step in range(11, 20):  # good again, since step 10, and then the same fault
        assert ladder.good_step(step) == ()
    assert climbed(ladder, 20, 20) == ["roll_back", "roll_back"]
    assert ladder.climb(20, "broken") is None


def test_an_earlier_fault_of_an_incident_moves_its_beginning_back_and_not_its_end():
    ladder = Ladder(("skip",), 3, 4)
    climbed(ladder, 20, 15)
    assert ladder.first_step == 15
    assert ladder.good_step(23) == ()
    assert ladder.good_step(24)


def test_an_incident_lasts_as_long_as_what_a_rung_holds():
    ladder = Ladder(("lower_lr",), 3, 4)
    climbed(ladder, 20)
    ladder.hold_until(30)
    assert ladder.good_step(33) == ()
    assert ladder.good_step(34)


def test_a_checkpoint_keeps_where_it_stands():
    ladder = Ladder(("skip", "lower_lr"), 3, 4)
    climbed(ladder, 20, 21)
    other = Ladder(("skip", "lower_lr"), 3, 4)
    other.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
    assert vars(other) == vars(ladder)
