"""Keeps secrets out of what a process says of itself: log records, warnings, uncaught exceptions.

No matter which code logs it and which handler shows it. Nothing here raises into the code that logs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .redaction import hide_secrets, traceback_of

__all__ = ["redacted_logs"]

_OWN_FIELDS = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
"""The fields of every log record; all else came by ``extra=``."""
_Hide = Callable[[str], str]


@contextlib.contextmanager
def redacted_logs(secrets: Iterable[str | None], environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """For the length of a block, show no secret of this process in logs, warnings and uncaught exceptions.

    Args:
        secrets: Texts that must not be shown.
        environ: Environment whose secrets must not be shown; None takes the process's own.
    """
    hide = functools.partial(hide_secrets, secrets=tuple(secrets), environ=environ)
    handle, show = logging.Logger.handle, warnings.showwarning
    end_thread, no_caller = threading.excepthook, sys.unraisablehook

    def handle_redacted(self: logging.Logger, record: logging.LogRecord) -> None:
        # Where a logger hands a record to its handlers: before that it has no ``extra=`` fields.
        _redact_record(record, hide)
        handle(self, record)

    def show_redacted(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        safe = hide(text)
        show(message if safe == text else safe, *args, **kwargs)

    def end_thread_redacted(given: threading.ExceptHookArgs) -> None:
        name = given.thread.name if given.thread is not None else "unknown"
        if not _show_redacted(given.exc_value, f"Exception in thread {name}", hide):
            end_thread(given)

    def no_caller_redacted(given: sys.UnraisableHookArgs) -> None:  # as those of destructors
        if not _show_redacted(given.exc_value, given.err_msg or "Exception without caller", hide):
            no_caller(given)

    with (
        _replaced(logging.Logger, "handle", handle_redacted),
        _replaced(warnings, "showwarning", show_redacted),
        _replaced(threading, "excepthook", end_thread_redacted),
        _replaced(sys, "unraisablehook", no_caller_redacted),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[..., None]) -> Iterator[None]:
    """Another function in place of one, until the end of the block; what others put there meanwhile stays."""
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if getattr(owner, name) is replacement:
            setattr(owner, name, before)


def _redact_record(record: logging.LogRecord, hide: _Hide) -> None:
    try:
        message = record.getMessage()
    except Exception as error:  # noqa: BLE001 - a wrong call in any library must not end a training
        record.msg, record.args = f"{_said(record.msg, hide)} {_said(record.args, hide)} [{type(error).__name__}]", ()
    else:
        safe = hide(message)
        if safe != message:
            record.msg, record.args = safe, ()
    if record.exc_info and record.exc_info[1] is not None:
        text = traceback_of(record.exc_info[1])
        record.exc_text = hide(text)
        if record.exc_text != text:
            record.exc_info = None  # for formatters that would make the text anew
    if record.stack_info:
        record.stack_info = hide(record.stack_info)
    for name, value in vars(record).items():
        if name not in _OWN_FIELDS:
            vars(record)[name] = _safe(value, hide)


def _safe(value: Any, hide: _Hide) -> Any:
    """`value` as it is where its text holds no secret, else that text without."""
    if isinstance(value, (bool, int, float, type(None))):
        return value
    if type(value) is dict:
        return {name: _safe(inner, hide) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_safe(inner, hide) for inner in value)
    try:
        text = value if isinstance(value, str) else f"{value!r} {value}"
    except Exception:  # noqa: BLE001 - a class of the user's may raise anything here
        return value
    safe = hide(text)
    return value if safe == text else safe


def _said(value: Any, hide: _Hide) -> str:
    try:
        return hide(str(value))
    except Exception:  # noqa: BLE001 - a class of the user's may raise anything here
        return f"<{type(value).__name__}>"


def _show_redacted(error: BaseException | None, title: str, hide: _Hide) -> bool:
    """Write the traceback of `error` where it holds a secret; False where it holds none and nothing was written."""
    if error is None or isinstance(error, SystemExit):
        return False
    text = traceback_of(error)
    safe = hide(text)
    if safe == text:
        return False
    if sys.stderr is not None:
        sys.stderr.write(f"{title}:\n{safe}\n")
    return True
