"""Uploads of a run's results.

`config` has the destinations and limits, `queue` the queue on disk, `uploader` the threads that deliver its entries,
and `destinations` the transfers and the wire format of the trainer contract. May import `events`, the plumbing and the
contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...adapter.plumbing.imports import lazy_exports

if TYPE_CHECKING:
    from .config import QUEUE_DIRECTORY as QUEUE_DIRECTORY, UploadConfig as UploadConfig
    from .queue import UploadedFile as UploadedFile
    from .uploader import Uploader as Uploader
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
