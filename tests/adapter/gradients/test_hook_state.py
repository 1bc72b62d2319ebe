"""A communication hook that remembers what it was given is given the same in each run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.communication_hooks import CommunicationHook
from genlight.adapter.gradients.gradient_sync import GradientSync
from genlight.adapter.gradients.hook_state import KeptHookState, kept_hook_state
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Seen:
    """A hook's state that says itself what is kept of it."""

    def __init__(self) -> None:
        self.buckets: list[tuple[int, int, bool]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"buckets": list(self.buckets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buckets = state["buckets"]


def remember(state: Seen, bucket: Any) -> Any:
    state.buckets.append((bucket.index(), bucket.buffer().numel(), bucket.is_last()))
    return allreduce_hook(None, bucket)


class Run:
    """A network of two layers, with a bucket for each parameter and a hook that remembers."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        found = discover({"model": self.model, "optimizer": self.optimizer})
        hook = CommunicationHook(remember, self.seen)
        self.router = StepRouter(
            found,
            torch.device("cpu"),
            precision=StepPrecision("fp32"),
            gradients=GradientSync(found, bucket_bytes=1, hook=hook),
        )

    def step(self, *, backward_calls: int = 1) -> list[tuple[int, int, bool]]:
        """What the hook was given in a step."""
        self.seen.buckets.clear()
        with self.router:
            self.optimizer.zero_grad()
            for _ in range(backward_calls):
                self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()
        return list(self.seen.buckets)


ONCE = [(0, 3, False), (1, 6, True)]


def test_each_bucket_comes_once_in_the_order_of_the_plan_however_often_the_trainer_calls_backward():
    run = Run()

    assert [run.step(backward_calls=calls) for calls in (1, 1, 3, 2, 1)] == [ONCE] * 5


def test_a_step_without_a_gradient_is_not_seen_by_the_hook():
    run = Run()

    assert run.step(backward_calls=0) == []
    assert run.step() == ONCE


def test_parameters_keep_their_number_in_a_run_that_begins_while_others_are_frozen():
    through, resumed = Run(), Run()
    whole, part = through.step(), None
    for frozen in (True, False, True):
        through.model[0].requires_grad_(not frozen)
        part = through.step() if frozen else part
    resumed.model[0].requires_grad_(False)

    assert resumed.step() == part
    ((number, size, is_last),) = part or []
    assert number not in {each for each, _, _ in whole}
    assert (size, is_last) == (3, True)


def test_what_a_state_says_of_itself_is_saved_and_given_back():
    state, other = Seen(), Seen()
    state.buckets.append((0, 3, True))

    KeptHookState(other, CPU).load_state_dict(KeptHookState(state, CPU).state_dict())

    assert other.buckets == [(0, 3, True)]


@pytest.mark.parametrize("state", [None, "group"])
def test_a_hook_without_a_memory_has_nothing_to_save(state):
    group = dist.group.WORLD if state else None

    assert kept_hook_state(DDPStrategy(ddp_comm_hook=allreduce_hook, ddp_comm_state=group)) is None


def test_power_sgd_goes_on_with_its_errors_factors_count_and_generator_but_not_with_another_runs_settings():
    state = PowerSGDState(None, matrix_approximation_rank=1)
    state.error_dict = {0: torch.ones(3)}
    state.p_memory_dict, state.q_memory_dict = {0: torch.ones(2)}, {0: torch.zeros(2)}
    state.iter = 7
    state.rng.randint(10)
    fresh = PowerSGDState(None, matrix_approximation_rank=2)

    KeptHookState(fresh, CPU).load_state_dict(KeptHookState(state, CPU).state_dict())

    assert (fresh.iter, fresh.matrix_approximation_rank) == (7, 2)
    assert fresh.error_dict[0].tolist() == [1, 1, 1]
    assert fresh.p_memory_dict.keys() == fresh.q_memory_dict.keys() == {0}
    assert np.array_equal(fresh.rng.randint(1000, size=5), state.rng.randint(1000, size=5))
