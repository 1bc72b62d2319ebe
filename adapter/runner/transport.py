"""The files between a submitter and the runner: arguments and callbacks in, a result out.

Arguments and callbacks are pickles, as they are or as base64: the only pickles that genlight reads. A pickle runs code,
so one is loaded only from a regular file that belongs to this user and that nobody else may write.
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import pickle
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ..plumbing.durable import write_bytes_durably
from ..plumbing.permissions import is_own_group
from ..plumbing.safe_open import PRIVATE_FILE, UnsafeFileError, open_checked

__all__ = ["ResultFormat", "read_pickle", "travelling", "write_pickle", "write_result"]

ResultFormat = Literal["json", "pickle"]

_PICKLE_STARTS = b"\x80"
"""The first byte of a pickle of protocol 2 or later; base64 has no such byte."""


def write_pickle(path: str | os.PathLike[str], value: Any) -> None:
    """Write what `read_pickle` reads, for this user alone."""
    write_bytes_durably(path, base64.b64encode(pickle.dumps(value)), mode=PRIVATE_FILE)


def travelling(callbacks: Iterable[Any]) -> list[Any]:
    """Those callbacks that the runner is to call, by their ``requires_runner_transport``, an attribute or a method.

    A submitter writes only them.
    """
    asked = [(each, getattr(each, "requires_runner_transport", False)) for each in callbacks]
    return [each for each, answer in asked if (answer() if callable(answer) else answer)]


def read_pickle(path: str | os.PathLike[str]) -> Any:
    """Load what the submitter wrote to `path`: a pickle, or the base64 of one.

    Raises:
        UnsafeFileError: It is a link or not a regular file, belongs to another user, or may be written by others.
        OSError: It cannot be read.
        ValueError: It is neither of the two.
    """
    data = _read_unchanged_by_others(path)
    if not data.startswith(_PICKLE_STARTS):
        try:
            data = base64.b64decode(b"".join(data.split()), validate=True)
        except binascii.Error:
            raise ValueError(f"{os.fspath(path)} is neither a pickle nor the base64 of one") from None
    return pickle.loads(data)  # noqa: S301 - of a file that this user alone can have written


def _read_unchanged_by_others(path: str | os.PathLike[str]) -> bytes:
    def check(_: int, status: os.stat_result) -> None:
        fault = None
        if status.st_uid != os.geteuid():
            fault = f"it belongs to another user (uid {status.st_uid})"
        elif status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not is_own_group(status.st_gid)):
            fault = "other users can write to it (`chmod go-w` prevents that)"
        if fault is not None:
            raise UnsafeFileError(errno.EPERM, f"{fault}, so no pickle is loaded from it", os.fspath(path))

    with open(open_checked(path, os.O_RDONLY | os.O_NOFOLLOW, check=check), "rb") as file:
        return file.read()


def write_result(path: Path, value: Any, form: ResultFormat) -> None:
    """Write what a function returned, whole or not at all.

    Raises:
        TypeError: It cannot be written in this form.
        OSError: The file cannot be written.
    """
    try:
        # No NaN: it is not JSON.
        data = json.dumps(value, allow_nan=False).encode() if form == "json" else pickle.dumps(value)
    except (TypeError, ValueError, RecursionError, pickle.PicklingError, AttributeError) as error:
        way_out = "; return plain values, or choose --result pickle" if form == "json" else ""
        raise TypeError(f"the result cannot be written as {form}: {error}{way_out}") from error
    write_bytes_durably(path, data, mode=PRIVATE_FILE)
