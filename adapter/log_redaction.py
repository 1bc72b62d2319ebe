"""Keeps secrets out of log records, whoever writes them and whichever handler shows them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .faults import redact
from .urls import URL_IN_TEXT, safe_url

__all__ = ["hide_secrets", "redacted_logs"]

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|SIGNATURE", re.IGNORECASE)
SHORTEST_OF_SECRET_NAME = 6
SHORTEST_OF_ANY_NAME = 16
"""A value as long as this, without blanks and slashes, may be a secret whatever its variable is called."""


def hide_secrets(text: str, *, secrets: Iterable[str | None] = (), environ: Mapping[str, str] | None = None) -> str:
    """`text` of any length without tokens, credentials in URLs and what looks like a secret in the environment.

    Paths and short values of the environment stay, because a traceback without them says little.
    """
    text = redact(text, secrets)
    values = os.environ if environ is None else environ
    hidden = {value: f"${name}" for name, value in values.items() if _may_be_secret(name, value)}
    for value in sorted(hidden, key=len, reverse=True):
        if value in text:
            text = text.replace(value, hidden[value])
    return URL_IN_TEXT.sub(lambda match: safe_url(match.group()), text)


def _may_be_secret(name: str, value: str) -> bool:
    if _SECRET_NAME.search(name):
        return len(value) >= SHORTEST_OF_SECRET_NAME
    return len(value) >= SHORTEST_OF_ANY_NAME and re.search(r"[\s/]", value) is None


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
