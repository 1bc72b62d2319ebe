"""Peak memory of a rank that averages gradients: genlight, and bare ``DistributedDataParallel``.

    python examples/benchmarks/exchange_memory.py

Two ranks over gloo on this machine, an MLP of 23.6 M parameters (90 MiB of weights), plain SGD. Each host has processes
of its own; what is printed is the largest resident size of rank 0 in five steps, less what it had before the model was
built, from the kernel's own count (``VmHWM``, Linux).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exchange import ROWS, WIDTH, Mlp

STEPS = 5
HOSTS = ("one rank alone", "bare DDP", "bare DDP, gradient_as_bucket_view", "genlight")


def peak_mib(host: str, rank: int, store: str) -> float:
    """What one rank of `host` takes at most, in MiB."""
    import lightning.pytorch as pl
    import torch
    import torch.distributed as dist
    from lightning.pytorch.strategies import DDPStrategy
    from step_cost.ranks import Environment
    from torch.nn.parallel import DistributedDataParallel

    from genlight.adapter import ContractModule, TrainingJobSpec

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    batch = torch.randn(ROWS, WIDTH)
    before = _of_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size counts from here on
    if host == "genlight":
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(cluster_environment=Environment(rank, 2)),
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(ContractModule(Mlp(1), TrainingJobSpec("memory", STEPS)), _Same(batch))
    else:
        wraps: dict[str, Callable[[Any], Any]] = {
            "one rank alone": lambda model: model,
            "bare DDP": DistributedDataParallel,
            "bare DDP, gradient_as_bucket_view": functools.partial(
                DistributedDataParallel, gradient_as_bucket_view=True
            ),
        }
        by_hand = Mlp(1, wraps[host])
        state = by_hand.configure(None)
        for _ in range(STEPS):
            by_hand.train_step(batch, state, None)
    peak = _of_status("VmHWM")
    dist.barrier()
    with contextlib.suppress(RuntimeError):  # the other rank may be faster to leave
        dist.destroy_process_group()
    return (peak - before) / 1024


class _Same:
    """The same batch in each step."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        return iter([self.batch] * STEPS)


def _of_status(name: str) -> float:
    """A line of the kernel's account of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=HOSTS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.host is not None:
        taken = peak_mib(chosen.host, chosen.rank, chosen.store)
        if chosen.rank == 0:
            print(f"{chosen.host:36}{taken:8.0f} MiB", flush=True)
        return
    for host in HOSTS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", __file__, "--host", host, "--store", str(Path(folder, "store"))]
            ranks = [subprocess.Popen([*command, "--rank", str(rank)], stderr=subprocess.DEVNULL) for rank in range(2)]
            codes = [process.wait() for process in ranks]
            if any(codes):
                sys.exit(f"a rank of {host} failed")


if __name__ == "__main__":
    main()
