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
    pytest.mark.usefixtures("group_of_one"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

Step = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def _uncompiled():
    yield
    torch._dynamo.reset()


def step_with(compiled: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a training step of which one piece is compiled."""

    def made(piece: str, call: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        return torch.compile(call, backend="eager", **settings) if piece == compiled else call

    def with_a_collective(rows: Tensor) -> Tensor:
        total = rows.sum()
        dist.all_reduce(total)
        return (forward(rows) * total).square().mean()

    forward = made("a module", model, fullgraph=True)
    loss = made("a loss", lambda rows: forward(rows).square().mean(), fullgraph=True)
    if compiled == "a loss with a collective":
        loss = made(compiled, with_a_collective, fullgraph=True)
    backward = made("a backward", lambda rows: loss(rows).backward())
    clip = made("a norm of gradients", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    update = made("an update", lambda: optimizer.step())
    if compiled == "an optimizer's step":
        update = torch.compile(optimizer.step, backend="eager")

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        backward(rows)
        if compiled in ("a module", "a norm of gradients"):
            clip()
        update()

    return made("a whole step", step)


def trained(piece: str, *, routed: bool) -> tuple[list[Tensor], int, int]:
    """Return the weights after a few steps, the number of graphs, and the breaks of graphs."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = step_with(piece, model, optimizer)
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


@pytest.mark.parametrize("piece", ["a module", "a loss", "a loss with a collective"])
def test_code_compiled_with_fullgraph_has_no_breaks(piece):
    weights, graphs, breaks = trained(piece, routed=True)

    expected, graphs_alone, _ = trained(piece, routed=False)
    assert (graphs, breaks) == (graphs_alone, 0)
    assert all(map(torch.equal, weights, expected))


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["a backward", "a whole step", "an optimizer's step", "an update"])
def test_graphs_break_no_more_often_than_in_a_plain_loop(piece):
    weights, graphs, breaks = trained(piece, routed=True)

    expected, graphs_alone, breaks_alone = trained(piece, routed=False)
    assert graphs == graphs_alone
    assert breaks <= breaks_alone
    assert all(map(torch.equal, weights, expected))


def test_a_gradient_that_is_read_in_compiled_code_is_the_average():
    weights, _, _ = trained("a norm of gradients", routed=True)

    expected, _, _ = trained("a norm of gradients", routed=False)
    assert all(map(torch.equal, weights, expected))
