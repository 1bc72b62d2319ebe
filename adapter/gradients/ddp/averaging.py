"""Averages gradients over the ranks before anything reads or uses them.

A trainer calls its modules directly, so their forward does not go through ``DistributedDataParallel`` (DDP). This
module does the work of DDP for bare tensors, with the same arithmetic but without its conditions: a parameter may be
unused on one rank, be used twice by a checkpointed segment, or get gradients from several backward calls.

An exchange sends all gradients, packed into the same buckets in the same order. So the messages of two ranks have the
same size whatever the ranks do, and the header in the first bucket shows whether they are at the same point. During a
backward call, each bucket is sent as soon as its gradients are complete and the previous bucket was sent; the averages
are written when the call ends. So after that call one rank may read gradients alone (rank 0 logs a norm) while the
other ranks continue, even if they wait in a barrier.

If `train_step` calls backward several times before an update, only the last call exchanges gradients; the calls before
it accumulate. The first updates show how many calls there are; until then, gradients are averaged after each call. If a
gradient is read or an update is made earlier than expected, gradients are averaged at that point. If another backward
call follows, they are averaged again. The result is exact: the complete ``.grad`` is averaged, and the part of it that
was averaged before is equal on all ranks, so averaging does not change that part. A checkpoint contains the numbers of
calls, because a resumed run has to make the same exchanges: rounding depends on them.

The gradients of a step are in one of four stages (`_Stage`)::

    stage       meaning                            backward begins  backward ends  read, update or end of the step
    USED        nothing to average                 RUNNING          -              USED
    RUNNING     a backward call runs               -                LOCAL          a hook reads this rank's gradient
    LOCAL       accumulated on this rank only      RUNNING          -              exchange, then USED
    AVERAGED    averaged after the last call       RUNNING          -              USED

After the last expected call, an exchange turns LOCAL into AVERAGED at once. A read or update that uses LOCAL or
AVERAGED gradients records how many calls came before it. Gradients that a trainer writes to ``.grad`` itself are
averaged at the first read or at the update, in any stage.

Three designs were compared:

- Averaging at the first read, with buckets that are sent early by a guess, and sent again if the guess was wrong. This
  supports different numbers of backward calls on each rank. But if only one rank reads a gradient, the others wait in
  another collective, so that the collectives of ``torch.distributed`` have to be replaced. The hosts also have to
  exchange messages about valid buckets, so that none runs ahead of another. This design took 1,900 lines.
- One exchange at the first read, without early buckets: 1.13 to 1.16 times the time of bare DDP at 1 and 4 Gbit/s.
- The present design. It refuses updates during backward, and different numbers of backward calls on the ranks (the
  error names the rank). Before the first update, each of several backward calls costs an exchange.

All three have to replace the class of a parameter (`GradientGuard`), to notice that a trainer writes gradients itself
and reads them to clip them (evolution strategies, Reptile, ``torch.func``). The present design also needs this to
notice reads between backward calls.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ....callbacks.optimizer_state import parameters_of
from ...discovery.discover import Discovered
from ...discovery.rank_local import EVERYTHING_SHARED, RankLocal
from ..rank_check import AFTER_STEP, FIRST_STEPS, ExchangePoint, RankCheck, Trigger, find_user_line
from ..refused import refused_on_ranks
from ..step_part import BackwardCall, StepPart
from ..torch_hooks import GradientGuard, read_gradient, write_gradient
from ..torch_internals import post_accumulate_hooks
from .buckets import BUCKET_BYTES, AveragedParameters, Bucket, Plan

log = logging.getLogger(__name__)

_Use = tuple[int, int]
"""A read or update of gradients in a step: the number of updates before it, and of uses since the last update."""

_NOTHING_TO_AVERAGE = (
    "The %d ranks train separately: `train_step` changes nothing that genlight could average (no optimizer, and no "
    "module or tensor that requires a gradient). Unless it averages by torch.distributed itself, each rank ends with "
    "different values. Keep trained values in tensors that require gradients, or use one device."
)

_READ_ELSEWHERE = (
    "The gradient of %s is read in another thread during step %d, before it is averaged over the ranks: the thread "
    "gets only this rank's gradient. Read gradients in `train_step`, in its own thread, after the last backward call."
)


class _Stage(enum.Enum):
    """State of the gradients of a step; the docstring of the module has the transitions."""

    USED = enum.auto()
    RUNNING = enum.auto()
    LOCAL = enum.auto()
    AVERAGED = enum.auto()


class Averaging(StepPart):
    """The part of a step that averages gradients over the ranks.

    Args:
        discovered: The trainer's objects; `AveragedParameters` selects the parameters to average.
        device: Root device of this rank.
        group: Process group; None means all ranks.
        rank_local: Objects that differ by rank on purpose.
        bucket_bytes: Size at which a bucket is complete.
        wire: Type in which gradients are sent; None keeps their type.
        is_last_step: Returns whether the running step is the last one of the run; equal on all ranks.

    Attributes:
        group: The argument.
        shared: Ids of the optimizers whose updates are the same on all ranks.
        after_each: Whether to average after each backward call, because a hook of Lightning reads gradients there.
        after_average: Functions to call each time after gradients were averaged.

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
        bucket_bytes: int = BUCKET_BYTES,
        wire: torch.dtype | None = None,
        is_last_step: Callable[[], bool] = lambda: False,
    ) -> None:
        _refuse_sparse(discovered)
        self.group = group
        self.after_each = False
        self.after_average: list[Callable[[], None]] = []
        self._device = device
        self._is_last_step = is_last_step
        self._parameters = AveragedParameters(discovered, rank_local, group, bucket_bytes=bucket_bytes, wire=wire)
        self.shared = {id(found.value) for found in rank_local.shared(discovered)}
        if not any(True for _ in discovered.updated()) and dist.get_rank(group) == 0:
            log.warning(_NOTHING_TO_AVERAGE, dist.get_world_size(group))
        self._guard = GradientGuard(self._on_read, self._on_write)
        self._check = RankCheck(group, self._with_paths)
        self._last_plan = self._parameters.make_plan(most_buckets=1)
        """The plan of the previous exchange; at first a plan with a single bucket, only for its header."""
        self._agreed = {self._last_plan.checksum}
        """Checksums of the plans that all ranks have; the first is equal, since `start_equal` compared the ranks."""

        self._step = 1
        self._steps_here = 0
        """Steps since this object was created; after a resume, `_step` is higher."""
        self._thread, self._has_warned = threading.get_ident(), False
        self._stage = _Stage.USED
        self._use: _Use = (0, 0)
        """The use of gradients that comes next."""
        self._updates = self._ordinal = 0
        """Updates by shared optimizers since this object was created, and exchanges since the last update."""
        self._calls = 0
        """Backward calls since the last use of gradients."""
        self._expected: dict[_Use, int] = {}
        """Number of backward calls before each use in a step."""
        self._not_early: set[_Use] = set()
        """Uses for which no bucket is sent early, because gradients changed once after their bucket was sent."""
        self._written: set[int] = set()
        """Ids of the parameters whose gradient the trainer has written since the last exchange."""
        self._updated = set(self.shared)
        """Ids of the optimizers that have updated since the last exchange; before any exchange, all shared ones."""
        self._was_averaged = False
        """Whether this step has exchanged gradients."""
        self._is_closed = False
        self._in_update: Optimizer | None = None
        self._update_line = self._last_update = ""
        """Lines of the trainer's code: of the update that is about to be made, and of the previous one."""
        self._early: _EarlyExchange | None = None
        self._watched: dict[int, tuple[Tensor, Any, RemovableHandle]] = {}

    # Calls of the router.

    @override
    def begin(self, step: int) -> None:
        self._step = step
        self._steps_here += 1
        self._thread = threading.get_ident()
        self._was_averaged = False
        self._reset_stage()
        self._refresh()
        self._guard.guard(self._parameters.all)

    @override
    def before_backward(self, call: BackwardCall) -> None:
        self._refresh()
        if any(map(post_accumulate_hooks, self._parameters.all)):
            raise refused_on_ranks("post-accumulate hook", "`train_step`")
        self._stage = _Stage.RUNNING
        self._calls += 1
        plan = self._parameters.plan()
        if self._is_last_call() and self._early is None and len(plan.buckets) > 1 and self._use not in self._not_early:
            self._agree_on(plan)
            self._watch(plan)
            self._early = _EarlyExchange(plan, self._begin_exchange(plan, Trigger.BACKWARD))

    @override
    def leave_backward(self, *, failed: bool) -> None:
        self._stage = _Stage.LOCAL

    @override
    def after_backward(self) -> None:
        if not self._guard.guard(self._parameters.all) or self._is_last_call():
            self._average(Trigger.BACKWARD)

    @override
    def before_update(self, optimizer: Optimizer) -> bool:
        self._update_line = find_user_line()
        first = next(parameters_of(optimizer), "nothing")
        self._require_averaged(Trigger.UPDATE, first)
        if id(optimizer) in self._updated:  # no exchange since its last update, but gradients may be written in place
            self._average(Trigger.UPDATE, first)
        self._guard.unguard()  # so that the optimizer reads gradients directly
        self._updated.add(id(optimizer))
        self._ordinal = 0
        is_shared = id(optimizer) in self.shared
        self._use = self._use[0] + is_shared, 0
        if is_shared:
            self._updates += 1
            self._last_update = self._update_line
        self._in_update = optimizer
        return True

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        self._in_update = None
        if not self._is_closed:
            self._guard.guard(self._parameters.all)

    @contextlib.contextmanager
    def zeroing(self) -> Iterator[None]:
        """Within this block, write gradients past the guard, which is faster, if no gradient waits to be averaged."""
        is_used = self._stage is _Stage.USED and not self._written
        if is_used:
            self._guard.unguard()
        try:
            yield
        finally:
            if is_used and not self._is_closed:
                self._guard.guard(self._parameters.all)

    @override
    def map_loss(self, loss: Any) -> Any:
        """Return the mean of a closure's loss over the ranks, because a line search must decide alike on all ranks."""
        if not isinstance(loss, Tensor | float | int):
            return loss
        mean = torch.as_tensor(loss, dtype=torch.float64, device=self._device).detach().clone()
        dist.all_reduce(mean.div_(dist.get_world_size(self.group)), group=self.group)
        return mean.to(loss.dtype) if isinstance(loss, Tensor) else mean.item()

    @override
    def grad(self, run: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse gradients of parameters during an update, and of parameters that no optimizer holds.

        The call returns this rank's gradients, and genlight cannot know when the trainer uses them. With
        ``create_graph``, gradients of parameters that no optimizer holds are allowed, as a penalty needs them.
        """
        _, create_graph, inputs = (*args, False, False, ())[:3]
        requested = {id(p) for p in inputs}
        if self._in_update is not None and any(id(p) in requested for p in self._parameters.all):
            raise refused_on_ranks("gradients in an update", type(self._in_update).__name__)
        if not create_graph and not requested.isdisjoint(self._parameters.by_hand):
            raise refused_on_ranks("gradients by hand", "`train_step`")
        return run(outputs, grads, *args, **kwargs)

    @override
    def end(self) -> None:
        """Average the remaining gradients, and find ranks that have diverged."""
        self._require_averaged(Trigger.END_OF_STEP)
        self._guard.unguard()
        if not self._was_averaged:
            self._send_header_only(Trigger.NOTHING)
        elif self._is_last_step():  # no later exchange would show that a rank makes more exchanges than others
            self._send_header_only(Trigger.LAST)

    @override
    def before_save(self) -> None:
        """Compare the updates of the last step by an additional header, and read all headers."""
        self._send_header_only(Trigger.SAVE)
        self._check.read_all()

    @override
    def abandon(self) -> None:
        self._guard.unguard()
        self._reset_stage()
        self._early = None

    @override
    def close(self) -> None:
        """End the training; from now on a read of a gradient does not involve other ranks."""
        self._is_closed = True
        self._guard.unguard()
        self._unwatch()

    def release_group(self) -> None:
        """Release the process group of the buckets. Collective."""
        self._parameters.release_group()

    def state_dict(self) -> dict[str, list[list[int]]]:
        """Return the state that a resumed run needs to make the same exchanges; equal on all ranks."""
        return {"expected": [[*use, calls] for use, calls in self._expected.items()]}

    def load_state_dict(self, state: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Restore the state that `state_dict` returned."""
        self._expected = {(updates, uses): calls for updates, uses, calls in state["expected"]}

    # When gradients are averaged.

    def _on_read(self, parameter: Tensor) -> None:
        has_new = self._stage is not _Stage.USED or id(parameter) in self._written
        if self._stage is _Stage.RUNNING or not has_new:
            return
        if threading.get_ident() == self._thread:
            self._require_averaged(Trigger.READ, parameter)
        elif not self._has_warned:  # to average here, every rank would need such a thread
            self._has_warned = True
            log.warning(_READ_ELSEWHERE, self._with_paths(ExchangePoint(what=parameter)).what, self._step)

    def _on_write(self, parameter: Tensor, value: Tensor | None) -> None:
        if self._stage is _Stage.RUNNING:
            return
        if value is None:
            self._written.discard(id(parameter))
        else:
            self._written.add(id(parameter))

    def _require_averaged(self, trigger: Trigger, what: Tensor | str = "") -> None:
        """Average gradients that are about to be used; remember the number of backward calls before this use."""
        is_local = self._stage is _Stage.LOCAL or bool(self._written)
        self._stage = _Stage.USED
        if self._calls:
            self._expected[self._use] = self._calls
            self._calls = 0
            self._use = self._use[0], self._use[1] + 1
        if is_local:
            self._average(trigger, what)

    def _is_last_call(self) -> bool:
        """Whether gradients are expected to be used after this backward call and before the next one."""
        return self.after_each or self._calls >= self._expected.get(self._use, 1)

    def _reset_stage(self) -> None:
        self._stage, self._use = _Stage.USED, (0, 0)
        self._in_update = None
        self._written.clear()
        self._calls = self._ordinal = 0

    # How gradients are averaged.

    def _average(self, trigger: Trigger, what: Tensor | str = "") -> None:
        """Replace every ``p.grad`` by its mean over the ranks, if any rank has one.

        Raises:
            ContractError: The ranks are at different points, or train different parameters.
            RankFailedError: The exchange broke off.
        """
        if self._stage is _Stage.LOCAL:
            self._stage = _Stage.AVERAGED
        self._written.clear()
        early, self._early = self._early, None
        if early is not None:
            is_stale = self._send_rest_of_early(early)
            self._finish(early.plan, early.at, keeps=not is_stale)
            if is_stale:  # all ranks send all buckets again
                self._not_early.add(self._use)
                early, trigger = None, Trigger.AGAIN
        if trigger is not Trigger.BACKWARD:
            self._refresh()
        self._parameters.include_new()
        plan = self._parameters.plan()
        if early is None or plan is not early.plan:  # nothing was sent, or other parameters are trained since then
            self._agree_on(plan)
            if plan.buckets:
                at = self._begin_exchange(plan, trigger, what)
                self._send_rest(plan, ())
                self._finish(plan, at)
        self._updated.clear()
        self._was_averaged = True
        for call in self.after_average:
            call()

    def _begin_exchange(self, plan: Plan, trigger: Trigger, what: Tensor | str = "") -> ExchangePoint:
        at = self._point(trigger, what, plan.checksum)
        self._ordinal += 1
        self._check.write(plan.header, at)
        self._last_plan = plan
        return at

    def _send_rest(self, plan: Plan, sent: Sequence[Any], *, stale: bool = False) -> None:
        """Send the remaining buckets of an exchange; the last one reports whether one of those in `sent` is stale."""
        if len(plan.buckets) > 1:
            plan.buckets[-1].extra.fill_(stale)
        for bucket in plan.buckets[len(sent) :]:
            bucket.send([read_gradient(p) for p in bucket.parameters])

    def _send_rest_of_early(self, early: _EarlyExchange) -> bool:
        """Send the rest of an early exchange; return whether all ranks have to discard and repeat it.

        They have to if a gradient has changed on any rank after its bucket was sent. On a device, reading the flags of
        other ranks means waiting for the device. So after the first steps each rank decides by its own gradients; if
        only some ranks then send theirs again, an error names them.
        """
        last, is_stale_here = early.plan.buckets[-1], early.is_stale()
        self._send_rest(early.plan, early.sent, stale=is_stale_here)
        if self._device.type != "cpu" and self._steps_here > FIRST_STEPS:
            return is_stale_here
        self._wait(last, early.at)
        return self._check.read(last.extra, early.at)[0] > 0

    @torch.no_grad()
    def _finish(self, plan: Plan, at: ExchangePoint, *, keeps: bool = True) -> None:
        """Wait for an exchange; if `keeps`, write the averages of each bucket while the next one is being exchanged."""
        for bucket in plan.buckets:
            self._wait(bucket, at)
            if bucket is plan.buckets[0]:
                self._check.receive(plan.header, at)
            for i, gradient in bucket.unpack(lambda tail: self._check.read(tail, at)).items() if keeps else ():
                write_gradient(bucket.parameters[i], gradient)

    def _send_header_only(self, trigger: Trigger) -> None:
        """Exchange only a header.

        Raises:
            ContractError: Another rank makes an exchange for another reason.
        """
        plan = self._parameters.plan()
        if plan.buckets:
            self._agree_on(plan)
            self._send_header(plan, self._begin_exchange(plan, trigger))

    def _send_header(self, plan: Plan, at: ExchangePoint) -> None:
        """Exchange the first bucket only for its header, and compare it."""

        def join() -> None:  # another rank may send all buckets; it waits for them before it compares the header
            for bucket in plan.buckets[1:]:
                bucket.send_unchanged()

        plan.buckets[0].send_unchanged()
        self._wait(plan.buckets[0], at)
        self._check.receive(plan.header, at, most_left=0, before_error=join)

    def _agree_on(self, plan: Plan) -> None:
        """Check that all ranks switch to `plan`, if it is new.

        If they did not, they would send tensors of different sizes: gloo would end the process, and other backends
        would mix up gradients. So the first bucket of the previous plan is sent once more, only for its header.

        Raises:
            ContractError: Ranks train different parameters.
        """
        if plan.checksum in self._agreed:
            return
        last = self._last_plan
        if last.buckets:
            at = self._point(Trigger.UPDATE, checksum=plan.checksum)
            self._check.write(last.header, at)
            self._send_header(last, at)
        self._agreed.add(plan.checksum)

    def _wait(self, bucket: Bucket, at: ExchangePoint) -> None:
        try:
            bucket.wait()
        except RuntimeError as error:
            raise self._check.explain_broken_exchange(error, at, bucket.parameters[0]) from error

    # Parameters and their hooks.

    def _refresh(self) -> None:
        """Find parameters that were added or replaced, unless an exchange is in flight."""
        if self._early is None and self._parameters.refresh():
            self._unwatch()

    def _watch(self, plan: Plan) -> None:
        for parameter in (p for bucket in plan.buckets for p in bucket.parameters):
            if id(parameter) not in self._watched:
                # A hook of the autograd node, not of the tensor: it runs after the trainer's hooks, and code that looks
                # at a parameter's hooks does not find it. A parameter holds its node weakly, so we keep the node.
                node = get_gradient_edge(parameter).node
                self._watched[id(parameter)] = (parameter, node, node.register_hook(self._make_hook(id(parameter))))

    def _make_hook(self, key: int) -> Callable[..., None]:
        def accumulated(*_: Any) -> None:
            if self._early is not None:
                self._early.on_accumulated(key)

        return accumulated

    def _unwatch(self) -> None:
        for _, _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    # The point of this rank.

    def _point(self, trigger: Trigger, what: Tensor | str = "", checksum: int = 0) -> ExchangePoint:
        where = self._update_line if trigger is Trigger.UPDATE else "" if trigger in AFTER_STEP else find_user_line()
        return ExchangePoint(
            trigger, self._step, self._ordinal, self._updates, checksum, what, where, self._last_update
        )

    def _with_paths(self, point: ExchangePoint) -> ExchangePoint:
        """Return `point` with the paths of its parameters, for a message."""
        paths = {id(p): path for path, p in self._parameters.named()}
        what, trained = point.what, (paths.get(id(p), "a parameter") for p in self._parameters.trained())
        name = what if isinstance(what, str) else paths.get(id(what), "a parameter")
        return point._replace(what=name, trained=tuple(trained))


def _refuse_sparse(discovered: Discovered) -> None:
    for found in discovered.modules:
        for name, part in found.value.named_modules():
            if getattr(part, "sparse", False) is True:
                raise refused_on_ranks("sparse", f"{found.path}{name and f'.{name}'}")


class _EarlyExchange:
    """An exchange whose buckets are sent while backward runs, by its threads: there may be one per device.

    Args:
        plan: The buckets.
        at: The point of this rank, as in the header.

    Attributes:
        sent: For each bucket that was sent, its gradients and their versions at that time.
    """

    def __init__(self, plan: Plan, at: ExchangePoint) -> None:
        self.plan, self.at = plan, at
        self.sent: list[list[tuple[Tensor | None, int]]] = []
        self._missing = [{id(p) for p in bucket.parameters} for bucket in plan.buckets]
        self._missing_with = {key: missing for missing in self._missing for key in missing}
        """By each parameter's id, the set in `_missing` for its bucket: parameters whose gradients are incomplete."""
        self._lock = threading.Lock()

    def on_accumulated(self, key: int) -> None:
        """Note a new gradient for the parameter with this id, and send the buckets that are complete now."""
        missing = self._missing_with.get(key)
        if missing is None:
            return
        missing.discard(key)
        if not missing:
            with self._lock:
                self._send_complete()  # a separate method, because the tests allow no loop under a lock

    def _send_complete(self) -> None:
        # The last bucket is sent after the backward call, with a flag: whether gradients in earlier buckets changed.
        while len(self.sent) < len(self.plan.buckets) - 1 and not self._missing[len(self.sent)]:
            bucket = self.plan.buckets[len(self.sent)]
            gradients = [read_gradient(p) for p in bucket.parameters]
            self.sent.append([(g, 0 if g is None else g._version) for g in gradients])
            bucket.send(gradients)

    def is_stale(self) -> bool:
        """Whether a gradient has changed since its bucket was sent, as in a checkpointed segment that is used twice."""
        for bucket, gradients in zip(self.plan.buckets, self.sent, strict=False):
            for parameter, (sent, version) in zip(bucket.parameters, gradients, strict=True):
                now = read_gradient(parameter)
                if now is not sent or (now is not None and now._version != version):
                    return True
        return False
