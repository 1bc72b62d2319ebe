"""Averages the gradients of a data-parallel run.

A trainer calls its modules directly, so ``DistributedDataParallel`` and its forward never see them. What it does is
done here for bare tensors instead, with the same arithmetic, and without its conditions: a parameter may be unused on
one rank, be used twice by a checkpointed segment, or get gradients from several backward calls.

Averaging is exact under accumulation, because it averages the whole of ``p.grad``: the part that was averaged before
is equal on all ranks and stays what it is.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..discovery.discover import Discovered
from ..discovery.rank_local import EVERYTHING_SHARED, RankLocal
from .buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, grouped, read_gradient, write_gradient
from .communication_hooks import CommunicationHook
from .early_buckets import EarlyBuckets, Place, Plan
from .equal_replicas import check_same
from .rank_points import NUMBERS, Point, are_together, parted
from .torch_internals import group_timeout

__all__ = ["GradientSync"]

LATE_CALLS = 8
"""How many calls a GPU may be behind the host before the host waits for it."""


class GradientSync:
    """Averages gradients over the ranks: of all optimizers' parameters, and of whatever else a trainer gives one.

    What an optimizer holds always takes part. Other parameters of the modules, and bare tensors that want a gradient,
    may be updated by hand, counted into a norm or copied to others: they take part where any rank has a gradient for
    them, which ranks tell each other first. To know that, the host waits for the device in each call, unless all of
    them are frozen. A trainer without optimizers updates by hand: then all of them always take part.

    Args:
        discovered: The trainer's objects. Parameters of its own ``DistributedDataParallel`` modules and sharded ones
            are left to those.
        group: Process group; None means all ranks.
        rank_local: What is each rank's own.
        bucket_bytes: Gradients travel in pieces of at most this size, unless one is larger; None means 25 MiB.
        hook: Exchanges them in its own way, but for those of optimizers that are stepped inside of backward.
    """

    def __init__(
        self,
        discovered: Discovered,
        group: dist.ProcessGroup | None = None,
        rank_local: RankLocal = EVERYTHING_SHARED,
        *,
        bucket_bytes: int | None = None,
        hook: CommunicationHook | None = None,
    ) -> None:
        self._hook = hook
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._first_bytes = min(FIRST_BUCKET_BYTES, self._bucket_bytes)
        self._discovered = discovered
        self._rank_local = rank_local
        self.group = group
        self._world_size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._own_group: dist.ProcessGroup | None = None
        """Of the buckets, once there are several."""
        self._foreign = {id(p) for m in _replicated_by_themselves(discovered) for p in m.parameters()}
        self._sent: deque[_SentPoint] = deque()
        self._previous: Point | None = None
        self._optimized: list[Tensor] | None = None
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self._candidates: list[Tensor] = []
        self._others: list[Tensor] = []
        self._all: list[Tensor] = []
        self._plans: dict[tuple[bool, ...], Plan] = {}
        self._buckets_inside: dict[tuple[int, ...], list[Bucket]] = {}
        self._averaged_inside: set[int] = set()
        """Ids of the parameters whose gradients were averaged in the middle of a backward call, until its end."""
        self._pending_plan: Plan | None = None
        """Of the parameters as they were in the first backward call since gradients were averaged."""
        self._early = EarlyBuckets()
        self._step = -1
        self._updates_before = 0
        self._is_small = True
        self._was_replaced = False
        self.by_hand: frozenset[int] = frozenset()
        """Ids of the tensors that no optimizer updates."""
        self.shared = {id(found.value) for found in rank_local.shared(discovered)}
        """Ids of the optimizers whose updates are the same on all ranks."""
        self.parameters()

    def before_backward(self, at: Point) -> None:
        """A backward call begins, whose gradients may be sent before it ends."""
        if self._pending_plan is None:
            self._refresh()
            if not self._is_small:
                plan = self._current_plan()
                self._pending_plan = plan if len(plan.buckets) > 1 else None
        if self._pending_plan is not None:
            self._early.before_backward(self._pending_plan, self._place(at))

    def after_backward(self) -> None:
        """A backward call has ended or failed."""
        self._early.after_backward()

    def abandon(self) -> None:
        """The step failed: the other ranks may not come this far."""
        self._pending_plan = None
        self._early.abandon()

    def close(self) -> None:
        """Training ended as planned: let go of what gloo keeps for the buckets; NCCL's goes with the process."""
        self._early.forget()
        self._plans.clear()
        own, self._own_group = self._own_group, None
        if own is not None and dist.get_backend(own) == "gloo":
            dist.destroy_process_group(own)

    def __call__(self, at: Point) -> None:
        """Replace every ``p.grad`` by its mean over the ranks, where any rank has one.

        Args:
            at: Where the trainer's code is; must be the same on all ranks.

        Raises:
            ContractError: It is not, and what was averaged does not belong together.
        """
        pending, self._pending_plan = self._pending_plan, None
        if pending is not None:
            self._write_averages(pending, at)
        plan = self._current_plan()
        self._averaged_inside.clear()
        if plan is not pending:
            self._write_averages(plan, at)

    def average_given(self, gradients: Mapping[int, Tensor | None], at: Point) -> dict[int, Tensor]:
        """Replace `gradients`, by the ids of their parameters, by their mean; in place, as far as there were any.

        Returns:
            What other ranks have and this one does not.
        """
        if self._pending_plan is not None:  # its buckets are on their way
            self(at)
        new = self._average(self._current_plan(), lambda p: gradients.get(id(p)), at)
        return {id(p): gradient for p, gradient in new if id(p) in gradients}

    @torch.no_grad()
    def average_inside_of_backward(self, parameters: Sequence[Tensor], at: Point) -> None:
        """Average the gradients of `parameters` alone, in the middle of a backward call; for that call once.

        Raises:
            ContractError: Another rank is not at the same parameters.
        """
        self._refresh()
        mine = {id(p) for p in parameters}
        averaged = [p for p in self._all if id(p) in mine and p.requires_grad]
        if not averaged:
            return
        # Ranks whose graphs differ come here with other parameters, of other sizes: first of all they compare notes.
        position = next(i for i, p in enumerate(self._all) if p is averaged[0])
        points = torch.zeros(self._world_size, NUMBERS + 1, device=averaged[0].device)
        points[self._rank] = torch.tensor([*at.numbers(), position])
        dist.all_reduce(points, group=self._own_group or self.group)
        if any(row != points[0].tolist() for row in points.tolist()):
            raise parted(self._named(at), self.group)
        key = tuple(map(id, averaged))
        if key not in self._buckets_inside:
            self._buckets_inside[key] = [Bucket(g, self._own_group or self.group) for g in grouped(averaged)]
        buckets = self._buckets_inside[key]
        for bucket in buckets:
            bucket.send_or_take_part(read_gradient)
        for bucket in buckets:
            bucket.wait()
            for i, gradient in bucket.land().items():
                write_gradient(bucket.parameters[i], gradient)
        self._averaged_inside |= set(key)

    def take_no_part(self, at: Point) -> None:
        """This rank's step ends without a gradient; learn whether that is so on all ranks.

        Raises:
            ContractError: It is not.
        """
        pending, self._pending_plan = self._pending_plan, None  # of a backward call that failed
        plan = pending or self._current_plan()
        if plan.buckets:
            self._exchange(plan, None, at)

    def _write_averages(self, plan: Plan, at: Point) -> None:
        for parameter, gradient in self._average(plan, read_gradient, at):
            write_gradient(parameter, gradient)

    @torch.no_grad()
    def _average(
        self, plan: Plan, gradient_of: Callable[[Tensor], Tensor | None], at: Point
    ) -> list[tuple[Tensor, Tensor]]:
        """Average in place; gives the gradients that are to be put in the place of others, or of none."""
        if not plan.buckets:
            return []
        others_used = self._exchange(plan, gradient_of, at)
        buckets = [*plan.buckets]
        if any(others_used):
            seconds = plan.of_others(others_used, self._own_group or self.group)
            for bucket in seconds:
                bucket.send([gradient_of(p) for p in bucket.parameters])
            for bucket in seconds:
                bucket.wait()
            buckets += seconds
        return [(bucket.parameters[i], gradient) for bucket in buckets for i, gradient in bucket.land().items()]

    def _exchange(self, plan: Plan, gradient_of: Callable[[Tensor], Tensor | None] | None, at: Point) -> list[bool]:
        """Send and wait; whether any rank has a gradient, for each of the tensors that no optimizer holds.

        Buckets that were sent inside of backward are on their way. The last one says whether one of them has to be
        sent again, on this rank or another.
        """
        if self._was_replaced:
            self._was_replaced = False
            check_same(_shapes([*self._candidates, *self._others]), self.group, _REPLACED)
        *firsts, last = plan.buckets
        window = self._early.window
        order = plan.order(self._place(at))
        for bucket in (firsts[position] for position in order if window is None or position not in window.sent):
            bucket.send_or_take_part(gradient_of)
        points, repeats, others = torch.split(last.extra, [NUMBERS * self._world_size, 1, len(plan.others)])
        last.extra.zero_()
        points[NUMBERS * self._rank :][:NUMBERS].copy_(torch.tensor(at.numbers()))
        if window is not None and window.must_repeat():
            repeats.fill_(1)
        if gradient_of is not None and plan.others:
            others.copy_(torch.tensor([float(gradient_of(p) is not None) for p in plan.others]))
        last.send_or_take_part(gradient_of)
        for bucket in plan.buckets:
            bucket.wait()
        self._sent.append(_SentPoint(at, self._previous, *_to_host(points)))
        self._previous = at
        # What ranks tell each other travels in the type of the gradients, which may be complex.
        used = [flag > 0 for flag in others.real.tolist()]
        self._check_points(0 if used or firsts or self._sent[-1].ready is None else LATE_CALLS)
        if firsts:
            repeated = repeats.real.item() > 0
            for bucket in firsts if repeated else ():
                bucket.send_or_take_part(gradient_of)
                bucket.wait()
            self._early.close(plan, self._place(at), repeated=repeated)
        return used

    def _place(self, at: Point) -> Place:
        """Where in its step `at` is; what happens there is likely to happen there in the next step."""
        if at.step != self._step:
            self._step, self._updates_before = at.step, at.updates
        return at.updates - self._updates_before, at.ordinal

    def _check_points(self, most_left: int) -> None:
        """Compare where the ranks were; on a GPU some calls later, so that the host need not wait for the device.

        All ranks look at a call after the same number of others, so that all raise the error in the same call.
        """
        while len(self._sent) > most_left:
            sent = self._sent.popleft()
            if sent.ready is not None and not sent.ready.query():  # type: ignore[no-untyped-call]
                sent.ready.synchronize()
            if not are_together(sent.numbers.real.reshape(-1, NUMBERS).tolist()):
                before = "" if sent.before is None else str(self._named(sent.before))
                raise parted(self._named(sent.point)._replace(before=before), self.group)

    def _named(self, point: Point) -> Point:
        """`point` with the path of its parameter, which is looked for only for a message."""
        paths = {id(p): path for path, p in self._outside_of_optimizers()}
        what = point.what
        return point if isinstance(what, str) else point._replace(what=paths.get(id(what), "a parameter"))

    def parameters(self) -> list[Tensor]:
        """The tensors whose gradients are averaged, as they are now; the same list while they are the same."""
        self._refresh()
        return self._all

    def _refresh(self) -> None:
        """Follow parameters that were added, or that took the place of others with the same names."""
        optimized = [
            p for found in self._discovered.optimizers for group in found.value.param_groups for p in group["params"]
        ]
        before = self._optimized
        if (
            before is not None
            and len(before) == len(optimized)
            and all(map(operator.is_, before, optimized))
            and all(slots.get(name) is parameter for slots, name, parameter in self._slots)
        ):
            return
        self._was_replaced = before is not None
        self._optimized = optimized
        self._plans.clear()
        self._buckets_inside.clear()
        self._early.forget()
        left_out = self._foreign | self._rank_local.ids(self._discovered)
        held = {id(p) for p in optimized}
        others = [p for _, p in self._outside_of_optimizers() if id(p) not in held]
        unique = {id(p): p for p in (*optimized, *others) if id(p) not in left_out and not isinstance(p, DTensor)}
        self._candidates = [p for p in unique.values() if id(p) in held]
        self._others = [p for p in unique.values() if id(p) not in held]
        self.by_hand = frozenset(id(p) for p in self._others)
        if not self._discovered.optimizers:
            self._candidates, self._others = self._others, []
        modules = [m for found in self._discovered.modules for m in found.value.modules()]
        self._all = self._candidates + self._others
        self._is_small = sum(p.numel() * p.element_size() for p in self._all) <= self._first_bytes
        self._slots = [
            (m._parameters, name, p)
            for m in modules
            for name, p in m._parameters.items()
            if p is not None and id(p) in self.by_hand
        ]

    def _outside_of_optimizers(self) -> Iterator[tuple[str, Tensor]]:
        for found in self._discovered.modules:
            yield from self._rank_local.parameters(found)
        yield from self._rank_local.bare(self._discovered)

    def _current_plan(self) -> Plan:
        self._refresh()
        # A GAN switches requires_grad between its phases, on all ranks alike: each pattern has its own plan.
        inside = self._averaged_inside
        pattern = tuple([p.requires_grad and id(p) not in inside for p in self._all])
        plan = self._plans.get(pattern)
        if plan is None:
            # Backward makes the last parameters' gradients first; so does the order of the buckets.
            wanted = [p for p in reversed(self._candidates) if p.requires_grad and id(p) not in inside]
            others = [p for p in self._others if p.requires_grad and id(p) not in inside]
            plan = self._plan(wanted or others, others if wanted else [])
            self._plans[pattern] = plan
        return plan

    def _plan(self, always: list[Tensor], others: list[Tensor]) -> Plan:
        extra = NUMBERS * self._world_size + 1 + len(others)
        groups = list(grouped(always, self._bucket_bytes, self._first_bytes))
        last = len(groups) - 1
        if last > 0 and self._own_group is None:
            self._own_group = self._early.group = _group_of_buckets(self.group)
        group = self._own_group or self.group
        buckets = [
            Bucket(g, group, extra if i == last else 0, hook=self._hook, index=i, is_last=i == last)
            for i, g in enumerate(groups)
        ]
        return Plan(buckets, others)


class _SentPoint(NamedTuple):
    """Where this rank was, the numbers of all ranks on their way through the device, and when they can be read."""

    point: Point
    before: Point | None
    numbers: Tensor
    ready: torch.cuda.Event | None


_REPLACED = (
    "Parameters were replaced while training, and not by equal ones on all ranks: rank 0 has {here}, rank {rank} has "
    "{there}. Ranks that add or remove rows must decide by what is equal on all of them: gradients of parameters are, "
    "statistics of a rank's own rows are not."
)


def _group_of_buckets(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of the same ranks for gradients alone.

    They are sent inside of backward, where they could come before or after a collective of the trainer (of a
    synchronized BatchNorm, say): in a group of their own the order does not matter.
    """
    parent = group or dist.group.WORLD
    assert parent is not None
    made: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(parent), timeout=group_timeout(parent))
    return made


def _shapes(tensors: Iterable[Tensor]) -> list[str]:
    return [f"{tuple(t.shape)} of {t.dtype}" for t in tensors]


def _replicated_by_themselves(discovered: Discovered) -> Iterator[nn.Module]:
    for found in discovered.modules:
        yield from (m for m in found.value.modules() if isinstance(m, DistributedDataParallel))


def _to_host(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and what to wait for before it is read."""
    if value.device.type != "cuda":
        return value, None
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return host, ready
