"""Uploads that arrive: a spool on disk, a thread that empties it, and the wire format of the trainer contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...adapter.plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .config import SPOOL_DIRECTORY, UploadConfig
    from .outcome import SettleResult, Undelivered
    from .payloads import TerminalPayload, UploadedFile
    from .uploader import Uploader
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".config": ("SPOOL_DIRECTORY", "UploadConfig"),
            ".outcome": ("SettleResult", "Undelivered"),
            ".uploader": ("Uploader",),
            ".payloads": ("TerminalPayload", "UploadedFile"),
        },
    )

__all__ = [
    "SPOOL_DIRECTORY",
    "SettleResult",
    "TerminalPayload",
    "Undelivered",
    "UploadConfig",
    "UploadedFile",
    "Uploader",
]
