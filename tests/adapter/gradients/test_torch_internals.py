"""A protected name that torch removes, or an entry that it no longer uses, is an error instead of wrong gradients."""

from __future__ import annotations

import pytest
import torch

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients import torch_hooks
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter
from genlight.adapter.gradients.torch_internals import engine_run_backward, protected, require_fsdp
from support.messages import refusal

pytestmark = pytest.mark.promise(name="ranks")


def router() -> StepRouter:
    model = torch.nn.Linear(1, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return StepRouter(discover(state), torch.device("cpu"), precision=StepPrecision("fp32"))


@pytest.fixture
def unproven():
    torch_hooks._prove.cache_clear()


@pytest.mark.parametrize(("module", "name"), [("torch", "_C._gone"), ("torch._gone", "name")])
def test_a_missing_name_of_torch_is_an_error_that_names_the_releases_with_it(module, name):
    with pytest.raises(ImportError, match=rf"torch .* has no {module}\.{name}.*torch>=2"):
        protected(module, name)


def test_this_torch_has_what_sharding_uses():
    require_fsdp()


def test_holding_the_entry_proves_once_that_backward_comes_through_it(unproven):
    held = router()
    random = torch.get_rng_state()
    held.open()
    held.close()

    assert torch_hooks._prove.cache_info().currsize == 1
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.autograd._engine_run_backward is engine_run_backward


def test_a_torch_whose_backward_bypasses_the_entry_is_refused_and_unchanged(unproven, monkeypatch):
    """Otherwise nothing would average gradients, and the replicas would diverge."""

    def past_the_entry(tensors, *_, **__):
        engine_run_backward(
            (tensors,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    monkeypatch.setattr(torch.autograd, "backward", past_the_entry)

    with refusal(RuntimeError):
        router().open()
    assert torch.autograd._engine_run_backward is engine_run_backward
    assert not torch_hooks._holders


def test_an_entry_restored_between_steps_is_replaced_again_and_one_within_a_step_is_an_error():
    held = router()
    held.open()
    try:
        torch.autograd._engine_run_backward = engine_run_backward
        with held:
            assert torch.autograd._engine_run_backward is not engine_run_backward
        with refusal(RuntimeError), held:
            torch.autograd._engine_run_backward = engine_run_backward
    finally:
        held.close()
    assert torch.autograd._engine_run_backward is engine_run_backward


def test_a_temporary_patch_of_torch_restores_our_entry():
    patch = getattr(torch.compiler, "_patch_engine_backward", None)
    if patch is None:
        pytest.skip("this torch has nothing that replaces the entry")
    held = router()
    with held:
        before = torch.autograd._engine_run_backward
        with patch():
            pass
        assert torch.autograd._engine_run_backward is before
