"""Check URLs, determine their origins, and render them without secrets; needs no HTTP client.

Parsers disagree about unusual URLs: a backslash before the host, two ``@``, a tab, letters that only look like ASCII.
The receiver of a token must not depend on the parser. So a URL is either so plain that all parsers find the same host
and port, or it is refused with the reason.
"""

from __future__ import annotations

import encodings.idna  # see below
import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import unquote

# Imported early: if this codec cannot be imported when it is first used, for example because too many files are open,
# Python remembers that for the rest of the process, and no URL could be checked any more.
assert encodings.idna is not None

PATTERN_CHARACTERS = "*?["
"""Characters that make a path a glob pattern."""

_FILE_SUFFIXES = (".parquet", ".json", ".safetensors", ".arrow", ".csv", ".pt", ".bin", ".zip", ".gz")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LONGEST = 65_536
_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?:[^@/?#\\\[\]]*@)?"
    r"(?P<host>[a-z0-9_~-]+(?:\.[a-z0-9_~-]+)*\.?|\[[0-9a-f.]*:[0-9a-f:.]*\])"
    r"(?::(?P<port>[0-9]{0,5}))?"
    r"(?:[/?#].*)?",
    re.IGNORECASE | re.ASCII,
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://|file:", re.IGNORECASE)
_PLAIN_AUTHORITY = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]\\]*)(?::[0-9]*)?")
# The bound on the scheme keeps the search linear in long runs of letters, such as an encoded blob in a log line.
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://(?:[^\s/@]*@)?[^\s'\"<>`]*")


def has_scheme(text: str) -> bool:
    """Whether `text` has a scheme: it is a URL, and not a path relative to a folder."""
    return _SCHEME.match(text) is not None


def is_http_url(text: str) -> bool:
    """Whether `text` starts like an address of a web server."""
    return text.lower().startswith(("http://", "https://"))


def looks_like_path(text: str) -> bool:
    """Whether `text` can only be meant as a path on this machine, even if nothing exists there."""
    if text.startswith(("hf:", "cozy:")) or "://" in text:
        return False
    begins, ends = text.startswith(("/", ".", "~")), text.lower().endswith(_FILE_SUFFIXES)
    return begins or ends or text.count("/") > 1 or any(character in text for character in PATTERN_CHARACTERS)


def path_of_url(url: str) -> str:
    """Return the path that a ``file:`` URL names; bytes that are not UTF-8 are kept.

    Raises:
        ValueError: It names another host, or no absolute path.
    """
    match = re.fullmatch(r"file:(?://(?:localhost)?)?(/(?!/).*)", url, re.IGNORECASE | re.DOTALL)
    if match is None:
        raise ValueError("a file URL has an absolute path and no host: file:///folder/name")
    return unquote(match[1], errors="surrogateescape")


def url_fault(url: str) -> str | None:
    """Return why `url` cannot be requested over HTTP, or None."""
    if not is_http_url(url):
        return "it does not begin with http:// or https://"
    if any(character.isspace() or not character.isprintable() for character in url):
        return "it contains white space or characters that are not allowed in an address"
    match = _URL.fullmatch(url)
    if match is None or len(url) > _LONGEST or not _is_sound(match["host"], match["port"]):
        return (
            "its host, its port or its length cannot be used; letters beyond ASCII are written in their xn-- spelling, "
            "an @ in a password as %40"
        )
    return None


def _is_sound(host: str, port: str | None) -> bool:
    """Return whether the host is a valid address or name, and the port a valid number."""
    try:
        if host.startswith("[") or host.replace(".", "").isdigit():
            ipaddress.ip_address(host.strip("[]"))
        else:
            host.encode("ascii").decode("idna")  # a name that starts with xn-- may be invalid
    except ValueError:
        return False
    return not port or 0 < int(port) < 65_536


def origin_of(url: str) -> str:
    """Return scheme, host and port of `url` in one spelling, such as ``https://store.example:443``.

    Raises:
        ValueError: `url` is not an HTTP URL. The message shows no user info and no query.
    """
    match = _URL.fullmatch(url)
    problem = url_fault(url)
    if problem is not None or match is None:
        raise ValueError(f"Invalid URL {safe_url(url)!r}: {problem}. Expected http://host/… or https://host/….")
    return origin_text(match["scheme"], match["host"].strip("[]"), int(match["port"] or 0) or None)


def origin_text(scheme: str, host: str, port: int | None) -> str:
    """Return an origin in its one spelling.

    Args:
        scheme: ``http`` or ``https``.
        host: A name or an address, IPv6 without brackets.
        port: None means the scheme's default.

    Raises:
        ValueError: The scheme is another one, or the address is malformed.
    """
    scheme = scheme.lower()
    if scheme not in _DEFAULT_PORTS:
        raise ValueError(f"Invalid scheme. Expected http or https, but received {scheme!r}.")
    shown = f"[{ipaddress.IPv6Address(host).compressed}]" if ":" in host else host.lower()
    return f"{scheme}://{shown}:{_DEFAULT_PORTS[scheme] if port is None else port}"


def trusted_origins(urls: Iterable[str | None], further: Iterable[str] = ()) -> frozenset[str]:
    """Return the origins that may receive the token: the origins of `urls` and `further`.

    None and empty URLs are skipped, and so are URLs of other schemes (``hf://``, ``s3://``), which have separate
    credentials. A bare host in `further` means https.

    Raises:
        ValueError: One of the URLs is malformed, or one of `further` is not an ``http`` or ``https`` origin.
    """
    served = {origin_of(url) for url in urls if url and is_http_url(url)}
    return frozenset(served | {origin_of(each if "://" in each else f"https://{each}") for each in further})


def safe_url(url: str) -> str:
    """Return `url` without user info, query and fragment, because they may hold credentials; for messages and logs.

    If the user info cannot be distinguished from the rest (a password with a slash in it), only the scheme is left.
    """
    scheme, separator, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    if not separator:
        return scheme
    authority, slash, path = rest.partition("/")
    host = authority.rpartition("@")[2]
    return f"{scheme}://{host}{slash}{path}" if _PLAIN_AUTHORITY.fullmatch(host) else f"{scheme}://…"


def hide_urls(text: str) -> str:
    """Replace every URL in `text` by its `safe_url`."""
    return _URL_IN_TEXT.sub(lambda match: safe_url(match.group()), text)
