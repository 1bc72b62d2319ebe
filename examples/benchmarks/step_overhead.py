"""The cost of hosting a trainer class in each step, compared with a bare torch loop and other hosts.

    python examples/benchmarks/step_overhead.py --json step_overhead.json --plot step_overhead.png
    python examples/benchmarks/step_overhead.py --ranks 2
    python examples/benchmarks/step_overhead.py --ranks 2 --norms
    python examples/benchmarks/step_overhead.py --ranks 2 --layers 10 --width 1448
    python examples/benchmarks/step_overhead.py --scale 1000000
    python examples/benchmarks/step_overhead.py --device cuda --trace step.json

Each host trains one linear layer at batch 8, so small that the cost of the host is visible, and takes turns with its
floor: a block of steps of a bare loop, a block of the host, and so on in one process. The floor of bf16 runs under
autocast, the floor of several ranks with ``DistributedDataParallel``. Figures are medians over all pairs of blocks,
with quartiles; the ratio of sums also includes events in few blocks. CPU time counts all threads of the process.

`standard` is the configuration of ``genlight run``: an event log with metrics every 10 steps, stop checks with a cancel
file and a runtime limit, a watch for hangs, checkpoints and samples (which are never due).
torchtnt, accelerate and transformers take part if they are installed, and the picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from step_cost import device, layers, norms, ranks, report, scale, start_up
from step_cost.alternating import Alternation, Pair, figures
from step_cost.hosts import Host, hosts_of_one


def measured(hosts: dict[str, Host], chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the figures of each host; every host runs once in each round."""
    pairs: dict[str, list[Pair]] = {name: [] for name in hosts}
    replicated = chosen.ranks > 1
    meet = torch.distributed.barrier if replicated else (lambda: None)
    blocks = max(1, chosen.steps // chosen.block)
    for _ in range(chosen.rounds):
        for name, host in hosts.items():
            settings = {"blocks": blocks, "block": chosen.block, "data_s": chosen.data_ms / 1000}
            batches = Alternation(host.floor(), meet=meet, shares_threads=replicated, **settings)
            with tempfile.TemporaryDirectory() as folder:
                host.run(batches, Path(folder))
            pairs[name] += batches.pairs
    return {name: figures(own, chosen.block) for name, own in pairs.items()}


def measure_steps(chosen: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure every host and its floor, on one rank or several."""
    of_ranks = norms.hosts_with_norms if chosen.norms else ranks.hosts_of_ranks
    if chosen.layers:
        of_ranks = functools.partial(layers.hosts_with_layers, layers=chosen.layers, width=chosen.width)
    hosts = hosts_of_one() if chosen.ranks == 1 else of_ranks(chosen.rank, chosen.ranks)
    hosts = {name: host for name, host in hosts.items() if any(text in name for text in chosen.only or [""])}
    found["hosts"] = measured(hosts, chosen)
    if chosen.rank:
        return
    report.show(found["hosts"], wall=False)
    report.show(found["hosts"], wall=True)
    if chosen.plot:
        report.plot(found["hosts"], chosen.plot)
    if chosen.startup and chosen.ranks == 1:
        found["start_up"] = start_up.start_up(chosen.startup)
        start_up.show(found["start_up"])


def measure_scale(chosen: argparse.Namespace, found: dict[str, Any]) -> None:
    """Many steps, and many callbacks."""
    found["steps"] = scale.many_steps(chosen.scale)
    scale.show_steps(found["steps"])
    found["callbacks"] = scale.many_callbacks(max(100, chosen.scale // 200), chosen.rounds)
    scale.show_callbacks(found["callbacks"])


def measure_device(chosen: argparse.Namespace, found: dict[str, Any]) -> None:
    """A small transformer on one device."""
    found["device"] = device.measure(chosen.device, steps=chosen.steps, block=chosen.block, trace=chosen.trace)
    device.show(found["device"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="steps that count, in each run of a host")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each host")
    parser.add_argument("--block", type=int, default=100, help="steps from one turn to the next")
    parser.add_argument("--ranks", type=int, default=1, help="processes, connected by gloo")
    parser.add_argument("--norms", action="store_true", help="with --ranks: a small ResNet with batch norms instead")
    parser.add_argument("--layers", type=int, help="with --ranks: so many linear layers instead, DDP and FSDP 2")
    parser.add_argument("--width", type=int, default=16, help="with --layers: their width")
    parser.add_argument("--data-ms", type=float, default=0.0, help="how long each batch is waited for")
    parser.add_argument("--startup", type=int, default=5, metavar="ROUNDS", help="rounds of start-up times; 0: none")
    parser.add_argument("--only", action="append", help="hosts whose name has this text; may be repeated")
    parser.add_argument("--scale", type=int, metavar="STEPS", help="instead: so many steps, and many callbacks")
    parser.add_argument("--device", help="instead: a small transformer on this device, such as cuda")
    parser.add_argument("--trace", type=Path, help="with --device: where to write a trace of 10 steps")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="where to draw the figures")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print and return all figures."""
    given = sys.argv[1:] if arguments is None else arguments
    chosen = _parser().parse_args(given)
    if chosen.ranks > 1 and not chosen.store:
        raise SystemExit(ranks.start_ranks([__file__, *given], chosen.ranks))
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if chosen.device is None:
        torch.set_num_threads(1)
    if chosen.store:
        ranks.join(chosen.rank, chosen.ranks, chosen.store)
    settings = {name: getattr(chosen, name) for name in ("steps", "rounds", "block", "ranks")}
    found: dict[str, Any] = {**report.about(), **settings}
    measure = measure_scale if chosen.scale else measure_device if chosen.device else measure_steps
    measure(chosen, found)
    if chosen.json and not chosen.rank:
        report.write_json(found, chosen.json)
    return found


if __name__ == "__main__":
    main()
