"""Half precision of every kind, against loops that follow torch's documentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.nn.functional import mse_loss
from zoo import runs, small as zoo

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.contract.types import StepResult
from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.precision import TrueUnitScaler, contract_dtype, step_precision
from genlight.adapter.gradients.step import StepRouter
from support.messages import refusal
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="precision")


def fp16(**scaler_args: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaler_args))


@pytest.fixture(autouse=True)
def _with_classes_of_this_file(monkeypatch):
    monkeypatch.setitem(zoo.ZOO, "Recording", Recording)
    monkeypatch.setitem(zoo.ZOO, "ClippingByValue", ClippingByValue)


class Recording(zoo.Accumulating):
    """Calls backward twice and clips; records the gradients that it reads in between."""

    def configure(self, ctx):
        self.seen, self.hooked = [], []
        state = super().configure(ctx)
        # A gradient hook of the trainer, registered before the hooks of genlight.
        state["model"][2].bias.register_hook(lambda g: self.hooked.append(g.clone()))
        return state

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True):
            (mse_loss(state["model"](x).float(), y) / 2).backward()
            self.seen.append(state["model"][2].bias.grad.clone())
        norm = nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
        state["optimizer"].step()
        return StepResult({"grad_norm": norm})


def reference(cls: type, *, dtype: torch.dtype, steps: int = runs.STEPS, **scaler_args: Any):
    """Mixed precision as in torch's documentation, for the update of `Accumulating`."""
    trainer, ctx = cls(), runs.context()
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    model, optimizer = state["model"], state["optimizer"]
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, **scaler_args)
    skipped = 0
    for step in range(steps):
        batch = runs.rows(step)
        optimizer.zero_grad()
        for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True):
            with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
                loss = mse_loss(model(x).float(), y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    return runs.weights(state, None), scaler, skipped


def run(name: str, plugin: Precision, steps: int = runs.STEPS):
    module, trainer = runs.hosted_run(name, steps=steps, plugins=plugin)
    return runs.weights(module.contract_state, None), module, trainer


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0, msg=name)


def test_bf16_mixed_is_bit_equal_to_an_autocast_loop_with_backward_outside():
    expected, _, _ = reference(Recording, dtype=torch.bfloat16)

    actual, module, _ = run("Recording", MixedPrecision("bf16-mixed", "cpu"))

    assert_equal(actual, expected)
    assert module.hosted_trainer.router.overflow_steps is None


def test_fp16_mixed_is_bit_equal_to_unscale_then_clip_also_under_accumulation():
    expected, scaler, _ = reference(Recording, dtype=torch.float16, init_scale=4096.0)

    actual, _, trainer = run("Recording", fp16(init_scale=4096.0))

    assert_equal(actual, expected)
    assert trainer.precision_plugin.scaler.get_scale() == scaler.get_scale()


def test_fp16_gradients_read_in_true_units_after_each_backward_and_inside_gradient_hooks():
    _, fp32, _ = run("Recording", Precision())

    _, half, _ = run("Recording", fp16(init_scale=2.0**14))

    for kind in ("seen", "hooked"):
        pairs = list(zip(getattr(half.plugin, kind), getattr(fp32.plugin, kind), strict=True))
        assert len(pairs) == 2 * runs.STEPS
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


def test_fp16_overflow_skips_the_update_lowers_the_scale_and_is_counted():
    expected, scaler, skipped = reference(Recording, dtype=torch.float16, init_scale=2.0**20)
    assert 0 < skipped < runs.STEPS, "some steps must overflow and some must not"

    actual, module, trainer = run("Recording", fp16(init_scale=2.0**20))

    assert_equal(actual, expected)
    assert module.hosted_trainer.router.overflow_steps == skipped
    assert trainer.precision_plugin.scaler.get_scale() == scaler.get_scale()
    assert trainer.global_step == runs.STEPS


class ClippingByValue(zoo.Base):
    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"]).float(), batch["y"])
        state["optimizer"].zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(state["model"].parameters(), 0.01)
        state["optimizer"].step()
        return StepResult({})


def test_fp16_overflow_that_clipping_by_value_hides_is_still_an_overflow():
    initial = runs.plain_run("ClippingByValue", steps=0)

    actual, module, _ = run("ClippingByValue", fp16(init_scale=2.0**100), steps=1)

    assert module.hosted_trainer.router.overflow_steps == 1
    assert_equal(actual, initial)


NOT_FP16 = ("ClippingByValue", "UpdatesByHand", "UpdatesByHandFromAutograd")


@pytest.mark.parametrize("name", [n for n in zoo.ZOO if n not in NOT_FP16])
def test_every_class_runs_close_to_fp32_in_fp16_mixed(name):
    expected = runs.plain_run(name)

    actual, module, _ = run(name, fp16(init_scale=256.0))

    assert not module.hosted_trainer.router.overflow_steps
    for key, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(actual[key], tensor, rtol=0.05, atol=0.05) if key.startswith("state") else None


def test_scaler_state_and_overflow_count_travel_in_the_precision_plugins_state():
    _, module, trainer = run("Recording", fp16(init_scale=2.0**20))
    saved = trainer.precision_plugin.state_dict()

    fresh = fp16()
    fresh.scaler = TrueUnitScaler.like(fresh.scaler)
    fresh.load_state_dict(saved)

    assert fresh.scaler.overflow_steps == module.hosted_trainer.router.overflow_steps > 0
    assert fresh.scaler.get_scale() == trainer.precision_plugin.scaler.get_scale()


def test_a_scaler_of_the_trainer_is_the_only_one_and_logged_once(caplog):
    caplog.set_level("INFO", logger="genlight")

    actual, module, _ = run("OwnScaler", fp16())

    assert_equal(actual, runs.plain_run("OwnScaler"))
    assert module.hosted_trainer.router.overflow_steps is None
    assert sum('state["scaler"]' in message for message in caplog.messages) == 1


def sum_and_assign(weight, loss, update):
    total = torch.zeros_like(weight)
    for factor in (float("inf"), 1.0):
        weight.grad = None
        loss(factor).backward()
        total += weight.grad
    weight.grad = total
    update()


def sum_and_copy(weight, loss, update):
    loss(float("inf")).backward()
    first = weight.grad.clone()
    weight.grad.zero_()
    loss(1.0).backward()
    weight.grad.add_(first)
    update()


def update_twice(weight, loss, update):
    loss(float("inf")).backward()
    update()
    update()


def differentiate_and_assign(weight, loss, update):
    (weight.grad,) = torch.autograd.grad(loss(float("inf")), weight)
    update()


@pytest.mark.parametrize("step", [sum_and_assign, sum_and_copy, update_twice, differentiate_and_assign])
def test_an_overflow_in_the_gradients_of_an_update_skips_it_whatever_the_last_backward_call_left(step):
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    discovered = discover({"weight": weight, "optimizer": optimizer})
    router = StepRouter(discovered, torch.device("cpu"), precision=step_precision(fp16(init_scale=8.0), discovered))

    with router:
        step(weight, lambda factor: weight.sum() * factor, optimizer.step)

    assert torch.equal(weight.detach(), torch.ones(2))
    assert router.overflow_steps >= 1
    with router:
        weight.grad = None
        weight.sum().backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.9))


def test_an_overflow_in_the_imaginary_part_of_a_weight_skips_its_update():
    weight = torch.ones(2, dtype=torch.cfloat, requires_grad=True)
    state = {"weight": weight, "opt": torch.optim.SGD([weight], lr=0.1)}
    discovered = discover(state)
    router = StepRouter(discovered, torch.device("cpu"), precision=step_precision(fp16(init_scale=8.0), discovered))

    with router:
        (weight.imag.sum() * float("inf")).backward()
        state["opt"].step()

    assert torch.equal(weight.detach(), torch.ones(2, dtype=torch.cfloat))
    assert router.overflow_steps == 1


class LossInSinglePrecision(zoo.Base):
    """The loss is written so because `mse_loss` and `huber_loss` of torch 2.11 have no gradients for two types."""

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        mse_loss(state["model"](batch["x"]).float(), batch["y"]).backward()
        state["optimizer"].step()
        return StepResult({})


def test_true_half_precision_takes_inputs_of_any_precision():
    zoo.ZOO["LossInSinglePrecision"] = LossInSinglePrecision
    actual, module, _ = run("LossInSinglePrecision", HalfPrecision("bf16-true"))
    del zoo.ZOO["LossInSinglePrecision"]

    assert all(t.dtype is torch.bfloat16 for t in actual.values())
    expected = runs.plain_run("Base")
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key].float(), tensor, rtol=0.05, atol=0.02)
    assert module.ctx.dtype == "bf16"


class CallingParts(zoo.Base):
    def train_step(self, batch, state, ctx):
        first, act, last = state["model"]
        out = last(act(first(batch["x"])).float())  # a head in fp32
        state["optimizer"].zero_grad()
        mse_loss(out.float(), batch["y"]).backward()
        state["optimizer"].step()
        return StepResult({})


def test_true_half_precision_takes_inputs_of_any_precision_where_parts_of_a_module_are_called():
    zoo.ZOO["CallingParts"] = CallingParts
    actual, _, _ = run("CallingParts", HalfPrecision("bf16-true"))
    del zoo.ZOO["CallingParts"]

    assert all(t.dtype is torch.bfloat16 for t in actual.values())
    for key, tensor in runs.plain_run("Base").items():
        torch.testing.assert_close(actual[key].float(), tensor, rtol=0.05, atol=0.02)


class MultipliesItself(zoo.Base):
    def train_step(self, batch, state, ctx):
        (batch["x"] @ state["model"][0].weight.t()).sum().backward()


def test_mixed_types_in_true_half_precision_are_an_error_with_the_way_out():
    zoo.ZOO["MultipliesItself"] = MultipliesItself
    with refusal(ContractError):
        run("MultipliesItself", HalfPrecision("bf16-true"))
    del zoo.ZOO["MultipliesItself"]


@pytest.mark.parametrize(
    ("plugin", "dtype"),
    [
        (Precision(), "fp32"),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16"),
        (MixedPrecision("16-mixed", "cpu"), "fp16"),
        (HalfPrecision("bf16-true"), "bf16"),
    ],
)
def test_context_dtype_follows_the_precision_plugin(plugin, dtype):
    assert contract_dtype(plugin) == dtype


class Quantizing(Precision):
    """Replaces layers."""


@pytest.mark.parametrize(
    "plugin", [Quantizing(), HalfPrecision("16-true"), DoublePrecision()], ids=lambda p: p.precision
)
def test_any_other_precision_is_refused_by_name(plugin):
    with refusal(ContractError):
        contract_dtype(plugin)


def test_an_overflow_of_one_optimizer_does_not_skip_the_other():
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b)]
    discovered = discover({"a": a, "b": b, "opts": opts})
    plugin = fp16(init_scale=8.0)
    router = StepRouter(discovered, torch.device("cpu"), precision=step_precision(plugin, discovered))
    before = [m.weight.detach().clone() for m in (a, b)]

    with router:
        (a(torch.ones(1, 2)).sum() * float("inf")).backward()
        opts[0].step()
        b(torch.ones(1, 2)).sum().backward()
        opts[1].step()

    assert torch.equal(a.weight, before[0])
    assert not torch.equal(b.weight, before[1])
    assert router.overflow_steps == 1


def test_two_fits_of_a_module_equal_one_fit():

    expected, _, _ = reference(Recording, dtype=torch.float16, init_scale=1024.0)
    module, _ = runs.hosted_run("Recording", steps=2, plugins=fp16(init_scale=1024.0))

    trainer = quiet_trainer(max_steps=2, plugins=fp16(init_scale=1024.0))
    trainer.fit(module, runs.Shares(0, 1, 4, first=2))

    assert_equal(runs.weights(module.contract_state, None), expected)
