"""Sends buckets of gradients while backward still runs, so that the exchange hides behind it.

How gradients add up does not depend on when a bucket is sent: which parameters travel together is laid down by the
plan, and a bucket that was sent too early is sent again. What is learned here, after how many backward calls a trainer
looks at its gradients and in which order buckets become ready, therefore changes how long a step takes and never what
it computes; a resumed run may learn it again.

All ranks send the same buckets in the same order, whatever their own graphs look like: each as early as it can, the
rest when gradients are wanted. The last bucket always waits until then. It says where the rank is and whether one of
its gradients changed after it was sent; if that is so on any rank, all send the others again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .buckets import Bucket, grouped, read_gradient
from .rank_notes import Notes

__all__ = ["EarlyBuckets", "Habit", "Place", "Plan", "Window"]

Place = tuple[int, int]
"""Where in a step gradients are exchanged: its updates until then, and how often they were exchanged since the last."""

MOST_MISTAKES = 2
"""How often buckets may be sent too early at one place of a step before they are sent late there."""
EXCHANGES_PER_MISTAKE = 100
"""How many exchanges later one more may be."""


@dataclass
class Habit:
    """What was learned about one place of a step."""

    calls: int = 0
    """After how many backward calls gradients are wanted, as far as is known."""
    order: list[int] | None = None
    """Positions of the buckets in the order in which they become ready, the same on all ranks; without the last."""
    mistakes: int = 0
    """How often buckets had to be sent again."""
    _exchanges: int = 0
    _last_calls: int = 0

    @property
    def is_trusted(self) -> bool:
        """Whether buckets may be sent early; again after many exchanges, since a trainer may have changed its ways."""
        return self.mistakes < MOST_MISTAKES + self._exchanges // EXCHANGES_PER_MISTAKE

    def learn(self, calls: int, *, repeated: bool) -> None:
        """Gradients were wanted after `calls` backward calls.

        That there were fewer than ever may be the short end of an epoch: it takes two such to believe it.
        """
        self._exchanges += 1
        self.mistakes += repeated
        if calls >= self.calls or calls == self._last_calls:
            self.calls = calls
        self._last_calls = calls


@dataclass(frozen=True)
class Plan:
    """How gradients travel: some always, others once it is known that some rank has one."""

    buckets: list[Bucket]
    others: list[Tensor]
    notes: Notes
    mark: int = 0
    """A number of `MARKS` that tells which parameters are trained."""
    habits: dict[Place, Habit] = field(default_factory=dict)
    """What was learned about when gradients are wanted, by the place in a step."""
    gradient_as_bucket_view: bool = False
    """Whether averages become gradients where they stand."""
    _others_buckets: dict[tuple[bool, ...], list[Bucket]] = field(default_factory=dict)

    def order(self, place: Place) -> Sequence[int]:
        """Positions of the buckets in the order in which they are sent, without the last."""
        habit = self.habits.get(place)
        return range(len(self.buckets) - 1) if habit is None or habit.order is None else habit.order

    def of_others(self, used: Sequence[bool], group: dist.ProcessGroup | None) -> list[Bucket]:
        """Buckets of those of `others` that are used."""
        key = tuple(used)
        if key not in self._others_buckets:
            wanted = [p for p, is_used in zip(self.others, used, strict=True) if is_used]
            self._others_buckets[key] = [
                Bucket(parameters, group, gradient_as_bucket_view=self.gradient_as_bucket_view)
                for parameters in grouped(wanted)
            ]
        return self._others_buckets[key]


@dataclass
class Window:
    """From a backward call until gradients are wanted.

    Attributes:
        buckets: All that are to be sent; the last one is never sent early.
    """

    buckets: Sequence[Bucket]
    habit: Habit
    calls: int = 0
    sent: dict[int, list[tuple[Tensor | None, int]]] = field(default_factory=dict)
    """By the position of a bucket: its gradients when it was sent, and their versions."""
    ready: list[int] = field(default_factory=list)
    """Positions of the buckets whose gradients are there, in the order in which they came."""
    _missing: list[int] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    is_open: bool = False

    def before_backward(self) -> None:
        """A backward call begins."""
        self.calls += 1
        if self.sent:  # too early; whatever this call adds shows in `must_repeat`
            return
        habit = self.habit
        is_last = self.calls == habit.calls and habit.is_trusted
        self.is_open = habit.order is None or is_last
        if self.is_open:
            self.ready.clear()
            self._seen.clear()
            self._missing = [len(bucket.parameters) for bucket in self.buckets]

    def after_backward(self) -> None:
        """A backward call has ended or failed."""
        self.is_open = False

    def on_accumulated(self, position: int, parameter: int) -> None:
        """The gradient of the parameter with the id `parameter`, in the bucket at `position`, was added to."""
        if not self.is_open or parameter in self._seen:  # twice in one call: in a checkpointed segment
            return
        self._seen.add(parameter)
        self._missing[position] -= 1
        if self._missing[position]:
            return
        self.ready.append(position)
        for following in self.habit.order or ():
            if following in self.sent:
                continue
            if self._missing[following]:
                break
            self._send(following)

    def must_repeat(self) -> bool:
        """Whether a gradient has changed since its bucket was sent."""
        for position, gradients in self.sent.items():
            for parameter, (sent, version) in zip(self.buckets[position].parameters, gradients, strict=True):
                now = read_gradient(parameter)
                if now is not sent or (now is not None and now._version != version):
                    return True
        return False

    def _send(self, position: int) -> None:
        bucket = self.buckets[position]
        with torch.no_grad():
            gradients = [read_gradient(p) for p in bucket.parameters]
            self.sent[position] = [(g, 0 if g is None else g._version) for g in gradients]
            bucket.send(gradients)


class EarlyBuckets:
    """Watches the parameters of buckets while backward runs, and remembers the habits of a trainer."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[Tensor, Any, RemovableHandle]] = {}
        self._positions: dict[int, int] = {}
        self._buckets: Sequence[Bucket] = ()
        self.window: Window | None = None

    def before_backward(self, plan: Plan, place: Place) -> None:
        """A backward call begins.

        Args:
            plan: Of the parameters that it may give gradients to; has several buckets.
            place: Where in a step this is; all ranks must give the same.
        """
        if self.window is None:
            self._watch(plan.buckets)
            self.window = Window(plan.buckets, plan.habits.setdefault(place, Habit()))
        self.window.before_backward()

    def after_backward(self) -> None:
        """A backward call has ended or failed."""
        if self.window is not None:
            self.window.after_backward()

    def close(self, plan: Plan, place: Place, *, repeated: bool) -> None:
        """Gradients were exchanged: learn from what was seen. To be called on all ranks.

        Args:
            plan: What was sent.
            place: Where in the step that was.
            repeated: Whether buckets were sent twice.
        """
        window, self.window = self.window, None
        habit = plan.habits.setdefault(place, Habit())
        habit.learn(habit.calls if window is None else window.calls, repeated=repeated)
        if habit.order is None:
            habit.order = self._agreed_order([] if window is None else window.ready, plan)

    def abandon(self) -> None:
        """The step failed; what was sent is left to itself."""
        self.window = None

    def _agreed_order(self, ready: Sequence[int], plan: Plan) -> list[int]:
        """The order in which the buckets of the group's first rank became ready, then those that did not."""
        firsts = range(len(plan.buckets) - 1)
        early = [position for position in ready if position in firsts]
        late = [position for position in firsts if position not in early]
        first = plan.buckets[0]
        numbers = torch.tensor(early + late, device=first.device)
        source = 0 if first.group is None else dist.get_global_rank(first.group, 0)
        dist.broadcast(numbers, src=source, group=first.group)
        return [int(n) for n in numbers.tolist()]

    def forget(self) -> None:
        """Parameters were replaced: watch none of them until the next backward call."""
        for _, _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()
        self._buckets = ()

    def _watch(self, buckets: Sequence[Bucket]) -> None:
        if buckets is self._buckets:
            return
        self._buckets = buckets
        self._positions = {id(p): position for position, bucket in enumerate(buckets) for p in bucket.parameters}
        for parameter in (p for bucket in buckets for p in bucket.parameters):
            if id(parameter) not in self._watched:
                # A hook of the node, not of the tensor: nobody who looks at a parameter's hooks sees it, and it runs
                # after those of the trainer. A parameter holds its node weakly, so it is kept here.
                node = get_gradient_edge(parameter).node
                handle = node.register_hook(self._hook(id(parameter)))
                self._watched[id(parameter)] = (parameter, node, handle)

    def _hook(self, key: int) -> Callable[..., None]:
        def accumulated(*_: Any) -> None:
            window = self.window
            if window is not None and window.is_open:
                position = self._positions.get(key)
                if position is not None:
                    window.on_accumulated(position, key)

        return accumulated
