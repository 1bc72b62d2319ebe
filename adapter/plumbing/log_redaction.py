"""Keep secrets out of log records, warnings and uncaught exceptions.

This covers every logger and every handler of the process. Nothing here raises into the code that logs.
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

_OWN_FIELDS = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
"""The fields of every log record; other fields came from ``extra=``."""
_Hide = Callable[[str], str]


@contextlib.contextmanager
def redacted_logs(secrets: Iterable[str | None], environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Hide the secrets of this process in logs, warnings and uncaught exceptions during the block.

    Args:
        secrets: Texts that must not be shown.
        environ: Environment whose secrets must not be shown; None takes the process's own.
    """
    hide = functools.partial(hide_secrets, secrets=tuple(secrets), environ=environ)
    handle, show = logging.Logger.handle, warnings.showwarning

    def handle_redacted(self: logging.Logger, record: logging.LogRecord) -> None:
        # The logger passes a complete record to its handlers here; earlier the record has no ``extra=`` fields.
        _redact_record(record, hide)
        handle(self, record)

    def show_redacted(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        show(_safe(message, hide), *args, **kwargs)

    with (
        _replace(logging.Logger, "handle", handle_redacted),
        _replace(warnings, "showwarning", show_redacted),
        _replace(threading, "excepthook", _wrap_hook(threading.excepthook, hide)),
        _replace(sys, "unraisablehook", _wrap_hook(sys.unraisablehook, hide)),  # for example, in destructors
    ):
        yield


@contextlib.contextmanager
def _replace(owner: Any, name: str, replacement: Callable[..., None]) -> Iterator[None]:
    """Replace a function during the block; if others replaced it meanwhile, their function stays."""
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if getattr(owner, name) is replacement:
            setattr(owner, name, before)


def _wrap_hook(before: Callable[[Any], object], hide: _Hide) -> Callable[[Any], None]:
    """Wrap a hook for uncaught exceptions: if a traceback has a secret, write it without the secret instead."""

    def show(given: Any) -> None:
        error = given.exc_value
        text = "" if error is None or isinstance(error, SystemExit) else traceback_of(error)
        safe = hide(text)
        if safe == text:
            before(given)
        elif sys.stderr is not None:
            thread = getattr(given, "thread", None)
            title = "Exception that nobody caught" if thread is None else f"Exception in thread {thread.name}"
            sys.stderr.write(f"{title}:\n{safe}\n")

    return show


def _redact_record(record: logging.LogRecord, hide: _Hide) -> None:
    """Hide secrets in the message, the traceback, the stack and the ``extra=`` fields of a record."""
    try:
        message = record.getMessage()
    except Exception as error:  # noqa: BLE001 - a wrong call in any library must not end a training
        message = f"{_text(str, record.msg)} {_text(str, record.args)} [{type(error).__name__}]"
        record.msg, record.args = message, ()
    safe = hide(message)
    if safe != message:
        record.msg, record.args = safe, ()
    if record.exc_info and record.exc_info[1] is not None:
        text = traceback_of(record.exc_info[1])
        record.exc_text = hide(text)
        if record.exc_text != text:
            record.exc_info = None  # otherwise formatters would format it again
    if record.stack_info:
        record.stack_info = hide(record.stack_info)
    for name in vars(record).keys() - _OWN_FIELDS:
        vars(record)[name] = _safe(vars(record)[name], hide)


def _safe(value: Any, hide: _Hide) -> Any:
    """Return `value` if its texts hold no secret, otherwise its text without secrets."""
    text, shown = _text(str, value), _text(repr, value)
    return value if hide(text) == text and hide(shown) == shown else hide(text)


def _text(make: Callable[[Any], str], value: Any) -> str:
    try:
        return make(value)
    except Exception:  # noqa: BLE001 - a class of the user's may raise anything here
        return f"<{type(value).__name__}>"
