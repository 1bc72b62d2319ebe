"""Batches made by the worker processes of a torch data loader, in the same order for any number of workers.

The loader returns blocks of steps in order. The number of a step determines its rows. So the position counts the
batches that were handed out, no matter how many the workers have made in advance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ...callbacks.stop.data_workers import NO_SPACE, hand_over_error, start_workers
from ..contract.exceptions import InputError
from .batching import CHUNK_BYTES, Spec, decode, rebatch
from .position import Position

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_ROWS = 65_536


class _Mapped(Dataset[Any]):
    """A dataset that applies `make` to each item."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __getitem__(self, item: Any) -> Any:
        return self._make(item)


def _identity(made: Any) -> Any:
    return made


def make_in_workers(
    make: Callable[[Any], Any], items: Iterator[Any], workers: int, *, ahead: int, seed: int, opened: ExitStack
) -> Iterator[Any]:
    """Apply `make` to `items` in `workers` processes, in order. They end with `opened` and ignore stop signals.

    Raises:
        InputError: The processes cannot be started.
    """
    loader = DataLoader(
        _Mapped(make),
        batch_size=None,
        sampler=items,
        num_workers=workers,
        prefetch_factor=max(ahead, 1),
        collate_fn=_identity,
        # Without a generator, the loader would draw from the random numbers of the training process.
        generator=torch.Generator().manual_seed(seed),
    )
    try:
        made = start_workers(loader)
    except OSError as error:
        raise InputError(
            f"{workers} data workers could not be started: {error.strerror or error}. They need room in /dev/shm, "
            "processes (`ulimit -u`, or the container's limit on pids) and open files (`ulimit -n`). Raise these "
            "limits, or train with fewer `workers`; 0 needs none of them."
        ) from error
    opened.callback(made._shutdown_workers)  # type: ignore[attr-defined]
    return _explain_errors(made)


def _explain_errors(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield `batches`; name the way out if a worker has too little shared memory."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            # A collate function of torch allocates shared memory itself, and a worker that gets too little is killed.
            if NO_SPACE in str(error) or "shared memory" in str(error):
                raise hand_over_error(f"{NO_SPACE}: {str(error).strip().rpartition(chr(10))[2]}") from None
            raise
        yield batch


def arrow_batches(spec: Spec, position: Position, workers: int, *, ahead: int, opened: ExitStack) -> Iterator[Any]:
    """Yield the batches of a pass from `position` on; workers decode them in blocks of about one row group.

    Raises:
        InputError: The processes cannot be started, or one of them cannot make a batch; the batches before it are
            yielded first.
    """
    import pyarrow as pa

    share, group_rows = spec.layout.share(position.rows), spec.layout.order.group_rows
    own_rows = share.batch_size if share.shard == "row_groups" else share.step_rows
    steps = max(1, min(max(group_rows), _BLOCK_ROWS) // own_rows)
    blocks = (range(first, min(first + steps, share.steps)) for first in range(position.step, share.steps, steps))
    make, seed = partial(_block, spec, position), spec.layout.order.seed
    for batches, error in make_in_workers(make, blocks, workers, ahead=ahead, seed=seed, opened=opened):
        yield from pa.ipc.open_stream(batches) if spec.collate is None else batches
        if error is not None:
            raise InputError(error)


def _block(spec: Spec, position: Position, steps: range) -> tuple[Any, str | None]:
    """Return the batches of a block, and the error that ended it; record batches come as one Arrow IPC stream."""
    made: list[Any] = []
    error = None
    try:
        intervals = spec.layout.share(position.rows).intervals(steps.start, steps.stop, spec.rank)
        batches = rebatch(decode(spec, position, steps, CHUNK_BYTES), intervals)
        for step, batch in zip(steps, batches, strict=True):
            if spec.collate is not None:
                seed_generators(seed_of_step(spec, position, step))
            made.append(batch if spec.collate is None else spec.collate(batch))
    except InputError as failure:
        error = str(failure)
    return (_pack(spec, made) if spec.collate is None else made), error


def seed_of_step(spec: Spec, position: Position, step: int) -> tuple[int, ...]:
    """Return the seed of a step's random numbers. Neither the number of workers nor a resume changes it."""
    rows_left = position.rows - spec.layout.share(position.rows).consumed(step)
    return (spec.layout.order.seed, 2, position.epoch, rows_left, spec.rank)


def seed_generators(entropy: Sequence[int]) -> None:
    """Seed the generators of Python, NumPy and torch (host) for the user's code."""
    words = np.random.SeedSequence(entropy).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))  # not `torch.manual_seed`, which seeds devices too


def _pack(spec: Spec, batches: list[pa.RecordBatch]) -> bytes:
    """Return the batches as one Arrow IPC stream, because a pickled slice would include all rows of its parent."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=False, unify_dictionaries=False)
    with pa.ipc.new_stream(sink, spec.source.schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed
