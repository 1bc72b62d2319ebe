"""A run's id as part of a path."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

__all__ = ["folder_name"]

LONGEST_FOLDER_NAME = 120


def folder_name(run_id: str) -> str:
    """A run's id as the name of one folder: what a path would interpret is percent-encoded."""
    name = quote(run_id, safe="")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    if len(name) <= LONGEST_FOLDER_NAME:
        return name
    return f"{name[:LONGEST_FOLDER_NAME]}~{hashlib.sha256(run_id.encode()).hexdigest()[:12]}"
