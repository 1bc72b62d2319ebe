"""Keeps secrets out of texts: tokens, values of the environment, credentials in URLs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping

from .urls import hide_urls

__all__ = ["HIDDEN", "hide_environment", "hide_secrets", "redact"]

HIDDEN = "<hidden>"
SHORTEST_SECRET = 4
SHORTEST_OF_SECRET_NAME = 6
SHORTEST_OF_ANY_NAME = 16
"""A value as long as this, without blanks and slashes, may be a secret whatever its variable is called."""

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|SIGNATURE", re.IGNORECASE)
_CUT = "…"


def redact(text: str, secrets: Iterable[str | None]) -> str:
    """`text` with every secret in it replaced; one of a few characters is none, and would blot out every message.

    A secret is found also in its JSON spelling, and where a message was cut in the middle of it.
    """
    return _replaced(text, _hidden_by(secrets))


def hide_secrets(text: str, *, secrets: Iterable[str | None] = (), environ: Mapping[str, str] | None = None) -> str:
    """`text` of a log without `secrets`, credentials in URLs and what looks like a secret in the environment.

    Paths and short values of the environment stay, because a traceback without them says little.
    """
    found = {value: f"${name}" for name, value in _environment(environ) if _may_be_secret(name, value)}
    return hide_urls(_replaced(text, found | _hidden_by(secrets)))


def hide_environment(text: str, *, secrets: Iterable[str | None] = (), environ: Mapping[str, str] | None = None) -> str:
    """`text` that leaves the machine, without `secrets`, credentials in URLs and any value of the environment.

    Values of fewer than 6 characters stay: ``1`` or ``true`` are part of many texts.
    """
    found: dict[str, str] = {}
    for name, value in _environment(environ):
        if len(value) >= SHORTEST_OF_SECRET_NAME:
            found.setdefault(value, f"${name}")
    return hide_urls(_replaced(text, found | _hidden_by(secrets)))


def _environment(environ: Mapping[str, str] | None) -> Iterable[tuple[str, str]]:
    return (os.environ if environ is None else environ).items()


def _may_be_secret(name: str, value: str) -> bool:
    if _SECRET_NAME.search(name):
        return len(value) >= SHORTEST_OF_SECRET_NAME
    return len(value) >= SHORTEST_OF_ANY_NAME and re.search(r"[\s/]", value) is None


def _hidden_by(secrets: Iterable[str | None]) -> dict[str, str]:
    return {secret: HIDDEN for secret in secrets if secret and len(secret) >= SHORTEST_SECRET}


def _replaced(text: str, hidden: Mapping[str, str]) -> str:
    """`text` with each key of `hidden` replaced by its value, a longer one before one that it contains."""
    for value in sorted(hidden, key=len, reverse=True):
        for spelling in _spellings(value):
            text = text.replace(spelling, hidden[value])
            if _CUT in text and hidden[value] == HIDDEN:
                text = _without_beginning(text, spelling)
    return text


def _spellings(value: str) -> Iterator[str]:
    yield value
    in_json = json.dumps(value)[1:-1]
    if in_json != value:
        yield in_json


def _without_beginning(text: str, secret: str) -> str:
    for length in range(len(secret) - 1, SHORTEST_SECRET - 1, -1):
        text = text.replace(secret[:length] + _CUT, HIDDEN + _CUT)
    return text
