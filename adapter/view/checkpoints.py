"""Summaries of checkpoints, for listings and pages. Works on every operating system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...callbacks.checkpoint.format.record import CheckpointRecord, name_of
from ...callbacks.checkpoint.listing import Listed
from ...callbacks.checkpoint.memory_tier import is_in_memory, list_tiers
from ...callbacks.checkpoint.selection import folder_of_checkpoints
from ...callbacks.checkpoint.storage import missing_file, verify_files
from ..contract.exceptions import BrokenCheckpointError


def checkpoints_of_run(folder: Path) -> list[Listed]:
    """Return the checkpoints of the run in `folder`, oldest first; none if this user may not read them."""
    checkpoints = folder_of_checkpoints(folder)
    try:
        return [] if checkpoints is None else list_tiers(checkpoints)
    except OSError:
        return []


def checkpoint_facts(listed: Listed, *, proves: bool = False) -> dict[str, Any]:
    """Return the facts about a checkpoint for a listing, as JSON, with its `state` in words.

    Args:
        listed: The checkpoint.
        proves: Whether to read its files and compare digests. By default only sizes are compared.
    """
    record, problem = listed.record, listed.problem
    facts: dict[str, Any] = {
        "name": name_of(listed.path),
        "step": None,
        "size": 0,
        "saved_ms": 0,
        "run_id": "",
        "ranks": None,
    }
    facts |= {"scores": {}, "finite_weights": None, "left_out": 0}
    facts["tier"] = "memory" if is_in_memory(listed.path) else "disk"
    words = ["intact"] if proves else []
    if record is not None:
        problem = _difference(record) if proves else missing_file(record)
        facts |= {name: getattr(record, name) for name in ("name", "step", "run_id", "finite_weights")}
        facts |= {"size": record.size_bytes, "saved_ms": record.created_at_ms, "ranks": record.world_size}
        facts |= {"scores": dict(record.metrics), "left_out": len(record.left_out)}
        words += ["in memory"] if facts["tier"] == "memory" else []
        words += ["final"] if record.final else []
        words += ["of an older runtime, without digests"] if record.is_old else []
        words += ["weights not finite"] if record.finite_weights is False else []
        words += [f"{len(record.left_out):,} tensors omitted"] if record.left_out else []
    return {**facts, "problem": problem, "state": f"broken: {problem}" if problem else ", ".join(words) or "saved"}


def _difference(record: CheckpointRecord) -> str:
    """Return how the files of a checkpoint differ from its record; empty if they do not."""
    try:
        verify_files(record)
    except BrokenCheckpointError as error:
        return error.reason
    return ""
