"""Run trainer classes in plain torch, hosted in one process, and hosted on ranks that rendezvous by a file.

Started once per rank as ``python -m zoo.runs RANK WORLD_SIZE FOLDER``; the folder has the jobs. A class is named
``module:Class``, or by its key in `zoo.small.ZOO`.
"""

import importlib
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from genlight.adapter.contract.types import StepContext, TrainingJobSpec
from support.rank import Ranks
from support.rank_processes import run_ranks
from support.trainers import quiet_trainer

STEPS = 4


HOOKS = {"fp16_compress_hook": default_hooks.fp16_compress_hook}
DDP: dict[str, dict[str, Any]] = {
    "ddp": {},
    # One parameter for each bucket, so that every exchange starts as early as possible.
    "small buckets": {"bucket_cap_mb": 1e-6},
    "find_unused_parameters": {"find_unused_parameters": True, "bucket_cap_mb": 1e-6},
    "static_graph": {"static_graph": True, "bucket_cap_mb": 1e-6},
}
"""Settings of DDP."""
ROWS = 8
"""Rows of a step, over all ranks."""

Weights = dict[str, Tensor]


def rows(step: int) -> dict[str, Tensor]:
    """Return the complete batch of a step; rows of kind 0 come first, so that each of two ranks has only one kind."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, 6, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True).tanh(), "kind": (torch.arange(ROWS) >= ROWS // 2).long()}


class Shares:
    """A loader of one rank's rows of every batch; Lightning would treat a list as several loaders."""

    def __init__(self, rank: int, world_size: int, steps: int, first: int = 0) -> None:
        n = ROWS // world_size
        batches = (rows(step) for step in range(first, steps))
        self.batches = [{k: v[rank * n : (rank + 1) * n] for k, v in batch.items()} for batch in batches]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def trainer_class(name: str) -> Any:
    """Return the class with a name."""
    module, colon, attribute = name.partition(":")
    if colon:
        members = vars(importlib.import_module(module))
        return members.get("ZOO", members).get(attribute) or members[attribute]
    from . import small

    return {**small.ZOO, **small.ZOO_OF_FAULTS}[name]


def context(device: str = "cpu", dtype: str = "fp32") -> StepContext:
    return StepContext(job=TrainingJobSpec(run_id="plain", max_steps=STEPS), device=device, dtype=dtype)


def plain_run(name: str, *, device: str = "cpu", steps: int = STEPS) -> Weights:
    """Train the class with plain torch; return its weights after `steps` steps of complete batches."""
    trainer, ctx = trainer_class(name)(), context(device)
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    for step in range(steps):
        trainer.train_step(trainer.prepare_batch(rows(step), state, ctx), state, ctx)
    return weights(state, trainer)


def weights(state: Any, trainer: Any) -> Weights:
    """Collect every tensor of the modules without the discovery that is under test."""
    found: Weights = {}

    def collect(path: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            members = getattr(value, "_orig_mod", value).state_dict().items()
            found.update({f"{path}.{name}": tensor for name, tensor in members})
        elif isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, dict):
            for key, member in value.items():
                collect(f"{path}.{key}", member)
        elif isinstance(value, list):
            for index, member in enumerate(value):
                collect(f"{path}.{index}", member)
        elif isinstance(value, SimpleNamespace) or is_dataclass(value):
            collect(path, vars(value))
        elif path == "state.weights":
            collect("closures", value())

    collect("state", state)
    collect("trainer", vars(trainer) if trainer is not None else {})
    return {path: tensor.detach().cpu().clone() for path, tensor in found.items()}


def whole(tensors: Weights) -> Weights:
    return {path: v.full_tensor() if hasattr(v, "full_tensor") else v for path, v in tensors.items()}


def hosted_run(
    name: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    steps: int = STEPS,
    callbacks: Any = (),
    resume: Path | None = None,
    resume_after: int = 2,
    save: Path | None = None,
    **trainer_args: Any,
) -> tuple[Any, Any]:
    """Train the class under genlight with this rank's share of every batch; return the module and the Trainer."""
    from genlight.adapter.module.module import ContractModule

    trainer = quiet_trainer(*callbacks, max_steps=steps, **trainer_args)
    module = ContractModule(
        trainer_class(name)(),
        TrainingJobSpec(run_id=name, max_steps=steps, metric_every=0),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found .* in eval mode")
        warnings.filterwarnings("ignore", ".*configure_optimizers. returned .None")
        trainer.fit(
            module, Shares(rank, world_size, steps, resume_after if resume else 0), ckpt_path=resume, weights_only=False
        )
        if save:
            trainer.save_checkpoint(save)
    return module, trainer


def strategy_of(kind: str, rank: int, world_size: int, device: str = "cpu", **sharding: Any) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    from genlight.adapter.gradients.fsdp.strategy import FSDP2Strategy

    environment, group = Ranks(rank, world_size), "gloo"
    if device == "sim":
        from support.device import PROCESS_GROUP as group
        from support.device.training import SimDDPStrategy as DDPStrategy
    if kind in HOOKS:
        return DDPStrategy(
            cluster_environment=environment,
            process_group_backend=group,
            bucket_cap_mb=1e-6,  # one parameter for each bucket
            ddp_comm_hook=HOOKS[kind],
        )
    if kind in DDP:
        settings: Any = DDP[kind]
        return DDPStrategy(cluster_environment=environment, process_group_backend=group, **settings)
    assert kind == "fsdp", kind
    strategy = FSDP2Strategy(process_group_backend=group, **sharding)
    strategy.cluster_environment = environment
    return strategy


def precision_of(name: str, device: str = "cpu") -> dict[str, Any]:
    """Return Trainer arguments; Lightning refuses 16-mixed on a CPU, but its plugin does not."""
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

    if name == "16-mixed":
        return {"plugins": MixedPrecision(name, device, torch.amp.GradScaler(device, init_scale=1024.0))}
    if name == "bf16-mixed":
        return {"plugins": MixedPrecision(name, device)}
    return {"plugins": HalfPrecision(name) if name == "bf16-true" else Precision()}


def on_two_ranks(folder: Path, jobs: Sequence[dict[str, Any]], *, timeout_s: float = 240) -> list[dict[str, Any]]:
    """Run `jobs` one after the other; return each rank's weights by the job's key, or the text of an error.

    Args:
        folder: Folder for the rendezvous and the results.
        jobs: Each has ``key`` and ``name``, and may have ``strategy`` (``ddp``, ``fsdp`` or ``torch's own``),
            ``precision``, ``sharding`` (the arguments of FSDP2Strategy), ``skips``, ``interrupted`` (the number of
            steps after which to save and resume in a new run), ``durable`` to save in genlight's format, and ``looks``
            for a callback that reads gradients after each backward call.
        timeout_s: Time limit for the ranks, also on a loaded machine.
    """
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_ranks("zoo.runs", folder, timeout_s=timeout_s)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def assert_close(actual: Any, expected: Weights, tolerance: float = 1e-6) -> None:
    """Check that weights are the expected ones, relative to the largest value of each."""
    assert not isinstance(actual, str), actual
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(tensor.abs().max().item(), 1e-3)
        difference = (actual[name].double() - tensor.double()).abs().max().item()
        assert difference <= tolerance * scale, f"{name} differs by {difference / scale:.2e} relative"


def _plain_ddp_run(name: str, rank: int, world_size: int, hook: str | None) -> Weights:
    """Train the class with torch's DistributedDataParallel around its ``state["model"]``."""
    trainer, ctx = trainer_class(name)(), context()
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    wrapped = {**state, "model": nn.parallel.DistributedDataParallel(state["model"])}
    if hook is not None:
        wrapped["model"].register_comm_hook(None, HOOKS[hook])
    for batch in Shares(rank, world_size, STEPS):
        trainer.train_step(batch, wrapped, ctx)
    return weights(state, trainer)


def _run_job(job: dict[str, Any], rank: int, world_size: int, folder: Path) -> Weights:
    if job.get("strategy") == "torch's own":
        return _plain_ddp_run(job["name"], rank, world_size, job.get("hook"))

    import lightning.pytorch as pl

    from genlight.callbacks import Checkpoint, Recover
    from genlight.callbacks.checkpoint import newest_valid

    class LooksAfterBackward(pl.Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...

    checkpoints = folder / f"{job['key']} checkpoints"
    callbacks: list[Any] = [Recover(["skip"], good_steps=1)] if job.get("skips") else []
    callbacks += [Checkpoint(checkpoints)] if job.get("durable") else []
    callbacks += [LooksAfterBackward()] if job.get("looks") else []

    def run(**more: Any) -> tuple[Any, Any]:
        return hosted_run(
            job["name"],
            callbacks=callbacks,
            rank=rank,
            world_size=world_size,
            devices=world_size,
            strategy=strategy_of(job.get("strategy", "ddp"), rank, world_size, **job.get("sharding", {})),
            **precision_of(job.get("precision", "32-true")),
            **more,
        )

    resume = None
    steps = int(job.get("interrupted", 0))
    if steps:
        resume = folder / f"{job['key']}.ckpt"
        run(steps=steps, save=None if job.get("durable") else resume)
        if job.get("durable"):
            resume = newest_valid(checkpoints)[0].path
    module, trainer = run(resume=resume, resume_after=steps)
    assert trainer.global_step == STEPS
    result = whole(weights(module.contract_state, module.plugin))
    if module.hosted_trainer.router is not None and module.hosted_trainer.router.overflow_steps is not None:
        result["overflow_steps"] = torch.tensor(module.hosted_trainer.router.overflow_steps)
    return result


def main(rank: int, world_size: int, folder: Path) -> None:
    """Run the jobs of one rank."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    results: dict[str, Any] = {}
    for job in json.loads((folder / "jobs.json").read_text()):
        try:
            results[job["key"]] = _run_job(job, rank, world_size, folder)
        except Exception as error:
            results[job["key"]] = f"{type(error).__name__}: {error}"
            if job.get("trace"):
                traceback.print_exc()
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
