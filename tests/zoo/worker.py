"""One rank: runs each class in one mode, compares it with a plain loop, and resumes it from an odd step.

``python -m zoo.worker RANK WORLD_SIZE FOLDER DEVICE``, in the folder of the tests; FOLDER has the jobs. A failed job
destroys its process group, so that the other rank gets an error.
"""

import contextlib
import datetime as dt
import functools
import gc
import json
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.trainers import quiet_trainer

from .harness import Cell, zoo
from .runs import precision_of, strategy_of

TOLERANCE = {"bf16-mixed": 0.05, "16-mixed": 0.05}
"""Tolerance relative to the largest value of a tensor; in fp32 the class sets it."""
ROUNDINGS = 2
"""Allowed difference in half precision, as a multiple of the effect of reversed rows."""
ANSWER_WITHIN_S = 80
"""Time after which a rank that waits in a collective counts as hanging."""


class Shares:
    """A loader of one rank's share of every batch, with a position."""

    def __init__(self, rows: Any, rank: int, world_size: int, steps: int) -> None:
        self.rows, self.rank, self.size, self.steps = rows, rank, world_size, steps
        self.next_step = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        while self.next_step < self.steps:
            batch = self.rows(self.next_step)
            n = len(next(iter(batch.values()))) // self.size
            self.next_step += 1
            yield {k: v[self.rank * n : (self.rank + 1) * n] for k, v in batch.items()}
        self.next_step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_step = state["next_step"]


@functools.cache
def plain(name: str, precision: str, device: str, *, reverses: bool = False) -> dict[str, Any]:
    """Train the class with plain torch on the same device and complete batches; return its tensors.

    With `reverses` the rows of each batch are in reversed order, so that sums round differently.
    """
    try:
        return _plain_loop(name, precision, device, reverses=reverses)
    except Exception:
        if device == "cpu":
            raise
        # The class leaves a module on the host.
        return _plain_loop(name, precision, device, moves=True, reverses=reverses)


def _plain_loop(name: str, precision: str, device: str, *, moves: bool = False, reverses: bool) -> dict[str, Any]:
    """Train in a loop as its author would write it; with `moves`, move modules that stay on the host to the device."""
    import torch
    from torch.utils._pytree import tree_map_only

    from genlight.adapter.contract.types import StepContext, TrainingJobSpec
    from zoo.base import STEPS

    cls = zoo()[name]
    dtype = {"fp32": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}[precision]
    trainer, job = cls(), TrainingJobSpec(run_id="plain", max_steps=STEPS)
    ctx = StepContext(job=job, device=device, dtype=dtype)
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    if moves:
        _move(state, trainer, device)
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    loaded = iter(cls.loader(0, 1)) if cls.loader is not None else map(cls.rows, range(STEPS))
    for rows in loaded:
        if reverses:
            rows = tree_map_only(torch.Tensor, lambda tensor: tensor.flip(0) if tensor.dim() else tensor, rows)
        batch = trainer.prepare_batch(rows, state, ctx)
        # Without the cache: it would hold old weights after an update within the step.
        with contextlib.nullcontext() if half is None else torch.autocast(device, half, cache_enabled=False):
            trainer.train_step(batch, state, ctx)
    return tensors(state, trainer)


def tensors(state: Any, trainer: Any) -> dict[str, Any]:
    """Collect parameters, buffers and trained tensors without the discovery that is under test."""
    import torch

    found: dict[str, Any] = {}
    for path, value in _parts(state, trainer).items():
        if isinstance(value, torch.nn.Module):
            members = (*value.named_parameters(), *value.named_buffers())
            found |= {f"{path}.{name}": tensor for name, tensor in members}
        elif isinstance(value, torch.Tensor):
            found[path] = value
    return {path: _whole(tensor.detach()).cpu().clone() for path, tensor in found.items() if not tensor.is_meta}


def _move(state: Any, trainer: Any, device: str) -> None:
    """Move modules and optimizers' tensors to the device in place."""
    import torch

    parts = _parts(state, trainer).values()
    for module in (part for part in parts if isinstance(part, torch.nn.Module)):
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module.to(device)
    for optimizer in (part for part in parts if isinstance(part, torch.optim.Optimizer)):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.data = parameter.data.to(device)
        optimizer.load_state_dict(optimizer.state_dict())  # moves its states to the device of the parameters


def _parts(state: Any, trainer: Any) -> dict[str, Any]:
    """Return modules, trained tensors and optimizers, by path."""
    import torch

    found: dict[str, Any] = {}
    seen: set[int] = set()

    def collect(path: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            value = getattr(value, "_orig_mod", value)
        if id(value) in seen:
            return
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            seen.add(id(value))
            found[path] = value
        elif isinstance(value, torch.Tensor):
            if value.requires_grad and value.is_leaf:
                seen.add(id(value))
                found[path] = value
        elif isinstance(value, Mapping):
            for key, member in value.items():
                collect(f"{path}.{key}", member)
        elif isinstance(value, list | tuple):
            for index, member in enumerate(value):
                collect(f"{path}.{index}", member)
        elif type(value).__module__.startswith("zoo") or type(value).__name__ == "SimpleNamespace":
            seen.add(id(value))
            collect(path, vars(value))

    collect("state", state)
    collect("trainer", trainer)
    return found


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def hosted(
    name: str, strategy: str, precision: str, rank: int, size: int, folder: Path, device: str, *, resume: bool
) -> Any:
    """Train the class under genlight; with `resume`, from its checkpoint of an odd step."""
    import torch

    from genlight.adapter.contract.types import TrainingJobSpec
    from genlight.adapter.module.module import ContractModule
    from genlight.callbacks.checkpoint import Checkpoint, list_checkpoints
    from support.witnessed import Proofs
    from zoo.base import INTERRUPTED_AT, STEPS

    torch.manual_seed(7 + rank + 100 * resume)
    cls = zoo()[name]
    arguments: dict[str, Any] = {"accelerator": device, "devices": size}
    if size > 1:
        arguments["strategy"] = strategy_of(strategy, rank, size, device)
    elif device == "sim":
        from support.device.training import one_device

        arguments = one_device()
    proofs = Proofs()
    trainer = quiet_trainer(
        proofs,
        Checkpoint(folder, every_n_steps=INTERRUPTED_AT, save_final=False, keep_last=None, asynchronous=False),
        max_steps=STEPS,
        use_distributed_sampler=False,
        **precision_of(precision, device),
        **arguments,
    )
    module = ContractModule(cls(), TrainingJobSpec(run_id=name, max_steps=STEPS, metric_every=0))
    saved = str(list_checkpoints(folder)[0].path) if resume else None
    loader = Shares(cls.rows, rank, size, STEPS) if cls.loader is None else cls.loader(rank, size)
    trainer.fit(module, loader, ckpt_path=saved)
    vars(module)["proofs"] = proofs.found
    return module


def cell(
    name: str, strategy: str, precision: str, rank: int, size: int, folder: Path, device: str, *, resumed: bool = True
) -> Cell:
    """Run one job; an exception becomes its result."""
    from genlight.adapter.contract.exceptions import GenlightError

    cls, make = zoo()[name], functools.partial(Cell, name, strategy, precision)
    try:
        expected = plain(name, precision, device)
    except Exception as error:
        return make("no plain", f"{type(error).__name__}: {_line(error)}")
    try:
        module = hosted(name, strategy, precision, rank, size, folder, device, resume=False)
        state, plugin = module.contract_state, module.plugin
        ended = tensors(state, plugin)
        left = everything(module)
    except GenlightError as error:
        return make("refused", _line(error))
    except Exception as error:
        text = f"{type(error).__name__}: {_line(error)}"
        return make("hang" if "imed out" in text or "imeout" in text else "error", text)
    verdict, detail = judge(cls, ended, expected, precision, size)
    if verdict == "off" and precision != "fp32" and not cls.differs and ended.keys() == expected.keys():
        other = plain(name, precision, device, reverses=True)
        limits = {path: ROUNDINGS * distance(other[path], tensor) for path, tensor in expected.items()}
        verdict, detail = judge(cls, ended, expected, precision, size, limits)
    if not resumed:
        return make(verdict, detail, "not tried")
    left = ended if cls.resume_compares == "weights" else left | ended
    return make(verdict, detail, _resume_verdict(name, strategy, precision, rank, size, folder, device, left))


def _resume_verdict(
    name: str,
    strategy: str,
    precision: str,
    rank: int,
    size: int,
    folder: Path,
    device: str,
    left: dict[str, Any],
) -> str:
    from genlight.adapter.check.snapshot import Snapshot

    try:
        again = hosted(name, strategy, precision, rank, size, folder, device, resume=True)
        state, plugin = again.contract_state, again.plugin
        found = tensors(state, plugin) | everything(again)
        after = Snapshot({"value": {path: found[path] for path in left if path in found}})
        differing = Snapshot({"value": left}).differences(after)
    except Exception as error:
        return f"{type(error).__name__}: {_line(error)}"
    if differing:
        return f"{differing[0]} ({len(differing)} of {len(left)})"
    alarms = [proof.text for proof in again.proofs if proof.difference is not None]
    return f"exact, but {alarms[0]}" if alarms else "exact"


def everything(module: Any) -> dict[str, Any]:
    """Return everything that a resume has to restore, also the scaler; for sharded tensors this rank's part."""
    from genlight.adapter.check.snapshot import snapshot
    from genlight.adapter.plumbing.devices import random_states

    kept = snapshot(module.contract_state, module.plugin, host=module)
    found = {path: value for values in kept.values.values() for path, value in values.items()}
    for kind, states in random_states().items():
        found |= {f"random numbers of {kind}:{index}": state for index, state in enumerate(states)}
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        found |= {f"scaler.{name}": value for name, value in scaler.state_dict().items()}
    return found


def judge(
    cls: Any,
    actual: dict[str, Any],
    expected: dict[str, Any],
    precision: str,
    size: int,
    limits: Mapping[str, float] | None = None,
) -> tuple[str, str]:
    """Check that tensors equal the plain loop, up to the tolerance or `limits`, and are equal on all ranks."""
    import torch
    import torch.distributed as dist

    if actual.keys() != expected.keys():
        return "off", f"different tensors: {sorted(actual.keys() ^ expected.keys())[:3]}"
    if size > 1:
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, actual)
        for path in actual:
            if not any(word in path for word in cls.per_rank) and not all(
                torch.equal(other[path].nan_to_num(), actual[path].nan_to_num()) for other in everyone
            ):
                return "drift", f"{path} differs between ranks"
    tolerance = (cls.tolerance_alone if size == 1 else cls.tolerance) if precision == "fp32" else TOLERANCE[precision]
    worst, where = 0.0, ""
    for path, tensor in expected.items():
        if any(word in path for word in cls.per_rank) or not tensor.numel():
            continue
        apart = distance(actual[path], tensor)
        if not apart <= max(worst, (limits or {}).get(path, 0.0)):
            worst, where = apart, path
    return ("equal", f"{worst:.0e}") if worst <= tolerance else ("off", f"{where} by {worst:.0e}")


def distance(actual: Any, expected: Any) -> float:
    """Return the distance relative to the largest value of `expected`; infinite if the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    a, b = actual.double(), expected.double()
    return float((a - b).abs().max() / max(b.abs().max().item(), 1e-2)) if b.numel() else 0.0


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:2000]


def _print(found: Cell, took_s: float) -> None:
    line = (
        f"{took_s:5.2f}s {found.name:28} {found.mode:16} {found.verdict:8} {found.detail[:300]} | {found.resume[:150]}"
    )
    print(line, file=sys.stderr, flush=True)


def main(rank: int, size: int, folder: Path, device: str) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    group = "gloo"
    if device == "sim":
        from support.device import (  # noqa: F401
            PROCESS_GROUP as group,
            load,
            training,
        )

        load().set_device(rank)
    for index, (name, strategy, precision, resumed) in enumerate(json.loads((folder / "jobs.json").read_text())):
        began = time.perf_counter()
        if size > 1:
            dist.init_process_group(
                group,
                init_method=f"file://{folder}/store{index}",
                rank=rank,
                world_size=size,
                timeout=dt.timedelta(seconds=ANSWER_WITHIN_S),
            )
        scratch = folder / f"checkpoints{index}"
        found = cell(name, strategy, precision, rank, size, scratch, device, resumed=resumed)
        with (folder / f"rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        if size > 1:
            dist.destroy_process_group()
        if found.verdict not in ("equal", "off"):
            # Collect the process group on all ranks now. A group with a pending exchange is released only when the
            # other ranks release theirs; if a later job collected it, the ranks would wait for each other.
            gc.collect()
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            _print(found, time.perf_counter() - began)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
