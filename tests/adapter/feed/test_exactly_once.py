"""Exactly once: whatever kills and rank changes a run goes through, each epoch trains each row of the files once."""

import itertools
import json
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import assume, example, given, settings, strategies as st

from genlight.adapter import ArrowFeed
from support.row_audit import AuditedFeed, trained_rows

EPOCHS = 2


@dataclass(frozen=True)
class Attempt:
    """One start of a run that is killed `lost` steps after its last checkpoint."""

    world_size: int
    batch_size: int
    shard: str
    steps: int
    lost: int


LAST = Attempt(world_size=1, batch_size=3, shard="rows", steps=10_000, lost=0)
NO_OPTIONS = (False, 1, False)

attempts = st.builds(
    Attempt,
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    shard=st.sampled_from(["rows", "row_groups"]),
    steps=st.integers(0, 12),
    lost=st.integers(0, 3),
)
layouts = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=3).filter(
    lambda files: sum(map(sum, files)) >= 4
)


def run(attempt: Attempt, source: Any, state: dict | None, audit: Path, **options: Any) -> dict:
    """Hand out batches on all ranks in lock-step; the state is the checkpoint before the kill."""
    feeds = [
        AuditedFeed(
            source,
            batch_size=attempt.batch_size,
            world_size=attempt.world_size,
            rank=rank,
            shard=attempt.shard,
            epochs=EPOCHS,
            audit=audit,
            **options,
        )
        for rank in range(attempt.world_size)
    ]
    for feed in feeds:
        if state is not None:
            feed.load_state_dict(json.loads(json.dumps(state)))
    iterators = [feed.iter_batches() for feed in feeds]
    for _ in itertools.islice(zip(*iterators, strict=True), attempt.steps):
        pass
    states = [feed.state_dict() for feed in feeds]
    assert all(saved == states[0] for saved in states)
    for _ in itertools.islice(zip(*iterators, strict=True), attempt.lost):
        pass
    for feed in feeds:
        feed.close()
    return states[0]


def run_all(history: list[Attempt], source: Any, folder: Path, **options: Any) -> tuple[Counter, int]:
    """Train all attempts and then to the end; the rows that were trained, and how many a warning gave up."""
    state, audits = None, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, attempt in enumerate([*history, LAST]):
            audits.append(folder / f"attempt-{number}")
            state = run(attempt, source, state, audits[-1], **options)
    given_up = sum(int(str(w.message).split()[2]) for w in caught if "not used" in str(w.message))
    return trained_rows(audits), given_up


@settings(max_examples=40)
@given(layouts, st.lists(attempts, max_size=5), st.booleans(), st.integers(1, 8), st.booleans())
@example([[2, 9]], [Attempt(1, 2, "rows", 8, 0), Attempt(1, 2, "rows", 3, 1), Attempt(2, 1, "rows", 0, 0)], *NO_OPTIONS)
@example([[10, 10]], [Attempt(2, 1, "row_groups", 2, 1)], *NO_OPTIONS)
@example([[9]], [Attempt(1, 4, "rows", 2, 0), Attempt(2, 2, "rows", 1, 0)], *NO_OPTIONS)  # a row waits for epoch 1
@example([[9]], [Attempt(1, 4, "rows", 5, 0), Attempt(2, 2, "rows", 1, 0)], *NO_OPTIONS)  # the last row is given up
@example([[10]], [Attempt(3, 1, "rows", 9, 0)], *NO_OPTIONS)
def test_every_row_is_trained_once_an_epoch_whatever_is_killed_and_resumed(files, history, shuffle, window, drop_last):
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i}.parquet") for i in range(len(files))]
        ids = itertools.count()
        for path, groups in zip(paths, files, strict=True):
            with pq.ParquetWriter(path, pa.schema([("id", pa.int32())])) as writer:
                for rows in groups:
                    writer.write_batch(pa.record_batch({"id": pa.array(itertools.islice(ids, rows), pa.int32())}))
        assume(not drop_last or all(a.world_size * a.batch_size <= sum(map(sum, files)) for a in [*history, LAST]))
        options = {"shuffle": shuffle, "shuffle_window": window, "drop_last": drop_last, "readahead": len(history) % 2}
        trained, given_up = run_all(history, paths, Path(folder), **options)
        expected = {(epoch, row) for epoch in range(EPOCHS) for row in range(sum(map(sum, files)))}
    assert set(trained.values()) <= {1}
    assert set(trained) <= expected
    assert drop_last or len(expected) - len(trained) == given_up


@settings(max_examples=25)
@given(layouts, st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_one_process_with_the_batches_of_all_ranks_sees_the_same_rows_per_step(files, world_size, batch_size, shuffle):
    tables = [pa.table({"id": pa.array(range(rows), pa.int64())}) for groups in files for rows in groups]
    options = {"shuffle": shuffle, "epochs": 1, "shuffle_window": 4}
    alone = ArrowFeed(tables, batch_size=batch_size * world_size, **options)
    ranks = [
        ArrowFeed(tables, batch_size=batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    together = [pa.Table.from_batches(step).column("id").to_pylist() for step in zip(*ranks, strict=True)]
    single = [batch.column("id").to_pylist() for batch in alone]
    rest = alone.rows % (batch_size * world_size)
    if 0 < rest < world_size and batch_size == 1:
        single.pop()  # they would come before the rows of the next epoch
    elif 0 < rest < world_size:
        *single, before, last = single  # the step before the last gives up what the ranks need for a row each
        single += [(before + last)[:-world_size], (before + last)[-world_size:]]
    assert together == single
