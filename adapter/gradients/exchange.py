"""Sends the buckets of a plan and waits for them, and for what ranks tell each other about it.

A rank that does not come along, or that is elsewhere in its code, is named instead of waited for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import Bucket
from .early_buckets import EarlyBuckets, Place, Plan
from .equal_replicas import check_same
from .lost_ranks import about_broken_exchange
from .rank_notes import Notes
from .rank_points import MARKS, NUMBERS, Point, are_together, parted
from .sent_points import LATE_CALLS, SentPoints

__all__ = ["Exchange", "GradientOf"]

GradientOf = Callable[[Tensor], Tensor | None]
"""Gives the gradient of a parameter."""

_NO_POSITION = -1
"""In a note: all gradients are averaged, rather than those of one optimizer."""

_REPLACED = (
    "Parameters were replaced while training, and not by equal ones on all ranks: rank 0 has {here}, rank {rank} has "
    "{there}. Ranks that add or remove rows must decide by what is equal on all of them: gradients of parameters are, "
    "statistics of a rank's own rows are not."
)


class Exchange:
    """Exchanges gradients with the other ranks, all of which have to come to the same place for that.

    Args:
        group: Of the ranks; None means all.
        agreed: Mark of the first plan, which all ranks have, since they were built alike.
        named: Gives a point whose parameter has its path, for a message.
        shapes: Says what parameters are like now, where some were replaced.
        in_order: Whether buckets travel one after the other, for a hook that remembers what it was given.

    Attributes:
        early: Sends buckets while backward runs.
        may_update_inside: Whether optimizers may be stepped in the middle of a backward call.
        was_replaced: Whether this rank's parameters are others than in the last exchange.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        agreed: int,
        named: Callable[[Point], Point],
        shapes: Callable[[], list[str]],
        *,
        in_order: bool,
    ) -> None:
        self._group = group
        self._named = named
        self._shapes = shapes
        self._in_order = in_order
        self._sent = SentPoints(group, named)
        self._agreed = {agreed}
        """Marks of the plans that all ranks are known to have."""
        self._last_plan: Plan | None = None
        self._step = -1
        self._updates_before = 0
        self.early = EarlyBuckets()
        self.may_update_inside = False
        self.was_replaced = False

    def before_backward(self, plan: Plan, at: Point) -> bool:
        """A backward call begins: send buckets of `plan` in it, where all ranks have that plan; whether they do."""
        if len(plan.buckets) < 2 or plan.mark not in self._agreed:
            return False
        self.early.before_backward(plan, self._place(at))
        return True

    def __call__(
        self, plan: Plan, gradient_of: GradientOf | None, at: Point, *, sends: bool = True
    ) -> list[bool] | None:
        """Send and wait; whether any rank has a gradient, for each of the tensors that no optimizer holds.

        Buckets that were sent inside of backward are on their way. The notes say whether one of them has to be sent
        again, on this rank or another.

        Args:
            plan: What to send.
            gradient_of: Gives the gradients; None takes part without any.
            at: Where this rank is.
            sends: False leaves it to the others. If none of them sends, the outcome is None; a single bucket, which
                takes the notes along, is sent in any case.

        Raises:
            ContractError: Another rank is elsewhere in its code, or trains other parameters.
            RankFailedError: The exchange broke off.
        """
        if self.may_update_inside:
            self.compare(at, plan.buckets[0], _NO_POSITION)
        self._agree_on(plan, at)
        at = at._replace(mark=plan.mark)
        self._last_plan = plan
        return self._send_and_wait(plan, gradient_of, at, sends=sends)

    def compare(self, at: Point, bucket: Bucket, position: int) -> None:
        """Learn whether all ranks are about to average the same, where their graphs alone decide about that.

        Args:
            at: Where this rank is.
            bucket: What it is about to send.
            position: A number that says which gradients these are.

        Raises:
            ContractError: They are not; tensors of different sizes would end the process.
        """
        notes = torch.zeros(dist.get_world_size(bucket.group), NUMBERS + 1, device=bucket.device)
        notes[dist.get_rank(bucket.group)] = torch.tensor([*at.numbers(), position], device="cpu")
        dist.all_reduce(notes, group=bucket.group)
        rows = notes.tolist()
        if any(row[-1] != rows[0][-1] for row in rows) or not are_together([row[:-1] for row in rows]):
            raise parted(self._named(at), self._group)

    def _agree_on(self, plan: Plan, at: Point) -> None:
        """Learn whether all ranks go over to `plan`, which is new.

        One that does not would send tensors of other sizes, by which gloo ends the process, and others mix up
        gradients. So the plan that was used last is used once more, for nothing but its notes.

        Raises:
            ContractError: They train different parameters.
        """
        if plan.mark in self._agreed and not self.was_replaced:
            return
        mark = MARKS - 1 if self.was_replaced else plan.mark
        if self._last_plan is not None:
            self._send_and_wait(self._last_plan, None, at._replace(mark=mark), sends=False)
            self._sent.check(0)
        if self.was_replaced:
            self.was_replaced = False
            check_same(self._shapes(), self._group, _REPLACED)
            self._agreed.clear()
        self._agreed.add(plan.mark)

    def _send_and_wait(
        self, plan: Plan, gradient_of: GradientOf | None, at: Point, *, sends: bool
    ) -> list[bool] | None:
        if self._in_order:
            return self._send_in_order(plan, gradient_of, at, sends=sends)
        *firsts, last = plan.buckets
        notes, window = plan.notes, self.early.window
        sends = sends or not notes.are_apart
        if sends:
            self._send_firsts(plan, gradient_of, at)
        repeats = window is not None and window.must_repeat()
        notes.write(at, _used(plan, gradient_of), sends=sends, repeats=repeats)
        if sends:
            last.send_or_take_part(gradient_of)
        if notes.are_apart:
            notes.send()
            self.wait(plan.buckets[0], at, notes)
            if not sends and notes.anyone_sends():
                self._send_firsts(plan, gradient_of, at)
                last.send_or_take_part(gradient_of)
                sends = True
        for bucket in plan.buckets if sends else ():
            self.wait(bucket, at)
        self._sent.add(at, notes.rows)
        used = notes.used_by_anyone()
        self._sent.check(0 if used or firsts else LATE_CALLS)
        if not sends:
            return None
        if firsts:
            repeated = notes.anyone_repeats()
            for bucket in firsts if repeated else ():
                bucket.send_or_take_part(gradient_of)
                self.wait(bucket, at)
            self.early.close(plan, self._place(at), repeated=repeated)
        return used

    def _send_firsts(self, plan: Plan, gradient_of: GradientOf | None, at: Point) -> None:
        """Send all buckets but the last one, unless they are on their way."""
        window = self.early.window
        for position in plan.order(self._place(at)):
            if window is None or position not in window.sent:
                plan.buckets[position].send_or_take_part(gradient_of)

    def _send_in_order(
        self, plan: Plan, gradient_of: GradientOf | None, at: Point, *, sends: bool
    ) -> list[bool] | None:
        """As `_send_and_wait`, for a hook that remembers what it was given.

        It is given each bucket once, in the order of the plan, when gradients are wanted on all ranks and some rank has
        one in it: its memory then depends on the trainer's code alone. One bucket has arrived before the next leaves,
        because such a hook sends from threads of the process group, which would mix up several.
        """
        plan.notes.write(at, _used(plan, gradient_of), sends=sends)
        for bucket in plan.buckets:
            bucket.pack([None if gradient_of is None else gradient_of(p) for p in bucket.parameters])
            bucket.send_tail()
        for bucket in plan.buckets:
            self.wait(bucket, at)
        self._sent.add(at, plan.notes.rows)
        self._sent.check(0)
        if not sends and not plan.notes.anyone_sends():
            return None
        used = [bucket for bucket in plan.buckets if bucket.is_used]
        for bucket in used:
            bucket.send_by_hook(is_last=bucket is used[-1])
            self.wait(bucket, at)
        return plan.notes.used_by_anyone()

    def wait(self, bucket: Bucket, at: Point, notes: Notes | None = None) -> None:
        """Until `bucket` has arrived, or the `notes` that travel beside it.

        Raises:
            RankFailedError: It will not.
        """
        try:
            (notes or bucket).wait()
        except RuntimeError as error:
            first = self._named(at._replace(what=bucket.parameters[0])).what
            raise about_broken_exchange(error, self._named(at), str(first), self._group) from error

    def _place(self, at: Point) -> Place:
        """Where in its step `at` is; what happens there is likely to happen there in the next step."""
        if at.step != self._step:
            self._step, self._updates_before = at.step, at.updates
        return at.updates - self._updates_before, at.ordinal


def _used(plan: Plan, gradient_of: GradientOf | None) -> list[bool]:
    return [] if gradient_of is None else [gradient_of(p) is not None for p in plan.others]
