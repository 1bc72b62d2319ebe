"""Writes and samples a second of the replay buffer, beside those of torchrl where that is installed.

Usage: ``python examples/benchmarks/replay.py``; a million rows of 8 + 2 + 1 + 8 floats and a flag, samples of 256 rows,
writes of 64, one thread. ``pip install torchrl`` for the comparison; its prioritised buffer needs its C++ extension to
be built for the torch that is installed, and is left out where that is not so.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from genlight.adapter.feed import ReplayBuffer

ROWS, DRAWN, WRITTEN = 1_000_000, 256, 64
ROW = {
    "observation": torch.zeros(8),
    "action": torch.zeros(2),
    "reward": torch.tensor(0.0),
    "next_observation": torch.zeros(8),
    "terminated": torch.tensor(False),
}


def rows(count: int) -> dict[str, Tensor]:
    return {name: torch.rand(count, *value.shape).to(value.dtype) for name, value in ROW.items()}


def rate(act: Callable[[], object]) -> int:
    """Calls a second: the best of five spans of 0.4 s."""
    act()
    best = 0.0
    for _ in range(5):
        began_s, calls = time.perf_counter(), 0
        while (took_s := time.perf_counter() - began_s) < 0.4:
            act()
            calls += 1
        best = max(best, calls / took_s)
    return round(best)


def genlight(exponent: float | None) -> None:
    buffer = ReplayBuffer(ROWS, ROW, priority_exponent=exponent)
    for _ in range(100):
        buffer.extend(rows(ROWS // 100))
    new, name = rows(WRITTEN), "uniform" if exponent is None else "by priority"
    print(f"genlight {name}: {rate(lambda: buffer.sample(DRAWN))} samples/s", end=", ")
    print(f"{rate(lambda: buffer.extend(new))} writes/s")
    if exponent is not None:
        index, priorities = buffer.sample(DRAWN)["index"], torch.rand(DRAWN)
        print(f"genlight {name}: {rate(lambda: buffer.update_priorities(index, priorities))} updates/s")


def torchrl(exponent: float | None) -> None:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

    arguments = {"storage": LazyTensorStorage(ROWS), "batch_size": DRAWN}
    name = "uniform" if exponent is None else "by priority"
    try:
        if exponent is None:
            buffer = TensorDictReplayBuffer(**arguments)
        else:
            buffer = TensorDictPrioritizedReplayBuffer(alpha=exponent, beta=0.4, **arguments)
    except RuntimeError as error:
        print(f"torchrl {name}: cannot be measured here: {error}")
        return
    for _ in range(100):
        buffer.extend(TensorDict(rows(ROWS // 100), [ROWS // 100]))
    new = TensorDict(rows(WRITTEN), [WRITTEN])
    print(f"torchrl {name}: {rate(buffer.sample)} samples/s, {rate(lambda: buffer.extend(new))} writes/s")
    if exponent is not None:
        index, priorities = buffer.sample()["index"], torch.rand(DRAWN)
        print(f"torchrl {name}: {rate(lambda: buffer.update_priority(index, priorities))} updates/s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for measured in (genlight, torchrl):
        for exponent in (None, 0.6):
            try:
                measured(exponent)
            except ImportError as error:
                print(f"{measured.__name__}: cannot be measured here: {error}")
