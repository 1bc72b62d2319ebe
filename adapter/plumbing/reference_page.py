"""Where the reference lies: the README of this package, which is installed with it."""

from __future__ import annotations

import os
from typing import Final, Literal

__all__ = ["reference", "reference_for"]

_PAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "README.md")


def reference(section: Literal["a-jobs-keys", "commands", "the-hooks"]) -> str:
    """The path of the reference, with the heading of one of its sections as a link has it."""
    return f"{_PAGE}#{section}"


def reference_for(code: str) -> str | None:
    """A line that says where to read about what the code of a `StartupContractError` is about; None for most."""
    if code == "startup.invalid_job_spec":
        return f"every key of a job: {reference('a-jobs-keys')}"
    if code == "startup.invalid_trainer":
        return f"every hook of a trainer class: {reference('the-hooks')}"
    return None
