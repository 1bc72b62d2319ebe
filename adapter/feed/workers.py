"""Batches made by a torch data loader, in the same order and with the same position for any number of processes.

The loader brings blocks of steps back in order. Which rows a step has follows from its number, so the position is
counted where the batches are handed out, and what the workers hold ready does not matter.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ...callbacks.stop.data_workers import start_workers
from ..contract.exceptions import InputError
from .batching import CLOSED, Block, Spec, batches_of, blocks
from .position import Position
from .row_plan import Share

__all__ = ["LoaderSupply", "arrow_supply", "draw_from", "entropy_of"]

_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class _Made:
    """A worker's result for one block."""

    batches: Any
    """Results of the collate function, or record batches as one Arrow IPC stream."""
    error: str | None = None
    """The error that ended the block after these batches."""


class _Blocks(IterableDataset[_Made]):
    """The blocks of one worker."""

    def __init__(self, spec: Spec, position: Position, steps: int) -> None:
        self._spec, self._position, self._steps = spec, position, steps

    def __iter__(self) -> Iterator[_Made]:
        info = get_worker_info()
        assert info is not None
        # A copy without open files: a forked process must not share them with the training process.
        spec = replace(self._spec, source=copy.copy(self._spec.source), readahead=0)
        for block in blocks(spec, self._position, self._steps):
            if block.number % info.num_workers == info.id:
                yield _make(spec, block)


def _make(spec: Spec, block: Block) -> _Made:
    results: list[Any] = []
    error = None
    try:
        for step, batch in enumerate(batches_of(spec, block), block.first):
            if spec.collate is not None:
                draw_from(entropy_of(spec, block.position, step))
            results.append(batch if spec.collate is None else spec.collate(batch))
    except InputError as failure:
        error = str(failure)
    return _Made(_packed(spec, results) if spec.collate is None else results, error)


def entropy_of(spec: Spec, position: Position, step: int) -> tuple[int, ...]:
    """The seed of the random numbers of a step: it depends on its rows, not the number of workers, nor a resume."""
    rows_left = position.rows - spec.layout.share(position.rows).consumed(step)
    return (spec.layout.order.seed, 2, position.epoch, rows_left, spec.rank)


def draw_from(entropy: Sequence[int]) -> None:
    """Seed the generators of the host, those of Python, NumPy and torch, which a user's code draws from."""
    words = np.random.SeedSequence(entropy).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))  # not `torch.manual_seed`, which seeds devices too


def _packed(spec: Spec, batches: list[pa.RecordBatch]) -> bytes:
    """The batches as one stream: a slice that is pickled would take its whole parent along."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, spec.source.schema, options=_IPC) as writer:
        for batch in batches:
            writer.write_batch(batch)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


_IPC = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=False, unify_dictionaries=False)


class LoaderSupply:
    """Batches of a torch data loader over the blocks from a position on; see `Supply`.

    Args:
        spec: Of the batches.
        position: Where the first block begins.
        dataset: Makes a block; `options` of the loader say in which order.
        steps: Of a block.
        workers: Processes that make blocks; 0 makes them in this one.
        batches: The batches of a block that was made.
        goes_on: Whether it hands out the epochs that follow; otherwise it ends with the first.
        options: Of the loader.

    Raises:
        InputError: The processes cannot be started.
    """

    def __init__(
        self,
        spec: Spec,
        position: Position,
        dataset: Any,
        *,
        steps: int,
        workers: int,
        batches: Callable[[Any], Iterator[Any]],
        goes_on: bool = True,
        **options: Any,
    ) -> None:
        self.position: Position | None = position
        self.wait_seconds = 0.0
        self._closed = False
        self._layout, self._batches, self._goes_on = spec.layout, batches, goes_on
        self._blocks = blocks(spec, position, steps)
        # A generator of its own: the default would draw from the training process's random numbers.
        generator = torch.Generator().manual_seed(spec.layout.order.seed)
        self._made = _started(DataLoader(dataset, num_workers=workers, generator=generator, **options))

    def epoch(self) -> Iterator[Any]:
        """See `Supply`."""
        assert self.position is not None
        position, share, self.position = self.position, self._layout.share(self.position.rows), None
        step = position.step
        while step < share.steps:
            block = next(self._blocks)
            for batch in self._batches(self._next()):
                yield batch
                if self._closed:
                    raise RuntimeError(CLOSED)
            step = block.end
        self.position = position.following(self._layout) if self._goes_on else None

    def _next(self) -> Any:
        start = time.perf_counter()
        try:
            return next(self._made)
        except StopIteration:
            raise RuntimeError(CLOSED) from None
        finally:
            self.wait_seconds += time.perf_counter() - start

    def close(self) -> None:
        """See `Supply`."""
        getattr(self._made, "_shutdown_workers", lambda: None)()
        self._made = iter(())
        self._closed = True


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator of `loader`, whose worker processes outlive a stop signal."""
    try:
        return start_workers(loader)
    except OSError as error:
        raise InputError(
            f"{loader.num_workers} data workers could not be started: {error.strerror or error}. They need room "
            "in /dev/shm, processes (`ulimit -u`, or the container's limit on pids) and open files (`ulimit -n`); make "
            "room, or train with fewer `workers`, of which 0 needs none of it."
        ) from error


def arrow_supply(spec: Spec, position: Position, workers: int) -> LoaderSupply:
    """Arrow batches from `workers` processes, each of which decodes blocks of about one row group.

    Raises:
        InputError: The processes cannot be started.
    """
    steps = _block_steps(spec)
    return LoaderSupply(
        spec,
        position,
        _Blocks(spec, position, steps),
        steps=steps,
        workers=workers,
        batches=lambda made: _handed_out(spec, made),
        batch_size=None,
        prefetch_factor=max(spec.readahead, 1),
    )


def _handed_out(spec: Spec, made: _Made) -> Iterator[Any]:
    yield from made.batches if spec.collate is not None else pa.ipc.open_stream(made.batches)
    if made.error is not None:
        raise InputError(made.error)


def _block_steps(spec: Spec) -> int:
    """Steps that make about one row group, within bounds."""
    order = spec.layout.order
    share = Share(order.rows, spec.layout.batch_size, spec.layout.world_size, spec.layout.shard)
    rows = min(max(order.group_rows), _BLOCK_ROWS)
    return max(1, rows // share.stride)
