"""Keeps secrets out of log records, whoever writes them and whichever handler shows them."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .redaction import hide_secrets

__all__ = ["redacted_logs"]


@contextlib.contextmanager
def redacted_logs(secrets: Iterable[str | None], environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """For the length of a block, have every log record of this process made without secrets, tracebacks included."""
    known = tuple(secrets)
    factory = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = factory(*args, **kwargs)
        message = record.getMessage()
        safe = hide_secrets(message, secrets=known, environ=environ)
        if safe != message:
            record.msg, record.args = safe, ()
        if record.exc_info and record.exc_info[1] is not None:
            text = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
            record.exc_text = hide_secrets(text, secrets=known, environ=environ)
        return record

    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
