"""Steps with checkpoints in memory, with and without copies on a second node, and the seconds until a copy is there.

    torchrun --nproc-per-node 2 examples/benchmarks/peer_copies.py

Two ranks of this machine stand for two nodes: each has its own folder of ``/dev/shm`` as its memory, and they exchange
gradients and copies over the loopback. The fits with and without copies alternate.
"""

import itertools
import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from genlight.callbacks import Checkpoint
from genlight.callbacks.checkpoint import memory_tier

WIDTH, LAYERS, ROUNDS, STEPS, EVERY = 1448, 4, 3, 40, 5
"""100 MB of weights and AdamW; a checkpoint in memory after every fifth step."""


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.body(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(pl.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


class Rounds(logging.Handler):
    """Collects how long each copy took to be on all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "is on all nodes" in str(record.msg) and isinstance(record.args, tuple):
            self.seconds.append(float(str(record.args[1])))


def fit(directory: Path, *, peer_copies: bool) -> list[float]:
    torch.manual_seed(0)
    clock = Clock()
    saver = Checkpoint(directory, memory_every_n_steps=EVERY, peer_copies=peer_copies, save_final=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=STEPS,
        callbacks=[saver, clock],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Net(), DataLoader([torch.randn(64, WIDTH) for _ in range(STEPS)], batch_size=None))
    times = clock.times[EVERY:]
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    rank = int(os.environ["RANK"])
    os.environ["GROUP_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    rounds = Rounds()
    logger = logging.getLogger("genlight.callbacks.checkpoint.peers")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(rounds)
    memory_tier.ROOT = Path(tempfile.mkdtemp(dir="/dev/shm"))
    directory = Path(tempfile.gettempdir(), f"peer-copies-{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}")
    steps: dict[bool, list[float]] = {False: [], True: []}
    try:
        for number in range(2 * ROUNDS):
            peer_copies = number % 2 == 1
            steps[peer_copies] += fit(directory / str(number), peer_copies=peer_copies)
    finally:
        dist.barrier()
        shutil.rmtree(memory_tier.ROOT)
        shutil.rmtree(directory, ignore_errors=True)
    if rank == 0:
        for peer_copies, seconds in steps.items():
            name = "with copies" if peer_copies else "without"
            median, mean = 1000 * statistics.median(seconds), 1000 * statistics.mean(seconds)
            print(f"{name}: median step {median:.1f} ms, mean {mean:.1f} ms, longest {1000 * max(seconds):.1f} ms")
        extra = statistics.mean(steps[True]) - statistics.mean(steps[False])
        print(f"extra time of a step {1000 * extra:.1f} ms, of a checkpoint {1000 * EVERY * extra:.1f} ms")
        if rounds.seconds:
            median = statistics.median(rounds.seconds)
            print(f"{len(rounds.seconds)} copies, each on the second node after {median:.2f} s, at most", end=" ")
            print(f"{max(rounds.seconds):.2f} s")


if __name__ == "__main__":
    main()
