"""The order that reads and writes of the run state ask for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol, TypeVar

from ...adapter.contract.exceptions import HookOrderError

__all__ = ["ReadsAndWrites", "in_order"]

FIELDS_OF_THE_LOOP = frozenset(
    {
        "run_id",
        "attempt",
        "agent_step",
        "epoch",
        "update_epoch",
        "minibatch_index",
        "stop_rollout",
        "stop_update_epoch",
        "rollout_stats",
        "loss_stats",
        "stop_reason",
    }
)
"""Fields of the run state that the loop itself writes, so that a hook may read them without another that writes."""


class ReadsAndWrites(Protocol):
    """The attributes that decide the order of a hook; see `Hook` for the meaning."""

    reads: Sequence[str]
    optional_reads: Sequence[str]
    writes: Sequence[str]


_Ordered = TypeVar("_Ordered", bound=ReadsAndWrites)


def in_order(hooks: Sequence[_Ordered]) -> list[_Ordered]:
    """The hooks, writers first, otherwise as they were registered.

    Raises:
        HookOrderError: Hooks wait for each other, or one reads a field that no hook writes.
    """
    # By position: a hook that is a dataclass can be neither hashed nor told from its equal.
    waits_for = [_predecessors(position, hooks) for position in range(len(hooks))]
    ordered: list[int] = []
    remaining = list(range(len(hooks)))
    while remaining:
        ready = next((position for position in remaining if not waits_for[position].intersection(remaining)), None)
        if ready is None:
            raise HookOrderError(_describe_cycle(remaining, waits_for, hooks))
        ordered.append(ready)
        remaining.remove(ready)
    return [hooks[position] for position in ordered]


def _predecessors(position: int, hooks: Sequence[ReadsAndWrites]) -> set[int]:
    """Positions of the hooks that must run before the one at `position`.

    Among hooks that both read and write a field, such as a counter, the order of registration decides.
    """
    hook = hooks[position]
    before: set[int] = set()
    for field in (*hook.reads, *hook.optional_reads):
        writers = [other for other, writer in enumerate(hooks) if field in writer.writes]
        if not writers and field in hook.reads and field not in FIELDS_OF_THE_LOOP:
            raise HookOrderError(
                f"{_label(hook)} reads {field!r}, which no hook writes; add the callback that writes it"
            )
        for writer in writers:
            both_update = field in hook.writes and field in hooks[writer].reads
            if writer != position and (not both_update or writer < position):
                before.add(writer)
    return before


def _describe_cycle(stuck: Sequence[int], waits_for: Sequence[set[int]], hooks: Sequence[ReadsAndWrites]) -> str:
    """Follow who waits for whom among the `stuck` until a hook comes twice."""
    path = [stuck[0]]
    while path.count(path[-1]) == 1:
        path.append(next(position for position in stuck if position in waits_for[path[-1]]))
    cycle = [hooks[position] for position in path[path.index(path[-1]) :]]
    steps = [
        f"{_label(hook)} reads {_shared_fields(hook, writer)} of {_label(writer)}"
        for hook, writer in itertools.pairwise(cycle)
    ]
    return "hooks wait for each other: " + ", ".join(steps) + "; drop one of these reads or writes"


def _shared_fields(reader: ReadsAndWrites, writer: ReadsAndWrites) -> list[str]:
    return sorted({*reader.reads, *reader.optional_reads}.intersection(writer.writes))


def _label(hook: ReadsAndWrites) -> str:
    label: str = getattr(hook, "label", type(hook).__name__)
    return label
