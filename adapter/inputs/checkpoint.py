"""The checkpoint that a run was told to resume from, brought to this machine with all its files."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

import httpx2

from ...callbacks.checkpoint.format.record import LARGEST_RECORD_BYTES, CheckpointRecord, read_record
from ...reporters.uploads.payloads import remote_name
from ..contract.exceptions import BrokenCheckpointError, InputError
from ..job.refs import HttpRef
from ..plumbing.retry import RetryPolicy
from .http import Download, download
from .progress import Tracker

__all__ = ["fetch_checkpoint"]


def fetch_checkpoint(
    ref: HttpRef, folder: Path, client: httpx2.Client, *, retry: RetryPolicy, tracker: Tracker
) -> Path:
    """Fetch a record by URL and the files that it names from beside it; the path of the local record.

    A record in a file store lies beside files whose names are flat, ``step-00000200-model.safetensors``; everywhere
    else the files lie where the record says. A query of the URL, a signature say, goes with every file.

    Raises:
        AuthError: The server refused the credentials.
        InputError: The record or a file of it is missing or broken.
    """
    path = download(
        Download(ref.url, folder / ref.file_name, ref.sha256, most_bytes=LARGEST_RECORD_BYTES),
        client,
        retry=retry,
        tracker=tracker,
    )
    try:
        record = read_record(path)
    except BrokenCheckpointError as error:
        raise InputError(f"{ref.label} cannot be resumed from: {error}.") from None
    for file in record.files:
        request = Download(
            _beside(ref, record, file.path, record.file_name(file)),
            folder / file.path,
            file.sha256,
            file.xxh3_128,
            file.size,
        )
        download(request, client, retry=retry, tracker=tracker)
    return path


def _beside(ref: HttpRef, record: CheckpointRecord, relative_path: str, name: str) -> str:
    """URL of a file of the record."""
    stored_as = remote_name(record.step, name, final=record.final)
    flat = ref.file_name.startswith(remote_name(record.step, "", final=record.final))
    parts = urlsplit(ref.url)
    bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    located = urlsplit(urljoin(bare, quote(stored_as if flat else relative_path)))
    return urlunsplit((located.scheme, located.netloc, located.path, parts.query, ""))
