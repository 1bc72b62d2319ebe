"""Training on one device."""

from __future__ import annotations

import pytest
import torch
from zoo.updates import OneBufferOfGradients

from device.runs import CountWaits, Penalised, Regression, fit, standard_callbacks
from genlight.adapter.contract.exceptions import ContractError
from genlight.callbacks import Evaluate


def check_no_step_waits_for_the_device(folder):
    counted = CountWaits(9, 15)
    fit(Penalised(), "one", steps=17, callbacks=[counted, *standard_callbacks(folder)])
    assert not counted.found, "\n".join(map(str, counted.found))


def check_a_step_of_16_mixed_waits_once_for_the_device(folder):
    """Whether the update may be made, as in torch's own scaler."""
    counted = CountWaits(9, 15)
    fit(Regression(), "one", steps=17, callbacks=[counted, *standard_callbacks(folder)], precision="16-mixed")
    assert len(counted.found) == 15 - 9, "\n".join(map(str, counted.found))
    assert all("may_update" in str(wait) for wait in counted.found)


def check_views_of_weights_that_the_move_to_the_device_would_part_are_refused():
    with pytest.raises(ContractError, match=r'state\["flat"\].*and state\["model"\].*are views of the same memory'):
        fit(OneBufferOfGradients(), "one", steps=2)


class Draws(Regression):
    """Its evaluation draws numbers on the device."""

    def evaluate(self, state, ctx):
        return {"noise": torch.rand(7, device=ctx.device).sum().item()}


def check_an_evaluation_leaves_the_random_numbers_of_the_device():
    without = fit(Draws(), "one", steps=6)
    evaluated = fit(Draws(), "one", steps=6, callbacks=[Evaluate(every_n_steps=2)])
    for one, other in zip(without.parameters(), evaluated.parameters(), strict=True):
        assert torch.equal(one, other)
