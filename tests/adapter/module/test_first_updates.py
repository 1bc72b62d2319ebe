"""Faults of a class that show in its first updates."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD

from genlight.adapter import StepResult, TrainingJobSpec

from .test_exact_state import Plain

STALE, BLIND, UNREAD = "was not cleared", "None of the parameters of", "has not been used"


class Trains(Plain):
    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return torch.ones(4, 3) * (raw + 1)

    def optimizer(self, parameters: Any) -> Any:
        return SGD(parameters, lr=1e-4)


class Accumulates(Trains):
    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        self.loss(batch, state).backward()
        if int(batch[0, 0]) % 2 == 0:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        return StepResult({})


class NeverClears(Trains):
    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        self.loss(batch, state).backward()
        nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
        state["optimizer"].step()
        return StepResult({})


class ClearsInPlace(Trains):
    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["optimizer"].zero_grad(set_to_none=False)
        self.loss(batch, state).backward()
        state["optimizer"].step()
        return StepResult({})


class Adversarial(Trains):
    """The second optimizer's backward also reaches the parameters of the first, whose gradients are cleared later."""

    set_to_none = True

    def configure(self, ctx: Any) -> Any:
        state, critic = super().configure(ctx), nn.Linear(1, 1)
        return {**state, "critic": critic, "critic_optimizer": SGD(critic.parameters(), lr=1e-4)}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        for name in ("critic_optimizer", "optimizer"):
            state[name].zero_grad(self.set_to_none)
            state["critic"](state["model"](batch)).mean().backward()
            state[name].step()
        return StepResult({})


class AdversarialInPlace(Adversarial):
    set_to_none = False


class ByClosure(Trains):
    def optimizer(self, parameters: Any) -> Any:
        return LBFGS(parameters, lr=1e-4, max_iter=2)

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        def closure() -> torch.Tensor:
            state["optimizer"].zero_grad()
            loss = self.loss(batch, state)
            loss.backward()
            return loss

        state["optimizer"].step(closure)
        return StepResult({})


class HoldsACopy(Trains):
    def configure(self, ctx: Any) -> Any:
        state, copy = super().configure(ctx), nn.Linear(3, 1)
        return {**state, "copy": copy, "optimizer": SGD(copy.parameters(), lr=0.1)}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Trains, ()),
        (Accumulates, ()),
        (ClearsInPlace, ()),
        (Adversarial, ()),
        (AdversarialInPlace, ()),
        (ByClosure, ()),
        (NeverClears, (STALE,)),
        (HoldsACopy, (BLIND,)),
    ],
)
def test_the_first_updates_warn_of_faults_without_an_error(
    fit: Any, caplog: Any, kind: type[Trains], said: tuple[str]
) -> None:
    _, module = fit(kind(), steps=8, job=TrainingJobSpec("r", 8, hyperparams={"lr": 1}))

    assert [text for text in (STALE, BLIND) if text in caplog.text] == list(said)
    assert caplog.text.count(UNREAD) == 1, "though no checkpoint was saved"
    assert not any(p._backward_hooks for p in module.parameters())
