"""The cost of a checkpoint if only a small part of the model is trained: bytes on disk, and the stall of a save.

    python examples/benchmarks/frozen_weights.py --frozen-mb 200 --trained-mb 2 --saves 10

The model has a frozen base and a trained part with AdamW's state. Each way of saving writes the same sequence of
checkpoints; the trained part changes between them. *Stall* is how long the training thread waits: in the first save,
the only one that may write the base, and the median of the others. *MB on disk* counts all checkpoints together, each
inode once. *Look* is the first check of the base, at the start of training. The lower limit of a save is a copy of the
trained part into warm memory and a digest of the base.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from genlight.callbacks.checkpoint import CheckpointStore, RecordMeta, verify
from genlight.callbacks.checkpoint.codec.tensors import content_digests
from genlight.callbacks.checkpoint.frozen import Frozen

LAYERS = 24


class Model:
    """Return the tensors of a base and of the trained part."""

    def __init__(self, frozen_mb: int, trained_mb: int) -> None:
        torch.manual_seed(0)
        self.base = {f"base.{i}.weight": torch.randn(frozen_mb * 250_000 // LAYERS) for i in range(LAYERS)}
        # A third are weights, the rest are their AdamW moments.
        self.trained = {f"adapter.{i}.weight": torch.randn(trained_mb * 250_000 // LAYERS) for i in range(LAYERS)}
        self.moments = {
            i: {"exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
            for i, weight in enumerate(self.trained.values())
        }

    def step(self) -> None:
        for tensor in self.changing():
            tensor.add_(1)

    def changing(self) -> Iterator[torch.Tensor]:
        yield from self.trained.values()
        for moment in self.moments.values():
            yield from moment.values()

    def checkpoint(self, step: int) -> dict:
        state = {"state": self.moments, "param_groups": []}
        return {"global_step": step, "state_dict": self.base | self.trained, "optimizer_states": [state]}


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def run(model: Model, directory: Path, saves: int, way: str) -> dict[str, float]:
    store, look = CheckpointStore(), 0.0
    if way != "whole":
        look = seconds(lambda: store.begin(directory, Frozen(model.base, leaves_out=way == "trained")))
    changing, frozen = (sum(t.nbytes for t in tensors) for tensors in (model.changing(), model.base.values()))
    store.buffer.reserve(changing + (frozen if way == "whole" else 0), torch.device("cpu"))
    stalls = []
    for step in range(1, saves + 1):
        model.step()
        path = directory / f"step-{step:08d}.json"
        state, meta = model.checkpoint(step), RecordMeta(step=step)
        stalls.append(seconds(lambda path=path, s=state, m=meta: store.save(path, s, m, asynchronous=True)))
        store.wait()
        verify(path)
    inodes = {status.st_ino: status.st_size for status in map(Path.stat, filter(Path.is_file, directory.rglob("*")))}
    return {
        "look_ms": look * 1e3,
        "first_ms": stalls[0] * 1e3,
        "stall_ms": statistics.median(stalls[1:]) * 1e3,
        "mb": sum(inodes.values()) / 1e6,
    }


def least(model: Model) -> dict[str, float]:
    """Return the milliseconds for a copy of the trained part and a digest of the base."""
    warm = [torch.zeros_like(tensor) for tensor in model.changing()]
    base = list(model.base.values())
    content_digests(base)
    copies = [
        seconds(lambda: [to.copy_(tensor) for to, tensor in zip(warm, model.changing(), strict=True)]) for _ in range(9)
    ]
    digests = [seconds(lambda: content_digests(base)) for _ in range(9)]
    return {"copy": statistics.median(copies) * 1e3, "digest": statistics.median(digests) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frozen-mb", type=int, default=200)
    parser.add_argument("--trained-mb", type=int, default=2, help="weights alone; AdamW's state takes twice as much")
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--directory", help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    model = Model(arguments.frozen_mb, arguments.trained_mb)
    limits = least(model)
    print(f"{arguments.frozen_mb} MB frozen, {arguments.trained_mb} MB trained, {arguments.saves} checkpoints\n")
    print(f"{'':26}{'look ms':>9}{'first ms':>10}{'stall ms':>10}{'MB on disk':>12}")
    for name, way in (("all, whole", "whole"), ("all, shared", "shared"), ("weights='trained'", "trained")):
        root = Path(tempfile.mkdtemp(dir=arguments.directory))
        try:
            row = run(model, root, arguments.saves, way)
        finally:
            shutil.rmtree(root)
        print(f"{name:26}{row['look_ms']:>9.1f}{row['first_ms']:>10.1f}{row['stall_ms']:>10.1f}{row['mb']:>12.1f}")
    print(f"\ncopy of what is trained {limits['copy']:.1f} ms, digest of what is frozen {limits['digest']:.1f} ms")


if __name__ == "__main__":
    main()
