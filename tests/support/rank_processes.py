"""Starts programs that are one rank each."""

import inspect
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from support import SUPPORT
from support.forked import Forked


def on_ranks(
    work: Callable[..., Any], folder: Path, *arguments: object, world_size: int = 2, **options: Any
) -> tuple[list[Any], str]:
    """Call `work`, a function of a test's file, on each rank with its `Rank` and `arguments`, which become texts.

    Returns what the ranks returned, which torch has to be able to load with ``weights_only``, and their output.
    """
    folder.mkdir(exist_ok=True)
    place = (folder, inspect.getfile(work), work.__name__)
    output = run_ranks("on_rank.py", *place, *arguments, world_size=world_size, **options)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)], output


def run_ranks(
    program: str,
    *arguments: object,
    world_size: int = 2,
    code: int = 0,
    timeout_s: float = 200,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run the ranks of ``PROGRAM RANK WORLD_SIZE ARGUMENTS…`` and return their output.

    Args:
        program: A file of this folder, or a module that is imported from the folder of the tests.
        arguments: Arguments after the world size.
        world_size: Number of ranks.
        code: Expected exit code of each.
        timeout_s: Time after which all are killed.
        environ: Additional environment variables.

    Raises:
        RuntimeError: One did not end with `code`; holds the output of all.
    """
    codes, outputs = run_ranks_to_their_ends(
        program, *arguments, world_size=world_size, code=code, timeout_s=timeout_s, environ=environ
    )
    if codes != [code] * world_size:
        raise RuntimeError("\n".join([f"the ranks ended with {codes}", *outputs]))
    return "".join(outputs)


def run_ranks_to_their_ends(
    program: str,
    *arguments: object,
    world_size: int,
    code: int = 0,
    timeout_s: float = float("inf"),
    may_fail: Collection[int] = (),
    environ: Mapping[str, str] | None = None,
) -> tuple[list[int], list[str]]:
    """Run all ranks until they have ended or one, not of those that may fail, has ended with another code than `code`.

    Returns the code and the output of each; -9 is the code of ranks that were killed because of another.
    """
    program = str(SUPPORT / program) if program.endswith(".py") else program
    path = os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environ or {})}
    deadline = time.monotonic() + timeout_s
    ranks: list[Forked] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(world_size)]
        try:
            for rank, log in enumerate(logs):
                numbers = (rank, world_size)
                ranks.append(Forked(program, *numbers, *arguments, environ=variables, folder=Path.cwd(), log=log))
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
                if any(rank.poll() not in (None, code) for i, rank in enumerate(ranks) if i not in may_fail):
                    break
                time.sleep(0.02)
        finally:
            for rank in ranks:
                rank.kill_session()
        return [rank.wait() for rank in ranks], [log.read_text(errors="replace") for log in logs]
