"""Runs trainer classes sharded over two ranks, and the same classes in a plain loop of one process.

Started as a script once per rank: ``fsdp_harness.py RANK WORLD_SIZE FOLDER JOBS``, where JOBS is a list of a zoo file's
name and a class in it. The helpers for one rank are those of `support.trainer_zoo`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
START_S = 240
"""How long two ranks may take for all of their classes, on a loaded machine."""


def load(path: Path) -> Any:
    """A Python file as a module under the name of the file, made once."""
    if path.stem in sys.modules:
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


base = load(HERE.parent / "support" / "trainer_zoo.py")


def classes(file: str) -> dict[str, type]:
    """The trainer classes of a zoo file, by name; also known to the helpers for one rank."""
    found: dict[str, type] = load(HERE / file).ZOO
    base.ZOO.update(found)
    return found


def plain(file: str, name: str, **settings: Any) -> dict[str, torch.Tensor]:
    """The weights that a class has after a plain loop over the whole batches."""
    classes(file)
    weights: dict[str, torch.Tensor] = base.plain_run(name, **settings)
    return weights


def on_two_ranks(folder: Path, jobs: list[dict[str, Any]], *, timeout_s: float = START_S) -> list[dict[str, Any]]:
    """What each rank made of `jobs`: weights by the job's key, or the text of an error.

    Args:
        folder: Where the ranks meet and leave their results.
        jobs: Each has ``key``, ``file``, ``name``, and may have ``strategy``, ``precision``, ``policy``.
        timeout_s: After this long the ranks are ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(rank), "2", str(folder), json.dumps(jobs)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def assert_close(actual: Any, expected: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    """Weights are those expected, each relative to its largest value."""
    assert not isinstance(actual, str), actual
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(tensor.abs().max().item(), 1e-3)
        difference = (actual[name].double() - tensor.double()).abs().max().item()
        assert difference <= tolerance * scale, f"{name} differs by {difference / scale:.2e} relative"


if __name__ == "__main__":
    jobs = json.loads(sys.argv[4])
    for job in jobs:
        classes(job["file"])
    base.rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), jobs)
