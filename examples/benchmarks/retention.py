"""The cost of many checkpoints in one directory: a start among them, and the removal of old ones.

    python examples/benchmarks/retention.py --kept 1000 --removed 1000
    python examples/benchmarks/retention.py --kept 10000 --removed 1000 --directory /dev/shm

*Start* is the work of a training before its first step: removing files of killed processes, and listing records.
*Removal* happens in the background, after a save.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch

from genlight.callbacks.checkpoint import (
    CheckpointStore,
    RecordMeta,
    Retention,
    list_checkpoints,
    newest_valid,
    save,
    sweep,
)
from genlight.callbacks.checkpoint.selection import WRITER, own_records, to_delete


def fill(directory: Path, count: int) -> None:
    for step in range(1, count + 1):
        state = {"global_step": step, "state_dict": {"w": torch.full((8,), float(step))}}
        save(directory / f"step-{step:08d}", state, meta=RecordMeta(run_id="r", writer=WRITER))


def measure(directory: Path, kept: int) -> dict[str, float]:
    begin = time.perf_counter()
    sweep(directory)
    list_checkpoints(directory)
    started = time.perf_counter()
    newest_valid(directory)
    found = time.perf_counter()
    store = CheckpointStore()
    store.prune(directory, lambda listed: to_delete(own_records(listed), Retention(keep_last=kept)))
    store.background.finish()
    done = time.perf_counter()
    assert len(list_checkpoints(directory)) == kept
    return {
        "start": started - begin,
        "search for the newest": found - started,
        "removal": done - found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=int, default=1000)
    parser.add_argument("--removed", type=int, default=1000)
    parser.add_argument("--directory", help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        fill(root, arguments.kept + arguments.removed)
        for name, seconds in measure(root, arguments.kept).items():
            print(f"{name:24}{seconds * 1e3:10.1f} ms")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
