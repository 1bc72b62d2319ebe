"""Gradients that a step leaves without an update travel once, with the update, and every resume is exact."""

from __future__ import annotations

import pytest
import torch
from zoo import runs

from support import waiting_ranks as ranks
from support.rank_processes import run_ranks

PARAMETERS = 8


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("waiting")
    run_ranks("waiting_ranks.py", folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.SCENARIOS)
def test_weights_are_those_of_gradients_averaged_by_hand_at_each_update_and_equal_on_both_ranks(two_ranks, name):
    first, second = (rank[name] for rank in two_ranks)
    for mine, its, expected in zip(first["weights"], second["weights"], first["expected"], strict=True):
        assert torch.equal(mine, its)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_buckets_are_sent_in_the_steps_that_update_and_in_no_other(two_ranks):
    for rank in two_ranks:
        sent = rank["over_three_steps"]["sent"]
        assert [step for step, count in enumerate(sent) if count] == [2, 5, 8]
        assert set(sent) == {0, PARAMETERS}


@pytest.mark.slow
def test_a_rank_that_reads_a_gradient_has_all_average(two_ranks):
    for rank in two_ranks:
        assert all(rank["read_by_one_rank"]["sent"])
        assert [bool(count) for count in rank["read_in_the_middle"]["sent"]][:3] == [False, True, True]


@pytest.mark.slow
def test_gradients_that_wait_at_the_end_are_each_ranks_own_even_where_some_are_on_their_way(two_ranks):
    """The trainer had updated in each step, so that buckets leave early, for an update that does not come."""
    first, second = (rank["updates_that_cease"] for rank in two_ranks)

    assert first["waits"] is second["waits"] is True
    assert 0 < first["sent"][ranks.STEPS - 4] < PARAMETERS
    assert not any(torch.equal(mine, its) for mine, its in zip(first["grads"], second["grads"], strict=True))


@pytest.mark.slow
def test_an_update_that_one_rank_makes_alone_is_told_by_all_in_the_same_step(two_ranks):
    for rank in two_ranks:
        message = rank["an_update_of_one_rank"]
        assert "Ranks part ways: rank 0 updates" in message
        assert "rank 1 has ended the step with gradients and without an update in step 6" in message


OPEN_AFTER = {"zoo.accumulation:OverTwoSteps": 1, "support.waiting_ranks:ClippedLater": 2}
"""After how many steps gradients wait; the second class reads them before it computes more."""


@pytest.mark.slow
def test_a_resume_in_the_middle_of_a_window_ends_with_the_bits_of_a_run_that_went_through(tmp_path):
    common = [
        {"name": name, "strategy": "small buckets", "precision": precision}
        for name in OPEN_AFTER
        for precision in ("32-true", "16-mixed")
    ]
    whole = [{**job, "key": f"whole {job}"} for job in common]
    resumed = [
        {**job, "key": f"resumed {job}", "interrupted": OPEN_AFTER[job["name"]], "durable": True} for job in common
    ]

    for rank in runs.on_two_ranks(tmp_path, [*whole, *resumed]):
        for one, other in zip(whole, resumed, strict=True):
            expected, actual = rank[one["key"]], rank[other["key"]]
            assert not isinstance(actual, str), actual
            assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("sync_each_batch", [False, True])
def test_a_module_has_gradients_averaged_in_each_step_where_it_is_told_to(tmp_path, sync_each_batch):
    job = {"key": "run", "name": "support.waiting_ranks:ClippedLater", "strategy": "small buckets"}

    first, second = (each["run"] for each in runs.on_two_ranks(tmp_path, [{**job, "sync_each_batch": sync_each_batch}]))

    for name in first:
        is_gradient = name.startswith("gradient of ")
        assert torch.equal(first[name], second[name]) is (sync_each_batch or not is_gradient), name
