"""Uploads that arrive: a spool on disk, a thread that empties it, and the wire format of the trainer contract."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import SPOOL_DIRECTORY, UploadConfig
    from .outcome import SettleResult, Undelivered
    from .uploader import Uploader
    from .wire import TerminalPayload, UploadedFile

__all__ = [
    "SPOOL_DIRECTORY",
    "SettleResult",
    "TerminalPayload",
    "Undelivered",
    "UploadConfig",
    "UploadedFile",
    "Uploader",
]

_HOMES = {
    "SPOOL_DIRECTORY": ".config",
    "UploadConfig": ".config",
    "SettleResult": ".outcome",
    "Undelivered": ".outcome",
    "Uploader": ".uploader",
    "TerminalPayload": ".wire",
    "UploadedFile": ".wire",
}


def __getattr__(name: str) -> Any:
    """Import on first use: an HTTP client is not loaded by a command that sends nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
