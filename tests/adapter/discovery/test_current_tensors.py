"""Tensors with which a trainer replaces others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from genlight.adapter.discovery.discover import discover

pytestmark = pytest.mark.promise(name="equal")


def test_a_tensor_that_replaced_another_is_found_wherever_it_is():
    trainer = SimpleNamespace(scale=torch.ones(1))
    state = {"params": {"w.a": torch.zeros(2), "b": torch.zeros(3)}, "list": [torch.zeros(4)], "gone": torch.zeros(5)}
    discovered = discover(state, trainer)
    state["params"] = {key: value + 1 for key, value in state["params"].items()}  # the dict is replaced, too
    state["list"][0] = torch.ones(6)
    trainer.scale = trainer.scale * 2
    state["gone"] = None
    now = discovered.current(discovered.tensors)

    assert [(each.path, each.value.sum().item()) for each in now] == [
        ('state["params"]["w.a"]', 2),
        ('state["params"]["b"]', 3),
        ('state["list"][0]', 6),
        ('state["gone"]', 0),
        ("trainer.scale", 2),
    ]
    assert [each.name for each in now] == [each.name for each in discovered.tensors]
