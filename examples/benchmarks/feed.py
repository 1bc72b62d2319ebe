"""Rows per second and resume time of the feed, compared with other ways to read 32-row batches from Parquet.

    python examples/benchmarks/feed.py --rows 204800 --repeats 7 --json feed.json

All contenders read the same files and return batches of 32 rows. They run one after the other in each round; the first
round does not count, and the table has the median over the others. A ratio is the ratio of two medians. `limit` decodes
batches of 65,536 rows and slices them in the same thread; any feed of this kind has to do at least that. `datasets` and
`litdata` take part if they are installed.

The rows decide how much faster than the scanner the feed can be. Narrow rows need little decoding, so most of the
scanner's time is the cost per batch that the feed avoids. For wide rows, decoding takes almost all of the time (two
thirds of it for the vectors, because Parquet stores two levels for each of their numbers), so that even `limit` is less
than twice as fast as the scanner. The ratio to `limit` shows the cost of the feed itself. Neither larger nor smaller
units, nor buffering ahead, nor a thread for each column changed the CPU time of decoding by more than a tenth.

Resume is the time from opening the files to the first batch after the position, at 25% and 75% of 20 row groups and in
the middle of a row group, whose first half has to be decoded; `read and drop` skips the batches before the position.
A resume costs the footer (about half of it for many columns) and the first pages of one row group, for any position.
Reading and dropping costs in proportion to the bytes, so the ratio grows with the size of the row groups: the wide
table has groups of 3 MB, a fraction of the usual size in training data. `--rows` makes them larger.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from genlight.adapter import ArrowFeed

BATCH = 32
GROUPS = 20

Contender = Callable[[Path], Iterator[Any]]


def narrow_table(rows: int) -> pa.Table:
    """Four columns: an id, a label, a number, a short text."""
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "id": np.arange(rows),
            "label": rng.integers(0, 10, rows),
            "x": rng.random(rows, dtype=np.float32),
            "text": [f"sample number {i}" for i in range(rows)],
        }
    )


def wide_table(rows: int) -> pa.Table:
    """A vector of 256 numbers, an encoded blob of 1 kB and 30 numeric columns."""
    rng = np.random.default_rng(0)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(rows * 256, dtype=np.float32)), 256)
    blobs = pa.array([rng.bytes(1024) for _ in range(rows)], pa.binary())
    numbers = {f"c{i}": rng.random(rows) for i in range(30)}
    return pa.table({"vector": vectors, "blob": blobs, **numbers})


def scanner(path: Path) -> Iterator[Any]:
    """A dataset scanner with batches of 32 rows."""
    return iter(ds.dataset(path).to_batches(batch_size=BATCH))


def iter_batches(path: Path) -> Iterator[Any]:
    """`ParquetFile.iter_batches` with batches of 32 rows."""
    return iter(pq.ParquetFile(path).iter_batches(BATCH))


def limit(path: Path) -> Iterator[Any]:
    """Large batches that are sliced."""
    for large in pq.ParquetFile(path).iter_batches(65_536):
        for start in range(0, large.num_rows, BATCH):
            yield large.slice(start, BATCH)


def feed(path: Path) -> Iterator[Any]:
    """The feed as in a job."""
    return iter(ArrowFeed(path, batch_size=BATCH, epochs=1))


def feed_in_thread(path: Path) -> Iterator[Any]:
    """The feed without its background thread."""
    return iter(ArrowFeed(path, batch_size=BATCH, epochs=1, readahead=0))


def feed_shuffled(path: Path) -> Iterator[Any]:
    """The feed, shuffled."""
    return iter(ArrowFeed(path, batch_size=BATCH, epochs=1, shuffle=True))


def hugging_face(path: Path) -> Iterator[Any]:
    """A streaming Hugging Face dataset in Arrow format."""
    import datasets

    stream = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    return iter(stream.with_format("arrow").iter(batch_size=BATCH))


def lit_data(path: Path) -> Iterator[Any]:
    """litdata's streaming loader over the Parquet folder; it makes Python objects of rows."""
    import litdata

    litdata.index_parquet_dataset(str(path.parent))
    dataset = litdata.StreamingDataset(str(path.parent), item_loader=litdata.streaming.item_loader.ParquetLoader())
    return iter(litdata.StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=list))


def contenders() -> dict[str, Contender]:
    """Return all contenders that are installed."""
    found: dict[str, Contender] = {
        "feed": feed,
        "feed, readahead=0": feed_in_thread,
        "feed, shuffled": feed_shuffled,
        "limit": limit,
        "scanner": scanner,
        "iter_batches": iter_batches,
    }
    if importlib.util.find_spec("datasets"):
        found["datasets"] = hugging_face
    if importlib.util.find_spec("litdata"):
        found["litdata"] = lit_data
    return found


def drained(make: Contender, path: Path) -> tuple[float, float, int]:
    """Return wall-clock and CPU seconds for all batches, and their number."""
    start, start_cpu, count = time.perf_counter(), time.process_time(), 0
    for _ in make(path):
        count += 1
    return time.perf_counter() - start, time.process_time() - start_cpu, count


def throughput(path: Path, rows: int, size: int, repeats: int) -> list[dict[str, Any]]:
    """Return one line of figures for each contender."""
    chosen = contenders()
    measured: dict[str, list[tuple[float, float, int]]] = {name: [] for name in chosen}
    for _ in range(repeats + 1):
        for name, make in chosen.items():
            measured[name].append(drained(make, path))
    lines = []
    for name, (_, *runs) in measured.items():
        seconds = statistics.median(run[0] for run in runs)
        cpu = statistics.median(run[1] for run in runs)
        lines.append(
            {
                "contender": name,
                "rows_per_s": round(rows / seconds),
                "mb_per_s": round(size / seconds / 1e6, 1),
                "cpu_s": round(cpu, 4),
                "batches": runs[0][2],
                "seconds": seconds,
            }
        )
    scanner_seconds = next(line["seconds"] for line in lines if line["contender"] == "scanner")
    limit_seconds = next(line["seconds"] for line in lines if line["contender"] == "limit")
    for line in lines:
        line["times_scanner"] = round(scanner_seconds / line["seconds"], 2)
        line["of_limit"] = round(line.pop("seconds") / limit_seconds, 2)
    return lines


def resumed(path: Path, state: dict[str, Any]) -> float:
    """Return the seconds from opening to the first batch after the position."""
    start = time.perf_counter()
    again = ArrowFeed(path, batch_size=BATCH, epochs=1)
    again.load_state_dict(state)
    next(iter(again))
    seconds = time.perf_counter() - start
    again.close()
    return seconds


def read_and_dropped(path: Path, batches: int) -> float:
    """Return the seconds to the first batch after reading and dropping `batches` batches."""
    start = time.perf_counter()
    for number, _ in enumerate(scanner(path)):
        if number >= batches:
            break
    return time.perf_counter() - start


def position(path: Path, batches: int) -> dict[str, Any]:
    """Return the state of a feed after `batches` batches."""
    first = ArrowFeed(path, batch_size=BATCH, epochs=1)
    for number, _ in enumerate(first, 1):
        if number == batches:
            break
    state = first.state_dict()
    first.close()
    return state


def resume(path: Path, rows: int, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each way to resume."""
    places = {"25%": rows // 4, "75%": rows * 3 // 4, "77.5%": rows * 31 // 40}
    states = {where: position(path, place // BATCH) for where, place in places.items()}
    three = places["75%"] // BATCH
    runs: dict[str, list[float]] = {**{f"feed at {where}": [] for where in places}, "read and drop at 75%": []}
    for _ in range(repeats):
        for where, state in states.items():
            runs[f"feed at {where}"].append(resumed(path, state))
        runs["read and drop at 75%"].append(read_and_dropped(path, three))
    figures = {name: round(statistics.median(seconds) * 1e3, 2) for name, seconds in runs.items()}
    figures["times faster at 75%"] = round(figures["read and drop at 75%"] / figures["feed at 75%"], 1)
    return figures


def show(name: str, lines: list[dict[str, Any]], resumes: dict[str, float]) -> None:
    """Print one table."""
    print(f"\n{name}")
    print(f"  {'':<20}{'rows/s':>12}{'MB/s':>10}{'x scanner':>11}{'/ limit':>9}{'CPU s':>9}{'batches':>9}")
    for line in lines:
        print(
            f"  {line['contender']:<20}{line['rows_per_s']:>12,}{line['mb_per_s']:>10,.0f}{line['times_scanner']:>11}"
            f"{line['of_limit']:>9}{line['cpu_s']:>9}{line['batches']:>9,}"
        )
    print("  resume: " + ", ".join(f"{key} {value}" for key, value in resumes.items()) + " (ms)")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print and return all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=204_800, help="rows of the narrow table; the wide one has a tenth")
    parser.add_argument("--repeats", type=int, default=7, help="rounds; medians are over these")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args(arguments)
    report: dict[str, Any] = {"machine": platform.platform(), "pyarrow": pa.__version__, "cpus": pa.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        for name, table in (("narrow", narrow_table(chosen.rows)), ("wide", wide_table(chosen.rows // 10))):
            path = Path(folder, name, "data.parquet")
            path.parent.mkdir()
            pq.write_table(table, path, row_group_size=max(1, table.num_rows // GROUPS))
            lines = throughput(path, table.num_rows, table.nbytes, chosen.repeats)
            resumes = resume(path, table.num_rows, chosen.repeats)
            show(f"{name}: {table.num_rows:,} rows, {table.num_columns} columns", lines, resumes)
            report[name] = {"throughput": lines, "resume_ms": resumes}
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    main()
