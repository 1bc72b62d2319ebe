"""Uploads that arrive: a queue on disk, threads that empty it, and the wire format of the trainer contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...adapter.plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .config import SPOOL_DIRECTORY as SPOOL_DIRECTORY, UploadConfig as UploadConfig
    from .outcome import SettleResult as SettleResult, Undelivered as Undelivered
    from .payloads import TerminalPayload as TerminalPayload, UploadedFile as UploadedFile
    from .uploader import Uploader as Uploader
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            ".config": ("SPOOL_DIRECTORY", "UploadConfig"),
            ".outcome": ("SettleResult", "Undelivered"),
            ".payloads": ("TerminalPayload", "UploadedFile"),
            ".uploader": ("Uploader",),
        },
    )
