"""Random number generators of a trainer class continue after a resume without being in its ``state_dict``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.resumed_fit import STEPS, Trains, fit

pytestmark = pytest.mark.promise(name="resume")


class Noisy:
    """Draws from its own generator."""

    def __init__(self) -> None:
        self.rng = np.random.Generator(np.random.MT19937(5))


class Draws(Trains):
    """Draws from one generator of each kind in each step; they are in the state, on the class and in an object."""

    pick = random.Random(7)

    def configure(self, ctx: Any) -> dict[str, Any]:
        self.old = np.random.RandomState(3)
        Draws.pick.seed(7)
        net = torch.nn.Linear(2, 1)
        return {
            "net": net,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "noise": torch.Generator().manual_seed(1),
            "kept": [np.random.default_rng(2), Noisy()],
            "system": random.SystemRandom(),
        }

    def outputs(self, batch: Any, state: Any) -> torch.Tensor:
        drawn = [state["kept"][0].normal(), self.old.uniform(), self.pick.gauss(0, 1), state["kept"][1].rng.normal()]
        noise = torch.randn(batch.shape, generator=state["noise"])
        return super().outputs(batch + noise + float(sum(drawn)), state)


class RestoresOneItself(Draws):
    """A class may restore a generator itself, because genlight once did not find generators."""

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"noise": state["noise"].get_state()}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["noise"].set_state(payload["noise"])


class PutsAnotherInItsPlace(Draws):
    """Makes a separate generator for each step, seeded by its number."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        return {**super().configure(ctx), "step": 0}

    def outputs(self, batch: Any, state: Any) -> torch.Tensor:
        if state["step"] % 3 == 0:
            state["noise"] = torch.Generator().manual_seed(state["step"])
        state["step"] += 1
        return super().outputs(batch, state)

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"step": state["step"]}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["step"] = payload["step"]


@pytest.mark.parametrize("cls", [Draws, RestoresOneItself, PutsAnotherInItsPlace])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path: Path, cls: type[Draws], stop: int) -> None:
    whole = fit(tmp_path / "whole", cls(), STEPS)
    fit(tmp_path / "parts", cls(), stop)
    resumed = fit(tmp_path / "parts", cls(), STEPS, ckpt_path=str(tmp_path / "parts" / "final.json"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
