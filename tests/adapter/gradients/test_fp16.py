"""Under 16-mixed, gradients of parameters have true units wherever they are seen; others what a scaler gives them."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.precision import step_precision
from genlight.adapter.gradients.step import StepRouter

SCALE = 2.0**12


def fp16(init_scale: float = SCALE) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale))


class Run:
    """A network, its optimizer and their router under a precision."""

    def __init__(self, plugin: Precision) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        discovered = discover({"model": self.model, "optimizer": self.optimizer})
        self.router = StepRouter(discovered, torch.device("cpu"), precision=step_precision(plugin, discovered))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        return x, x.sum(1, keepdim=True).tanh()


def mean_square(out: Tensor, y: Tensor) -> Tensor:
    return mse_loss(out.float(), y)


def test_hooks_of_a_parameter_see_true_units_and_those_of_an_activation_what_a_scaler_gives():
    seen: dict[str, list[Tensor]] = {"parameter": [], "activation": []}
    for plugin in (fp16(), Precision()):
        run = Run(plugin)
        x, y = run.batch(0)
        run.model[2].bias.register_hook(lambda g: seen["parameter"].append(g))
        with run.router:
            hidden = run.model[0](x)
            hidden.register_hook(lambda g: seen["activation"].append(g.float()))
            mean_square(run.model[2](run.model[1](hidden)), y).backward()

    torch.testing.assert_close(*seen["parameter"], rtol=0.01, atol=1e-4)
    torch.testing.assert_close(seen["activation"][0], seen["activation"][1] * SCALE, rtol=0.05, atol=0.5)


def test_an_optimizer_of_what_a_step_makes_updates_by_true_units():
    run = Run(fp16())
    for _ in range(2):
        latent = torch.ones(1, requires_grad=True)
        inner = torch.optim.SGD([latent], lr=0.25)
        with run.router:
            for _ in range(2):
                inner.zero_grad()
                latent.square().sum().backward()
                inner.step()

        assert latent.item() == 0.25


class Fused:
    """Updates each parameter as soon as its gradient is there."""

    def __init__(self, plugin: Precision) -> None:
        self.run = Run(plugin)
        parameters = list(self.run.model.parameters())
        self.optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in parameters}
        discovered = discover({"model": self.run.model, "optimizers": list(self.optimizers.values())})
        self.plugin = plugin
        self.router = StepRouter(discovered, torch.device("cpu"), precision=step_precision(plugin, discovered))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()


def test_optimizers_that_step_inside_of_backward_skip_overflows_and_adapt_the_scale_once_a_call():
    fused, by_hand = Fused(fp16(2.0**22)), Run(Precision())
    optimizers = [torch.optim.SGD([p], lr=0.5) for p in by_hand.model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)

    for number in range(8):
        x, y = by_hand.batch(number)
        with fused.router:
            mean_square(fused.run.model(x), y).backward()
        by_hand.model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mean_square(by_hand.model(x), y)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    assert fused.router.overflow_steps > 0
    assert fused.plugin.scaler.get_scale() == scaler.get_scale() < 2.0**22
    for mine, expected in zip(fused.run.model.parameters(), by_hand.model.parameters(), strict=True):
        assert torch.equal(mine, expected)
