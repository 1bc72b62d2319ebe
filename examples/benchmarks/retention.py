"""The cost of many checkpoints in one directory: a start among them, a decision about them, the removal of old ones.

    python examples/benchmarks/retention.py --kept 1000 --removed 1000
    python examples/benchmarks/retention.py --kept 10000 --removed 1000 --directory /dev/shm

*Start* is what a training looks at before its first step: the sweep of what killed processes left, and the list of
records. *Decision* is what the training thread does after a save, *removal* what happens in the background.
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
from genlight.callbacks.checkpoint.selection import WRITER, Kept, own_records


def fill(directory: Path, count: int) -> None:
    for step in range(1, count + 1):
        state = {"global_step": step, "state_dict": {"w": torch.full((8,), float(step))}}
        save(directory / f"step-{step:08d}", state, meta=RecordMeta(run_id="r", writer=WRITER))


def measure(directory: Path, kept: int, removed: int) -> dict[str, float]:
    begin = time.perf_counter()
    sweep(directory)
    records = own_records(list_checkpoints(directory))
    started = time.perf_counter()
    newest_valid(directory)
    found = time.perf_counter()
    of_run, store = Kept(Retention(keep_last=kept)), CheckpointStore()
    of_run.begin(records[:-1])
    decided = time.perf_counter()
    of_run.add(records[-1])
    surplus = of_run.surplus()
    asked = time.perf_counter()
    assert len(surplus) == removed
    store.prune(surplus, lambda some: some)
    returned = time.perf_counter()
    store.background.finish()
    done = time.perf_counter()
    assert len(list_checkpoints(directory)) == kept
    return {
        "start": started - begin,
        "search for the newest": found - started,
        "decision": asked - decided + returned - asked,
        "removal": done - returned,
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
        for name, seconds in measure(root, arguments.kept, arguments.removed).items():
            print(f"{name:24}{seconds * 1e3:10.1f} ms")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
