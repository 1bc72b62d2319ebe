"""Code compiled by torch.compile on several ranks has the graphs of a plain loop, and no additional breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.ddp.averaging import Averaging
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter

pytestmark = [
    pytest.mark.promise(name="ranks"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

Step = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def group_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def compiled(**settings: Any) -> Callable[..., Any]:
    return torch.compile(backend="eager", **settings)


def a_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    forward = torch.compile(model, backend="eager", fullgraph=True)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        forward(rows).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def a_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @compiled(fullgraph=True)
    def loss(rows: Tensor) -> Tensor:
        return model(rows).square().mean()

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()

    return step


def a_loss_with_a_collective(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @compiled(fullgraph=True)
    def loss(rows: Tensor) -> Tensor:
        total = rows.sum()
        dist.all_reduce(total)
        return (model(rows) * total).square().mean()

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()

    return step


def a_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @compiled()
    def forward_and_backward(rows: Tensor) -> None:
        model(rows).square().mean().backward()

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        forward_and_backward(rows)
        optimizer.step()

    return step


def a_whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @compiled()
    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    return step


def an_optimizers_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    update = torch.compile(optimizer.step, backend="eager")

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        update()

    return step


def an_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @compiled()
    def update() -> None:
        optimizer.step()

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        update()

    return step


def a_norm_of_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @compiled()
    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        clip()
        optimizer.step()

    return step


def trained(parts: Callable[..., Step], *, routed: bool) -> tuple[list[Tensor], int, int]:
    """Return the weights after a few steps, the number of graphs, and the breaks of graphs."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = parts(model, optimizer)
    router: Any = contextlib.nullcontext()
    if routed:
        found = discover({"model": model, "optimizer": optimizer})
        device = torch.device("cpu")
        averaging = Averaging(found, device)
        router = StepRouter(found, device, precision=StepPrecision("fp32"), averaging=averaging)
        router.open()
    try:
        for number in range(3):
            with router:
                step(torch.randn(3, 4, generator=torch.Generator().manual_seed(number)))
    finally:
        if routed:
            router.close()
    weights = [p.detach().clone() for p in model.parameters()]
    return weights, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("parts", [a_module, a_loss, a_loss_with_a_collective])
def test_code_compiled_with_fullgraph_has_no_breaks(parts):
    weights, graphs, breaks = trained(parts, routed=True)

    expected, graphs_alone, _ = trained(parts, routed=False)
    assert (graphs, breaks) == (graphs_alone, 0)
    assert all(map(torch.equal, weights, expected))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [a_backward, a_whole_step, an_optimizers_step, an_update])
def test_graphs_break_no_more_often_than_in_a_plain_loop(parts):
    weights, graphs, breaks = trained(parts, routed=True)

    expected, graphs_alone, breaks_alone = trained(parts, routed=False)
    assert graphs == graphs_alone
    assert breaks <= breaks_alone
    assert all(map(torch.equal, weights, expected))


def test_a_gradient_that_is_read_in_compiled_code_is_the_average():
    weights, _, _ = trained(a_norm_of_gradients, routed=True)

    expected, _, _ = trained(a_norm_of_gradients, routed=False)
    assert all(map(torch.equal, weights, expected))
