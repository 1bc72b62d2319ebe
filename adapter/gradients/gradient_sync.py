"""Averages the gradients of a data-parallel run.

A trainer calls its modules directly, so ``DistributedDataParallel`` and its forward never see them. What it does is
done here for bare tensors instead, with the same arithmetic, and without its conditions: a parameter may be unused on
one rank, be used twice by a checkpointed segment, or get gradients from several backward calls.

Averaging is exact under accumulation, because it averages the whole of ``p.grad``: the part that was averaged before
is equal on all ranks and stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..discovery.discover import Discovered
from ..discovery.rank_local import EVERYTHING_SHARED, RankLocal
from .averaged_parameters import AveragedParameters
from .bucket_plans import Plans
from .buckets import Bucket, grouped, read_gradient, write_gradient
from .communication_hooks import CommunicationHook
from .early_buckets import EarlyBuckets, Place, Plan
from .equal_replicas import check_same
from .lost_ranks import about_broken_exchange
from .rank_points import MARKS, NUMBERS, Point, are_together, parted
from .sent_points import LATE_CALLS, SentPoints
from .torch_internals import post_accumulate_hooks

__all__ = ["GradientSync"]


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
        gradient_as_bucket_view: Whether averages become gradients where they arrived, rather than being copied into
            them, wherever nobody but its parameter holds a gradient.
    """

    def __init__(
        self,
        discovered: Discovered,
        group: dist.ProcessGroup | None = None,
        rank_local: RankLocal = EVERYTHING_SHARED,
        *,
        bucket_bytes: int | None = None,
        hook: CommunicationHook | None = None,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self.group = group
        self._world_size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._managed = AveragedParameters(discovered, rank_local)
        self._sent = SentPoints(group, self._named)
        self._plans = Plans(self._managed, group, bucket_bytes, hook, gradient_as_bucket_view=gradient_as_bucket_view)
        self._buckets_inside: dict[tuple[int, ...], list[Bucket]] = {}
        self._averaged_inside: set[int] = set()
        """Ids of the parameters whose gradients were averaged in the middle of a backward call, until its end."""
        self._pending_plan: Plan | None = None
        """Of the parameters as they were in the first backward call since gradients were averaged."""
        self._early = EarlyBuckets()
        self._keeps_hook_state = hook is not None and hook.keeps_state
        self._step = -1
        self._updates_before = 0
        self._was_replaced = False
        self._updates_inside = any(map(post_accumulate_hooks, self._managed.all))
        """Whether optimizers may be stepped in the middle of a backward call."""
        self._last_plan: Plan | None = None
        self._agreed = {self._plans.mark_now(self._averaged_inside)}
        """Marks of the plans that all ranks are known to have; they were built alike."""
        self.shared = {id(found.value) for found in rank_local.shared(discovered)}
        """Ids of the optimizers whose updates are the same on all ranks."""

    @property
    def by_hand(self) -> frozenset[int]:
        """Ids of the tensors that no optimizer updates."""
        return self._managed.by_hand

    def before_backward(self, at: Point) -> None:
        """A backward call begins, whose gradients may be sent before it ends."""
        if self._keeps_hook_state:
            return
        pending = self._pending_plan
        if pending is None:
            self._refresh()
        if self._managed.count_bytes <= self._plans.first_bytes:  # one bucket, which waits until gradients are wanted
            return
        if any(map(post_accumulate_hooks, self._managed.all)):  # they may update in the middle of it
            return
        if pending is None:
            pending = self._plans.now(self._averaged_inside)
            if len(pending.buckets) < 2 or pending.mark not in self._agreed:
                return
            self._pending_plan = pending
        self._early.before_backward(pending, self._place(at))

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
        self._plans.close()

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
        averaged = [p for p in self._managed.all if id(p) in mine and p.requires_grad]
        if not averaged:
            return
        self._updates_inside = True
        position = next(i for i, p in enumerate(self._managed.all) if p is averaged[0])
        self._compare_notes(at, position, averaged[0].device)
        key = tuple(map(id, averaged))
        if key not in self._buckets_inside:
            self._buckets_inside[key] = [Bucket(g, self._plans.group) for g in grouped(averaged)]
        buckets = self._buckets_inside[key]
        for bucket in buckets:
            bucket.send_or_take_part(read_gradient)
        for bucket in buckets:
            self._wait(bucket, at)
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
            seconds = plan.of_others(others_used, self._plans.group)
            for bucket in seconds:
                bucket.send([gradient_of(p) for p in bucket.parameters])
            for bucket in seconds:
                self._wait(bucket, at)
            buckets += seconds
        return [(bucket.parameters[i], gradient) for bucket in buckets for i, gradient in bucket.land().items()]

    def _compare_notes(self, at: Point, position: int, device: torch.device) -> None:
        """Learn whether all ranks are about to average the same, where their graphs alone decide about that.

        Raises:
            ContractError: They are not; tensors of different sizes would end the process.
        """
        notes = torch.zeros(self._world_size, NUMBERS + 1, device=device)
        notes[self._rank] = torch.tensor([*at.numbers(), position])
        dist.all_reduce(notes, group=self._plans.group)
        rows = notes.tolist()
        if any(row[-1] != rows[0][-1] for row in rows) or not are_together([row[:-1] for row in rows]):
            raise parted(self._named(at), self.group)

    def _agree_on(self, plan: Plan, at: Point) -> None:
        """Learn whether all ranks go over to `plan`, which is new.

        One that does not would send tensors of other sizes, by which gloo ends the process, and others mix up
        gradients. So the plan that was used last is used once more, for nothing but what its last bucket tells.

        Raises:
            ContractError: They train different parameters.
        """
        if plan.mark in self._agreed and not self._was_replaced:
            return
        mark = MARKS - 1 if self._was_replaced else plan.mark
        if self._last_plan is not None:
            self._send_and_wait(self._last_plan, None, at._replace(mark=mark))
            self._sent.check(0)
        if self._was_replaced:
            self._was_replaced = False
            check_same(_shapes(self._managed.all), self.group, _REPLACED)
            self._agreed.clear()
        self._agreed.add(plan.mark)

    def _exchange(self, plan: Plan, gradient_of: Callable[[Tensor], Tensor | None] | None, at: Point) -> list[bool]:
        """Send and wait; whether any rank has a gradient, for each of the tensors that no optimizer holds.

        Buckets that were sent inside of backward are on their way. The last one says whether one of them has to be
        sent again, on this rank or another.
        """
        if self._updates_inside:
            self._compare_notes(at, _NO_POSITION, plan.buckets[0].device)
        self._agree_on(plan, at)
        at = at._replace(mark=plan.mark)
        self._last_plan = plan
        return self._send_and_wait(plan, gradient_of, at)

    def _send_and_wait(
        self, plan: Plan, gradient_of: Callable[[Tensor], Tensor | None] | None, at: Point
    ) -> list[bool]:
        if self._keeps_hook_state:
            return self._exchange_in_order(plan, gradient_of, at)
        *firsts, last = plan.buckets
        window = self._early.window
        order = plan.order(self._place(at))
        for bucket in (firsts[position] for position in order if window is None or position not in window.sent):
            bucket.send_or_take_part(gradient_of)
        points, repeats, others = self._write_extra(plan, gradient_of, at)
        if window is not None and window.must_repeat():
            repeats.fill_(1)
        last.send_or_take_part(gradient_of)
        for bucket in plan.buckets:
            self._wait(bucket, at)
        self._sent.add(at, points)
        # What ranks tell each other travels in the type of the gradients, which may be complex.
        used = [flag > 0 for flag in others.real.tolist()]
        self._sent.check(0 if used or firsts else LATE_CALLS)
        if firsts:
            repeated = repeats.real.item() > 0
            for bucket in firsts if repeated else ():
                bucket.send_or_take_part(gradient_of)
                self._wait(bucket, at)
            self._early.close(plan, self._place(at), repeated=repeated)
        return used

    def _exchange_in_order(
        self, plan: Plan, gradient_of: Callable[[Tensor], Tensor | None] | None, at: Point
    ) -> list[bool]:
        """As `_exchange`, for a hook that remembers what it was given.

        It is given each bucket once, in the order of the plan, when gradients are wanted on all ranks and some rank has
        one in it: its memory then depends on the trainer's code alone. One bucket has arrived before the next leaves,
        because such a hook sends from threads of the process group, which would mix up several.
        """
        points, _, others = self._write_extra(plan, gradient_of, at)
        for bucket in plan.buckets:
            bucket.pack([None if gradient_of is None else gradient_of(p) for p in bucket.parameters])
            bucket.send_tail()
        for bucket in plan.buckets:
            self._wait(bucket, at)
        self._sent.add(at, points)
        self._sent.check(0)
        used = [bucket for bucket in plan.buckets if bucket.is_used]
        for bucket in used:
            bucket.send_by_hook(is_last=bucket is used[-1])
            self._wait(bucket, at)
        return [flag > 0 for flag in others.real.tolist()]

    def _wait(self, bucket: Bucket, at: Point) -> None:
        try:
            bucket.wait()
        except RuntimeError as error:
            first = self._named(at._replace(what=bucket.parameters[0])).what
            raise about_broken_exchange(error, self._named(at), str(first), self.group) from error

    def _write_extra(
        self, plan: Plan, gradient_of: Callable[[Tensor], Tensor | None] | None, at: Point
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the last bucket is to tell: where each rank is, whether to repeat, which other tensors are used."""
        extra = plan.buckets[-1].extra.zero_()
        points, repeats, others = torch.split(extra, [NUMBERS * self._world_size, 1, len(plan.others)])
        points[NUMBERS * self._rank :][:NUMBERS].copy_(torch.tensor(at.numbers()))
        if gradient_of is not None and plan.others:
            others.copy_(torch.tensor([float(gradient_of(p) is not None) for p in plan.others]))
        return points, repeats, others

    def _place(self, at: Point) -> Place:
        """Where in its step `at` is; what happens there is likely to happen there in the next step."""
        if at.step != self._step:
            self._step, self._updates_before = at.step, at.updates
        return at.updates - self._updates_before, at.ordinal

    def _named(self, point: Point) -> Point:
        """`point` with the path of its parameter, which is looked for only for a message."""
        paths = {id(p): path for path, p in self._managed.outside_of_optimizers()}
        what, trained = point.what, (paths.get(id(p), "a parameter") for p in self._managed.all if p.requires_grad)
        named = what if isinstance(what, str) else paths.get(id(what), "a parameter")
        return point._replace(what=named, trained=tuple(trained))

    def parameters(self) -> list[Tensor]:
        """The tensors whose gradients are averaged, as they are now; the same list while they are the same."""
        self._refresh()
        return self._managed.all

    def _refresh(self) -> None:
        if self._managed.refresh():
            self._was_replaced = True
            self._plans.forget()
            self._buckets_inside.clear()
            self._early.forget()

    def _current_plan(self) -> Plan:
        self._refresh()
        return self._plans.now(self._averaged_inside)


_NO_POSITION = -1
"""In a note: all gradients are averaged, rather than those of one optimizer."""

_REPLACED = (
    "Parameters were replaced while training, and not by equal ones on all ranks: rank 0 has {here}, rank {rank} has "
    "{there}. Ranks that add or remove rows must decide by what is equal on all of them: gradients of parameters are, "
    "statistics of a rank's own rows are not."
)


def _shapes(tensors: Iterable[Tensor]) -> list[str]:
    return [f"{tuple(t.shape)} of {t.dtype}" for t in tensors]
