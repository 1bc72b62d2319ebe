"""Starts programs that are one rank each."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from support import SUPPORT
from support.forked import Forked


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
