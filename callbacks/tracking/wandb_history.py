"""What a run of W&B holds on this machine, read from the files that its process writes.

A ``.wandb`` file is a header of seven bytes and a log in the format of LevelDB (``doc/log_format.md`` there): blocks of
32 KiB with records, each with a checksum, a length and a type. Each holds a ``Record`` of W&B's protocol. The process
that writes them writes whole blocks, so what was logged last before a kill is not there.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["last_steps_of_wandb"]

log = logging.getLogger(__name__)

_RUN_ID = re.compile(r"\w[\w.-]*")
_HEADER = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_STEP = "trainer/global_step"
"""The metric by which Lightning's logger says the step."""


def last_steps_of_wandb(directory: Path, run_id: str) -> dict[str, int]:
    """The last step at which each metric of a run was written below `directory`, which holds the folder ``wandb``.

    Raises:
        ValueError: W&B gives no run such an identity.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"{run_id!r} is not the id of a run of W&B")
    from wandb.proto.wandb_internal_pb2 import Record

    last: dict[str, int] = {}
    for path in sorted(directory.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")):
        for content in _records(path):
            record = Record()
            record.ParseFromString(content)
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if _STEP not in row:
                continue
            step = int(float(row[_STEP]))
            for name in row:
                last[name] = max(step, last.get(name, step))
    return last


def _records(path: Path) -> Iterator[bytes]:
    """The whole records of a file, which may still be growing, or have been cut off."""
    with path.open("rb") as file:
        if not file.read(_HEADER_BYTES).startswith(_HEADER):
            log.warning("%s is not a history of W&B and was skipped", path)
            return
        offset, parts = _HEADER_BYTES, b""
        while True:
            left = _BLOCK_BYTES - offset % _BLOCK_BYTES
            if left < _RECORD.size:
                file.seek(left, 1)
                offset += left
                continue
            head = file.read(_RECORD.size)
            if len(head) < _RECORD.size:
                return
            _, length, kind = _RECORD.unpack(head)
            content = file.read(length)
            if len(content) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
                return
            offset += _RECORD.size + length
            parts = content if kind in (_FULL, _FIRST) else parts + content
            if kind in (_FULL, _LAST):
                yield parts
