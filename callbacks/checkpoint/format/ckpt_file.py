"""The file that holds a record whose name ends in ``.ckpt``: torch opens it, and says what to do instead.

Such a name is taken for a file of ``torch.save`` by everything around Lightning, and torch says of JSON no more than
"Unsupported operand 123". So the record is the first entry of a ZIP archive of the layout that torch knows, stored as
it is. What torch looks at next, before anything is unpickled, is the archive's byte order: that entry holds what to do,
and torch quotes it. The archive holds no pickle.

Only the record within is read by genlight, and it proves itself; the rest of the archive is for torch alone. The module
imports neither torch nor Lightning.
"""

from __future__ import annotations

import io
import zipfile

__all__ = ["CKPT_FILE_START", "TORCH_MAGICS", "WAY_OUT", "in_ckpt_file", "is_torch_file", "record_in"]

TORCH_MAGICS = (b"PK", b"\x80\x02")
"""What a file that ``torch.save`` wrote begins with: a ZIP archive, or a bare pickle."""

WAY_OUT = (
    "none, because this .ckpt file is a checkpoint of genlight, whose tensors are in the folder beside it. "
    "`from genlight.callbacks import DurableCheckpointIO` lets Lightning load it, "
    "`genlight.callbacks.checkpoint.load(path)` gives what is in it, and "
    "`genlight checkpoints export PATH --to FILE.ckpt` converts it to a file of torch"
)
"""Follows "Unknown endianness type: " in what torch raises."""

_RECORD = "genlight/record.json"
_ENTRIES = {"genlight/byteorder": WAY_OUT.encode(), "genlight/version": b"3\n"}
_SIGNATURE, _SIZE_AT, _NAME_SIZES_AT, _HEADER_SIZE = b"PK\x03\x04", 18, 26, 30
CKPT_FILE_START = _HEADER_SIZE + len(_RECORD)
"""Bytes by which such a file is known, and after which its record follows."""


def in_ckpt_file(record: bytes) -> bytes:
    """The content of a ``.ckpt`` file that holds `record`."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for name, content in {_RECORD: record, **_ENTRIES}.items():
            file.writestr(zipfile.ZipInfo(name), content)  # of a fixed date: equal records give equal files
    return archive.getvalue()


def record_in(data: bytes) -> bytes | None:
    """The record in the content of a file that `in_ckpt_file` made, cut off where the file is; None for other content.

    The first `CKPT_FILE_START` bytes are enough to tell whether it is one.
    """
    if not data.startswith(_SIGNATURE) or data[_HEADER_SIZE:CKPT_FILE_START] != _RECORD.encode():
        return None
    size = int.from_bytes(data[_SIZE_AT : _SIZE_AT + 4], "little")
    extra = int.from_bytes(data[_NAME_SIZES_AT + 2 : _NAME_SIZES_AT + 4], "little")
    return data[CKPT_FILE_START + extra : CKPT_FILE_START + extra + size]


def is_torch_file(start: bytes) -> bool:
    """Whether a file that begins with `start`, at least `CKPT_FILE_START` bytes of it, is one of ``torch.save``."""
    return start.startswith(TORCH_MAGICS) and record_in(start) is None
