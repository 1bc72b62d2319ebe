"""Torch's protected names: one that is gone, and an entry that torch no longer uses, are errors and no wrong sums."""

from __future__ import annotations

import pytest
import torch

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients import autograd_patch
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter
from genlight.adapter.gradients.torch_internals import engine_run_backward, protected, require_fsdp


def router() -> StepRouter:
    model = torch.nn.Linear(1, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return StepRouter(discover(state), torch.device("cpu"), precision=StepPrecision("fp32"))


@pytest.fixture
def unproven(monkeypatch):
    monkeypatch.setattr(autograd_patch._Canary, "is_proven", False)


@pytest.mark.parametrize(("module", "name"), [("torch", "_C._gone"), ("torch._gone", "name")])
def test_a_name_that_torch_no_longer_has_is_one_error_with_the_releases_that_have_it(module, name):
    with pytest.raises(ImportError, match=rf"torch .* has no {module}\.{name}.*torch>=2"):
        protected(module, name)


def test_this_torch_has_what_sharding_uses():
    require_fsdp()


def test_holding_the_entry_proves_once_that_backward_comes_through_it(unproven):
    held = router()
    random = torch.get_rng_state()
    held.open()
    held.close()

    assert autograd_patch._Canary.is_proven
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.autograd._engine_run_backward is engine_run_backward


def test_a_torch_whose_backward_goes_past_the_entry_is_refused_and_left_as_it_was(unproven, monkeypatch):
    """Gradients would be averaged by nobody, and the replicas would drift apart."""

    def past_the_entry(tensors, *_, **__):
        engine_run_backward(
            (tensors,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    monkeypatch.setattr(torch.autograd, "backward", past_the_entry)

    with pytest.raises(RuntimeError, match="past the entry"):
        router().open()
    assert torch.autograd._engine_run_backward is engine_run_backward
    assert not autograd_patch._holders
