"""Uploads: a queue on disk, threads that deliver its entries, and the wire format of the trainer contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...adapter.plumbing.imports import lazy_exports

if TYPE_CHECKING:
    from .config import QUEUE_DIRECTORY as QUEUE_DIRECTORY, UploadConfig as UploadConfig
    from .queue import UploadedFile as UploadedFile
    from .uploader import Uploader as Uploader
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
