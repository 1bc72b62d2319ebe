"""One of two ranks whose gradients wait for the update of a later step; started by ``test_waiting_gradients.py``.

Arguments: rank, world size, folder. A scenario is a generator: what it yields is an optimizer that is to be stepped.
Each trains some steps with routed gradients, in a bucket for each parameter, and computes by hand, from the rows of
both ranks, what the weights must be.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from zoo.accumulation import OverTwoSteps

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.contract.types import StepResult
from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.buckets import Bucket
from genlight.adapter.gradients.gradient_sync import GradientSync
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter
from support.early_buckets_ranks import Net, rows

STEPS = 10
WORLD = 2
WINDOW = 3


class Subject:
    """What a scenario trains: one optimizer for all, and one that some scenarios use for the last layer alone."""

    def __init__(self, *, splits: bool = False) -> None:
        self.net = Net()
        last = list(self.net.last.parameters()) if splits else []
        held = {id(p) for p in last}
        self.optimizer = torch.optim.Adam([p for p in self.net.parameters() if id(p) not in held], lr=0.01)
        self.second = torch.optim.SGD(last, lr=0.1) if splits else None

    def backward(self, step: int, rank: int, call: int = 0) -> None:
        self.net(rows(step, rank, call)).backward()

    def norm(self) -> torch.Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])


class ClippedLater(OverTwoSteps):
    """A trainer class that clips and updates at the beginning of a step, by what the steps before have left."""

    def train_step(self, batch, state, ctx):
        if state["calls"] and state["calls"] % 2 == 0:
            nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        self.loss(batch, state).backward()
        state["calls"] += 1
        return StepResult({})


Updates = Iterator[torch.optim.Optimizer]


def over_three_steps(subject: Subject, step: int, rank: int) -> Updates:
    if step % WINDOW == 0:
        subject.optimizer.zero_grad()
    subject.backward(step, rank)
    if step % WINDOW == WINDOW - 1:
        yield subject.optimizer


def clipped_before_the_next_backward(subject: Subject, step: int, rank: int) -> Updates:
    if step and step % WINDOW == 0:
        nn.utils.clip_grad_norm_(subject.net.parameters(), 0.1)
        yield subject.optimizer
        subject.optimizer.zero_grad()
    subject.backward(step, rank)


def read_by_one_rank(subject: Subject, step: int, rank: int) -> Updates:
    yield from over_three_steps(subject, step, rank)
    if rank == 0:
        subject.norm()


def read_in_the_middle(subject: Subject, step: int, rank: int) -> Updates:
    yield from over_three_steps(subject, step, rank)
    if step % WINDOW == 1:
        subject.norm()


def calls_that_differ(subject: Subject, step: int, rank: int) -> Updates:
    if step % WINDOW == 0:
        subject.optimizer.zero_grad()
    for call in range(2 if rank == 1 and step % 2 else 0 if rank == 0 and step % WINDOW == 1 else 1):
        subject.backward(step, rank, call)
    if step % WINDOW == WINDOW - 1:
        yield subject.optimizer


def a_layer_that_freezes_in_the_middle(subject: Subject, step: int, rank: int) -> Updates:
    subject.net.aside.requires_grad_(step % WINDOW != 1)
    yield from over_three_steps(subject, step, rank)


def a_parameter_that_is_replaced_in_the_middle(subject: Subject, step: int, rank: int) -> Updates:
    if step % WINDOW == 1:
        old = subject.net.last.bias
        new = nn.Parameter(torch.cat([old.detach(), old.detach().mean().reshape(1)])[1:])
        subject.net.last.bias = new
        held = subject.optimizer.param_groups[0]["params"]
        held[next(i for i, p in enumerate(held) if p is old)] = new
        subject.optimizer.state.pop(old, None)
    yield from over_three_steps(subject, step, rank)


def windows_of_two_lengths(subject: Subject, step: int, rank: int) -> Updates:
    assert subject.second is not None
    subject.backward(step, rank)
    if step % 2:
        yield subject.optimizer
        subject.optimizer.zero_grad()
    if step % WINDOW == WINDOW - 1:
        yield subject.second
        subject.second.zero_grad()


def a_window_that_ends_early(subject: Subject, step: int, rank: int) -> Updates:
    if step in (0, 2, 4, 5, 7):
        subject.optimizer.zero_grad()
    subject.backward(step, rank)
    if step in (1, 3, 4, 6, 8):
        yield subject.optimizer


def written_by_hand(subject: Subject, step: int, rank: int) -> Updates:
    if step % WINDOW == 0:
        subject.optimizer.zero_grad()
    parameters = list(subject.net.parameters())
    gradients = torch.autograd.grad(subject.net(rows(step, rank)), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    if step % WINDOW == WINDOW - 1:
        yield subject.optimizer


def updates_that_cease(subject: Subject, step: int, rank: int) -> Updates:
    if step < STEPS - 3:
        subject.optimizer.zero_grad()
    subject.backward(step, rank)
    if step < STEPS - 4:
        yield subject.optimizer


SCENARIOS: dict[str, Callable[[Subject, int, int], Updates]] = {
    f.__name__: f
    for f in (
        over_three_steps,
        clipped_before_the_next_backward,
        read_by_one_rank,
        read_in_the_middle,
        calls_that_differ,
        a_layer_that_freezes_in_the_middle,
        a_parameter_that_is_replaced_in_the_middle,
        windows_of_two_lengths,
        a_window_that_ends_early,
        written_by_hand,
        updates_that_cease,
    )
}


def an_update_of_one_rank(subject: Subject, step: int, rank: int) -> Updates:
    subject.backward(step, rank)
    if step == 4 or (rank == 0 and step == 5):
        yield subject.optimizer


def routed(scenario: Callable[[Subject, int, int], Updates], rank: int) -> dict[str, object]:
    """What is left after the steps, and in which of them how many buckets were sent."""
    subject = Subject(splits=scenario is windows_of_two_lengths)
    optimizers = [optimizer for optimizer in (subject.optimizer, subject.second) if optimizer is not None]
    found = discover({"model": subject.net, "optimizers": optimizers})
    gradients = GradientSync(found, bucket_bytes=1, sync_each_batch=False)
    router = StepRouter(found, torch.device("cpu"), precision=StepPrecision("fp32"), gradients=gradients)
    sent, real = [0] * STEPS, Bucket.send_as_it_is

    def count(bucket: Bucket) -> None:
        sent[step] += 1
        real(bucket)

    router.open()
    Bucket.send_as_it_is = count
    try:
        for step in range(STEPS):
            with router:
                for optimizer in scenario(subject, step, rank):
                    optimizer.step()
    except ContractError:
        subject.norm()  # as Lightning's teardown reads them: nobody waits for the other rank any more
        raise
    finally:
        Bucket.send_as_it_is = real
        router.close()
    waits = router.averaging.waits
    router.ended()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in subject.net.parameters()]
    weights = [p.detach().clone() for p in subject.net.parameters()]
    return {"weights": weights, "grads": grads, "sent": sent, "waits": waits}


def by_hand(scenario: Callable[[Subject, int, int], Updates]) -> list[torch.Tensor]:
    """The weights that two ranks must have: gradients of both, averaged by hand before each update."""
    subjects = [Subject(splits=scenario is windows_of_two_lengths) for _ in range(WORLD)]
    for step in range(STEPS):
        runs = [scenario(subject, step, rank) for rank, subject in enumerate(subjects)]
        while (optimizers := [next(run, None) for run in runs])[0] is not None:
            for pair in zip(*(subject.net.parameters() for subject in subjects), strict=True):
                present = [p.grad for p in pair if p.grad is not None]
                for p in pair if present else ():
                    p.grad = sum(present[1:], start=present[0]) / WORLD
            for optimizer in optimizers:
                optimizer.step()
    return [p.detach() for p in subjects[0].net.parameters()]


def clipped_by_hand() -> list[torch.Tensor]:
    """As `by_hand`, for the scenario that reads gradients before it yields: on all rows at once."""
    subject = Subject()
    for step in range(STEPS):
        if step and step % WINDOW == 0:
            nn.utils.clip_grad_norm_(subject.net.parameters(), 0.1)
            subject.optimizer.step()
            subject.optimizer.zero_grad()
        for rank in range(WORLD):
            (subject.net(rows(step, rank)) / WORLD).backward()
    return [p.detach() for p in subject.net.parameters()]


def main(rank: int, world_size: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    expected = {name: by_hand(SCENARIOS[name]) for name in SCENARIOS if "clipped" not in name}
    expected["clipped_before_the_next_backward"] = clipped_by_hand()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    results = {name: {**routed(SCENARIOS[name], rank), "expected": expected[name]} for name in SCENARIOS}
    try:
        routed(an_update_of_one_rank, rank)
    except ContractError as error:
        results["an_update_of_one_rank"] = str(error)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
