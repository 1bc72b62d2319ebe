"""Runs trainer classes of the zoo on two ranks of DDP over gloo, and alone in plain torch over the whole batch.

Not a test module; started as a script once per rank: ``two_ranks.py RANK FOLDER JOBS``.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WORLD_SIZE = 2
STEPS = 5
ROWS = 8
"""In a step, over all ranks."""

Outcome = dict[str, Tensor] | str


def rows(step: int) -> dict[str, Tensor]:
    """The whole batch of a step; rows of kind 0 come first, so that each rank sees one kind alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, 6, generator=generator)
    kind = (torch.arange(ROWS) >= ROWS // 2).long()
    return {"x": x, "y": x.sum(1, keepdim=True).tanh(), "kind": kind}


def share(batch: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """The rows of one rank."""
    size = ROWS // world_size
    return {name: value[rank * size : (rank + 1) * size] for name, value in batch.items()}


class Shares:
    """A loader of one rank's share of every batch."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.batches = [share(rows(step), rank, world_size) for step in range(STEPS)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def trainer_class(name: str) -> Any:
    """A class of the zoo by ``file:Class``."""
    stem, _, attribute = name.partition(":")
    module = sys.modules.get(stem)
    if module is None:
        spec = importlib.util.spec_from_file_location(stem, Path(__file__).with_name(f"{stem}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[stem] = module
        spec.loader.exec_module(module)
    return getattr(module, attribute)


def plain(name: str) -> dict[str, Tensor]:
    """Weights after all steps in plain torch, one process, whole batches."""
    from genlight.adapter import StepContext, TrainingJobSpec

    trainer = trainer_class(name)()
    ctx = StepContext(job=TrainingJobSpec(run_id="plain", max_steps=STEPS), device="cpu", dtype="fp32")
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    for step in range(STEPS):
        trainer.train_step(trainer.prepare_batch(rows(step), state, ctx), state, ctx)
    return weights(state)


def weights(state: Any) -> dict[str, Tensor]:
    """Every tensor in a state of dicts and lists, by hand: not by the discovery that is under test."""
    found: dict[str, Tensor] = {}

    def collect(path: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            found.update({f"{path}.{name}": tensor for name, tensor in value.state_dict().items()})
        elif isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(f"{path}.{key}", item)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                collect(f"{path}.{i}", item)

    collect("state", state)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def on_two_ranks(folder: Path, names: Sequence[str], **options: Any) -> list[dict[str, Outcome]]:
    """For each rank what became of each class: its weights, or the error that ended it.

    Args:
        folder: For the ranks' messages.
        names: Classes as ``file:Class``, trained one after the other by the same processes.
        options: ``guard`` is the cadence of the replica guard, -1 the default.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    jobs = json.dumps({"names": list(names), **options})
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder), jobs],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * WORLD_SIZE, "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]


def _hosted(name: str, rank: int, guard: int) -> tuple[Any, Any]:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from genlight.adapter import ContractModule, TrainingJobSpec
    from genlight.callbacks import ReplicaGuard

    class Environment(LightningEnvironment):
        @property
        def creates_processes_externally(self) -> bool:
            return True

        def local_rank(self) -> int:
            return rank

        def global_rank(self) -> int:
            return rank

        def world_size(self) -> int:
            return WORLD_SIZE

        def set_world_size(self, size: int) -> None:
            assert size == WORLD_SIZE

    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=DDPStrategy(cluster_environment=Environment(), process_group_backend="gloo"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if guard < 0 else [ReplicaGuard(guard)],
    )
    module = ContractModule(trainer_class(name)(), TrainingJobSpec(run_id=name, max_steps=STEPS, metric_every=0))
    trainer.fit(module, Shares(rank, WORLD_SIZE))
    return module, trainer


def main(rank: int, folder: Path, jobs: dict[str, Any]) -> None:
    """Do what one rank does."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    results: dict[str, Outcome] = {}
    for name in jobs["names"]:
        try:
            module, trainer = _hosted(name, rank, jobs.get("guard", -1))
            assert trainer.global_step == STEPS
            results[name] = weights(module.contract_state)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
