"""The cost of comparing replicas, as a share of steps of 10 ms.

    python examples/benchmarks/replica_guard.py

A comparison computes one number from all parameters and AdamW's moments. `ReplicaGuard` compares after steps 1, 2, 4,
8, …, so its share falls with the length of a run. The figure is the CPU time of one thread, without the exchange of 32
bytes in the background.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from genlight.adapter.discovery.discover import discover
from genlight.adapter.discovery.rank_local import EVERYTHING_SHARED
from genlight.callbacks.checkpoint.codec.tensors import digest_of_all

STEP_MS = 10.0
MODELS = {
    "1 M parameters in 20 tensors": [(100_000, 1)] * 10 + [(300, 1)] * 10,
    "1 M parameters in 200 tensors": [(100, 100)] * 100 + [(100, 1)] * 100,
    "10 M parameters in 200 tensors": [(316, 316)] * 100 + [(316, 1)] * 100,
}


def comparison_ms(shapes: list[tuple[int, int]], repeats: int) -> float:
    """Return the median CPU milliseconds of one comparison, including the search for tensors."""
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    discovered = discover({"model": model, "optimizer": optimizer})
    taken = []
    for _ in range(repeats + 1):
        began_s = time.process_time()
        int(digest_of_all(EVERYTHING_SHARED.replicated_values(discovered), torch.device("cpu")))
        taken.append((time.process_time() - began_s) * 1000)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(f"{'':34}{'a comparison':>14}{'of 1,000 steps':>16}{'of 10,000':>12}")
    for name, shapes in MODELS.items():
        took = comparison_ms(shapes, repeats)
        shares = [took * steps.bit_length() / (steps * STEP_MS) for steps in (1_000, 10_000)]
        print(f"{name:34}{took:>11.2f} ms{shares[0]:>16.3%}{shares[1]:>12.3%}")


if __name__ == "__main__":
    main()
