"""Runs functions on the device: one process a rank for all functions of a module, an outcome for each.

A test imports the module (this loads torch but not the device) and asserts each outcome::

    outcome = outcomes_of(checks)                               # a module of functions check_…()

    @pytest.mark.parametrize("name", names_of(checks))
    def test_on_the_device(outcome, name):
        outcome(name)

As a program it is one rank: ``python -m support.device.checks RANK WORLD_SIZE MODULE FOLDER``. On several ranks each
function finds a process group. A failing rank tells the others, so that they do not wait for it.
"""

import datetime as dt
import importlib
import inspect
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.device import PROCESS_GROUP, Waiting, load, run_on_device

ANSWER_WITHIN_S = 60


def names_of(module: ModuleType) -> list[str]:
    """The functions of a module that are checks, in their order."""
    return [name for name in vars(module) if name.startswith("check_")]


def outcomes_of(module: ModuleType, *, world_size: int = 1, waiting: Waiting = Waiting.HOST) -> Any:
    """Make a fixture: a function that takes the name of a check and fails with its traceback."""

    @pytest.fixture(scope="module")
    def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
        folder = tmp_path_factory.mktemp("device")
        said = run_on_device(
            "support.device.checks", module.__name__, folder, world_size=world_size, waiting=waiting, timeout_s=280
        )
        results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]

        def check(name: str) -> None:
            failed = [f"rank {rank}\n{found[name]}" for rank, found in enumerate(results) if found[name]]
            assert not failed, "\n".join([*failed, said[-4000:]])

        return check

    return outcome


def main(rank: int, world_size: int, module: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    sim = load()
    sim.set_device(rank)
    outcomes: dict[str, str] = {}
    checks = importlib.import_module(module)
    for name in names_of(checks):
        arguments = {"folder": folder / name} if inspect.signature(getattr(checks, name)).parameters else {}
        (folder / name).mkdir(exist_ok=True)
        if world_size > 1:
            within = dt.timedelta(seconds=ANSWER_WITHIN_S)
            store = dist.FileStore(f"{folder}/store {name}", world_size)
            dist.init_process_group(PROCESS_GROUP, store=store, rank=rank, world_size=world_size, timeout=within)
        try:
            getattr(checks, name)(**arguments)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        if world_size > 1:
            # Of a check without an exchange one rank could be at its end before the other is connected.
            store.set(f"rank {rank} has checked", "")
            store.wait([f"rank {each} has checked" for each in range(world_size)], within)
            dist.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
