"""Checkpoints of genlight next to those of other libraries: the same state, in one interleaved run.

    pip install --no-deps --target others torch-checkpointing lm-resiliency nvidia-resiliency-ext
    PYTHONPATH=others OMP_NUM_THREADS=1 python examples/benchmarks/checkpoint_libraries.py --mb 300 --rounds 5

The state is that of `checkpoint.py`: a model and its two AdamW moments. Each round saves once with every library, in an
order that rotates, and loads that checkpoint again; a first round is not counted. All figures are medians.

*Stall* is how long the training thread waits, *complete* how long the save takes. "not durable" means that the library
syncs no file, so a power cut may lose a checkpoint that is complete. *Load* includes genlight's proof of every byte.
*Read* has the bytes of the system calls of a load as a share of the state; libraries that map a file into memory read
fewer. Files are read from the page cache.

A library that is not installed, or does not run without a GPU, is named with its error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint import LAYERS, Variants, clear, make_state
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from genlight.callbacks.checkpoint import load, save


def wait_for_nothing() -> None:
    """The save was complete when it returned."""


@dataclass
class Library:
    """A way to save and to load."""

    name: str
    save: Callable[[Path], Callable[[], object] | None]
    """Begins a save, and returns a call that waits for its end."""
    load: Callable[[Path], object] | None = None
    is_durable: bool = True
    close: Callable[[], object] = wait_for_nothing


def builtin_libraries(state: dict, variants: Variants) -> list[Library]:
    """Return genlight, and what torch has."""

    def save_at_once(path: Path) -> None:
        save(path, state)

    def save_in_background(path: Path) -> Callable[[], object]:
        variants.ours.save_checkpoint(state, path)
        return variants.ours.store.wait

    def save_and_sync(path: Path) -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def save_dcp(path: Path) -> None:
        dcp.save(state, checkpoint_id=str(path))

    def save_dcp_later(kind: AsyncCheckpointerType) -> Callable[[Path], Callable[[], object]]:
        return lambda path: dcp.async_save(state, checkpoint_id=str(path), async_checkpointer_type=kind).result

    def load_dcp(path: Path) -> None:
        dcp.load(state, checkpoint_id=str(path))

    return [
        Library("genlight", save_at_once, load),
        Library("genlight, asynchronous", save_in_background),
        Library("torch.save and fsync", save_and_sync, lambda path: torch.load(path, weights_only=True)),
        Library("torch.distributed.checkpoint", save_dcp, load_dcp),
        Library("  async_save, thread", save_dcp_later(AsyncCheckpointerType.THREAD)),
        Library("  async_save, process", save_dcp_later(AsyncCheckpointerType.PROCESS)),
    ]


def torch_checkpointing(state: dict, directory: Path) -> list[Library]:
    """Return Meta's library. Its default of direct I/O needs a file system that accepts unaligned writes."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)

    def library(name: str, config: CheckpointManager.Config) -> Library:
        config.storage_config = storage
        manager = config.build()

        def begin(path: Path) -> Callable[[], object] | None:
            future = manager.save(str(path), {"state": state})
            with manager.lock():  # before the next update, as its tutorial says
                return None if future is None else future.result

        def read(path: Path) -> object:
            return manager.load(str(path), into={"state": state})

        return Library(name, begin, read, is_durable=False, close=manager.close)

    return [
        library("torch-checkpointing", CheckpointManager.Config.with_sync_save()),
        library("torch-checkpointing, asynchronous", CheckpointManager.Config.with_async_save()),
    ]


def lm_resiliency(state: dict, directory: Path) -> list[Library]:
    """Return the memory of lm-resiliency, with each save also written to the disk, as after a signal."""
    from lm_resiliency.checkpointing.config import InMemoryCkptConfig
    from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

    folder = str(directory.parent / "lm")
    config = InMemoryCkptConfig(disk_folder=folder, run_id="run", disk_flush_interval=0, verify_integrity=True)
    manager = InMemoryCheckpointManager(config)
    steps = iter(range(1, 1000))

    def begin(path: Path) -> Callable[[], object]:
        step = next(steps)
        manager.save(state, step)

        def finish() -> None:
            manager.maybe_wait()
            manager.flush_to_disk(step)
            manager._disk.wait()

        return finish

    return [Library("lm-resiliency", begin, close=manager.close)]


def nvidia_resiliency_ext(state: dict, directory: Path) -> list[Library]:
    """Return NVIDIA's asynchronous `torch.save`."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    checkpoint = TorchAsyncCheckpoint()

    def begin(path: Path) -> Callable[[], object]:
        checkpoint.async_save(state, path)
        return lambda: checkpoint.finalize_async_save(blocking=True)

    begin(directory / "first")()  # it needs a GPU
    return [Library("nvidia-resiliency-ext", begin, is_durable=False)]


def bytes_read() -> int:
    """Return how many bytes this process has read by system calls."""
    with open("/proc/self/io") as file:
        return int(next(file).split()[1])


def measure(libraries: list[Library], variants: Variants, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median figures of each library."""
    figures: dict[str, dict[str, list[float]]] = {library.name: {} for library in libraries}
    for number in range(rounds + 1):
        turn = number % len(libraries)
        for library in libraries[turn:] + libraries[:turn]:
            clear(variants.directory, variants.tensors)
            path = variants.path()
            begin = time.perf_counter()
            wait = library.save(path)
            times = {"stall": time.perf_counter() - begin}
            (wait or wait_for_nothing)()
            times["complete"] = time.perf_counter() - begin
            if library.load is not None:
                before, begin = bytes_read(), time.perf_counter()
                library.load(path)
                times["load"] = time.perf_counter() - begin
                times["read"] = (bytes_read() - before) / variants.nbytes
            for name, value in times.items() if number else ():
                figures[library.name].setdefault(name, []).append(value)
    return {name: {key: statistics.median(each) for key, each in of.items()} for name, of in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=300, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(dir=arguments.directory))
    directory = root / "saves"
    directory.mkdir()
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
    libraries: list[Library] = []
    try:
        state = make_state(arguments.mb * 1_000_000 // 4 // 3 // LAYERS)
        variants = Variants(state, directory)
        libraries += builtin_libraries(state, variants)
        for find in (torch_checkpointing, lm_resiliency, nvidia_resiliency_ext):
            try:
                libraries += find(state, directory)
            except (ImportError, AssertionError, RuntimeError) as error:
                print(f"{find.__name__}: {error}")
        print(f"\n{'':36}{'stall ms':>10}{'complete ms':>13}{'load ms':>9}{'read':>7}")
        for library, row in zip(libraries, measure(libraries, variants, arguments.rounds).values(), strict=True):
            line = f"{library.name:36}{row['stall'] * 1e3:>10.1f}{row['complete'] * 1e3:>13.0f}"
            if "load" in row:
                line += f"{row['load'] * 1e3:>9.0f}{row['read']:>7.2f}"
            print(line, "" if library.is_durable else "  not durable")
    finally:
        for library in libraries:
            library.close()
        dist.destroy_process_group()
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
