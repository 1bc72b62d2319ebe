"""Objects with which training replaces those of `configure` are restored exactly, or refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, SequentialLR

from genlight.adapter import StepResult
from genlight.adapter.contract.exceptions import CheckpointError

from .test_exact_state import Plain, fit

pytestmark = pytest.mark.promise(name="resume")

CHANGED_AT = 2
Change = Callable[[Any], None]


class Changing(Plain):
    """Changes its state after its second step, and again when it loads, if it restores that change itself."""

    def __init__(self, change: Change, *, restores: bool = False) -> None:
        self.change, self.restores, self.steps = change, restores, 0

    def optimizer(self, parameters: Any) -> Any:
        return SGD(parameters, lr=0.1)

    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        last = SGD(state["model"].parameters(), lr=0.2, momentum=0.9)
        spare = SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
        schedule = CosineAnnealingLR(state["optimizer"], 4)
        return {**state, "other": nn.Linear(3, 1), "last": last, "spare": spare, "schedule": schedule}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["spare"].step()
        result = super().train_step(batch, state, ctx)
        if state["schedule"] is not None:
            state["schedule"].step()
        self.steps += 1
        if self.steps == CHANGED_AT:
            self.change(state)
        return result

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        self.steps = payload["steps"]
        if self.restores and self.steps >= CHANGED_AT:
            self.change(state)


def make_again(state: Any) -> None:
    """A warm restart, with a longer period."""
    state["schedule"] = CosineAnnealingLR(state["optimizer"], 9, eta_min=0.01)


def make_of_parts(state: Any) -> None:
    parts = [LinearLR(state["optimizer"], 0.1, total_iters=2), ExponentialLR(state["optimizer"], 0.9)]
    state["schedule"] = SequentialLR(state["optimizer"], parts, milestones=[2])


def make_of_a_function(state: Any) -> None:
    state["schedule"] = LambdaLR(state["optimizer"], lambda step: 0.5**step)


def add(state: Any) -> None:
    state["added"] = ExponentialLR(state["spare"], 0.9)


def take_another_optimizer(state: Any) -> None:
    state["schedule"] = CosineAnnealingLR(state["spare"], 4)


def swap_networks(state: Any) -> None:
    """Swap two networks, as double Q-learning does."""
    state["model"], state["other"] = state["other"], state["model"]


def swap_optimizers(state: Any) -> None:
    state["optimizer"], state["last"] = state["last"], state["optimizer"]


def remove(state: Any) -> None:
    state["schedule"] = None


def draw_own_numbers(state: Any) -> None:
    """Make a generator when it is first needed."""
    state["generator"] = torch.Generator().manual_seed(0)


REFUSED = [
    (make_of_parts, 'state["schedule"]', "SequentialLR(LinearLR, ExponentialLR)"),
    (make_of_a_function, 'state["schedule"]', "a new LambdaLR"),
    (add, 'state["added"]', "a new ExponentialLR"),
    (take_another_optimizer, 'state["schedule"]', 'CosineAnnealingLR of state["spare"]'),
    (swap_networks, 'state["model"]', 'the Linear that was built as state["other"]'),
    (swap_optimizers, 'state["last"]', 'the SGD that was built as state["optimizer"]'),
]
"""Changes that a resume cannot repeat, with the path and the description of the object that replaced another."""


def resumed(folder: Path, change: Change, *, restores: bool) -> tuple[Any, Any]:
    """The states of an uninterrupted and of a resumed run."""
    whole = fit(folder, Changing(change, restores=restores))
    return whole, fit(folder, Changing(change, restores=restores), folder / "step-00000003.json")


def are_equal(whole: Any, other: Any) -> bool:
    weights = zip(whole["model"].parameters(), other["model"].parameters(), strict=True)
    rates = [[group["lr"] for group in state["optimizer"].param_groups] for state in (whole, other)]
    return rates[0] == rates[1] and all(torch.equal(one, two) for one, two in weights)


def test_a_schedule_made_again_is_restored_as_it_was_at_the_save(tmp_path: Path, caplog: Any) -> None:
    assert are_equal(*resumed(tmp_path, make_again, restores=False))
    assert "replaced" not in caplog.text


@pytest.mark.parametrize("change", [make_again, remove, *(change for change, _, _ in REFUSED)])
def test_a_class_may_restore_replaced_objects_itself(tmp_path: Path, change: Change) -> None:
    assert are_equal(*resumed(tmp_path, change, restores=True))


@pytest.mark.parametrize(("change", "path", "was"), REFUSED)
def test_an_object_that_a_resume_cannot_restore_is_named_at_the_save_and_refused(
    tmp_path: Path, caplog: Any, change: Change, path: str, was: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        resumed(tmp_path, change, restores=False)

    for text in (str(refused.value), caplog.text):
        assert path in text
        assert was in text


def test_a_removed_schedule_that_a_resume_builds_again_is_named(tmp_path: Path, caplog: Any) -> None:
    fit(tmp_path, Changing(remove))
    assert 'state["schedule"] is gone' in caplog.text
    caplog.clear()

    fit(tmp_path, Changing(remove), tmp_path / "step-00000003.json")

    assert 'state["schedule"] did not exist any more' in caplog.text


def test_a_generator_that_a_resume_does_not_find_is_named(tmp_path: Path, caplog: Any) -> None:
    resumed(tmp_path, draw_own_numbers, restores=True)
    assert 'state["generator"]' not in caplog.text

    resumed(tmp_path, draw_own_numbers, restores=False)

    assert 'the state of state["generator"], which does not exist' in caplog.text
