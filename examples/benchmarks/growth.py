"""How the cost of a step grows: with the tensors that are averaged and compared, and with the metrics that are logged.

    OMP_NUM_THREADS=1 python examples/benchmarks/growth.py

CPU time of one thread for each tensor, metric or line, beyond the cost of the smallest case; medians. The process group
has one rank, so that no time goes to transfers. A number that stays the same in a row means linear growth.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from genlight.adapter.discovery.discover import discover
from genlight.adapter.discovery.rank_local import EVERYTHING_SHARED
from genlight.adapter.gradients.ddp.averaging import Averaging
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter
from genlight.callbacks.replicas.digest import digest_of_all
from genlight.reporters.events.event_log import EventLog
from genlight.reporters.events.validation import iter_violations

TENSORS = (10, 100, 1_000, 10_000, 40_000)
METRICS = (1, 10, 100)
LINES = (1_000, 10_000, 100_000)
CPU = torch.device("cpu")


def median_s(act: Callable[[], object], repeats: int) -> float:
    """Return the median CPU seconds of the calling thread in `act`, without the first call."""
    taken = []
    for _ in range(repeats + 1):
        began_s = time.thread_time()
        act()
        taken.append(time.thread_time() - began_s)
    return statistics.median(taken[1:])


def averaged_s(tensors: int, repeats: int) -> float:
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


def compared_s(tensors: int, repeats: int) -> float:
    """A comparison of `ReplicaGuard`."""
    model = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(tensors)])
    discovered = discover({"model": model})
    return median_s(lambda: digest_of_all(EVERYTHING_SHARED.replicated_values(discovered), CPU), repeats)


def logged_s(metrics: int, repeats: int) -> float:
    """The metrics of one step."""
    values = {f"metric {number}": number / 3 for number in range(metrics)}
    steps = itertools.count()
    with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder, "events.jsonl"), run_id="growth") as log:
        log.started()
        return median_s(lambda: log.metrics(values, step=next(steps)), 100 * repeats)


def checked_s(lines: int, repeats: int) -> float:
    """``genlight events --check`` of a log with a fault in each line, without its output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "events.jsonl")
        path.write_text('{"event": "metric", "name": "a", "run_id": "r", "seq": 1, "step": 1, "value": 0.5}\n' * lines)
        return median_s(lambda: sum(1 for _ in iter_violations(path)), max(1, repeats // 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        rows: tuple[tuple[str, Callable[[int, int], float], tuple[int, ...]], ...] = (
            ("averaging, each tensor", averaged_s, TENSORS),
            ("comparison of replicas, each tensor", compared_s, TENSORS),
            ("metrics, each", logged_s, METRICS),
            ("check of faulty events, each line", checked_s, LINES),
        )
        for name, measure, counts in rows:
            first, *rest = ((count, measure(count, repeats)) for count in counts)
            costs = [(count, (took - first[1]) / (count - first[0]) * 1e6) for count, took in rest]
            print(f"{name:38}{first[0]}: {first[1] * 1e6:,.0f} us in all;", end="")
            print(*(f"  {count:,}: {cost:.2f} us" for count, cost in costs), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
