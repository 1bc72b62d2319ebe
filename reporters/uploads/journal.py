"""The lines of a spool's journal, and what they amount to."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec

from ...adapter.contract.exceptions import UploadError
from ...adapter.plumbing.safe_open import read_own
from .artifact import Artifact, unpack
from .payloads import Kind, UploadedFile

__all__ = [
    "DESCRIPTION",
    "JOURNAL",
    "Content",
    "Description",
    "Entry",
    "Line",
    "fault_of",
    "read_content",
    "read_description",
    "read_journal",
]

JOURNAL = "journal.jsonl"
DESCRIPTION = "about.json"
MAX_RECEIPTS = 1024
LARGEST_JOURNAL_BYTES = 1 << 30
LARGEST_DESCRIPTION_BYTES = 1 << 20


class Entry(msgspec.Struct):
    """One thing to deliver, and how far its delivery has come."""

    seq: int
    kind: Kind
    step: int
    body: dict[str, Any]
    parts: dict[str, dict[str, Any]] = {}
    """Receipts of the parts that were delivered, by the name of the part."""
    failure: str | None = None
    """Why it can't be delivered, in safe text; None while it can be tried."""
    auth: bool = False
    attempted: bool = True
    """Whether a request for it may have been sent; an entry read back from disk counts as attempted."""


class Description(msgspec.Struct, frozen=True):
    """Whose spool it is. Where to send what waits is not read from here: the folder may have come from elsewhere."""

    run_id: str
    owner: str = ""
    targets: list[str] = []
    """Names of further destinations, for a person to look at."""
    starts: int = 0
    stores_files: bool = False


class MetricsBody(msgspec.Struct):
    """What an entry of kind ``metrics`` holds."""

    metrics: dict[str, float | None]


class TerminalMessage(msgspec.Struct):
    """What is read of a terminal message before it is sent as it is."""

    status: str
    error: str | None = None


class TerminalBody(msgspec.Struct):
    """What an entry of kind ``terminal`` holds."""

    payload: TerminalMessage
    key: str


class Line(msgspec.Struct, omit_defaults=True):
    """One line of a journal: what happened to an entry, or a receipt."""

    op: str
    seq: int = 0
    entry: Entry | None = None
    part: str = ""
    receipt: dict[str, Any] | None = None
    body: dict[str, Any] | None = None
    failure: str | None = None
    auth: bool = False
    key: str = ""


class Content:
    """What the lines of a journal amount to."""

    def __init__(self) -> None:
        self.entries: dict[Kind, dict[int, Entry]] = {kind: {} for kind in get_args(Kind)}
        self.by_seq: dict[int, Entry] = {}
        self.receipts: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.next_seq = 1

    def apply(self, line: Line) -> None:
        """Take over what a line says; one about an entry that is gone says nothing."""
        if line.op == "add" and line.entry is not None:
            self.by_seq[line.entry.seq] = self.entries[line.entry.kind][line.entry.seq] = line.entry
            self.next_seq = max(self.next_seq, line.entry.seq + 1)
        elif line.op == "next":
            self.next_seq = max(self.next_seq, line.seq)
        elif line.op == "receipt":
            self.receipts[line.key] = line.receipt or {}
            self.receipts.move_to_end(line.key)
            while len(self.receipts) > MAX_RECEIPTS:
                self.receipts.popitem(last=False)
        elif line.seq in self.by_seq:
            self._change(self.by_seq[line.seq], line)

    def _change(self, entry: Entry, line: Line) -> None:
        if line.op == "part":
            entry.parts[line.part] = line.receipt or {}
        elif line.op == "body" and line.body is not None:
            entry.body = line.body
        elif line.op == "failed":
            entry.failure, entry.auth = line.failure, line.auth
        elif line.op == "gone":
            del self.by_seq[line.seq], self.entries[entry.kind][line.seq]

    def lines(self) -> Iterable[Line]:
        """The lines of a new journal that amounts to the same."""
        yield Line("next", seq=self.next_seq)
        for key, receipt in self.receipts.items():
            yield Line("receipt", key=key, receipt=receipt)
        for entry in self.by_seq.values():
            yield Line("add", entry=entry)


def fault_of(entry: Entry) -> str | None:
    """Why the content of an entry cannot be used; None where it can."""
    kind: Any = {"metrics": MetricsBody, "terminal": TerminalBody}.get(entry.kind, Artifact)
    try:
        if kind is Artifact:
            unpack(entry.body)
        else:
            msgspec.convert(entry.body, kind)
        for part, receipt in entry.parts.items():
            if part.startswith("put:"):
                msgspec.convert(receipt, UploadedFile)
    except (UploadError, msgspec.ValidationError) as error:
        return str(error)
    return None


def read_journal(directory: str | os.PathLike[str]) -> list[Entry]:
    """The entries that wait in the spool at `directory`, oldest first; takes no lock and changes nothing.

    Raises:
        UploadError: A line in the middle of the journal is damaged.
    """
    content, _ = read_content(Path(directory) / JOURNAL)
    return list(content.by_seq.values())


def read_description(directory: str | os.PathLike[str]) -> Description:
    """Whose spool lies at `directory`.

    Raises:
        UploadError: There is no spool, or the description is damaged.
    """
    path = Path(directory) / DESCRIPTION
    try:
        return msgspec.json.decode(read_own(path, limit=LARGEST_DESCRIPTION_BYTES), type=Description)
    except (OSError, ValueError, RecursionError) as error:
        raise UploadError(f"{directory} is not an upload spool: {path.name} cannot be read ({error}).") from error


def read_content(path: Path) -> tuple[Content, int]:
    """The content of a journal and the length of its whole lines in bytes."""
    content, length = Content(), 0
    try:
        data = read_own(path, limit=LARGEST_JOURNAL_BYTES)
    except FileNotFoundError:
        return content, 0
    except OSError as error:
        raise UploadError(f"The upload journal {path} cannot be read: {error.strerror}.") from error
    decoder = msgspec.json.Decoder(Line)
    for number, raw in enumerate(data.splitlines(keepends=True), start=1):
        if not raw.endswith(b"\n"):
            break
        try:
            content.apply(decoder.decode(raw))
        except (ValueError, RecursionError) as error:
            raise UploadError(
                f"The upload journal {path} is damaged in line {number} ({error}). Move it aside to go on without "
                "what it holds."
            ) from error
        length += len(raw)
    return content, length
