"""The files between a submitter and the runner: arguments and callbacks in; a result, or the reason of a failure, out.

Arguments, callbacks and results are pickles, plain or as base64: the only pickles that genlight reads. A pickle runs
code, so one is loaded only from a regular file that belongs to this user and that nobody else may write. A failure is
JSON in a file next to the result.
"""

from __future__ import annotations

import base64
import binascii
import errno
import glob
import json
import os
import pickle
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.redaction import hide_secrets
from ..plumbing.safe_open import PRIVATE_FILE, UnsafeFileError, is_own_group, open_checked
from .contexts import RunEndContext

ResultFormat = Literal["json", "pickle"]

_PICKLE_STARTS = b"\x80"
"""The first byte of a pickle of protocol 2 or later; base64 has no such byte."""


class FunctionFailedError(RuntimeError):
    """The function of a job failed; the text has its message and its traceback."""

    def __init__(self, error_type: str, error_message: str, traceback: str) -> None:
        super().__init__(f"{error_type}: {error_message}\n\n{traceback}".rstrip())
        self.error_type, self.error_message, self.traceback = error_type, error_message, traceback


def write_pickle(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` for `read_pickle`, into a file that only this user can read."""
    write_bytes_durably(path, base64.b64encode(pickle.dumps(value)), mode=PRIVATE_FILE)


def callbacks_for_runner(callbacks: Iterable[Any]) -> list[Any]:
    """Return the callbacks that the runner calls: ``requires_runner_transport`` is true, or returns True."""
    asked = [(each, getattr(each, "requires_runner_transport", False)) for each in callbacks]
    return [each for each, answer in asked if (answer() if callable(answer) else answer)]


def read_pickle(path: str | os.PathLike[str]) -> Any:
    """Load a pickle, or the base64 of one.

    Raises:
        UnsafeFileError: It is a link or not a regular file, belongs to another user, or may be written by others.
        OSError: It cannot be read.
        ValueError: It is neither a pickle nor the base64 of one.
    """
    return _load(path, _read_unchanged_by_others(path))


def _load(path: str | os.PathLike[str], data: bytes) -> Any:
    if not data.startswith(_PICKLE_STARTS):
        try:
            data = base64.b64decode(b"".join(data.split()), validate=True)
        except binascii.Error:
            raise ValueError(f"{os.fspath(path)} is neither a pickle nor the base64 of one") from None
    return pickle.loads(data)  # noqa: S301 - only this user can have written the file


def _read_unchanged_by_others(path: str | os.PathLike[str]) -> bytes:
    """Read a file that nobody but this user can have written."""

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


def prepare_output(path: Path, rank: int = 0, world_size: int = 1) -> None:
    """Remove the files that an earlier attempt of a requeued job left; on rank 0, prove that `path` can be written.

    It is called before the function, so that no result is lost after hours of work.

    Raises:
        OSError: The folder cannot be made or written, or `path` is a folder.
    """
    make_directory(path.parent)
    failure_file(path, rank).unlink(missing_ok=True)
    if rank:
        return
    path.unlink(missing_ok=True)
    for each in path.parent.glob(f"{glob.escape(path.name)}.error-*.json"):
        if each.name not in {failure_file(path, other).name for other in range(world_size)}:
            each.unlink(missing_ok=True)  # left by an attempt with more ranks
    with tempfile.TemporaryFile(dir=path.parent) as probe:
        probe.write(b"0")


def failure_file(path: Path, rank: int | None = 0) -> Path:
    """Return the file, next to the result, in which `rank` reports its failure."""
    return path.with_name(f"{path.name}.error-{rank}.json" if rank else f"{path.name}.error.json")


def write_result(path: Path, value: Any, form: ResultFormat) -> None:
    """Write a function's result, completely or not at all.

    Raises:
        TypeError: It cannot be written in this form.
        OSError: The file cannot be written.
    """
    make_directory(path.parent)  # which may have been removed while the function ran
    try:
        # No NaN: it is not JSON.
        data = json.dumps(value, allow_nan=False).encode() if form == "json" else pickle.dumps(value)
    except (TypeError, ValueError, RecursionError, pickle.PicklingError, AttributeError) as error:
        way_out = ""
        if form == "json":
            kept = path.with_name(f"{path.name}.pickle")
            write_result(kept, value, "pickle")
            way_out = f"; it is in {kept} instead: return plain values, or choose --result pickle"
        raise TypeError(f"the result cannot be written as {form}: {error}{way_out}") from error
    write_bytes_durably(path, data, mode=PRIVATE_FILE)


def write_failure(path: Path, end: RunEndContext, rank: int | None) -> None:
    """Write type, message and traceback of a failure as JSON next to `path`, without secrets, for this user only.

    Raises:
        OSError: The file cannot be written.
    """
    texts = {name: hide_secrets(getattr(end, name) or "") for name in ("error_type", "error_message", "traceback")}
    facts = {"rank": rank, "job_id": end.job_id, "exit_code": end.exit_code, "end_time": end.start_time + end.duration}
    make_directory(path.parent)
    write_bytes_durably(failure_file(path, rank), json.dumps(texts | facts).encode(), mode=PRIVATE_FILE)


def read_result(path: str | os.PathLike[str]) -> Any:
    """Return the result of a job's function, from its ``--output-file``.

    Raises:
        FunctionFailedError: A rank failed; if several did, this is the first failure.
        OSError: There is neither a result nor a failure, or others may write the file.
    """
    target = Path(path)
    paths = target.parent.glob(f"{glob.escape(target.name)}.error*.json")
    if failures := [json.loads(_read_unchanged_by_others(each)) for each in paths]:
        first = min(failures, key=lambda failure: failure["end_time"])
        raise FunctionFailedError(first["error_type"], first["error_message"], first["traceback"])
    data = _read_unchanged_by_others(target)
    return _load(target, data) if data.startswith(_PICKLE_STARTS) else json.loads(data)
