"""Keeps secrets out of what a process says of itself: log records, warnings, uncaught exceptions.

No matter which code logs it and which handler shows it. Nothing here raises into the code that logs.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

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
    known = tuple(secrets)

    def hide(text: str) -> str:
        return hide_secrets(text, secrets=known, environ=environ)

    with _redacted_records(hide), _redacted_warnings(hide), _redacted_exceptions(hide):
        yield


@contextlib.contextmanager
def _redacted_records(hide: _Hide) -> Iterator[None]:
    """Redact where a logger hands a record to its handlers: before that it has no ``extra=`` fields."""
    handle = logging.Logger.handle

    def handle_redacted(self: logging.Logger, record: logging.LogRecord) -> None:
        _redact_record(record, hide)
        handle(self, record)

    logging.Logger.handle = handle_redacted  # type: ignore[method-assign]
    try:
        yield
    finally:
        logging.Logger.handle = handle  # type: ignore[method-assign]


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


@contextlib.contextmanager
def _redacted_warnings(hide: _Hide) -> Iterator[None]:
    show = warnings.showwarning

    def show_redacted(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = str(message)
        safe = hide(text)
        show(message if safe == text else safe, category, filename, lineno, file, line)

    warnings.showwarning = show_redacted
    try:
        yield
    finally:
        if warnings.showwarning is show_redacted:
            warnings.showwarning = show


@contextlib.contextmanager
def _redacted_exceptions(hide: _Hide) -> Iterator[None]:
    """Exceptions that end a thread, or that have no caller, as those of destructors."""
    end_thread, no_caller = threading.excepthook, sys.unraisablehook

    def end_thread_redacted(given: threading.ExceptHookArgs) -> None:
        name = given.thread.name if given.thread is not None else "unknown"
        if not _show_redacted(given.exc_value, f"Exception in thread {name}", hide):
            end_thread(given)

    def no_caller_redacted(given: sys.UnraisableHookArgs) -> None:
        if not _show_redacted(given.exc_value, given.err_msg or "Exception without caller", hide):
            no_caller(given)

    threading.excepthook, sys.unraisablehook = end_thread_redacted, no_caller_redacted
    try:
        yield
    finally:
        if threading.excepthook is end_thread_redacted:
            threading.excepthook = end_thread
        if sys.unraisablehook is no_caller_redacted:
            sys.unraisablehook = no_caller


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
