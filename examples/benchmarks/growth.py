"""How costs grow: with tensors, metrics, lines of a log, ranks, files of data, waiting uploads and checkpoints.

    OMP_NUM_THREADS=1 python examples/benchmarks/growth.py
    OMP_NUM_THREADS=1 python examples/benchmarks/growth.py --only rank --only checkpoint

Each row has the cost of one tensor, metric, file and so on, beyond the cost of the smallest case, and the exponent that
fits these costs best: 1 is linear growth, 2 quadratic, 0 none. Costs are the CPU time of one thread, medians. Among
several ranks, most of the time would be noise; there the rows count collective calls and the bytes in them, on rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import logging
import multiprocessing
import shutil
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from step_cost.hosts import fit
from step_cost.layers import Layers
from step_cost.ranks import Environment, join
from torch import nn

from genlight.adapter import ArrowFeed, ContractModule, TrainingJobSpec
from genlight.adapter.cli import main as command
from genlight.adapter.discovery.discover import discover
from genlight.adapter.discovery.rank_local import EVERYTHING_SHARED
from genlight.adapter.gradients.ddp.averaging import Averaging
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter
from genlight.adapter.view.checkpoints import checkpoint_facts
from genlight.callbacks import Checkpoint, LogMetrics, ReplicaGuard, StopRequests
from genlight.callbacks.checkpoint import CheckpointStore, RecordMeta, list_checkpoints, newest_valid, save, sweep
from genlight.callbacks.checkpoint.codec.tensors import digest_of_all
from genlight.callbacks.checkpoint.selection import WRITER
from genlight.reporters.events.event_log import EventLog
from genlight.reporters.events.validation import iter_violations
from genlight.reporters.uploads.queue import Entry, Queue

TENSORS = (10, 100, 1_000, 10_000, 40_000)
METRICS = (1, 10, 100)
LINES = (1_000, 10_000, 100_000)
RANKS = (2, 4, 8, 16)
FILES = (10, 100, 1_000, 10_000)
CPU = torch.device("cpu")
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "gather")
STEPS = 10
"""Steps of several ranks that are counted without a save, and then with one."""


def median_s(act: Callable[[], object], repeats: int) -> tuple[float]:
    """Return the median CPU seconds of the calling thread in `act`, without the first call, as the only cost."""
    taken = []
    for _ in range(repeats + 1):
        began_s = time.thread_time()
        act()
        taken.append(time.thread_time() - began_s)
    return (statistics.median(taken[1:]),)


def averaged_s(tensors: int, repeats: int) -> tuple[float]:
    """A step of several ranks without forward and update: zeroing, backward with an exchange, and its end."""
    model = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(tensors)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    discovered = discover({"model": model, "optimizer": optimizer})
    router = StepRouter(discovered, CPU, precision=StepPrecision("fp32"), averaging=Averaging(discovered, CPU))

    def step() -> None:
        with router:
            optimizer.zero_grad()
            torch.cat([*model]).sum().backward()

    return median_s(step, repeats)


def compared_s(tensors: int, repeats: int) -> tuple[float]:
    """A comparison of `ReplicaGuard`."""
    model = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(tensors)])
    discovered = discover({"model": model})
    return median_s(lambda: digest_of_all(EVERYTHING_SHARED.replicated_values(discovered), CPU), repeats)


def saved_s(tensors: int, repeats: int) -> tuple[float]:
    """A save of as many tensors, written and synced."""
    state = {"global_step": 1, "state_dict": {f"tensor {number}": torch.randn(4) for number in range(tensors)}}
    with tempfile.TemporaryDirectory() as folder:
        return median_s(lambda: save(Path(folder, "step-00000001"), state), max(1, repeats // 5))


def logged_s(metrics: int, repeats: int) -> tuple[float]:
    """The metrics of one step."""
    values = {f"metric {number}": number / 3 for number in range(metrics)}
    steps = itertools.count()
    with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder, "events.jsonl"), run_id="growth") as log:
        log.started()
        return median_s(lambda: log.metrics(values, step=next(steps)), 100 * repeats)


def checked_s(lines: int, repeats: int) -> tuple[float]:
    """``genlight events --check`` of a log with a fault in each line, without its output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "events.jsonl")
        path.write_text('{"event": "metric", "name": "a", "run_id": "r", "seq": 1, "step": 1, "value": 0.5}\n' * lines)
        return median_s(lambda: sum(1 for _ in iter_violations(path)), max(1, repeats // 5))


def reported_s(lines: int, repeats: int) -> tuple[float]:
    """``genlight report`` of a run whose log has as many lines."""
    with tempfile.TemporaryDirectory() as folder:
        with EventLog(Path(folder, "metrics", "events.jsonl"), run_id="growth") as log:
            log.started()
            for step in range(lines // 100):
                log.metrics({f"metric {number}": step / 3 for number in range(100)}, step=step)
        arguments = ["report", folder, "--to", str(Path(folder, "report.html"))]
        with contextlib.redirect_stdout(io.StringIO()):
            return median_s(lambda: command(arguments), max(1, repeats // 5))


def fed_s(files: int, repeats: int) -> tuple[float]:
    """The start of a pass over as many files of Parquet, up to the first batch."""
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "0.parquet")
        pq.write_table(pa.table({"number": list(range(8))}), first)
        for number in range(1, files):
            shutil.copy(first, Path(folder, f"{number}.parquet"))
        return median_s(lambda: next(iter(ArrowFeed(folder, batch_size=8, readahead=0))), max(1, repeats // 5))


def queued_s(entries: int, repeats: int) -> tuple[float]:
    """The start of a queue in which as many uploads wait."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(Queue(folder)) as queue:
            for step in range(entries):
                payload = {"metrics": {"loss": 0.5}}
                queue.add(Entry(run_id="r", kind="metrics", step=step, to=("endpoint",), payload=payload, key="key"))
        return median_s(lambda: Queue(folder).close(), max(1, repeats // 5))


CHECKPOINTS = tempfile.TemporaryDirectory()
"""Directory that all cases of checkpoints fill up further."""


def among_checkpoints(count: int, repeats: int) -> tuple[float, ...]:
    """In a directory of `count` checkpoints: the start of a resumed training, the work after a save, and a listing."""
    directory, store, taken = Path(CHECKPOINTS.name), CheckpointStore(), []
    steps = itertools.count(len(list_checkpoints(directory)))

    def save_next() -> None:
        state = {"global_step": (step := next(steps)), "state_dict": {"w": torch.full((8,), float(step))}}
        save(directory / f"step-{step:08d}", state, meta=RecordMeta(run_id="r", writer=WRITER))

    for _ in range(count - next(steps)):
        save_next()
    for _ in range(max(1, repeats // 5) + 1):
        save_next()
        moments = [time.process_time()]
        sweep(directory)
        newest_valid(directory)
        moments.append(time.process_time())
        store.prune(directory, lambda listed: [each.record for each in listed if each.record and each.problem])
        store.background.finish()
        moments.append(time.process_time())
        [checkpoint_facts(listed) for listed in list_checkpoints(directory)]
        taken.append(np.diff([*moments, time.process_time()]))
    return tuple(np.median(taken[1:], axis=0))


def train_rank(rank: int, ranks: int, folder: Path, counted: Any) -> None:
    """Train one rank of `ranks` with metrics, stops and a comparison of replicas in every step, and one save."""
    seen: Counter[str] = Counter()
    for module, name in itertools.product((dist, dist.distributed_c10d), COLLECTIVES):
        setattr(module, name, _counting(getattr(module, name), seen))
    torch.set_num_threads(1)
    join(rank, ranks, str(folder / "store"))
    strategy = DDPStrategy(cluster_environment=Environment(rank, ranks))
    callbacks = [
        StopRequests(cancel_file=folder / "cancel"),
        LogMetrics(1, reduce="mean"),
        ReplicaGuard(every_n_steps=1),
        Checkpoint(folder / "checkpoints", every_n_steps=2 * STEPS + STEPS // 2, save_final=False),
    ]
    moments: list[tuple[int, int, float]] = []

    def batches() -> Iterator[int]:
        for step in range(3 * STEPS + 1):
            if step and not step % STEPS:
                moments.append((seen["calls"], seen["bytes"], time.process_time()))
            yield step

    module = ContractModule(Layers(10, 16), TrainingJobSpec("growth", 3 * STEPS + 1))
    fit(module, batches(), folder, steps=3 * STEPS + 1, strategy=strategy, devices=ranks, callbacks=callbacks)
    if rank == 0:
        counted.put([np.diff([each[column] for each in moments]).tolist() for column in range(3)])


def _counting(real: Callable[..., Any], seen: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **settings: Any) -> Any:
        parts = [part for each in args for part in (each if isinstance(each, list) else [each])]
        seen["calls"] += 1
        seen["bytes"] += sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
        return real(*args, **settings)

    return call


def trained(ranks: int, _: int) -> tuple[float, float, float, float, float]:
    """Return the calls, bytes and CPU seconds of a step of rank 0, then the calls and bytes of a save."""
    context = multiprocessing.get_context("fork")
    counted = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=train_rank, args=(rank, ranks, Path(folder), counted)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        (calls, calls_with_save), (moved, moved_with_save), (cpu_s, _) = counted.get()
        for process in processes:
            process.join()
    return calls / STEPS, moved / STEPS, cpu_s / STEPS, calls_with_save - calls, moved_with_save - moved


def print_row(name: str, counts: tuple[int, ...], costs: list[float], scale: float, unit: str) -> None:
    """Print one row of Markdown: the smallest case, the cost of one more in each larger case, and the exponent."""
    more = np.array(counts[1:]) - counts[0], (np.array(costs[1:]) - costs[0]) * scale
    fitted = np.polyfit(*np.log(more), 1)[0] if (more[1] > 0).all() else 0.0
    each = "; ".join(f"{cost:,.3g}" for cost in more[1] / more[0])
    print(f"| {name} | {counts[0]:,} to {counts[-1]:,} | {costs[0] * scale:,.0f} {unit} | {each} | {fitted:.2f} |")


US = 1e6, "us"
OF_RANKS = {
    "a rank: collective calls of a step": (1.0, "calls"),
    "a rank: bytes in them": (1.0, "bytes"),
    "a rank: CPU of a step of rank 0": US,
    "a rank: collective calls of a save": (1.0, "calls"),
    "a rank: bytes in them, of a save": (1.0, "bytes"),
}
OF_CHECKPOINTS = {
    "a checkpoint in the directory: start of a resumed training": US,
    "a checkpoint in the directory: after each save": US,
    "a checkpoint in the directory: listing": US,
}
Measure = Callable[[int, int], tuple[float, ...]]
GROUPS: tuple[tuple[Measure, tuple[int, ...], dict[str, tuple[float, str]]], ...] = (
    (trained, RANKS, OF_RANKS),  # first, since the ranks are forks of this process
    (averaged_s, TENSORS, {"a tensor that is averaged: zeroed, backward, exchange": US}),
    (compared_s, TENSORS, {"a tensor that `ReplicaGuard` compares": US}),
    (saved_s, TENSORS, {"a tensor of a save": US}),
    (logged_s, METRICS, {"a metric of a step in the event log": US}),
    (checked_s, LINES, {"a line with a fault in `events --check`": US}),
    (reported_s, LINES, {"a line of the log of `report`": US}),
    (fed_s, FILES, {"a file of the data, until the first batch": US}),
    (queued_s, FILES, {"an upload that waits, at the start": US}),
    (among_checkpoints, FILES, OF_CHECKPOINTS),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", action="append", help="rows whose name has this text; may be repeated")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as a run does after its imports
    print("| one more of | from, to | the smallest case | cost of one more | exponent |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, CHECKPOINTS:
        for measure, counts, rows in GROUPS:
            if not any(text in name for text in chosen.only or [""] for name in rows):
                continue
            if measure is averaged_s:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            columns = zip(*(measure(count, chosen.repeats) for count in counts), strict=True)
            for (name, (scale, unit)), costs in zip(rows.items(), columns, strict=True):
                print_row(name, counts, list(costs), scale, unit)


if __name__ == "__main__":
    main()
