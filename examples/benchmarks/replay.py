"""Samples and writes per second of the replay buffer, and of torchrl and cpprb if they are installed.

    OMP_NUM_THREADS=1 python examples/benchmarks/replay.py

A million rows of 8 + 2 + 1 + 8 floats and a flag, samples of 256 rows, writes of 64, one thread. All buffers take
turns; a figure is the median over the rounds of the calls in a second of CPU time.

For the comparison, install the others into a separate folder and add it to ``PYTHONPATH``: ``pip install --no-deps
--target FOLDER torchrl==0.14.1 tensordict==0.14.3 pyvers hoptorch cpprb``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from genlight.adapter import ReplayBuffer

ROWS, DRAWN, WRITTEN = 1_000_000, 256, 64
ROW = {
    "observation": torch.zeros(8),
    "action": torch.zeros(2),
    "reward": torch.tensor(0.0),
    "next_observation": torch.zeros(8),
    "terminated": torch.tensor(False),
}
Actions = dict[str, Callable[[], object]]


def rows(count: int) -> dict[str, Tensor]:
    return {name: torch.rand(count, *value.shape).to(value.dtype) for name, value in ROW.items()}


def genlight() -> Actions:
    buffer = ReplayBuffer(ROWS, ROW)
    for _ in range(100):
        buffer.extend(rows(ROWS // 100))
    new = rows(WRITTEN)
    return {"samples": lambda: buffer.sample(DRAWN), "writes": lambda: buffer.extend(new)}


def torchrl() -> Actions:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=DRAWN)
    for _ in range(100):
        buffer.extend(TensorDict(rows(ROWS // 100), [ROWS // 100]))
    new = TensorDict(rows(WRITTEN), [WRITTEN])
    return {"samples": buffer.sample, "writes": lambda: buffer.extend(new)}


def cpprb() -> Actions:
    import cpprb

    columns = {name: {"shape": tuple(value.shape) or 1, "dtype": value.numpy().dtype} for name, value in ROW.items()}
    buffer = cpprb.ReplayBuffer(ROWS, columns)
    for _ in range(100):
        buffer.add(**{name: column.numpy() for name, column in rows(ROWS // 100).items()})
    new = {name: column.numpy() for name, column in rows(WRITTEN).items()}
    return {"samples": lambda: buffer.sample(DRAWN), "writes": lambda: buffer.add(**new)}


def rate(act: Callable[[], object], span_s: float) -> float:
    """Calls in a second of CPU time."""
    began_s, calls = time.thread_time(), 0
    while (took_s := time.thread_time() - began_s) < span_s:
        act()
        calls += 1
    return calls / took_s


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print and return the rates by buffer and action."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--span", type=float, default=0.2, help="seconds of CPU time of an action in a round")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    actions: Actions = {}
    for made in (genlight, torchrl, cpprb):
        try:
            own = made()
        except (ImportError, RuntimeError) as error:
            print(f"{made.__name__} cannot be measured here: {error}")
            continue
        actions |= {f"{made.__name__}: {action}": act for action, act in own.items()}
    rates: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(chosen.rounds):
        for name, act in actions.items():
            rates[name].append(rate(act, chosen.span))
    found = {name: statistics.median(own) for name, own in rates.items()}
    for name, median in found.items():
        print(f"{name} {median:,.0f} a second")
    return found


if __name__ == "__main__":
    main()
