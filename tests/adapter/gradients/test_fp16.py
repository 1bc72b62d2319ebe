"""Under 16-mixed, all readers get true units of parameters' gradients; other gradients have the scale of the loss."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.precision import step_precision
from genlight.adapter.gradients.step import StepRouter
from support.messages import refusal

pytestmark = pytest.mark.promise(name="precision")

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


def test_hooks_of_parameters_get_true_units_and_hooks_of_activations_scaled_gradients():
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


def test_an_optimizer_made_in_a_step_is_refused_because_its_gradients_are_scaled():
    run = Run(fp16())
    latent = torch.ones(1, requires_grad=True)
    inner = torch.optim.SGD([latent], lr=0.25)

    with run.router:
        latent.square().sum().backward()
        with refusal(ContractError):
            inner.step()


def test_an_update_inside_of_backward_is_refused_because_it_could_not_be_skipped():
    run = Run(fp16())
    run.model[2].bias.register_post_accumulate_grad_hook(lambda _: run.optimizer.step())
    x, y = run.batch(0)

    with refusal(ContractError), run.router:
        mean_square(run.model(x), y).backward()
