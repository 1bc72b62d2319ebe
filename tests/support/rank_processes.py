"""Starts the programs of this folder that are one rank each."""

from __future__ import annotations

import os
import subprocess
import sys

from support import SUPPORT

__all__ = ["run_ranks"]


def run_ranks(program: str, *arguments: object, world_size: int = 2, code: int = 0, timeout_s: float = 200) -> str:
    """What the ranks of ``PROGRAM RANK WORLD_SIZE ARGUMENTS…`` wrote to their terminals.

    Raises:
        RuntimeError: One did not end with `code`; holds what all of them wrote.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, SUPPORT / program, str(rank), str(world_size), *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    codes = [process.returncode for process in ranks]
    if codes != [code] * world_size:
        raise RuntimeError("\n".join([f"the ranks ended with {codes}", *outputs]))
    return "".join(outputs)
