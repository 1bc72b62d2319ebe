"""A ring of transitions that one thread writes and another samples, and a loader of its samples."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..contract.exceptions import InputError, ReplayWriterError
from .replay_files import ReplayFiles, ReplayMeta

__all__ = ["ReplayBuffer", "ReplayFeed", "SumTree"]

FANOUT = 32
"""Children of a node: a level is a few operations of torch for a whole batch."""
MOST_AT_TOP = 1024
"""The top has no nodes: sums up to each of so many entries take less time than two levels."""
MOST_NODES_TO_SUM_AGAIN = 1024
"""Up to so many nodes, summing one twice takes less time than finding out that it comes twice."""

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]


class SumTree:
    """Priorities of `size` leaves, all 0 at first, with the sums of their groups, of groups of groups, and so on.

    Sums are always made of their parts anew, so that they depend on the leaves alone and not on what these were before.
    """

    def __init__(self, size: int) -> None:
        self._levels: list[Floats] = []
        count = size
        while not self._levels or count > MOST_AT_TOP:
            groups = -(-count // FANOUT)
            self._levels.append(np.zeros((groups, FANOUT)))
            count = groups
        self._top = np.zeros(count)
        self._tensors = [torch.from_numpy(level) for level in self._levels]
        self._top_tensor = torch.from_numpy(self._top)

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._top_tensor.cumsum(0)[-1])

    def values(self, leaves: Positions) -> Floats:
        """The priorities of `leaves`."""
        found: Floats = self._levels[0].reshape(-1)[leaves]
        return found

    def set(self, leaves: Positions, priorities: Floats | float) -> None:
        """Give `leaves` other priorities; where one is named twice, the last counts."""
        self._levels[0].reshape(-1)[leaves] = priorities
        nodes = leaves // FANOUT
        for level, above in zip(self._levels, [*self._levels[1:], self._top], strict=True):
            if len(nodes) > MOST_NODES_TO_SUM_AGAIN:
                nodes = np.unique(nodes)
            above.reshape(-1)[nodes] = level[nodes].sum(axis=1)
            nodes = nodes // FANOUT

    def find(self, targets: Floats) -> Positions:
        """For each target, from 0 to below `total`, the leaf in whose part of the sum of all it lies."""
        left = torch.from_numpy(targets)
        ends = self._top_tensor.cumsum(0)
        picked = _first_above(ends, left)
        left, nodes = left - (ends[picked] - self._top_tensor[picked]), picked
        for level in reversed(self._tensors):
            children = level[nodes]
            ends = children.cumsum(1)
            in_row = _first_above(ends, left.clamp_(min=0.0)[:, None])
            left = left - (ends.gather(1, in_row) - children.gather(1, in_row))[:, 0]
            nodes = nodes * FANOUT + in_row[:, 0]
        found: Positions = nodes.numpy()
        return found


def _first_above(ends: Tensor, targets: Tensor) -> Tensor:
    """In rows of growing numbers, the place of the first one above the target."""
    places = torch.searchsorted(ends, targets, right=True)
    if places.numel() and int(places.max()) == ends.shape[-1]:
        # Rounding has put a target at the very end, behind the last entry that has a priority.
        places = torch.minimum(places, torch.searchsorted(ends, ends[..., -1:]))
    return places


class ReplayBuffer:
    """The newest `capacity` rows that were written, in columns that are allocated once.

    The thread that writes first is the only one that may write. Any thread may sample meanwhile; it gets whole rows.

    Args:
        capacity: Rows that it holds.
        row: A row by column, for names, dtypes and shapes.
        seed: Of the generator that samples are drawn with, which belongs to the buffer.
        priority_exponent: Rows are drawn in proportion to their priority to this power (Schaul et al. 2016); None draws
            all alike.

    Raises:
        ValueError: Arguments are out of range; lists every fault.
    """

    def __init__(
        self,
        capacity: int,
        row: Mapping[str, Tensor],
        *,
        seed: int = 0,
        priority_exponent: float | None = None,
    ) -> None:
        self._row, faults = _as_tensors(row)
        if faults := [*faults, *_faults(capacity, self._row, priority_exponent)]:
            raise ValueError("ReplayBuffer: " + "; ".join(faults))
        self.capacity, self.priority_exponent = capacity, priority_exponent
        self._columns = {
            name: torch.zeros((capacity, *value.shape), dtype=value.dtype, device="cpu")
            for name, value in self._row.items()
        }
        self._generator = torch.Generator().manual_seed(seed)
        self._tree = None if priority_exponent is None else SumTree(capacity)
        self._largest_priority = 1.0
        self._written = self._oldest = 0
        """Rows that were ever written, and how many of them are gone."""
        self._writer: tuple[int, int] | None = None
        self._changed = threading.Condition()
        self._files = ReplayFiles()

    def __len__(self) -> int:
        return self._written - self._oldest

    @property
    def written(self) -> int:
        """Rows that were ever written; the next one has this number."""
        return self._written

    def close(self) -> None:
        """Close the folder of the last save; a save that follows is a whole one."""
        self._files.close()

    # writing

    def extend(self, rows: Mapping[str, Any]) -> None:
        """Write rows: each column with one more dimension, in front. New rows have the largest priority so far.

        Raises:
            ReplayWriterError: Another thread or process has written before; nothing was changed.
            ValueError: Columns, dtypes or shapes are not those of the buffer, or there are more rows than it holds;
                lists every fault, and nothing was changed.
        """
        self._claim()
        given, faults = _as_tensors(rows)
        if faults := faults or _row_faults(given, self._row, self.capacity):
            raise ValueError("ReplayBuffer.extend: " + "; ".join(faults))
        count = len(next(iter(given.values())))
        with self._changed:
            places = np.arange(self._written, self._written + count) % self.capacity
            # Before a row of it is touched: what an interrupt leaves half written is no longer a row of the buffer.
            self._oldest = max(self._oldest, self._written + count - self.capacity)
            try:
                self._put(given, self._written, count)
            except BaseException:
                if self._tree is not None:
                    self._tree.set(places, 0.0)
                raise
            if self._tree is not None:
                self._tree.set(places, self._largest_priority)
            self._written += count
            self._changed.notify_all()

    def _claim(self) -> None:
        me = (os.getpid(), threading.get_ident())
        with self._changed:
            if self._writer is None:
                self._writer = me
        if self._writer != me:
            pid, thread = self._writer
            raise ReplayWriterError(
                f"thread {me[1]} of process {me[0]} writes to a replay buffer whose writer is thread {thread} of "
                f"process {pid}: send it the rows, for example over a queue, or call `release_writer` there first"
            )

    def release_writer(self) -> None:
        """Let another thread become the writer; called by the one that is.

        Raises:
            ReplayWriterError: It is called by another.
        """
        self._claim()
        self._writer = None

    def _put(self, rows: Mapping[str, Tensor], first: int, count: int) -> None:
        begin = first % self.capacity
        fits = min(count, self.capacity - begin)
        for name, column in self._columns.items():
            column[begin : begin + fits] = rows[name][:fits]
            column[: count - fits] = rows[name][fits:]

    # sampling

    def wait_for(self, rows: int, seconds: float | None = None) -> bool:
        """Return when there are so many rows, or after so many seconds; whether there are."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self) >= rows, seconds)

    def sample(self, batch_size: int, *, importance_exponent: float = 0.4) -> dict[str, Tensor]:
        """Rows drawn with replacement, as new tensors.

        Beside the columns there are ``index``, the numbers of the rows (int64) for `update_priorities`, and ``weight``
        with priorities: importance weights to the power of `importance_exponent`, at most 1.

        Raises:
            ValueError: `batch_size` is below 1, or more than there are rows.
        """
        with self._changed:
            if not (_is_whole_number(batch_size) and 1 <= batch_size <= len(self)):
                raise ValueError(
                    f"Invalid `batch_size`. Expected a number from 1 to the {len(self)} rows of the buffer, but "
                    f"received {batch_size}."
                )
            weight, generator = None, self._generator
            if self._tree is None:
                index = torch.randint(self._oldest, self._written, (batch_size,), generator=generator, device="cpu")
            else:
                index, weight = self._drawn_by_priority(self._tree, batch_size, importance_exponent)
            drawn = self._rows(index)
        return {**drawn, "index": index, **({} if weight is None else {"weight": weight})}

    def _drawn_by_priority(self, tree: SumTree, batch_size: int, exponent: float) -> tuple[Tensor, Tensor]:
        total = tree.total
        if not total > 0:
            raise ValueError("all rows of the buffer have priority 0: none can be drawn")
        drawn = torch.rand(batch_size, dtype=torch.float64, generator=self._generator, device="cpu")
        places = tree.find(drawn.numpy() * total)
        newest = self._written - 1
        weights = (len(self) * tree.values(places) / total) ** -exponent
        index = newest - (newest - places) % self.capacity
        return torch.from_numpy(index), torch.from_numpy(weights / weights.max()).float()

    def _rows(self, index: Tensor) -> dict[str, Tensor]:
        places = index % self.capacity
        return {name: column[places] for name, column in self._columns.items()}

    def update_priorities(self, index: Tensor, priorities: Any) -> None:
        """Give the rows of a sample other priorities; rows that are gone meanwhile are passed over.

        Raises:
            ValueError: The buffer has no priorities, or one is negative, infinite or NaN; nothing was changed.
        """
        if self._tree is None or self.priority_exponent is None:
            raise ValueError("the buffer draws all rows alike; give it a `priority_exponent`")
        given = torch.as_tensor(priorities).detach().to("cpu", torch.float64).reshape(-1).numpy()
        rows = torch.as_tensor(index).cpu().reshape(-1).numpy()
        if rows.dtype.kind not in "iu" or len(given) != len(rows):
            raise ValueError(
                "expected the `index` of a sample and a priority for each of its rows, but received "
                f"{len(rows)} numbers of {rows.dtype} and {len(given)} priorities"
            )
        wrong = ~(np.isfinite(given) & (given >= 0) & (rows >= 0) & (rows < self._written))
        if wrong.any():
            first = int(wrong.argmax())
            raise ValueError(
                f"expected numbers >= 0 for rows from 0 to {self._written - 1}, but received {int(wrong.sum())} "
                f"others, of which the first is {given[first]} for row {rows[first]}"
            )
        with self._changed:
            there = rows >= self._oldest
            weighted = given[there] ** self.priority_exponent
            self._tree.set(rows[there] % self.capacity, weighted)
            self._largest_priority = max(self._largest_priority, float(weighted.max(initial=0.0)))

    # checkpoints

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write rows, priorities and the generator into `folder`, such as the ``output_dir`` of ``save_checkpoint``.

        Rows that the last save or load has in a folder on the same file system are linked, not written again: what is
        written is new rows, and 8 bytes for the priority of each row. The writer waits meanwhile.

        Raises:
            OSError: They could not be written.
        """
        with self._changed:
            sampling = {"generator": self._generator.get_state()}
            if self._tree is not None:
                places = np.arange(self._oldest, self._written) % self.capacity
                sampling["priorities"] = torch.from_numpy(self._tree.values(places))
            meta = ReplayMeta(
                layout=self._layout(),
                oldest=self._oldest,
                written=self._written,
                largest_priority=self._largest_priority,
            )
            self._files.save(Path(folder), meta, sampling, self._range)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take over what `save` wrote; samples that follow are those that followed there.

        The thread that calls this may write, or another that writes first.

        Raises:
            FileNotFoundError: There is nothing of `save` in `folder`.
            BrokenCheckpointError: It is not whole; the buffer is empty then.
            ValueError: It is of a buffer with other arguments; lists every difference, and nothing was changed.
        """
        with self._changed:
            saved, sampling = self._files.look(Path(folder), self._layout())
            self._written = self._oldest = 0
            if self._tree is not None:
                self._tree = SumTree(self.capacity)
            for first, rows in self._files.load(Path(folder), saved, self._row):
                self._put(rows, first, len(next(iter(rows.values()))))
            if self._tree is not None:
                self._tree.set(np.arange(saved.oldest, saved.written) % self.capacity, sampling["priorities"].numpy())
            self._largest_priority = saved.largest_priority
            self._generator.set_state(sampling["generator"])
            self._oldest, self._written, self._writer = saved.oldest, saved.written, None
            self._changed.notify_all()

    def _layout(self) -> dict[str, Any]:
        columns = {name: [str(row.dtype).removeprefix("torch."), *row.shape] for name, row in self._row.items()}
        return {
            "capacity": self.capacity,
            "columns": columns,
            "prioritised": self._tree is not None,
        }

    def _range(self, first: int, last: int) -> dict[str, Tensor]:
        return self._rows(torch.arange(first, last, device="cpu"))


def _faults(capacity: int, row: Mapping[str, Tensor], priority_exponent: float | None) -> list[str]:
    faults = []
    if not (_is_whole_number(capacity) and capacity >= 1):
        faults.append(f"Invalid `capacity`. Expected a whole number >= 1, but received {capacity!r}")
    if not row:
        faults.append("`row` has no columns")
    if reserved := sorted({"index", "weight"}.intersection(row)):
        faults.append(f"`row` has columns that a sample has of its own: {', '.join(reserved)}")
    if priority_exponent is not None and not (math.isfinite(priority_exponent) and priority_exponent >= 0):
        faults.append(f"Invalid `priority_exponent`. Expected a number >= 0, but received {priority_exponent}")
    return faults


def _as_tensors(values: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Columns as tensors that keep no graph of what they were computed from, and what is wrong with the others."""
    if not isinstance(values, Mapping):
        return {}, [f"expected rows by column, but received a {type(values).__qualname__}"]
    tensors, faults = {}, []
    for name, value in values.items():
        try:
            tensors[name] = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError):
            faults.append(f"column {name!r} is not a tensor, and none can be made of a {type(value).__qualname__}")
    return tensors, faults


def _is_whole_number(value: Any) -> bool:
    """Whether `value` counts something; a truth value does not."""
    return hasattr(value, "__index__") and not isinstance(value, bool | Tensor)


def _row_faults(given: Mapping[str, Tensor], row: Mapping[str, Tensor], capacity: int) -> list[str]:
    """The faults of rows for a buffer of such a `row`; a phrase each."""
    faults = [f"there is no column {name!r}" for name in given if name not in row]
    faults += [f"column {name!r} is missing" for name in row if name not in given]
    lengths: dict[str, int] = {}
    for name in (name for name in row if name in given):
        column, wanted = given[name], row[name]
        if column.dtype != wanted.dtype:
            faults.append(f"column {name!r} is of {wanted.dtype}, not of {column.dtype}")
        if column.ndim == 0 or column.shape[1:] != wanted.shape:
            faults.append(f"column {name!r} has rows of shape {tuple(wanted.shape)}; received {tuple(column.shape)}")
        else:
            lengths[name] = len(column)
    if len(set(lengths.values())) > 1:
        faults.append(f"columns differ in length: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
    elif lengths:
        count = next(iter(lengths.values()))
        if not 1 <= count <= capacity:
            faults.append(f"expected from 1 to {capacity} rows, but received {count}")
    return faults


class ReplayFeed:
    """A loader whose batches are samples of `buffer`; what it has drawn is in the buffer's own checkpoint.

    Args:
        buffer: Is written by another thread, or between two steps.
        batch_size: Rows of a batch.
        start_after: Rows that there must be before the first batch; None waits for `batch_size`.
        batches: Batches of a pass; None is a pass without end.
        importance_exponent: Of the weights, where the buffer has priorities.
        wait_s: How long to wait for `start_after` rows.

    Raises:
        ValueError: Arguments are out of range.
    """

    begins_anew = True  # a pass has no position but the buffer's
    lost_on_resume = None

    def __init__(
        self,
        buffer: ReplayBuffer,
        batch_size: int,
        *,
        start_after: int | None = None,
        batches: int | None = None,
        importance_exponent: float = 0.4,
        wait_s: float = 60.0,
    ) -> None:
        needed = batch_size if start_after is None else start_after
        if not 1 <= batch_size <= needed <= buffer.capacity or (batches is not None and batches < 1):
            raise ValueError(
                "ReplayFeed: expected 1 <= batch_size <= start_after <= the capacity of the buffer, and batches >= 1, "
                f"but received {batch_size}, {needed}, {buffer.capacity} and {batches}"
            )
        self.buffer, self.batch_size, self.start_after, self.batches = buffer, batch_size, needed, batches
        self.importance_exponent, self.wait_s = importance_exponent, wait_s

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self.buffer.wait_for(self.start_after, self.wait_s):
            raise InputError(
                f"the replay buffer has {len(self.buffer)} rows after {self.wait_s:g} s, and training starts after "
                f"{self.start_after}: does its writer run?"
            )
        drawn = 0
        while self.batches is None or drawn < self.batches:
            yield self.buffer.sample(self.batch_size, importance_exponent=self.importance_exponent)
            drawn += 1
