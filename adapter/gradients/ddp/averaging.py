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

from ....callbacks.optimizer_state import parameters_of
from ...contract.exceptions import ContractError
from ...discovery.discover import Discovered
from ...discovery.rank_local import EVERYTHING_SHARED, RankLocal
from ..rank_check import AT_ITS_END, FIRST_STEPS, MARKS, ExchangePoint, RankCheck, Trigger, users_line
from ..refused import refused_on_ranks
from ..step_part import BackwardCall, StepPart
from ..torch_hooks import GradientGuard, read_gradient, write_gradient
from ..torch_internals import group_timeout, post_accumulate_hooks
from .buckets import BUCKET_BYTES, Bucket, grouped
from .parameters import AveragedParameters

__all__ = ["Averaging"]

log = logging.getLogger(__name__)

_Place = tuple[int, int]
"""Where in a step gradients are wanted: its updates until then, and how often they were wanted since the last."""

_APART = (
    "The %d ranks train on their own rows: `train_step` changes nothing that genlight could average (no optimizer, and "
    "no module or tensor that requires a gradient). Unless it averages by torch.distributed itself, each rank ends "
    "with values of its own. Keep what is trained as tensors that require gradients, or use one device."
)


_READ_ELSEWHERE = (
    "The gradient of %s is read in another thread during step %d, before the ranks have averaged it: the thread sees "
    "this rank's own. Read gradients in `train_step`, in its own thread, after the last backward call."
)


@dataclass(frozen=True)
class _Plan:
    """The buckets of one choice of trained parameters."""

    buckets: list[Bucket]
    mark: int
    """The same on ranks that have chosen the same."""
    header: Tensor


class Averaging(StepPart):
    """The part of a step that averages gradients over the ranks.

    Args:
        discovered: The trainer's objects; see `AveragedParameters` for those that take part.
        device: Root device of this rank.
        group: Process group; None means all ranks.
        rank_local: What is each rank's own.
        bucket_bytes: Gradients travel in pieces that are complete at this size; None means 25 MiB.
        wire: The type in which they travel; None means their own.
        is_last_step: Whether the step that runs is the last one, on all ranks.

    Attributes:
        group: As given.
        shared: Ids of the optimizers whose updates are the same on all ranks.
        after_each: Whether gradients are wanted after each backward call, because a hook of Lightning's looks at them.
        averaged: What is called each time gradients were averaged.

    Raises:
        ContractError: An embedding has sparse gradients.
    """

    def __init__(
        self,
        discovered: Discovered,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        rank_local: RankLocal = EVERYTHING_SHARED,
        *,
        bucket_bytes: int | None = None,
        wire: torch.dtype | None = None,
        is_last_step: Callable[[], bool] = lambda: False,
    ) -> None:
        _refuse_sparse(discovered)
        self.group = group
        self.after_each = False
        self.averaged: list[Callable[[], None]] = []
        self._device = device
        self._wire = wire
        self._is_last_step = is_last_step
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._managed = AveragedParameters(discovered, rank_local)
        self.shared = {id(found.value) for found in rank_local.shared(discovered)}
        self._may_be_apart = not any(True for _ in discovered.updated())
        """Whether nothing says yet that the ranks train together."""
        self._guard = GradientGuard(self._on_read, self._on_write)
        self._check = RankCheck(group, self._named)

        self._own_group: dist.ProcessGroup | None = None
        self._make_group()  # now, where all ranks do it
        self._plans: dict[tuple[bool, ...], _Plan] = {}
        self._last_plan = self._made(self._taking_part(), most_buckets=1)
        """That of the exchange before; at first its first bucket, for the header alone."""
        self._agreed = {self._last_plan.mark}
        """Marks of the plans that all ranks are known to have: of the first one, since they were built alike."""

        self._step, self._begun = 1, 0
        self._thread, self._has_warned = threading.get_ident(), False
        self._updates = self._updates_before = 0
        """Updates of this run, and those before this step."""
        self._ordinal = self._wants = 0
        """How often gradients were averaged, and wanted, since the last update."""
        self._calls = 0
        """Backward calls since gradients were last wanted."""
        self._expected: dict[_Place, int] = {}
        """After how many backward calls gradients are wanted at a place of a step."""
        self._not_early: set[_Place] = set()
        """Places where gradients changed after their bucket had left."""
        self._waits = False
        """Whether gradients were accumulated that have not been averaged."""
        self._written: set[int] = set()
        """Ids of the parameters whose gradient the trainer has written since gradients were averaged."""
        self._updated = set(self.shared)
        """Optimizers that have updated since gradients were averaged, or that never had any."""
        self._was_averaged = False
        """Whether this step has averaged gradients."""
        self._in_backward = self._is_closed = False
        self._in_update: Optimizer | None = None
        self._update_line = self._last_update = ""
        """Lines of the trainer's code: of the update that is about to be made, and of the last one that was."""
        self._early: _Early | None = None
        self._watched: dict[int, tuple[Tensor, Any, RemovableHandle]] = {}

    # What a step calls.

    @override
    def begin(self, step: int) -> None:
        self._step = step
        self._begun += 1
        self._thread = threading.get_ident()
        self._updates_before = self._updates
        self._was_averaged = False
        self._forget_window()
        self._refresh()
        self._guard.guard(self._managed.all)

    @override
    def before_backward(self, call: BackwardCall) -> None:
        self._refresh()
        if any(map(post_accumulate_hooks, self._managed.all)):
            raise refused_on_ranks("post-accumulate hook", "`train_step`")
        self._in_backward = True
        self._calls += 1
        place = self._place()
        plan = self._plan()
        if self._is_last_call() and self._early is None and len(plan.buckets) > 1 and place not in self._not_early:
            self._agree_on(plan)
            self._watch(plan)
            self._early = _Early(plan, self._begin_exchange(plan, Trigger.BACKWARD))

    @override
    def leave_backward(self, *, failed: bool) -> None:
        self._in_backward = False
        self._waits = True

    @override
    def after_backward(self) -> None:
        if not self._guard.guard(self._managed.all) or self._is_last_call():
            self._average(Trigger.BACKWARD)

    @override
    def before_update(self, optimizer: Optimizer) -> bool:
        self._update_line = users_line()
        first = next(parameters_of(optimizer), "nothing")
        self._require_averaged(Trigger.UPDATE, first)
        if id(optimizer) in self._updated:  # what is in its gradients now was written in place
            self._average(Trigger.UPDATE, first)
        self._guard.unguard()  # gradients are read without a detour
        self._updated.add(id(optimizer))
        self._ordinal = self._wants = 0
        if id(optimizer) in self.shared:
            self._updates += 1
            self._last_update = self._update_line
        self._in_update = optimizer
        return True

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        self._in_update = None
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
        """Refuse gradients by what nothing but the trainer's own code updates: nothing says when they are used."""
        _, create_graph, inputs = (*args, False, False, ())[:3]
        asked = {id(p) for p in inputs}
        if self._in_update is not None and any(id(p) in asked for p in self._managed.all):
            raise refused_on_ranks("gradients in an update", type(self._in_update).__name__)
        if not create_graph and not asked.isdisjoint(self._managed.by_hand):
            raise refused_on_ranks("gradients by hand", "`train_step`")
        return run(outputs, grads, *args, **kwargs)

    @override
    def end(self) -> None:
        """Average what the step has left, and find out about ranks that are elsewhere."""
        self._require_averaged(Trigger.END_OF_STEP)
        self._guard.unguard()
        if self._may_be_apart:
            self._may_be_apart = False
            if dist.get_rank(self.group) == 0:
                log.warning(_APART, dist.get_world_size(self.group))
        if not self._was_averaged:
            self._take_no_part(Trigger.NOTHING)
        elif self._is_last_step():  # no step follows whose exchange would meet one that another rank makes still
            self._take_no_part(Trigger.LAST)

    @override
    def before_save(self) -> None:
        """Send one more header, with the updates of the step that has just ended, and read all of them."""
        self._take_no_part(Trigger.SAVE)
        self._check.read_all()

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

    def state_dict(self) -> dict[str, list[list[int]]]:
        """The state by which a resumed run makes the same exchanges; equal on all ranks."""
        return {"expected": [[*place, calls] for place, calls in self._expected.items()]}

    def load_state_dict(self, state: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Go on with what `state_dict` has returned."""
        self._expected = {(updates, wants): calls for updates, wants, calls in state["expected"]}

    # When gradients are averaged.

    def _on_read(self, parameter: Tensor) -> None:
        if self._in_backward or not (self._calls or id(parameter) in self._written):
            return
        if threading.get_ident() == self._thread:
            self._require_averaged(Trigger.READ, parameter)
        elif not self._has_warned:  # the other ranks do not know of this thread
            self._has_warned = True
            log.warning(_READ_ELSEWHERE, self._named(ExchangePoint(what=parameter)).what, self._step)

    def _on_write(self, parameter: Tensor, value: Tensor | None) -> None:
        if self._in_backward:
            return
        if value is None:
            self._written.discard(id(parameter))
        else:
            self._written.add(id(parameter))

    def _require_averaged(self, trigger: Trigger, what: Tensor | str = "") -> None:
        """Gradients are wanted: learn after how many calls, and make them those of all ranks."""
        if self._calls:
            self._expected[self._place()] = self._calls
            self._calls = 0
            self._wants += 1
        if self._waits or self._written:
            self._average(trigger, what)

    def _is_last_call(self) -> bool:
        """Whether the running backward call is the one, as far as is known, after which gradients are wanted."""
        return self.after_each or self._calls >= self._expected.get(self._place(), 1)

    def _place(self) -> _Place:
        return self._updates - self._updates_before, self._wants

    def _forget_window(self) -> None:
        self._waits = self._in_backward = False
        self._in_update = None
        self._written.clear()
        self._calls = self._ordinal = self._wants = 0

    # How they are averaged.

    def _average(self, trigger: Trigger, what: Tensor | str = "") -> None:
        """Replace every ``p.grad`` by its mean over the ranks, where any rank has one.

        Raises:
            ContractError: The ranks are not at the same place, or do not train the same.
            RankFailedError: The exchange broke off.
        """
        self._waits = False
        self._written.clear()
        early, self._early = self._early, None
        if early is not None:
            is_stale = self._is_stale(early)
            self._finish(early.plan, early.at, lands=not is_stale)
            if is_stale:  # all of them are sent again, as on the other ranks
                self._not_early.add(self._place())
                early, trigger = None, Trigger.AGAIN
        if trigger is not Trigger.BACKWARD:
            self._refresh()
        self._include_new_parameters()
        plan = self._plan()
        if early is None or plan is not early.plan:  # what is trained has changed since that call
            self._agree_on(plan)
            if plan.buckets:
                at = self._begin_exchange(plan, trigger, what)
                self._send_rest(plan, ())
                self._finish(plan, at)
        self._updated.clear()
        self._was_averaged = True
        for call in self.averaged:
            call()

    def _begin_exchange(self, plan: _Plan, trigger: Trigger, what: Tensor | str = "") -> ExchangePoint:
        at = self._point(trigger, what, plan.mark)
        self._ordinal += 1
        self._check.write(plan.header, at)
        self._last_plan = plan
        return at

    def _send_rest(self, plan: _Plan, sent: Sequence[Any], *, stale: bool = False) -> None:
        """Send what is left of an exchange, in order; with the last of several buckets, whether one sent is `stale`."""
        if len(plan.buckets) > 1:
            plan.buckets[-1].extra.fill_(stale)
        for bucket in plan.buckets[len(sent) :]:
            bucket.send([read_gradient(p) for p in bucket.parameters])

    def _is_stale(self, early: _Early) -> bool:
        """Send the rest of an early exchange; whether it is void, on all ranks alike.

        It is if a gradient has changed after its bucket had left, on any rank. After the first steps of a run a device
        would wait to learn that of other ranks: each then decides by its own gradients, and one that sends them again
        alone is named.
        """
        last, here = early.plan.buckets[-1], early.is_stale()
        self._send_rest(early.plan, early.sent, stale=here)
        if self._device.type != "cpu" and self._begun > FIRST_STEPS:
            return here
        self._wait(last, early.at)
        return self._check.read(last.extra, early.at)[0] > 0

    @torch.no_grad()
    def _finish(self, plan: _Plan, at: ExchangePoint, *, lands: bool = True) -> None:
        """Wait for an exchange; write the averages of each bucket, if they count, while the next one travels."""
        for bucket in plan.buckets:
            self._wait(bucket, at)
            if bucket is plan.buckets[0]:
                self._check.arrived(plan.header, at)
            for i, gradient in bucket.land(lambda tail: self._check.read(tail, at)).items() if lands else ():
                write_gradient(bucket.parameters[i], gradient)

    def _take_no_part(self, trigger: Trigger) -> None:
        """This rank's step ends without a gradient; learn whether that is so on all ranks.

        Raises:
            ContractError: It is not.
        """
        plan = self._plan()
        if plan.buckets:
            self._agree_on(plan)
            self._send_header(plan, self._begin_exchange(plan, trigger))

    def _send_header(self, plan: _Plan, at: ExchangePoint) -> None:
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
        if plan.mark in self._agreed:
            return
        last = self._last_plan
        if last.buckets:
            at = self._point(Trigger.UPDATE, mark=plan.mark)
            self._check.write(last.header, at)
            self._send_header(last, at)
        self._agreed.add(plan.mark)

    def _wait(self, bucket: Bucket, at: ExchangePoint) -> None:
        try:
            bucket.wait()
        except RuntimeError as error:
            raise self._check.broken(error, at, bucket.parameters[0]) from error

    # Which gradients travel together.

    def _refresh(self) -> None:
        """Follow parameters that were added or replaced, unless an exchange is on its way."""
        if self._early is None and self._managed.refresh():
            self._plans.clear()
            self._unwatch()

    def _include_new_parameters(self) -> None:
        """Have tensors that no optimizer holds take part once they have a gradient."""
        new = [key for key, p in self._managed.waiting.items() if read_gradient(p) is not None]
        for key in new:
            self._managed.take_on(key)
        if new:
            self._plans.clear()

    def _plan(self) -> _Plan:
        """The buckets of what wants a gradient now: a GAN may switch between several in each step."""
        pattern = tuple([p.requires_grad for p in self._managed.all])
        plan = self._plans.get(pattern)
        if plan is None:
            plan = self._plans[pattern] = self._made(self._taking_part())
        return plan

    def _taking_part(self) -> list[Tensor]:
        return [p for p in self._managed.all if p.requires_grad and id(p) not in self._managed.waiting]

    def _made(self, parameters: list[Tensor], *, most_buckets: int | None = None) -> _Plan:
        numbers = {id(p): i for i, p in enumerate(self._managed.all)}
        mark = crc32(str([(numbers[id(p)], p.shape, p.dtype) for p in parameters]).encode()) % MARKS
        # Backward makes the last parameters' gradients first; so does the order of the buckets.
        groups = list(grouped(parameters[::-1], self._bucket_bytes))[:most_buckets]
        size = self._check.header_size
        group = self._own_group or self.group
        extras = [size] + [0] * (len(groups) - 2) + [1] * (len(groups) > 1)
        buckets = [Bucket(each, group, extra, self._wire) for each, extra in zip(groups, extras, strict=False)]
        return _Plan(buckets, mark, buckets[0].extra if buckets else torch.empty(0))

    def _make_group(self) -> None:
        """Make a group of the same ranks for buckets, where there are several.

        They are sent inside of backward, where they could come before or after a collective of the trainer (of a
        synchronized BatchNorm, say): in a group of their own the order does not matter.
        """
        if len(list(grouped(self._managed.all, self._bucket_bytes))) > 1:
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

    def _point(self, trigger: Trigger, what: Tensor | str = "", mark: int = 0) -> ExchangePoint:
        where = self._update_line if trigger is Trigger.UPDATE else "" if trigger in AT_ITS_END else users_line()
        return ExchangePoint(trigger, self._step, self._ordinal, self._updates, mark, what, where, self._last_update)

    def _named(self, point: ExchangePoint) -> ExchangePoint:
        """`point` with the path of its parameter, which is looked for only for a message."""
        paths = {id(p): path for path, p in self._managed.named()}
        what, trained = point.what, (paths.get(id(p), "a parameter") for p in self._taking_part())
        named = what if isinstance(what, str) else paths.get(id(what), "a parameter")
        return point._replace(what=named, trained=tuple(trained))


def _refuse_sparse(discovered: Discovered) -> None:
    for found in discovered.modules:
        for name, part in found.value.named_modules():
            if getattr(part, "sparse", False) is True:
                raise refused_on_ranks("sparse", f"{found.path}{name and f'.{name}'}")


class _Early:
    """An exchange whose buckets leave while backward runs, which may be in a thread for each device.

    Args:
        plan: Its buckets.
        at: What its header says.

    Attributes:
        sent: By bucket, its gradients when it left, and their versions.
    """

    def __init__(self, plan: _Plan, at: ExchangePoint) -> None:
        self.plan, self.at = plan, at
        self.sent: list[list[tuple[Tensor | None, int]]] = []
        self._bucket_of = {id(p): i for i, bucket in enumerate(plan.buckets) for p in bucket.parameters}
        self._missing = [{id(p) for p in bucket.parameters} for bucket in plan.buckets]
        self._lock = threading.Lock()

    def on_accumulated(self, key: int) -> None:
        """The gradient of the parameter with this id was added to; send the buckets that are complete by that."""
        with self._lock:
            position = self._bucket_of.get(key)
            if position is None:
                return
            self._missing[position].discard(key)
            self._send_complete()  # a call, since no loop may run under a lock: see tests/test_locks.py

    def _send_complete(self) -> None:
        # The last one leaves after the call, and says whether gradients of the others have changed.
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
