"""What may be shown of a URL, and where it belongs."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

__all__ = ["URL_IN_TEXT", "is_http_url", "origin_of", "safe_url", "url_fault"]

DEFAULT_PORTS = {"http": 80, "https": 443}

URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`]+")
"""Anything in a text that looks like a URL."""


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def is_http_url(text: str) -> bool:
    """Whether `text` starts like an address of a web server."""
    return text.lower().startswith(("http://", "https://"))


def url_fault(url: str) -> str | None:
    """Why `url` cannot be requested over HTTP, or None when it can."""
    parts = _split(url)
    if parts is None:
        return "its host or port is malformed"
    if parts.scheme not in DEFAULT_PORTS:
        return "it does not begin with http:// or https://"
    if not parts.hostname:
        return "it names no host"
    if any(character.isspace() or not character.isprintable() for character in url):
        return "it holds white space or characters that no address has"
    return None


def origin_of(url: str) -> str:
    """Scheme, host and port of `url` in one spelling: ``https://host:443``.

    Raises:
        ValueError: `url` is no HTTP URL.
    """
    problem = url_fault(url)
    if problem:
        raise ValueError(f"Invalid URL {safe_url(url)}: {problem}.")
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}:{parts.port or DEFAULT_PORTS[parts.scheme]}"


def safe_url(url: str) -> str:
    """`url` without user info, query and fragment, which may hold credentials; fit for messages and logs."""
    parts = _split(url)
    if parts is None:
        return url.partition("://")[0] + "://…"
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else parts.path
    return shown + ("?…" if parts.query else "")
