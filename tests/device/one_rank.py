"""Training on one device."""

import pytest
import torch
from zoo.updates import OneBufferOfGradients

from device.runs import CountWaits, Penalised, Pinned, Regression, fit, standard_callbacks
from genlight.adapter import StepContext, TrainingJobSpec, run_training_loop
from genlight.adapter.contract.exceptions import ContractError
from genlight.callbacks import Checkpoint, Evaluate
from genlight.callbacks.checkpoint import newest_valid


def check_no_step_waits_for_the_device(folder):
    counted = CountWaits(9, 15)
    fit(Penalised(), "one", steps=17, callbacks=[counted, *standard_callbacks(folder)])
    assert not counted.found, "\n".join(map(str, counted.found))


def check_a_step_of_16_mixed_waits_once_for_the_device(folder):
    """Like torch's own scaler, it reads whether gradients are finite."""
    counted = CountWaits(9, 15)
    fit(Regression(), "one", steps=17, callbacks=[counted, *standard_callbacks(folder)], precision="16-mixed")
    assert len(counted.found) == 15 - 9, "\n".join(map(str, counted.found))
    assert all("may_update" in str(wait) for wait in counted.found)


def check_views_of_weights_that_the_move_to_the_device_would_separate_are_refused():
    with pytest.raises(ContractError, match=r'state\["flat"\].*and state\["model"\].*are views of the same memory'):
        fit(OneBufferOfGradients(), "one", steps=2)


class SavesTensors(Regression):
    """Saves tensors of the device, of the host, and of its module; records their devices after a resume."""

    def state_dict(self, state):
        average = [parameter.detach().clone() for parameter in state["model"].parameters()]
        return {"average": average, "seen": torch.ones(2), "model": state["model"].state_dict()}

    def load_state_dict(self, state, payload, ctx):
        tensors = [*payload["average"], payload["seen"], *payload["model"].values()]
        self.loaded_on = [tensor.device.type for tensor in tensors]
        self.are_leaves = all(tensor.is_leaf for tensor in tensors)


def check_tensors_of_a_class_are_loaded_on_the_device_except_tensors_of_modules(folder):
    def saves() -> list[Checkpoint]:
        return [Checkpoint(folder, every_n_steps=2, save_final=False)]

    fit(SavesTensors(), "one", steps=3, callbacks=saves())
    resumed = SavesTensors()
    fit(resumed, "one", steps=4, callbacks=saves(), ckpt_path=str(newest_valid(folder)[0].path))
    assert resumed.loaded_on == ["sim"] * 4 + ["cpu"] + ["cpu"] * 4
    assert resumed.are_leaves


class Reports:
    """A caller's reporter and writer; records the model's device when the final artifact is written."""

    def started(self, **_):
        self.finalized_on = []

    def metric(self, **_): ...

    def completed(self, **_): ...

    def failed(self, *, error, **_):
        raise AssertionError(error)

    def is_canceled(self):
        return False

    def finalize(self, *, state, ctx, **_):
        self.finalized_on += [ctx.device, *(str(parameter.device) for parameter in state["model"].parameters())]


def check_the_callers_writer_finalizes_while_the_state_is_on_the_device():
    reports, job = Reports(), TrainingJobSpec("old", 3, metric_every=1)
    assert run_training_loop(job, StepContext(job, device="sim:1"), Regression(), Pinned(3), reports, reports) == 3
    assert set(reports.finalized_on) == {"sim:1"}


class Draws(Regression):
    """Draws random numbers on the device in its evaluation."""

    def evaluate(self, state, ctx):
        return {"noise": torch.rand(7, device=ctx.device).sum().item()}


def check_an_evaluation_does_not_change_the_random_numbers_of_the_device():
    without = fit(Draws(), "one", steps=6)
    evaluated = fit(Draws(), "one", steps=6, callbacks=[Evaluate(every_n_steps=2)])
    for one, other in zip(without.parameters(), evaluated.parameters(), strict=True):
        assert torch.equal(one, other)
