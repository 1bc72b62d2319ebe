"""One of two ranks whose gradients travel in a bucket for each parameter; started by ``test_early_buckets.py``.

Arguments: rank, world size, folder. Each scenario trains a few steps with routed gradients, and computes the expected
weights by hand, from the rows of both ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.ddp.averaging import Averaging
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter
from support.rank import Rank

STEPS = 5
WORLD = 2


class Net(nn.Module):
    """Three layers in a row and one optional one; they are used in another order than registered."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.second, self.first, self.aside, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, rows, aside=True, around=lambda x: x):
        hidden = around(self.second(torch.tanh(self.first(rows))))
        return self.last(hidden + self.aside(rows) if aside else hidden).square().mean()


def rows(step, rank, call=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1 + step + 100 * rank + 1000 * call))


class Failed(Exception):
    pass


def fail_in_backward(hidden):
    hidden.register_hook(lambda grad: (_ for _ in ()).throw(Failed()))
    return hidden


def one_call(net, step, rank):
    net(rows(step, rank)).backward()


def more_calls_and_fewer(net, step, rank):
    for call in range((1, 3, 2, 4, 1)[step]):
        net(rows(step, rank, call)).backward()


def a_layer_that_one_rank_leaves_out(net, step, rank):
    net(rows(step, rank), aside=rank == 0 or step == 2).backward()


def frozen_after_backward(net, step, rank):
    net.requires_grad_(True)
    net(rows(step, rank)).backward()
    net.first.requires_grad_(step % 2 == 1)


def a_call_that_fails(net, step, rank):
    if step in (2, 3):
        try:
            net(rows(step, rank), around=fail_in_backward).backward()
        except Failed:
            for parameter in net.parameters():
                parameter.grad = None
    net(rows(step, rank)).backward()


def a_collective_inside_of_backward(net, step, rank):
    def around(hidden):
        def average(grad):
            if dist.is_initialized() and not net.by_hand:
                total = grad.clone()
                dist.all_reduce(total)
                assert total.shape == grad.shape
            return grad

        hidden.register_hook(average)
        return hidden

    net(rows(step, rank), aside=rank == 0, around=around).backward()


def a_gradient_that_is_kept(net, step, rank):
    if step == 0:
        net.kept = []
    for gradient in net.kept:
        gradient.zero_()
    net(rows(step, rank)).backward()
    for gradient in net.kept:
        gradient.mul_(2)
    if step == 0:
        net.kept = [p.grad for p in net.parameters()]


def checkpointed_segments_that_share_a_layer(net, step, rank):
    from torch.utils.checkpoint import checkpoint

    hidden = rows(step, rank).requires_grad_()
    for _ in range(2):
        hidden = checkpoint(net.first, hidden, use_reentrant=True)
    net.last(net.second(hidden)).square().mean().backward()


def a_gradient_that_a_hook_replaces_in_a_late_step(net, step, rank):
    def change(grad):
        if rank == 0 and step == 4:
            net.last.weight.grad = net.last.weight.grad * 3

    net(rows(step, rank), around=lambda hidden: (hidden.register_hook(change), hidden)[1]).backward()


def phases_whose_gradients_stay(net, step, rank):
    for phase, trained in enumerate((net.first, net.second, net.first)):
        net.requires_grad_(False)
        trained.requires_grad_(True)
        net.last.requires_grad_(phase != 1)
        net(rows(step, rank, phase)).backward()
        if phase == 1:
            net.first.weight.grad.mul_(0.5)
    net.requires_grad_(True)


def added_to_after_a_look(net, step, rank):
    for call in range(3):
        net(rows(step, rank, call)).backward()
        net.first.weight.grad.mul_(0.5)


def gradients_that_are_zeroed(net, step, rank):
    for call in range(2):
        net(rows(step, rank, call)).backward()


SCENARIOS: dict[str, Callable[[nn.Module, int, int], None]] = {
    f.__name__: f
    for f in (
        one_call,
        more_calls_and_fewer,
        a_layer_that_one_rank_leaves_out,
        frozen_after_backward,
        a_call_that_fails,
        a_collective_inside_of_backward,
        a_gradient_that_is_kept,
        checkpointed_segments_that_share_a_layer,
        a_gradient_that_a_hook_replaces_in_a_late_step,
        phases_whose_gradients_stay,
        added_to_after_a_look,
        gradients_that_are_zeroed,
    )
}
KEEPING = ("a_gradient_that_is_kept", "gradients_that_are_zeroed")


def routed(name, rank):
    """The weights after a few steps, and how many buckets left inside of a backward call."""
    net = Net()
    net.by_hand = False
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = discover({"model": net, "optimizer": optimizer})
    averaging = Averaging(found, torch.device("cpu"), bucket_bytes=1)
    router = StepRouter(found, torch.device("cpu"), precision=StepPrecision("fp32"), averaging=averaging)
    early, real = [], dist.all_reduce

    def count(*args, **kwargs):
        if router.in_backward and kwargs.get("async_op"):
            early.append(args[0].numel())
        return real(*args, **kwargs)

    dist.all_reduce = count
    try:
        for step in range(STEPS):
            with router:
                optimizer.zero_grad(set_to_none=name not in KEEPING)
                SCENARIOS[name](net, step, rank)
                optimizer.step()
    finally:
        dist.all_reduce = real
    return [p.detach().clone() for p in net.parameters()], len(early)


def by_hand(name):
    """The weights that two ranks must have: gradients of both, averaged by hand."""
    net, other = Net(), Net()
    net.by_hand = other.by_hand = True
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, other)]
    for step in range(STEPS):
        for rank, (each, optimizer) in enumerate(zip((net, other), optimizers, strict=True)):
            optimizer.zero_grad(set_to_none=name not in KEEPING)
            SCENARIOS[name](each, step, rank)
        for mine, its in zip(net.parameters(), other.parameters(), strict=True):
            present = [p.grad for p in (mine, its) if p.grad is not None]
            if present:
                mean = sum(present) / WORLD
                for p in (mine, its):
                    if p.grad is None:
                        p.grad = mean.clone()
                    else:
                        p.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def main(rank):
    expected = {name: by_hand(name) for name in SCENARIOS}
    results = {}
    with rank.group():
        for name in SCENARIOS:
            weights, early = routed(name, rank.number)
            results[name] = {"weights": weights, "expected": expected[name], "early": early}
    torch.save(results, rank.folder / f"rank{rank.number}.pt")


if __name__ == "__main__":
    main(Rank.of_command_line())
