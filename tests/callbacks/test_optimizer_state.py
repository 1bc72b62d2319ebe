"""The state of optimizers returns to its devices."""

import copy

import pytest
import torch

from genlight.callbacks.optimizer_state import restore_as_stored, unusual_devices

pytestmark = pytest.mark.promise(name="resume")


def test_state_returns_to_the_device_that_it_was_stored_from():
    """A meta tensor stands for a tensor on an accelerator."""
    optimizer = torch.optim.SGD([torch.zeros(2, device="meta", requires_grad=True)], lr=0.1)
    (parameter,) = optimizer.param_groups[0]["params"]
    count = torch.tensor(2, device="meta")
    optimizer.state[parameter] = {"moment": torch.ones(2, device="meta"), "offloaded": [torch.ones(2)], "step": count}
    stored, devices = copy.deepcopy(optimizer.state_dict()), unusual_devices(optimizer)
    stored["state"][0]["step"] = torch.tensor(2)  # as a checkpoint loads it
    optimizer.load_state_dict(stored)

    restore_as_stored(optimizer, stored, devices)

    (offloaded,) = optimizer.state[parameter]["offloaded"]
    assert offloaded.tolist() == [1, 1]
    assert {name: optimizer.state[parameter][name].device.type for name in ("moment", "step")} == {
        "moment": "meta",
        "step": "meta",
    }


def test_state_on_the_device_of_its_parameters_needs_no_entry():
    optimizer = torch.optim.Adam([torch.zeros(2, requires_grad=True)])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()

    assert unusual_devices(optimizer) == []
