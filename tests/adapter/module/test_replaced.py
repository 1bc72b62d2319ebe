"""Objects with which training replaces those of `configure` are restored exactly, or refused by name."""

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


class Changing(Plain):
    """Replaces an object after its second step."""

    def __init__(self, *, restores: bool = False) -> None:
        self.steps, self.restores = 0, restores

    def optimizer(self, parameters: Any) -> Any:
        return SGD(parameters, lr=0.1)

    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        return {**state, "schedule": self.schedule(state["optimizer"])}

    def schedule(self, optimizer: Any) -> Any:
        return CosineAnnealingLR(optimizer, 4)

    def change(self, state: Any) -> None: ...

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        result = super().train_step(batch, state, ctx)
        if state.get("schedule") is not None:
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


class MadeAgain(Changing):
    """A warm restart, with a longer period."""

    def change(self, state: Any) -> None:
        state["schedule"] = CosineAnnealingLR(state["optimizer"], 9, eta_min=0.01)


class OfParts(Changing):
    def change(self, state: Any) -> None:
        parts = [LinearLR(state["optimizer"], 0.1, total_iters=2), ExponentialLR(state["optimizer"], 0.9)]
        state["schedule"] = SequentialLR(state["optimizer"], parts, milestones=[2])


class OfAFunction(Changing):
    def schedule(self, optimizer: Any) -> Any:
        return LambdaLR(optimizer, lambda step: 1.0)

    def change(self, state: Any) -> None:
        state["schedule"] = LambdaLR(state["optimizer"], lambda step: 0.5**step)


class Added(Changing):
    def schedule(self, optimizer: Any) -> Any:
        return None

    def change(self, state: Any) -> None:
        state["schedule"] = ExponentialLR(state["optimizer"], 0.9)


class OfAnotherOptimizer(Changing):
    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        return {**state, "other": SGD([torch.zeros(1, requires_grad=True)], lr=0.2)}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["other"].step()
        return super().train_step(batch, state, ctx)

    def change(self, state: Any) -> None:
        state["schedule"] = CosineAnnealingLR(state["other"], 4)


class Swapped(Changing):
    """Swaps two networks, as double Q-learning does."""

    def configure(self, ctx: Any) -> Any:
        return {**super().configure(ctx), "other": nn.Linear(3, 1)}

    def change(self, state: Any) -> None:
        state["model"], state["other"] = state["other"], state["model"]


class OfTwoOptimizers(Changing):
    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        return {**state, "last": SGD(state["model"].parameters(), lr=0.2, momentum=0.9)}

    def change(self, state: Any) -> None:
        state["optimizer"], state["last"] = state["last"], state["optimizer"]


class Removed(Changing):
    def change(self, state: Any) -> None:
        state["schedule"] = None


def resumed(folder: Path, kind: type[Changing], *, restores: bool) -> tuple[Any, Any]:
    """The states of an uninterrupted and of a resumed run."""
    whole = fit(folder, kind(restores=restores))
    return whole, fit(folder, kind(restores=restores), folder / "step-00000003.json")


def are_equal(whole: Any, other: Any) -> bool:
    weights = zip(whole["model"].parameters(), other["model"].parameters(), strict=True)
    rates = [[group["lr"] for group in state["optimizer"].param_groups] for state in (whole, other)]
    return rates[0] == rates[1] and all(torch.equal(one, two) for one, two in weights)


def test_a_schedule_made_again_is_restored_as_it_was_at_the_save(tmp_path: Path, caplog: Any) -> None:
    whole, again = resumed(tmp_path, MadeAgain, restores=False)

    assert are_equal(whole, again)
    assert "replaced" not in caplog.text


@pytest.mark.parametrize(
    "kind", [MadeAgain, OfParts, OfAFunction, Added, OfAnotherOptimizer, Swapped, OfTwoOptimizers, Removed]
)
def test_a_class_may_restore_replaced_objects_itself(tmp_path: Path, kind: type[Changing]) -> None:
    assert are_equal(*resumed(tmp_path, kind, restores=True))


@pytest.mark.parametrize(
    ("kind", "path", "was"),
    [
        (OfParts, 'state["schedule"]', "SequentialLR(LinearLR, ExponentialLR)"),
        (OfAFunction, 'state["schedule"]', "a new LambdaLR"),
        (Added, 'state["schedule"]', "a new ExponentialLR"),
        (OfAnotherOptimizer, 'state["schedule"]', 'CosineAnnealingLR of state["other"]'),
        (Swapped, 'state["model"]', 'the Linear that was built as state["other"]'),
        (OfTwoOptimizers, 'state["last"]', 'the SGD that was built as state["optimizer"]'),
    ],
)
def test_an_object_that_a_resume_cannot_restore_is_named_at_the_save_and_refused(
    tmp_path: Path, caplog: Any, kind: type[Changing], path: str, was: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        resumed(tmp_path, kind, restores=False)

    for text in (str(refused.value), caplog.text):
        assert path in text
        assert was in text


def test_a_removed_schedule_that_a_resume_builds_again_is_named(tmp_path: Path, caplog: Any) -> None:
    fit(tmp_path, Removed())
    assert 'state["schedule"] is gone' in caplog.text
    caplog.clear()

    fit(tmp_path, Removed(), tmp_path / "step-00000003.json")

    assert 'state["schedule"] did not exist any more' in caplog.text


class OwnNumbers(Changing):
    """Makes its generator when it first needs it."""

    def change(self, state: Any) -> None:
        state["generator"] = torch.Generator().manual_seed(0)


def test_a_generator_that_a_resume_does_not_find_is_named(tmp_path: Path, caplog: Any) -> None:
    resumed(tmp_path, OwnNumbers, restores=True)
    assert 'state["generator"]' not in caplog.text

    resumed(tmp_path, OwnNumbers, restores=False)

    assert 'the state of state["generator"], which does not exist' in caplog.text
