"""Which gradients travel together, for each choice of parameters that a trainer trains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from .averaged_parameters import AveragedParameters
from .buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, grouped
from .communication_hooks import CommunicationHook
from .early_buckets import Plan
from .rank_notes import Notes
from .rank_points import MARKS
from .torch_internals import group_timeout

__all__ = ["Plans"]


class Plans:
    """Makes a plan for each pattern of frozen parameters, and keeps it: a GAN switches between them in each step.

    Args:
        managed: The parameters; plans are for what it has at the time.
        group: Process group; None means all ranks.
        bucket_bytes: Gradients travel in pieces of at most this size, unless one is larger; None means 25 MiB.
        hook: Exchanges them in its own way.
        gradient_as_bucket_view: Whether averages become gradients where they stand.

    Attributes:
        group: In which buckets travel: one of their own, once there are several.
        notes_group: In which ranks then tell each other what they send; None where a single bucket takes that along.
        first_bytes: The largest size of the first bucket.
    """

    def __init__(
        self,
        managed: AveragedParameters,
        group: dist.ProcessGroup | None,
        bucket_bytes: int | None,
        hook: CommunicationHook | None,
        *,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self._managed = managed
        self._parent = self.group = group
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self.first_bytes = min(FIRST_BUCKET_BYTES, self._bucket_bytes)
        self._hook = hook
        self._gives_views = gradient_as_bucket_view
        self.notes_group: dist.ProcessGroup | None = None
        self._plans: dict[tuple[bool, ...], Plan] = {}
        self._whole = frozenset(id(p) for p in managed.optimized if p.requires_grad)
        """Ids of what is trained where nothing has been frozen or replaced yet."""
        self._make_group(managed.all)  # now, where all ranks do it; later on one of them may make a plan alone

    def now(self, left_out: Collection[int]) -> Plan:
        """The plan for the parameters that want a gradient now, but for those with ids in `left_out`."""
        pattern = self._pattern(left_out)
        plan = self._plans.get(pattern)
        if plan is None:
            # Backward makes the last parameters' gradients first; so does the order of the buckets.
            wanted = [p for p in reversed(self._managed.optimized) if p.requires_grad and id(p) not in left_out]
            others = [p for p in self._managed.others if p.requires_grad and id(p) not in left_out]
            plan = self._made(wanted or others, others if wanted else [], _mark(pattern))
            self._plans[pattern] = plan
        return plan

    def mark_now(self, left_out: Collection[int]) -> int:
        """The mark of the plan that `now` would give, which is not made for that."""
        return _mark(self._pattern(left_out))

    def forget(self) -> None:
        """Parameters were replaced."""
        self._plans.clear()
        self._whole = frozenset()

    def close(self) -> None:
        """Let go of what gloo keeps for a group of its own; NCCL's goes with the process."""
        self._plans.clear()
        own, self.group = self.group, self._parent
        notes, self.notes_group = self.notes_group, None
        for group in (own, notes):
            if group is not None and group is not self._parent and dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)

    def _pattern(self, left_out: Collection[int]) -> tuple[bool, ...]:
        return tuple([p.requires_grad and id(p) not in left_out for p in self._managed.all])

    def _made(self, always: list[Tensor], others: list[Tensor], mark: int) -> Plan:
        groups = list(grouped(always, self._bucket_bytes, self.first_bytes))
        last = len(groups) - 1
        self._make_group(always)
        extra = Notes.count(len(others), self.group) if self.notes_group is None else 0
        buckets = [
            Bucket(
                g,
                self.group,
                extra if i == last else 0,
                hook=self._hook,
                index=index,
                is_last=i == last,
                gradient_as_bucket_view=self._gives_views,
            )
            for i, (g, index) in enumerate(zip(groups, self._indices(groups), strict=True))
        ]
        values = buckets[-1].extra if buckets and extra else None
        notes = Notes(len(others), dist.get_rank(self.group), values=values, group=self.notes_group)
        return Plan(buckets, others, notes, mark, gradient_as_bucket_view=self._gives_views)

    def _make_group(self, parameters: Sequence[Tensor]) -> None:
        if self.group is self._parent and len(list(grouped(parameters, self._bucket_bytes, self.first_bytes))) > 1:
            self.group = _group_like(self._parent)
            if self._hook is None or not self._hook.keeps_state:  # its buckets travel one after the other
                self.notes_group = _group_like(self._parent, backend="gloo")

    def _indices(self, groups: Sequence[Sequence[Tensor]]) -> Sequence[int]:
        """What a hook knows buckets by; one that keeps state, by a number that the same parameters have in each run."""
        keeps_state = self._hook is not None and self._hook.keeps_state
        if not keeps_state or {id(p) for group in groups for p in group} == self._whole:
            return range(len(groups))
        positions = {id(p): position for position, p in enumerate(self._managed.all)}
        contents = [[(positions[id(p)], *p.shape) for p in group] for group in groups]
        return [int.from_bytes(blake2b(repr(each).encode(), digest_size=6).digest()) for each in contents]


def _mark(pattern: tuple[bool, ...]) -> int:
    return crc32(bytes(pattern)) % (MARKS - 1)


def _group_like(group: dist.ProcessGroup | None, backend: str | None = None) -> dist.ProcessGroup:
    """A group of the same ranks for the exchange of gradients alone.

    They are sent inside of backward, where they could come before or after a collective of the trainer (of a
    synchronized BatchNorm, say): in a group of their own the order does not matter.

    Args:
        group: Whose ranks and timeout it has; None means all ranks.
        backend: None takes the same.
    """
    parent = group or dist.group.WORLD
    assert parent is not None
    ranks = dist.get_process_group_ranks(parent)
    made: dist.ProcessGroup = dist.new_group(ranks, timeout=group_timeout(parent), backend=backend)
    return made
