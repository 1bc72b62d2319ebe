"""Averages the gradients of the ranks before anything reads, uses or sends one.

A trainer calls its modules directly, so ``DistributedDataParallel`` and its forward never see them. What it does is
done here for bare tensors instead, with the same arithmetic and without its conditions: a parameter may be unused on
one rank, be used twice by a checkpointed segment, or get gradients from several backward calls.

An exchange sends all buckets, always the same ones in the same order, so that whatever two ranks do their messages have
one size, and the header in the first one says whether they belong together. Inside of a backward call each bucket
leaves once its gradients and the buckets before it are there; the averages are written when the call ends. So what
follows the call on one rank alone (a norm that rank 0 logs, a barrier) needs no other rank.

Several backward calls before an update cost one exchange, once it is known after how many of them gradients are wanted:
calls before that only accumulate, and wait. Until then gradients are averaged after each call. Should one be read
earlier than expected, or an update come, they are averaged there; should one more call follow, they are averaged again,
which is exact, because the whole of ``.grad`` is averaged and what was averaged before is equal on all ranks. The
counts are part of a checkpoint: rounding differs with the number of exchanges, and a resumed run has to make the same
ones.

Gradients that a trainer writes to ``.grad`` itself are averaged at the first read, or at the update.

Why so. Three designs were compared:

- Averaging at the first reader, with buckets that were sent early by what was learned, and sent again after a wrong
  guess. It takes any number of backward calls on each rank. But a rank that reads alone has the others wait in whatever
  collective they are in, so that the collectives of ``torch.distributed`` have to be replaced; ranks tell each other by
  messages between the hosts which buckets are good, so that no host runs ahead of another; 1,900 lines.
- One exchange at the first reader, without early buckets: 1.13 to 1.16 times bare DDP at 1 and 4 Gbit/s.
- This one. What it gives up: ranks with unequal numbers of backward calls, which are named, and updates inside of
  backward. Its first update with several calls costs an exchange each.

All three need the class of a parameter replaced (`GradientGuard`), for gradients that a trainer writes and then clips
(evolution strategies, Reptile, ``torch.func``), and here for reads between backward calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ...contract.exceptions import ContractError
from ...discovery.discover import Discovered
from ...discovery.rank_local import EVERYTHING_SHARED, RankLocal
from ..step_part import BackwardCall, StepPart
from ..torch_hooks import GradientGuard, read_gradient, write_gradient
from ..torch_internals import group_timeout, is_gradtrackingtensor, post_accumulate_hooks, runs_compiled_code
from .buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, CommunicationHook, grouped
from .parameters import AveragedParameters
from .rank_check import MARKS, Point, RankCheck, Why, check_same, users_line

__all__ = ["Averaging"]

log = logging.getLogger(__name__)

_CHANGED = (
    "Gradients are changed between two backward calls of one update, after %s. They are means over the %d ranks "
    "there, so that a bound (clip_grad_norm_ of each row or microbatch, as in DP-SGD) holds for that mean, and not for "
    "what each rank's own rows give. To bound those, ask for their gradients by torch.autograd.grad or torch.func, "
    "which average nothing, and write the sum of what was bounded to `.grad` before the update; or use one device. "
    "Factors that do not depend on the gradients are right as they are."
)
WATCHED_UPDATES = 3
"""Updates of a run in which gradients that are changed between backward calls are looked for; each look goes through
all parameters."""

_GradientOf = Callable[[Tensor], Tensor | None]
_Place = tuple[int, int]
"""Where in a step gradients are wanted: its updates until then, and how often they were wanted since the last."""

_APART = (
    "The %d ranks train on their own rows: `train_step` changes nothing that genlight could average (no optimizer, and "
    "no module or tensor that requires a gradient). Unless it averages by torch.distributed itself, each rank ends "
    "with values of its own. Keep what is trained as tensors that require gradients, or use one device."
)
_REPLACED = (
    "Parameters were replaced while training, and not by equal ones on all ranks: rank 0 has {here}, rank {rank} has "
    "{there}. Ranks that add or remove rows must decide by what is equal on all of them: gradients of parameters are, "
    "statistics of a rank's own rows are not."
)


@dataclass(frozen=True)
class _Plan:
    """The buckets of one choice of trained parameters."""

    buckets: list[Bucket]
    others: list[Tensor]
    """What no optimizer holds and no rank has had a gradient for; the last bucket says who has one."""
    mark: int
    header: Tensor
    flags: Tensor


class Averaging(StepPart):
    """The part of a step that averages gradients over the ranks.

    What an optimizer holds always takes part. Other parameters of the modules, and bare tensors that want a gradient,
    may be updated by hand, counted into a norm or copied to others: they take part from the first gradient on that any
    rank has for them. To know that, a rank on a device waits for it where it has such a gradient for the first time,
    and all ranks must have it then. A trainer without optimizers updates by hand: then all of them always take part.

    Args:
        discovered: The trainer's objects. Parameters of its own ``DistributedDataParallel`` modules and sharded ones
            are left to those.
        device: Root device of this rank.
        group: Process group; None means all ranks.
        rank_local: What is each rank's own.
        bucket_bytes: Gradients travel in pieces of at most this size, unless one is larger; None means 25 MiB.
        hook: Exchanges them in its own way.
        is_last_step: Whether the step that runs is the last one, on all ranks.

    Attributes:
        group: As given.
        shared: Ids of the optimizers whose updates are the same on all ranks.
        after_each: Whether gradients are wanted after each backward call, because a hook of Lightning's looks at them.
        averaged: Called each time gradients were averaged.
    """

    def __init__(
        self,
        discovered: Discovered,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        rank_local: RankLocal = EVERYTHING_SHARED,
        *,
        bucket_bytes: int | None = None,
        hook: CommunicationHook | None = None,
        is_last_step: Callable[[], bool] = lambda: False,
    ) -> None:
        self.group = group
        self.after_each = False
        self.averaged: Callable[[], None] = lambda: None
        self._device = device
        self._hook = hook
        self._is_last_step = is_last_step
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._managed = AveragedParameters(discovered, rank_local)
        self.shared = {id(found.value) for found in rank_local.shared(discovered)}
        self._in_modules = {id(p) for found in discovered.modules for p in found.value.parameters()}
        self._may_be_apart = not any(True for _ in discovered.updated())
        """Whether nothing says yet that the ranks train together."""
        self._guard = GradientGuard(self._on_read, self._on_write)
        self._check = RankCheck(group, self._named)

        self._own_group: dist.ProcessGroup | None = None
        self._plans: dict[tuple[bool, ...], _Plan] = {}
        self._last_plan: _Plan | None = None
        self._agreed = {self._mark()}
        """Marks of the plans that all ranks are known to have: of the first one, since they were built alike."""
        self._was_replaced = False
        self._make_group()  # now, where all ranks do it

        self._step = 1
        self._updates = self._updates_before = 0
        """Updates of this run, and those before this step."""
        self._ordinal = self._wants = 0
        """How often gradients were averaged, and wanted, since the last update."""
        self._calls = 0
        """Backward calls since gradients were last wanted."""
        self._expected: dict[_Place, int] = {}
        """After how many backward calls gradients are wanted at a place of a step."""
        self._last_calls: dict[_Place, int] = {}
        self._not_early: set[_Place] = set()
        """Places where gradients changed after their bucket had left."""
        self._waits = False
        """Whether gradients were accumulated that have not been averaged."""
        self._written: set[int] = set()
        """Ids of the parameters whose gradient the trainer has written since gradients were averaged."""
        self._may_be_written = False
        """Whether a gradient by a parameter was computed that the trainer may write in place."""
        self._is_up_to_date = False
        """Whether gradients were averaged at all."""
        self._updated: set[int] = set()
        """Optimizers that have updated since."""
        self._was_averaged = False
        """Whether this step has averaged gradients."""
        self._in_backward = self._in_update = self._is_closed = False
        self._update_line = self._last_update = ""
        """Lines of the trainer's code: of the update that is about to be made, and of the last one that was."""
        self._told_of_graphs = False
        self._changes = _Changes()
        self._watches_changes = True
        self._early: _Early | None = None
        self._watched: dict[int, tuple[Tensor, Any, RemovableHandle]] = {}

    # What a step calls.

    @override
    def begin(self, step: int) -> None:
        self._step = step
        self._updates_before = self._updates
        self._watches_changes = self._watches_changes and self._updates < WATCHED_UPDATES
        self._was_averaged = False
        self._forget_window()
        self._refresh()
        self._guard.guard(self._managed.all)

    @override
    def before_backward(self, call: BackwardCall) -> None:
        self._refresh()
        if any(map(post_accumulate_hooks, self._managed.all)):
            raise ContractError(
                "a parameter has a hook that runs when its gradient was accumulated "
                "(register_post_accumulate_grad_hook). On several ranks that gradient is this rank's own: update after "
                "backward, register_hook for what changes a gradient, or use one device or FSDP 2."
            )
        self._in_backward = True
        self._changes.before_backward()
        self._calls += 1
        place = self._place()
        plan = self._plan()
        if self._is_last_call() and self._early is None and len(plan.buckets) > 1 and place not in self._not_early:
            self._agree_on(plan)
            self._watch(plan)
            self._early = _Early(plan, self._begin_exchange(plan, Why.BACKWARD))

    @override
    def leave_backward(self, *, failed: bool) -> None:
        self._in_backward = False
        self._waits = True
        if not failed and self._watches_changes and self._changes.were_added_to():
            self._watches_changes = False
            self._changes.forget()
            log.warning(_CHANGED, self._changes.line, dist.get_world_size(self.group))

    @override
    def after_backward(self) -> None:
        if not self._guard.guard(self._managed.all) or self._is_last_call():
            self._average(Why.BACKWARD)

    @override
    def before_update(self, optimizer: Optimizer, *, in_backward: bool) -> bool:
        if in_backward:
            raise ContractError(
                f"{type(optimizer).__name__} is stepped in the middle of a backward call, where gradients are not yet "
                "those of all ranks. Step it after backward, or use one device or FSDP 2."
            )
        self._update_line = users_line()
        first = next((p for group in optimizer.param_groups for p in group["params"]), "nothing")
        self._wanted(Why.UPDATE, first)
        if self._may_be_written or not self._is_up_to_date or id(optimizer) in self._updated:
            self._average(Why.UPDATE, first)
        self._guard.unguard()  # gradients are read without a detour
        self._may_be_written = False
        self._updated.add(id(optimizer))
        self._changes.forget()
        self._ordinal = self._wants = 0
        if id(optimizer) in self.shared:
            self._updates += 1
            self._last_update = self._update_line
        self._in_update = True
        return True

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        self._in_update = False
        if not self._is_closed:
            self._guard.guard(self._managed.all)

    @override
    def of_loss(self, loss: Any) -> Any:
        """The mean of a closure's loss over the ranks: a line search decides by it, and must do so alike on all."""
        if not isinstance(loss, Tensor | float | int):
            return loss
        mean = torch.as_tensor(loss, dtype=torch.float64, device=self._device).detach().clone()
        dist.all_reduce(mean.div_(dist.get_world_size(self.group)), group=self.group)
        return mean.to(loss.dtype) if isinstance(loss, Tensor) else mean.item()

    @override
    def grad(self, run: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Give the mean of all ranks where nothing tells when the result is used.

        So for tensors that no optimizer updates, and for all within an update, such as products with the Hessian.
        """
        _, create_graph, inputs = (*args, False, False, ())[:3]
        if any(map(self._may_be_parameter, inputs)):
            self._may_be_written = True
        result = run(outputs, grads, *args, **kwargs)
        self._refresh()
        wanted = {id(p) for p in self._managed.all} if self._in_update else self._managed.by_hand
        given = {id(p): g for p, g in zip(inputs, result, strict=True) if id(p) in wanted}
        if not given or create_graph:
            return result
        self._was_averaged = True
        new = self._average_given(given)
        return tuple(new.get(id(p), g) for p, g in zip(inputs, result, strict=True))

    @override
    def end(self) -> None:
        """Average what the step has left, and find out about ranks that are elsewhere."""
        self._wanted(Why.END_OF_STEP)
        self._guard.unguard()
        if self._may_be_apart:
            self._may_be_apart = False
            if dist.get_rank(self.group) == 0:
                log.warning(_APART, dist.get_world_size(self.group))
        if not self._was_averaged:
            self._take_no_part(Why.NOTHING)
        elif self._is_last_step():  # no step follows whose exchange would meet one that another rank makes still
            self._take_no_part(Why.LAST)

    @override
    def abandon(self) -> None:
        self._guard.unguard()
        self._forget_window()
        self._early = None

    @override
    def close(self) -> None:
        """Training is over, or has failed: who reads a gradient now has no other rank wait for it."""
        self._is_closed = True
        self._guard.unguard()
        self._unwatch()

    def ended(self) -> None:
        """Training ended as planned, on all ranks: let go of what gloo keeps for the buckets; NCCL's goes with it."""
        self._plans.clear()
        own, self._own_group = self._own_group, None
        if own is not None and dist.get_backend(own) == "gloo":
            dist.destroy_process_group(own)

    def state_dict(self) -> dict[str, list[int]]:
        """What a resumed run has to know to make the same exchanges; equal on all ranks."""
        return {
            "updates": [place[0] for place in self._expected],
            "wants": [place[1] for place in self._expected],
            "calls": [*self._expected.values()],
            "last_calls": [self._last_calls[place] for place in self._expected],
        }

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Go on with what `state_dict` has returned."""
        places = list(zip(state["updates"], state["wants"], strict=True))
        self._expected = dict(zip(places, state["calls"], strict=True))
        self._last_calls = dict(zip(places, state["last_calls"], strict=True))

    # When gradients are averaged.

    def _on_read(self, parameter: Tensor) -> None:
        if not self._in_backward and (self._calls or id(parameter) in self._written):
            self._changes.look()
            self._wanted(Why.READ, parameter)
            if self._watches_changes:
                self._changes.begin([p for p in self._managed.all if id(p) not in self._managed.by_hand])

    def _on_write(self, parameter: Tensor, value: Tensor | None) -> None:
        if self._in_backward:
            return
        self._changes.note(parameter, value)
        if value is None:
            self._written.discard(id(parameter))
        else:
            self._written.add(id(parameter))

    def _wanted(self, why: Why, what: Tensor | str = "") -> None:
        """Gradients are wanted: learn after how many calls, and make them those of all ranks."""
        if why is Why.READ:
            self._warn_of_compiled_code()
        if self._calls:
            self._learn()
        if self._waits or self._written:
            self._average(why, what)

    def _learn(self) -> None:
        """A count that is lower than ever may be the short end of an epoch: it takes two such to believe it."""
        place, calls = self._place(), self._calls
        if calls >= self._expected.get(place, 0) or calls == self._last_calls.get(place):
            self._expected[place] = calls
        self._last_calls[place] = calls
        self._calls = 0
        self._wants += 1

    def _is_last_call(self) -> bool:
        """Whether the running backward call is the one, as far as is known, after which gradients are wanted."""
        return self.after_each or self._calls >= self._expected.get(self._place(), 1)

    def _place(self) -> _Place:
        return self._updates - self._updates_before, self._wants

    def _forget_window(self) -> None:
        self._waits = self._may_be_written = self._in_backward = self._in_update = False
        self._written.clear()
        self._calls = self._ordinal = self._wants = 0

    def _may_be_parameter(self, tensor: Any) -> bool:
        """Whether a gradient by `tensor` may be one of a parameter: torch.func differentiates by stand-ins of them."""
        if id(tensor) in self._in_modules:
            return True
        return isinstance(tensor, Tensor) and is_gradtrackingtensor(tensor)

    # How they are averaged.

    def _average(self, why: Why, what: Tensor | str = "") -> None:
        """Replace every ``p.grad`` by its mean over the ranks, where any rank has one.

        Raises:
            ContractError: The ranks are not at the same place, or do not train the same.
            RankFailedError: The exchange broke off.
        """
        self._waits = False
        self._written.clear()
        early, self._early = self._early, None
        if early is not None:
            is_stale = early.is_stale()
            self._send_rest(early.plan, early.sent, read_gradient)
            self._finish(early.plan, early.at, read_gradient, lands=not is_stale)
            if is_stale:  # all of them are sent again, as on the other ranks
                self._not_early.add(self._place())
                early = None
        if why is not Why.BACKWARD:
            self._refresh()
        plan = self._plan()
        if early is None or plan is not early.plan:  # what is trained has changed since that call
            self._agree_on(plan)
            self._exchange(plan, why, read_gradient, what)
        self._updated.clear()
        self._is_up_to_date = True
        self._was_averaged = True
        self.averaged()

    def _average_given(self, gradients: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
        """The mean of `gradients`, by the ids of their parameters; in place, as far as there are any.

        Returns:
            What other ranks have and this one does not.
        """
        plan = self._plan()
        self._agree_on(plan)
        new: dict[int, Tensor] = {}
        self._exchange(plan, Why.AUTOGRAD_GRAD, lambda p: gradients.get(id(p)), put=lambda p, g: new.update({id(p): g}))
        return {key: gradient for key, gradient in new.items() if key in gradients}

    def _exchange(
        self,
        plan: _Plan,
        why: Why,
        gradient_of: _GradientOf,
        what: Tensor | str = "",
        put: Callable[[Tensor, Tensor], None] = write_gradient,
    ) -> None:
        if plan.buckets:
            at = self._begin_exchange(plan, why, what)
            self._send_rest(plan, (), gradient_of)
            self._finish(plan, at, gradient_of, put)

    def _begin_exchange(self, plan: _Plan, why: Why, what: Tensor | str = "") -> Point:
        at = self._point(why, what, plan.mark)
        self._ordinal += 1
        self._check.write(plan.header, at)
        self._last_plan = plan
        return at

    def _send_rest(self, plan: _Plan, sent: Sequence[Any], gradient_of: _GradientOf) -> None:
        """Send what is left of an exchange, in order."""
        if plan.others:
            flags = [float(gradient_of(p) is not None) for p in plan.others]
            plan.flags.copy_(torch.tensor(flags, dtype=plan.flags.dtype)) if any(flags) else plan.flags.zero_()
        for bucket in plan.buckets[len(sent) :]:
            bucket.send([gradient_of(p) for p in bucket.parameters])

    @torch.no_grad()
    def _finish(
        self,
        plan: _Plan,
        at: Point,
        gradient_of: _GradientOf,
        put: Callable[[Tensor, Tensor], None] = write_gradient,
        *,
        lands: bool = True,
    ) -> None:
        """Wait for an exchange; write the averages of each bucket, if they count, while the next one travels."""
        for bucket in plan.buckets:
            self._wait(bucket, at)
            if bucket is plan.buckets[0]:
                self._check.arrived(plan.header, at)
            if lands:
                self._land(bucket, at, put)
        if lands:
            self._take_on_others(plan, at, gradient_of, put)

    def _land(self, bucket: Bucket, at: Point, put: Callable[[Tensor, Tensor], None]) -> None:
        for i, gradient in bucket.land(lambda tail: self._check.read(tail, at)).items():
            put(bucket.parameters[i], gradient)

    def _take_on_others(
        self, plan: _Plan, at: Point, gradient_of: _GradientOf, put: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Have those of the plan's others take part from now on for which a rank has a gradient."""
        mine = [gradient_of(p) is not None for p in plan.others]
        if not plan.others or not (any(mine) or plan.flags.device.type == "cpu"):
            return
        counts = self._check.read(plan.flags, at)
        new = [p for p, count in zip(plan.others, counts, strict=True) if count > 0]
        if not new:
            return
        if plan.flags.device.type != "cpu" and any(0 < count < dist.get_world_size(self.group) for count in counts):
            which = next(p for p, c in zip(plan.others, counts, strict=True) if 0 < c < dist.get_world_size(self.group))
            path = self._named(at._replace(what=which)).what
            raise ContractError(
                f"some ranks have a gradient for {path}, which no optimizer holds, "
                "and others have none. Give it to an optimizer, use it on all ranks, or freeze it."
            )
        buckets = [Bucket(tensors, self._own_group or self.group) for tensors in grouped(new)]
        for bucket in buckets:
            bucket.send([gradient_of(p) for p in bucket.parameters])
        for bucket in buckets:
            self._wait(bucket, at)
            self._land(bucket, at, put)
        self._managed.take_on(new)
        self._plans.clear()
        self._agreed = {self._mark()}  # all ranks have counted the same

    def _take_no_part(self, why: Why) -> None:
        """This rank's step ends without a gradient; learn whether that is so on all ranks.

        Raises:
            ContractError: It is not.
        """
        plan = self._plan()
        if plan.buckets:
            self._agree_on(plan)
            self._send_header(plan, self._begin_exchange(plan, why))

    def _send_header(self, plan: _Plan, at: Point) -> None:
        """Send the first bucket for its header alone, and look at it; where others send all, join them."""
        plan.buckets[0].take_part()
        try:
            self._wait(plan.buckets[0], at)
            self._check.arrived(plan.header, at, most_left=0)
        except ContractError:
            for bucket in plan.buckets[1:]:
                bucket.take_part()
            raise

    def _agree_on(self, plan: _Plan) -> None:
        """Learn whether all ranks go over to `plan`, which is new.

        One that does not would send tensors of other sizes, by which gloo ends the process, and others mix up
        gradients. So the first bucket of the plan that was used last is sent once more, for nothing but its header.

        Raises:
            ContractError: They train different parameters.
        """
        if plan.mark in self._agreed and not self._was_replaced:
            return
        mark = MARKS - 1 if self._was_replaced else plan.mark
        last = self._last_plan
        if last is not None:
            at = self._point(Why.UPDATE, mark=mark)
            self._check.write(last.header, at)
            self._send_header(last, at)
        if self._was_replaced:
            self._was_replaced = False
            shapes = [f"{tuple(t.shape)} of {t.dtype}" for t in self._managed.all]
            check_same(shapes, self.group, _REPLACED)
            self._agreed.clear()
        self._agreed.add(plan.mark)

    def _wait(self, bucket: Bucket, at: Point) -> None:
        try:
            bucket.wait()
        except RuntimeError as error:
            raise self._check.broken(error, at, bucket.parameters[0]) from error

    # Which gradients travel together.

    def _refresh(self) -> None:
        """Follow parameters that were added or replaced, unless an exchange is on its way."""
        if self._early is None and self._managed.refresh():
            self._was_replaced = True
            self._plans.clear()
            self._unwatch()

    def _plan(self) -> _Plan:
        """The buckets of what wants a gradient now: a GAN may switch between several in each step."""
        pattern = tuple([p.requires_grad for p in self._managed.all])
        plan = self._plans.get(pattern)
        if plan is None:
            # Backward makes the last parameters' gradients first; so does the order of the buckets.
            always = [p for p in reversed(self._managed.always) if p.requires_grad]
            others = [p for p in self._managed.others if p.requires_grad]
            if not always:
                always, others = others, []
            plan = self._plans[pattern] = self._made(always, others)
        return plan

    def _made(self, always: list[Tensor], others: list[Tensor]) -> _Plan:
        groups = self._groups(always)
        header, flags = self._check.header_size, len(others)
        last = len(groups) - 1
        buckets = [
            Bucket(
                group,
                self._own_group or self.group,
                (header if i == 0 else 0) + (flags if i == last else 0),
                hook=self._hook,
                index=i,
                is_last=i == last,
            )
            for i, group in enumerate(groups)
        ]
        if not buckets:
            return _Plan([], [], self._mark(), torch.empty(0), torch.empty(0))
        extra = buckets[-1].extra
        return _Plan(buckets, others, self._mark(), buckets[0].extra[:header], extra[extra.numel() - flags :])

    def _groups(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        return list(grouped(parameters, self._bucket_bytes, FIRST_BUCKET_BYTES))

    def _mark(self) -> int:
        return crc32(bytes([p.requires_grad for p in self._managed.all])) % (MARKS - 1)

    def _make_group(self) -> None:
        """Make a group of the same ranks for buckets, where there are several.

        They are sent inside of backward, where they could come before or after a collective of the trainer (of a
        synchronized BatchNorm, say): in a group of their own the order does not matter.
        """
        if len(self._groups(self._managed.all)) > 1:
            parent = self.group or dist.group.WORLD
            assert parent is not None
            ranks = dist.get_process_group_ranks(parent)
            self._own_group = dist.new_group(ranks, timeout=group_timeout(parent))

    def _watch(self, plan: _Plan) -> None:
        for parameter in (p for bucket in plan.buckets for p in bucket.parameters):
            if id(parameter) not in self._watched:
                # A hook of the node, not of the tensor: nobody who looks at a parameter's hooks sees it, and it runs
                # after those of the trainer. A parameter holds its node weakly, so it is kept here.
                node = get_gradient_edge(parameter).node
                self._watched[id(parameter)] = (parameter, node, node.register_hook(self._hook_of(id(parameter))))

    def _hook_of(self, key: int) -> Callable[..., None]:
        def accumulated(*_: Any) -> None:
            if self._early is not None:
                self._early.on_accumulated(key)

        return accumulated

    def _unwatch(self) -> None:
        for _, _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    # Where this rank is.

    def _point(self, why: Why, what: Tensor | str = "", mark: int = 0) -> Point:
        if why is Why.UPDATE:
            where = self._update_line
        else:
            where = "" if why in (Why.END_OF_STEP, Why.NOTHING, Why.LAST) else users_line()
        return Point(why, self._step, self._ordinal, self._updates, mark, what, where, self._last_update)

    def _named(self, point: Point) -> Point:
        """`point` with the path of its parameter, which is looked for only for a message."""
        paths = {id(p): path for path, p in self._managed.outside_of_optimizers()}
        what, trained = point.what, (paths.get(id(p), "a parameter") for p in self._managed.all if p.requires_grad)
        named = what if isinstance(what, str) else paths.get(id(what), "a parameter")
        return point._replace(what=named, trained=tuple(trained))

    def _warn_of_compiled_code(self) -> None:
        if not self._told_of_graphs and runs_compiled_code():
            self._told_of_graphs = True
            log.warning(
                "torch.compile cannot take a read of `.grad` on several ranks into a graph, because it has the "
                "gradients averaged: what is compiled around %s runs in parts, and `fullgraph=True` refuses it. Read "
                "gradients, or clip them, outside of compiled code.",
                users_line(),
            )


class _Changes:
    """Finds gradients that a trainer changes after a read, and that another backward call of the same update adds to.

    A factor and a clip look alike, and both look like neither where a gradient is set to zero.

    Attributes:
        line: Of the trainer's code, where gradients were read.
    """

    def __init__(self) -> None:
        self.line = ""
        self._read: dict[int, tuple[Tensor, int]] = {}
        """Parameters, and the versions of their gradients when those were read."""
        self._changed: dict[int, tuple[Tensor, tuple[int, int] | None]] = {}
        """Those whose gradient has changed since, and which one it was before the running backward call."""

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Gradients are read, as they are now."""
        self.line = users_line()
        gradients = ((p, read_gradient(p)) for p in parameters)
        self._read = {id(p): (p, gradient._version) for p, gradient in gradients if gradient is not None}

    def note(self, parameter: Tensor, value: Tensor | None) -> None:
        """The gradient of `parameter` is about to become `value`."""
        if id(parameter) not in self._read:
            return
        _, version = self._read.pop(id(parameter))
        before = read_gradient(parameter)
        new = before if value is None else value
        if new is not None and (new is not before or new._version != version) and bool(new.any()):
            self._changed[id(parameter)] = (parameter, None)

    def look(self) -> None:
        """Look for gradients that were changed in place since they were read."""
        for key, (parameter, version) in tuple(self._read.items()):
            gradient = read_gradient(parameter)
            if gradient is not None and gradient._version != version:
                del self._read[key]
                if gradient._version != version + 1 or bool(gradient.any()):  # else it was set to zero, and no more
                    self._changed[key] = (parameter, None)

    def before_backward(self) -> None:
        """A backward call follows, which changes gradients itself."""
        self.look()
        self._read.clear()
        for key, (parameter, _) in self._changed.items():
            self._changed[key] = (parameter, _identity(read_gradient(parameter)))

    def were_added_to(self) -> bool:
        """Whether the backward call that has ended added to a gradient that was changed before it."""
        return any(_identity(read_gradient(parameter)) != before for parameter, before in self._changed.values())

    def forget(self) -> None:
        """An update follows."""
        self._read.clear()
        self._changed.clear()


def _identity(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


class _Early:
    """An exchange whose buckets leave while backward runs, which may be in a thread for each device.

    Args:
        plan: Its buckets.
        at: What its header says.

    Attributes:
        sent: By bucket, its gradients when it left, and their versions.
    """

    def __init__(self, plan: _Plan, at: Point) -> None:
        self.plan, self.at = plan, at
        self.sent: list[list[tuple[Tensor | None, int]]] = []
        self._bucket_of = {id(p): i for i, bucket in enumerate(plan.buckets) for p in bucket.parameters}
        self._missing = [{id(p) for p in bucket.parameters} for bucket in plan.buckets]
        self._lock = threading.Lock()

    def on_accumulated(self, key: int) -> None:
        """The gradient of the parameter with this id was added to; send the buckets that are complete by that.

        The last one leaves when the call has ended, with what else there is to say.
        """
        with self._lock:
            position = self._bucket_of.get(key)
            if position is None:
                return
            self._missing[position].discard(key)
            while len(self.sent) < len(self.plan.buckets) - 1 and not self._missing[len(self.sent)]:
                bucket = self.plan.buckets[len(self.sent)]
                gradients = [read_gradient(p) for p in bucket.parameters]
                self.sent.append([(g, 0 if g is None else g._version) for g in gradients])
                bucket.send(gradients)

    def is_stale(self) -> bool:
        """Whether a gradient has changed since its bucket left, as in a checkpointed segment that is used twice."""
        for bucket, gradients in zip(self.plan.buckets, self.sent, strict=False):
            for parameter, (sent, version) in zip(bucket.parameters, gradients, strict=True):
                now = read_gradient(parameter)
                if now is not sent or (now is not None and now._version != version):
                    return True
        return False
