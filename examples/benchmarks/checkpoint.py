"""The cost of a checkpoint: ours, torch.save, Lightning and torch.distributed.checkpoint, in one interleaved run.

    python examples/benchmarks/checkpoint.py --mb 100 --rounds 5
    python examples/benchmarks/checkpoint.py --mb 1000 --rounds 3 --json
    python examples/benchmarks/checkpoint.py --tensors 400 4000 40000 --rounds 7
    python examples/benchmarks/checkpoint.py --tensors 96 1200 --mb 100 --rounds 15
    python examples/benchmarks/checkpoint.py --tensors 96 --mb 1000 --rounds 9 --synchronous
    python examples/benchmarks/checkpoint.py --beside-training --mb 1000 --rounds 7

The state is a model and its two AdamW moments, a third of the bytes each. Every round runs every variant once, in an
order that rotates, and each figure is the median over the rounds. *Stall* is how long the training thread waits,
*durable* how long until the bytes are surely on the disk ("-": the variant never syncs), *CPU* the seconds of all
threads, *memory* the growth of the resident set at its peak as a share of the state. The two first rows are the limits:
no asynchronous save can wait less than a copy takes, and the bare bytes, written and then synced, are what durability
costs at least unless the disk works while they are written.

With `--tensors`, only asynchronous saves of that many tensors are measured, with a copy before and after each. With
`--synchronous` as well, synchronous saves are measured, with a bare write and sync before and after each. A tensor has
64 numbers, unless `--mb` says how large all are together. The state is a new one in each round, as a Trainer's is: new
tensors for the weights, with the same memory.

With `--beside-training`, asynchronous saves of a training with AdamW are measured: how long a save takes, how long the
next update waits for its copy, and whether steps with a save take longer. A step's forward and backward pass are
products of matrices that take twice as long as a copy.

Before each variant the memory that its files will take is touched: on a virtual machine it may have gone back to the
host, and who takes it first would pay for that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from genlight.callbacks.checkpoint import DurableCheckpointIO, save, verify

LAYERS = 24


def make_state(elements: int, layers: int = LAYERS) -> dict:
    """Return a model of some layers with `elements` weights each, and AdamW's state for it."""
    torch.manual_seed(0)
    names = [f"layers.{i}.weight" for i in range(layers)]
    weights = {name: torch.randn(elements) for name in names}
    moments = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.randn(elements), "exp_avg_sq": torch.rand(elements)}
        for i in range(layers)
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(layers))}]
    optimizer = {"state": moments, "param_groups": groups}
    return {"global_step": 1, "state_dict": weights, "optimizer_states": [optimizer]}


def tensors_of(state: dict) -> list[torch.Tensor]:
    moments = state["optimizer_states"][0]["state"].values()
    return [*state["state_dict"].values(), *(tensor for moment in moments for tensor in moment.values())]


def write_all(descriptor: int, tensors: list[torch.Tensor]) -> None:
    """The bare bytes of `tensors`."""
    for tensor in tensors:
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        while view:
            view = view[os.write(descriptor, view[: 16 << 20]) :]


class Variants:
    """Return all ways to save; each returns its stall and its time until durable in seconds, None for never."""

    def __init__(self, state: dict, directory: Path) -> None:
        self.state, self.directory = state, directory
        self.tensors = tensors_of(state)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.warm = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.ours = DurableCheckpointIO(asynchronous=True)
        self.theirs = AsyncCheckpointIO(TorchCheckpointIO())
        self.number = 0

    def path(self, suffix: str = "") -> Path:
        self.number += 1
        return self.directory / f"save{self.number}{suffix}"

    def copy(self) -> tuple[float, float | None]:
        begin = time.perf_counter()
        for target, source in zip(self.warm, self.tensors, strict=True):
            target.copy_(source)
        return time.perf_counter() - begin, None

    def write_and_sync(self) -> tuple[float, float | None]:
        begin = time.perf_counter()
        with open(self.path(), "wb", buffering=0) as file:
            write_all(file.fileno(), self.tensors)
            os.fsync(file.fileno())
        stall = time.perf_counter() - begin
        return stall, stall

    def ours_sync(self) -> tuple[float, float | None]:
        begin = time.perf_counter()
        save(self.path(), self.state)
        stall = time.perf_counter() - begin
        return stall, stall

    def ours_async(self) -> tuple[float, float | None]:
        begin = time.perf_counter()
        self.ours.save_checkpoint(self.state, self.path(".ckpt"))
        stall = time.perf_counter() - begin
        self.ours.store.wait()
        return stall, time.perf_counter() - begin

    def torch_durable(self) -> tuple[float, float | None]:
        """torch.save with the same promise: temporary file, sync, loaded to check it, rename, sync of the directory."""
        begin = time.perf_counter()
        target, temporary = self.path(".pt"), self.path(".tmp")
        with open(temporary, "wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        torch.load(temporary, weights_only=True)
        os.replace(temporary, target)
        descriptor = os.open(self.directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        stall = time.perf_counter() - begin
        return stall, stall

    def lightning(self) -> tuple[float, float | None]:
        begin = time.perf_counter()
        TorchCheckpointIO().save_checkpoint(self.state, self.path(".ckpt"))
        return time.perf_counter() - begin, None

    def lightning_async(self) -> tuple[float, float | None]:
        begin = time.perf_counter()
        self.theirs.save_checkpoint(self.state, self.path(".ckpt"))
        stall = time.perf_counter() - begin
        self.theirs.teardown()
        return stall, None

    def dcp_sync(self) -> tuple[float, float | None]:
        begin = time.perf_counter()
        dcp.save(self.state, checkpoint_id=str(self.path()))
        stall = time.perf_counter() - begin
        return stall, stall  # Its file system writer syncs every file.

    def dcp_async(self) -> tuple[float, float | None]:
        begin = time.perf_counter()
        future = dcp.async_save(self.state, checkpoint_id=str(self.path()))
        stall = time.perf_counter() - begin
        future.result()
        return stall, time.perf_counter() - begin

    def all(self) -> dict[str, Callable[[], tuple[float, float | None]]]:
        return {
            "copy into warm buffers": self.copy,
            "write and sync": self.write_and_sync,
            "genlight": self.ours_sync,
            "genlight async": self.ours_async,
            "torch.save, durable": self.torch_durable,
            "Lightning": self.lightning,
            "Lightning async": self.lightning_async,
            "dcp": self.dcp_sync,
            "dcp async": self.dcp_async,
        }


def resident(name: str) -> int:
    """Bytes of this process, now (``VmRSS``) or at the peak since the last reset (``VmHWM``)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def growth(call: Callable[[], object]) -> tuple[object, int]:
    """The result of a call, and how much the resident set grew meanwhile."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    result = call()
    return result, max(0, resident("VmHWM") - before)


def bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def clear(directory: Path, tensors: list[torch.Tensor]) -> None:
    """Make room, and let the disk finish what it has, so that a variant pays for its own bytes only."""
    shutil.rmtree(directory)
    directory.mkdir()
    os.sync()
    # The file is removed before it reaches the disk, but its memory stays warm.
    with tempfile.TemporaryFile(dir=directory) as file:
        write_all(file.fileno(), tensors)


def measure(variants: Variants, rounds: int) -> dict[str, dict[str, float | None]]:
    calls = variants.all()
    stalls: dict[str, list[float]] = {name: [] for name in calls}
    durable: dict[str, list[float | None]] = {name: [] for name in calls}
    memory: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    written: dict[str, int] = {}
    for number in range(rounds + 1):
        names = list(calls)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            clear(variants.directory, variants.tensors)
            begin = time.process_time()
            (stall, until_durable), grown = growth(calls[name])
            cpu[name].append(time.process_time() - begin)
            written[name] = bytes_below(variants.directory)
            if number == 0:
                memory[name].append(grown / variants.nbytes)  # Includes buffers that are kept for later saves.
                continue
            stalls[name].append(stall)
            durable[name].append(until_durable)
    return {
        name: {
            "stall_s": statistics.median(stalls[name]),
            "durable_s": None if durable[name][0] is None else statistics.median(durable[name]),
            "cpu_s": statistics.median(cpu[name][1:]),
            "memory": memory[name][0],
            "written_mb": written[name] / 1e6,
        }
        for name in calls
    }


def measure_verification(state: dict, directory: Path, rounds: int) -> dict[str, float]:
    clear(directory, tensors_of(state))
    save(directory / "ours", state)
    torch.save(state, directory / "theirs.pt")
    proofs, loads = [], []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        verify(directory / "ours")
        middle = time.perf_counter()
        torch.load(directory / "theirs.pt", weights_only=True)
        proofs.append(middle - begin)
        loads.append(time.perf_counter() - middle)
    return {"verify_s": statistics.median(proofs[1:]), "torch_load_s": statistics.median(loads[1:])}


def measure_work(variants: Variants, rounds: int) -> dict[str, float]:
    """Measure how much of their speed a training thread and a background save keep on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a = torch.randn(256, 256)
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    saves: dict[str, list[float]] = {"bare": [], "beside": []}
    for _ in range(rounds):
        clear(variants.directory, variants.tensors)
        saves["bare"].append(variants.write_and_sync()[0])
        clear(variants.directory, variants.tensors)
        begin = time.perf_counter()
        saved = variants.ours.store.save(variants.path(".ckpt"), variants.state, asynchronous=True)
        count, middle = 0, time.perf_counter()
        while not saved.done():
            a @ a
            count += 1
        end = time.perf_counter()
        saves["beside"].append(end - begin)
        rates["beside"].append(count / (end - middle))
        variants.ours.store.wait()
        count, middle, duration = 0, time.perf_counter(), end - middle
        while time.perf_counter() - middle < duration:
            a @ a
            count += 1
        rates["alone"].append(count / duration)
    torch.set_num_threads(threads)
    return {
        "work": statistics.median(rates["beside"]) / statistics.median(rates["alone"]),
        "durable": statistics.median(saves["beside"]) / statistics.median(saves["bare"]),
    }


def measure_pairs(variants: Variants, rounds: int, *, synchronous: bool) -> list[tuple[float, float]]:
    """Return the mean seconds of its limit before and after each save, and those of the save."""
    weights, pairs = variants.state["state_dict"], []
    limit, save = (variants.write_and_sync, variants.ours_sync) if synchronous else (variants.copy, variants.ours_async)
    for _ in range(rounds + 2):  # the first two saves find no layout, and memory that was never touched
        variants.state["state_dict"] = {name: weight.detach() for name, weight in weights.items()}
        clear(variants.directory, variants.tensors)
        seconds = []
        for call in (limit, save, limit):
            seconds.append(call()[0])
            if synchronous:
                clear(variants.directory, variants.tensors)
        pairs.append(((seconds[0] + seconds[2]) / 2, seconds[1]))
    return pairs[2:]


def show_pairs(counts: list[int], megabytes: int | None, directory: Path, rounds: int, *, synchronous: bool) -> None:
    print(f"{'tensors':>10}{'limit ms':>10}{'save ms':>10}{'ratio':>8}{'range':>18}{'more than two, us a tensor':>28}")
    for tensors in counts:
        elements = 64 if megabytes is None else megabytes * 1_000_000 // 4 // 3 // (tensors // 4)
        variants = Variants(make_state(elements, tensors // 4), directory)
        pairs = measure_pairs(variants, rounds, synchronous=synchronous)
        limit, save = (statistics.median(values) * 1e3 for values in zip(*pairs, strict=True))
        ratios = sorted(save / limit for limit, save in pairs)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        more = (save - 2 * limit) / tensors * 1e3
        print(f"{tensors:>10}{limit:>10.1f}{save:>10.1f}{statistics.median(ratios):>8.2f}{spread:>18}{more:>28.1f}")


def measure_beside_training(megabytes: int, directory: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds of a copy, a save, the wait of the next update, and steps with and without a save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.randn(megabytes * 1_000_000 // 4 // 3 // LAYERS)) for _ in range(LAYERS)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = {f"layers.{number}.weight": parameter for number, parameter in enumerate(parameters)}
    variants = Variants({"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}, directory)
    factor, store = torch.randn(512, 512), variants.ours.store
    store.copies_later = True
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", "save", "wait", "step with a save", "step")}
    for number in range(2 * rounds + 4):
        copy, _ = variants.copy()
        clear(directory, [])
        begin = time.perf_counter()
        if saves := number % 2 == 0:
            weights = {name: parameter.detach() for name, parameter in zip(weights, parameters, strict=True)}
            variants.state.update(state_dict=weights, optimizer_states=[optimizer.state_dict()])
            variants.ours.save_checkpoint(variants.state, variants.path(".ckpt"))
            seconds["save"].append(time.perf_counter() - begin)
        middle = time.perf_counter()
        while time.perf_counter() - middle < 2 * copy:
            factor @ factor
        optimizer.step()
        seconds["step with a save" if saves else "step"].append(time.perf_counter() - begin)
        seconds["copy"].append(copy)
        if saves:
            seconds["wait"].append(store.overlap.waited_s)
        store.wait()
    torch.set_num_threads(threads)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def show(results: dict, megabytes: int) -> None:
    print(f"{megabytes} MB of model and AdamW\n")
    print(f"{'':26}{'stall s':>10}{'durable s':>11}{'CPU s':>8}{'memory':>9}{'MB written':>12}")
    for name, row in results["variants"].items():
        durable = "-" if row["durable_s"] is None else f"{row['durable_s']:.3f}"
        print(
            f"{name:26}{row['stall_s']:>10.3f}{durable:>11}{row['cpu_s']:>8.2f}{row['memory']:>9.2f}"
            f"{row['written_mb']:>12.0f}"
        )
    print()
    for name, (value, aim) in results["ratios"].items():
        print(f"{name:52}{value:6.2f}   aim {aim}")


def ratios(rows: dict, verification: dict[str, float], work: dict[str, float]) -> dict[str, tuple[float, str]]:
    copy, write = rows["copy into warm buffers"]["stall_s"], rows["write and sync"]["stall_s"]
    ours, background = rows["genlight"], rows["genlight async"]
    return {
        "async stall / copy": (background["stall_s"] / copy, "<= 1.15"),
        "sync save / write and sync": (ours["stall_s"] / write, "<= 1.35"),
        "async durable / write and sync": (background["durable_s"] / write, "<= 1.7"),
        "async durable beside training / write and sync": (work["durable"], "<= 1.7"),
        "training beside an async save": (work["work"], ">= 0.85"),
        "CPU of a sync save / of write and sync": (ours["cpu_s"] / rows["write and sync"]["cpu_s"], "<= 2"),
        "CPU of an async save / of write and sync": (background["cpu_s"] / rows["write and sync"]["cpu_s"], "<= 2.2"),
        "extra memory, sync": (ours["memory"], "<= 0.05"),
        "extra memory, async": (background["memory"], "<= 1.05"),
        "verify / torch.load": (verification["verify_s"] / verification["torch_load_s"], "<= 0.35"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, help="size of the state; default: 100, or small tensors with --tensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, nargs="+", help="measure only saves of so many tensors")
    parser.add_argument("--synchronous", action="store_true", help="with --tensors: synchronous saves")
    parser.add_argument("--beside-training", action="store_true", help="measure only the stall of a training")
    parser.add_argument("--directory", help="where to write; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(dir=arguments.directory))
    directory = root / "saves"
    directory.mkdir()
    if arguments.tensors:
        counts, synchronous = arguments.tensors, arguments.synchronous
        show_pairs(counts, arguments.mb, directory, arguments.rounds, synchronous=synchronous)
        shutil.rmtree(root)
        return
    megabytes = arguments.mb or 100
    if arguments.beside_training:
        seconds = measure_beside_training(megabytes, directory, arguments.rounds)
        print("\n".join(f"{name:20}{value * 1e3:9.1f} ms" for name, value in seconds.items()))
        print(f"{'stall / copy':20}{(seconds['save'] + seconds['wait']) / seconds['copy']:9.3f}   aim <= 0.15")
        shutil.rmtree(root)
        return
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
    try:
        state = make_state(megabytes * 1_000_000 // 4 // 3 // LAYERS)
        variants = Variants(state, directory)
        rows = measure(variants, arguments.rounds)
        verification = measure_verification(state, directory, arguments.rounds)
        work = measure_work(variants, arguments.rounds)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(root)
    results = {"variants": rows, "verification": verification, "ratios": ratios(rows, verification, work)}
    if arguments.json:
        print(json.dumps(results))
    else:
        show(results, megabytes)


if __name__ == "__main__":
    main()
