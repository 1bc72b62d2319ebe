"""A run that starts from an older checkpoint compares itself with the newest one when it reaches the step of that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.adapter.contract.exceptions import ResumeDifferenceError
from genlight.callbacks import Checkpoint
from genlight.callbacks.witness.state import differing_values, values_of_state
from support.resumed_fit import seed
from support.trainers import quiet_trainer
from support.witnessed import Hosted, Plain, Proofs, attempt, rows

pytestmark = pytest.mark.promise(name="resume")


def repeat(folder: Any, module: Any, **options: Any) -> list[str]:
    seed(8)
    proofs = Proofs()
    checkpoint = Checkpoint(folder, every_n_steps=10, asynchronous=False, overlap=True, **options)
    trainer = quiet_trainer(checkpoint, proofs, max_steps=24, max_epochs=-1, log_every_n_steps=5)
    if not isinstance(module, Plain):
        module = ContractModule(module, TrainingJobSpec("witnessed", 24))
    trainer.fit(module, rows(), ckpt_path=str(folder / "step-00000010.json"))
    return [proof.text for proof in proofs.found]


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.body[0].requires_grad_(False)


@pytest.mark.parametrize(("make", "weights"), [(Hosted, "all"), (Plain, "all"), (Frozen, "trained")])
def test_the_newest_checkpoint_has_the_values_of_the_repeated_step(make, weights, tmp_path):
    attempt(tmp_path, make(), rows(), until=22, weights=weights)

    assert repeat(tmp_path, make(), weights=weights) == [
        "step 20, repeated after the restart, has every value of step-00000020",
        "steps 11 to 22, repeated after the restart, have the same bits",
    ]


class Forgets(Hosted):
    def configure(self, ctx: Any) -> Any:
        return {**super().configure(ctx), "seen": torch.zeros(())}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        state["seen"] += 1
        return super().train_step(batch, state, ctx)

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {"seen": state["seen"].clone(), "count": int(state["seen"])}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        pass


@dataclass
class Average:
    value: torch.Tensor
    names: set[str]


def test_values_of_a_state_are_found_wherever_they_are():
    def values(value: float, *names: str) -> dict[str, Any]:
        state = {"a": [Average(torch.tensor(value), set(names))], "path": Path(), "sparse": torch.eye(2).to_sparse()}
        return values_of_state({"genlight": {"state": state}})

    assert differing_values(values(1.0, "x", "y"), values(1.0, "y", "x")) == []
    assert differing_values(values(1.0), values(1.0 + 1e-7)) == ['checkpoint["genlight"]["state"]["a"][0]["value"]']
    assert differing_values(values(1.0, "x"), values(1.0)) == ['checkpoint["genlight"]["state"]["a"][0]["names"]']


def test_values_that_no_step_shows_are_named(tmp_path):
    attempt(tmp_path, Forgets(), rows(), until=22)

    text, _ = repeat(tmp_path, Forgets())

    expected = (
        "step 20, repeated after the restart, is not the same: step-00000020, saved when the step was first trained"
    )
    names = (f'checkpoint["genlight"]["state"]["{name}"]' for name in ("seen", "count"))
    assert text == f"{expected}, has other values of {', '.join(names)}"


def test_a_difference_can_end_the_run_before_it_replaces_the_checkpoint(tmp_path):
    attempt(tmp_path, Forgets(), rows(), until=22)
    before = (tmp_path / "step-00000020.json").read_bytes()

    with pytest.raises(ResumeDifferenceError):
        repeat(tmp_path, Forgets(), on_difference="stop")

    assert (tmp_path / "step-00000020.json").read_bytes() == before
