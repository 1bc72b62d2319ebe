"""Peak memory of a rank: genlight under DDP and FSDP 2, bare ``DistributedDataParallel`` and ``fully_shard``.

    python examples/benchmarks/exchange_memory.py

Two ranks over gloo on this machine, an MLP of 23.6 M parameters (90 MiB of weights), plain SGD. Each host has its own
processes. The figures are the largest resident size of rank 0 in five steps, and the size at the end of the last
forward, minus the size before the model was built, as counted by the kernel (``VmHWM`` and ``VmRSS``, Linux). Before
that, each host has trained a small model, so the figures exclude its imports and threads. The allocator (glibc) returns
memory at once; otherwise the figures would include memory that it happened to keep, 40 MiB more or less in each run.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from exchange import ROWS, WIDTH, Mlp

STEPS = 5
LONGEST_WAIT = timedelta(minutes=1)
"""Ranks that wait longer for each other fail: bare DDP sometimes stalls in a backward call over gloo."""
SMALL = 256
"""Width of the model that is trained first; its gradients need several buckets too."""
HOSTS: dict[str, dict[str, Any]] = {
    "one rank alone": {},
    "bare DDP": {},
    "bare DDP, gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "genlight": {},
    "bare fully_shard": {},
    "genlight, FSDP 2": {},
    "genlight, FSDP 2, reshard_after_forward=True": {"reshard_after_forward": True},
}
"""Hosts, with the arguments of their DDP or FSDP 2."""


def taken_mib(host: str, rank: int, store: str) -> tuple[float, float]:
    """Return the memory of one rank of `host` in MiB: the peak, and at the end of its last forward."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}", timeout=LONGEST_WAIT)
    train(host, rank, SMALL)
    gc.collect()
    dist.barrier()
    before = _of_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    forward = train(host, rank, WIDTH)
    peak = _of_status("VmHWM")
    dist.barrier()  # not before the other rank has received everything from this one
    return (peak - before) / 1024, (forward - before) / 1024


def train(host: str, rank: int, width: int) -> float:
    """Train a few steps; return the resident size at the end of the last forward, in KiB."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.strategies import DDPStrategy
    from step_cost.ranks import Environment
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from genlight.adapter import ContractModule, FSDP2Strategy, TrainingJobSpec

    class Watched(Mlp):
        """Reads the resident size at the end of each forward."""

        def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
            if not sizes:  # in the first step: the model is sharded, and FSDP 2 frees memory in a hook before this one
                state["model"].register_forward_hook(lambda *_: sizes.append(_of_status("VmRSS")))
            return super().train_step(batch, state, ctx)

    sizes: list[float] = []
    batch = torch.randn(ROWS, width)
    settings = HOSTS[host]
    if host.startswith("genlight"):
        strategy: Any = FSDP2Strategy(**settings) if "FSDP" in host else DDPStrategy(**settings)
        strategy.cluster_environment = Environment(rank, 2)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = ContractModule(Watched(1, width=width), TrainingJobSpec("memory", STEPS))
        trainer.fit(module, _Same(batch))
        return sizes[-1]

    def wrap(model: Any) -> Any:
        if host == "bare fully_shard":
            return fully_shard(model)
        return model if host == "one rank alone" else DistributedDataParallel(model, **settings)

    by_hand = Watched(1, wrap, width=width)
    state = by_hand.configure(None)
    for _ in range(STEPS):
        by_hand.train_step(batch, state, None)
    return sizes[-1]


class _Same:
    """The same batch in each step."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        return iter([self.batch] * STEPS)


def _of_status(name: str) -> float:
    """Return a line of this process's ``/proc`` status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=HOSTS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.host is not None:
        peak, forward = taken_mib(chosen.host, chosen.rank, chosen.store)
        if chosen.rank == 0:
            print(f"{chosen.host:46}{peak:8.0f} MiB{forward:8.0f} MiB", flush=True)
        os._exit(0)  # do not wait for the other rank, since it may have ended
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 * 2**10)}
    for host in HOSTS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", __file__, "--host", host, "--store", str(Path(folder, "store"))]
            ranks = [
                subprocess.Popen([*command, "--rank", str(rank)], stderr=subprocess.DEVNULL, env=environment)
                for rank in range(2)
            ]
            codes = [process.wait() for process in ranks]
            if any(codes):
                sys.exit(f"A rank of {host} failed; start again.")


if __name__ == "__main__":
    main()
