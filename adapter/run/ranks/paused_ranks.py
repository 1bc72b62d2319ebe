"""Ranks that do not answer a stop because their process is paused: they are waited for, for a while."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ...contract.exceptions import RankFailed
from ...plumbing.threads import started

__all__ = ["is_paused", "watching_paused_ranks"]

LOOK_EVERY_S = 0.2
PATIENCE_S = 15.0
"""How long after a stop was asked for a process may stay paused, as one is by a debugger or a suspended job."""


def is_paused(pid: int) -> bool:
    """Whether a process of this machine is stopped (``SIGSTOP``, a debugger); False where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(") ")[2][:1] in ("T", "t")


@contextlib.contextmanager
def watching_paused_ranks(
    processes: Callable[[], Mapping[int, int]], is_asked: Callable[[], bool], end: Callable[[RankFailed], None]
) -> Iterator[None]:
    """Call `end`, in a thread, when a rank stays paused for too long after a stop was asked for in this block.

    The others wait for it in a collective, and would for half an hour.

    Args:
        processes: Gives the process id of each rank on this machine that can be looked at.
        is_asked: Whether a stop was asked for.
        end: Takes what names the rank, and ends this process.
    """
    over = threading.Event()

    def watch() -> None:
        since: dict[int, float] = {}
        while not over.wait(LOOK_EVERY_S):
            if not is_asked():
                continue
            now = time.monotonic()
            paused = {rank: pid for rank, pid in processes().items() if is_paused(pid)}
            since = {rank: since.get(rank, now) for rank in paused}
            late = next((rank for rank, began in since.items() if now - began >= PATIENCE_S), None)
            if late is not None:
                end(
                    RankFailed(
                        f"rank {late} (process {paused[late]}) is paused and did not answer the stop within "
                        f"{PATIENCE_S:g} s"
                    )
                )
                return

    started(threading.Thread(target=watch, name="genlight-paused-ranks", daemon=True))
    try:
        yield
    finally:
        over.set()
