"""Averages the gradients of a data-parallel run.

A trainer calls its modules directly, so ``DistributedDataParallel`` and its forward never see them. What it does is
done here for bare tensors instead, with the same arithmetic, and without its conditions: a parameter may be unused on
one rank, be used twice by a checkpointed segment, or get gradients from several backward calls.

Averaging is exact under accumulation, because it averages the whole of ``p.grad``: the part that was averaged before
is equal on all ranks and stays what it is. So gradients that a step leaves without an update may wait for a later one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..discovery.discover import Discovered
from ..discovery.rank_local import EVERYTHING_SHARED, RankLocal
from .averaged_parameters import AveragedParameters
from .bucket_plans import Plans
from .buckets import Bucket, grouped, read_gradient, write_gradient
from .communication_hooks import CommunicationHook
from .early_buckets import Plan
from .exchange import Exchange, GradientOf
from .rank_points import Point
from .torch_internals import post_accumulate_hooks

__all__ = ["GradientSync"]

log = logging.getLogger(__name__)

MOST_WAITING_BYTES = 2**31
"""Of all ranks together, of gradients that wait for an update of a later step where nobody has said that they shall."""


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
        sync_each_batch: Whether gradients are averaged at the end of a step that has not updated by them; False has
            them wait for the update, and costs a place in checkpoints for those of each rank. None waits where that is
            less than 2 GiB. Those that fit into one bucket never wait: what ranks tell each other would cost as much.
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
        sync_each_batch: bool | None = None,
    ) -> None:
        self.group = group
        self._managed = AveragedParameters(discovered, rank_local)
        self._plans = Plans(self._managed, group, bucket_bytes, hook, gradient_as_bucket_view=gradient_as_bucket_view)
        self._buckets_inside: dict[tuple[int, ...], list[Bucket]] = {}
        self._averaged_inside: set[int] = set()
        """Ids of the parameters whose gradients were averaged in the middle of a backward call, until its end."""
        self._pending_plan: Plan | None = None
        """Of the parameters as they were in the first backward call since gradients were averaged."""
        self._keeps_hook_state = hook is not None and hook.keeps_state
        self._sync_each_batch = sync_each_batch
        self._told_of_size = False
        self._exchange = Exchange(
            group,
            self._plans.mark_now(self._averaged_inside),
            self._named,
            lambda: _shapes(self._managed.all),
            in_order=self._keeps_hook_state,
        )
        self._exchange.may_update_inside = any(map(post_accumulate_hooks, self._managed.all))
        self.shared = {id(found.value) for found in rank_local.shared(discovered)}
        """Ids of the optimizers whose updates are the same on all ranks."""
        self.trains = any(True for _ in discovered.updated())
        """Whether the trainer changes anything that could be averaged."""

    @property
    def by_hand(self) -> frozenset[int]:
        """Ids of the tensors that no optimizer updates."""
        return self._managed.by_hand

    def may_wait(self) -> bool:
        """Whether gradients that a step leaves without an update wait for a later one; the same on all ranks."""
        if self._sync_each_batch or not (self._keeps_hook_state or self._plans.notes_group is not None):
            return False
        of_all = dist.get_world_size(self.group) * self._managed.count_bytes
        if self._sync_each_batch is None and of_all > MOST_WAITING_BYTES:
            if not self._told_of_size and dist.get_rank(self.group) == 0:
                log.info(
                    "Gradients that a step leaves without an update are averaged at its end. With `sync_each_batch: "
                    "false` they wait for the update, which saves exchanges; a checkpoint in between then holds those "
                    "of each rank, %.1f GiB.",
                    of_all / 2**30,
                )
            self._told_of_size = True
            return False
        return True

    def before_backward(self, at: Point) -> None:
        """A backward call begins, whose gradients may be sent before it ends."""
        if self._keeps_hook_state:
            return
        if self._managed.count_bytes <= self._plans.first_bytes:  # one bucket, which waits until gradients are wanted
            return
        pending = self._pending_plan
        if pending is None:
            self._refresh()
        if any(map(post_accumulate_hooks, self._managed.all)):  # they may update in the middle of it
            return
        plan = pending or self._plans.now(self._averaged_inside)
        if self._exchange.before_backward(plan, at):
            self._pending_plan = plan

    def after_backward(self) -> None:
        """A backward call has ended or failed."""
        self._exchange.early.after_backward()

    def abandon(self) -> None:
        """The step failed: the other ranks may not come this far."""
        self._pending_plan = None
        self._exchange.early.abandon()

    def close(self, at: Point) -> None:
        """Training ended as planned: let go of what gloo keeps for the buckets; NCCL's goes with the process."""
        if self._pending_plan is not None and self._plans.notes_group is not None:
            self.take_no_part(at)  # of an update that does not come; some buckets may be on their way
        self._exchange.early.forget()
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
        self._average_rest(pending, at)

    def offer(self, at: Point) -> bool:
        """Average gradients that wait for the update of a later step if another rank does, which has read one.

        Args:
            at: The end of a step.

        Returns:
            Whether they were averaged; the same on all ranks.

        Raises:
            ContractError: Another rank has updated by its gradients.
        """
        plan = self._pending_plan = self._pending_plan or self._current_plan()
        if not self._write_averages(plan, at, sends=False):
            return False
        self._pending_plan = None
        self._average_rest(plan, at)
        return True

    def _average_rest(self, done: Plan | None, at: Point) -> None:
        """Average by the plan of what is trained now, unless it is `done`."""
        plan = self._current_plan()
        self._averaged_inside.clear()
        if plan is not done:
            self._write_averages(plan, at)

    def average_given(self, gradients: Mapping[int, Tensor | None], at: Point) -> dict[int, Tensor]:
        """Replace `gradients`, by the ids of their parameters, by their mean; in place, as far as there were any.

        Returns:
            What other ranks have and this one does not.
        """
        if self._pending_plan is not None:  # its buckets are on their way
            self(at)
        new = self._average(self._current_plan(), lambda p: gradients.get(id(p)), at) or ()
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
        self._exchange.may_update_inside = True
        key = tuple(map(id, averaged))
        if key not in self._buckets_inside:
            self._buckets_inside[key] = [Bucket(g, self._plans.group) for g in grouped(averaged)]
        buckets = self._buckets_inside[key]
        position = next(i for i, p in enumerate(self._managed.all) if p is averaged[0])
        self._exchange.compare(at, buckets[0], position)
        for bucket in buckets:
            bucket.send_or_take_part(read_gradient)
        for bucket in buckets:
            self._exchange.wait(bucket, at)
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
            self._exchange(plan, None, at, sends=pending is not None)

    def _write_averages(self, plan: Plan, at: Point, *, sends: bool = True) -> bool:
        """Make the parameters' gradients averages; whether they are, see `_average`."""
        averages = self._average(plan, read_gradient, at, sends=sends)
        for parameter, gradient in averages or ():
            write_gradient(parameter, gradient)
        return averages is not None

    @torch.no_grad()
    def _average(
        self, plan: Plan, gradient_of: GradientOf, at: Point, *, sends: bool = True
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Average in place; gives the gradients that are to be put in the place of others, or of none.

        None where this rank does not send by itself and no other did: nothing was averaged.
        """
        if not plan.buckets:
            return [] if sends else None
        others_used = self._exchange(plan, gradient_of, at, sends=sends)
        if others_used is None:
            return None
        buckets = [*plan.buckets]
        if any(others_used):
            seconds = plan.of_others(others_used, self._plans.group)
            for bucket in seconds:
                bucket.send([gradient_of(p) for p in bucket.parameters])
            for bucket in seconds:
                self._exchange.wait(bucket, at)
            buckets += seconds
        return [(bucket.parameters[i], gradient) for bucket in buckets for i, gradient in bucket.land().items()]

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
            self._exchange.was_replaced = True
            self._plans.forget()
            self._buckets_inside.clear()
            self._exchange.early.forget()

    def _current_plan(self) -> Plan:
        self._refresh()
        return self._plans.now(self._averaged_inside)


def _shapes(tensors: Iterable[Tensor]) -> list[str]:
    return [f"{tuple(t.shape)} of {t.dtype}" for t in tensors]
