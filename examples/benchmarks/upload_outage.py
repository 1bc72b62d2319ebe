"""The slowdown of training during an outage of all upload endpoints.

The same small network is trained with and without `UploadArtifacts`, in turns, so that both see the same machine. With
it, metrics are queued every 10 steps and a checkpoint every 100, while the endpoints are down: connections are
refused (``refused``), or accepted and never answered (``silent``). Both arms write the same checkpoints.

Prints one JSON object for each kind of outage: steps per second of both arms (medians), the median of the ratios of
neighbours, and the processor time of the process per step.

Usage: ``python examples/benchmarks/upload_outage.py [--steps 300] [--rounds 7]``
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from genlight.callbacks import Checkpoint, UploadArtifacts

WARM_UP_STEPS = 20
URLS = ("TENSORHUB_URL", *(f"TRAINER_UPLOAD_{kind}_URL" for kind in ("METRICS", "CHECKPOINT", "TERMINAL")))


class Network(pl.LightningModule):
    """Three layers: a step of a few milliseconds on one core."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
            torch.nn.Linear(width, 1),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Wall and processor seconds from the end of the warm-up to the last step."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int) -> None:
        if trainer.global_step == WARM_UP_STEPS:
            self.wall_s, self.cpu_s = -time.perf_counter(), -time.process_time()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.wall_s += time.perf_counter()
        self.cpu_s += time.process_time()


def train(steps: int, width: int, upload: UploadArtifacts | None) -> Clock:
    """Train once; returns the clock."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoint(Path(folder, "checkpoints"), every_n_steps=100)
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[*([upload] if upload else []), clock, checkpoints],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Network(width), DataLoader(TensorDataset(torch.randn(64 * 512, 64)), batch_size=64))
    return clock


@contextmanager
def outage(kind: str) -> Iterator[str]:
    """Return a URL that never answers."""
    server = socket.create_server(("127.0.0.1", 0), backlog=128)
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    held: list[socket.socket] = []

    def hold() -> None:
        while True:
            try:
                held.append(server.accept()[0])
            except OSError:
                return

    if kind == "refused":
        server.close()
        yield url
        return
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield url
    finally:
        server.shutdown(socket.SHUT_RDWR)
        for connection in (server, *held):
            connection.close()
        thread.join()


def measure(kind: str, steps: int, rounds: int, width: int) -> dict[str, object]:
    """Train in turns without and with uploads to endpoints that are down."""
    without, during = [], []
    with outage(kind) as url:
        for number in range(rounds):
            os.environ |= dict.fromkeys(URLS, url) | {"TRAINER_UPLOAD_DEADLINE_SECONDS": "0.1"}
            upload = UploadArtifacts(run_id=f"run-{number}", owner="me", metric_every=10, critical=False)
            arms = [(without, None), (during, upload)]
            for clocks, callback in arms if number % 2 else reversed(arms):
                clocks.append(train(steps, width, callback))
    counted = steps - WARM_UP_STEPS
    ratios = [a.wall_s / b.wall_s for a, b in zip(without, during, strict=True)]
    return {
        "outage": kind,
        "steps_per_s_without": round(statistics.median(counted / c.wall_s for c in without), 1),
        "steps_per_s_during": round(statistics.median(counted / c.wall_s for c in during), 1),
        "throughput_ratio": round(statistics.median(ratios), 4),
        "throughput_ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "cpu_ms_per_step_without": round(1e3 * statistics.median(c.cpu_s / counted for c in without), 4),
        "cpu_ms_per_step_during": round(1e3 * statistics.median(c.cpu_s / counted for c in during), 4),
    }


def main() -> None:
    """Measure both kinds of outage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers; sets the length of a step")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["TRAINER_CAPABILITY_TOKEN"] = "token"
    torch.set_num_threads(1)
    train(60, args.width, None)
    for kind in ("refused", "silent"):
        print(json.dumps(measure(kind, args.steps, args.rounds, args.width)))


if __name__ == "__main__":
    main()
