"""One HTTP client for uploads and downloads. It decides who receives the token, also after redirects.

The bearer token belongs to an origin (scheme, host, port). It is added to a request only if the origin of the request
is trusted. It is dropped when a redirect leaves that origin, even if the new origin is trusted too, because the server
and not the operator decides about a redirect.

Usage::

    origins = trusted_origins([config.checkpoint_url, config.file_store_url], config.token_origins)
    with build_client(token, origins) as client, client.stream("GET", url) as response:
        ...
"""

from __future__ import annotations

import logging
import os
import ssl
import urllib.request
from collections.abc import Collection, Generator
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx2

from ..contract.exceptions import StartupContractError
from .failures import causes_of
from .urls import origin_text, safe_url

_TOKEN_ORIGIN = "genlight.token_origin"  # noqa: S105 - the name of a request extension, not a secret
MAX_REDIRECTS = 5
CONNECT_TIMEOUT_S = 10.0
"""Connect timeout in seconds."""


def _connected_origin(url: httpx2.URL) -> str | None:
    """Return the origin that a request for `url` goes to; None if the scheme is not HTTP (the client refuses it).

    Built from the parts that the client connects to, so that no other parser decides who receives the token.
    """
    try:
        return origin_text(url.scheme, url.raw_host.decode("ascii"), url.port)
    except ValueError:
        return None


def failure_text(error: BaseException) -> str:
    """Describe a network error without URL, header or body: its type, the system's text, and the proxy if there is one.

    A failed connection to a proxy looks like one to the server, and users forget the variables that set a proxy.
    """
    causes = [part for part in causes_of(error) if isinstance(part, OSError) and part.strerror]
    name = type(error).__name__
    text = f"{name}: {causes[0].strerror}" if causes and causes[0] is not error else name
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        text += _through_proxy(error)
    return text


def _through_proxy(error: httpx2.RequestError) -> str:
    """Return a text about the proxy that the environment sets, for the error of a request; empty if there is none."""
    try:
        url = error.request.url
    except RuntimeError:  # it belongs to no request
        return ""
    proxies = {} if urllib.request.proxy_bypass(url.host) else urllib.request.getproxies()
    name = next((name for name in (url.scheme, "all") if name in proxies), None)
    if name is None:
        return ""
    variable = next((each for each in (f"{name}_proxy", f"{name.upper()}_PROXY") if each in os.environ), "the system")
    return f" through the proxy {safe_url(proxies[name])} that {variable} names"


class _OriginAuth(httpx2.Auth):
    """Adds the token if the request's origin is trusted, and remembers that origin."""

    def __init__(self, token: str, origins: Collection[str]) -> None:
        self._token = token
        self._origins = frozenset(origins)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(token=***, origins={sorted(self._origins)})"

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        origin = _connected_origin(request.url)
        if origin in self._origins:
            request.headers["Authorization"] = f"Bearer {self._token}"
            request.extensions = {**request.extensions, _TOKEN_ORIGIN: origin}
            yield request
        elif request.url.username or request.url.password:
            yield from httpx2.BasicAuth(request.url.username, request.url.password).auth_flow(request)
        else:
            yield request


def _drop_token_after_redirect(request: httpx2.Request) -> None:
    """Drop the token if a redirect leads to another origin.

    The client itself drops it for another host, but keeps it from http to https and does not know our origins.
    """
    meant_for = request.extensions.get(_TOKEN_ORIGIN)
    if "Authorization" in request.headers and meant_for is not None and _connected_origin(request.url) != meant_for:
        del request.headers["Authorization"]


def _hide_queries(record: logging.LogRecord) -> bool:
    """Remove queries from the URLs that the HTTP library logs at level INFO: they may hold secrets."""
    if isinstance(record.args, tuple):
        record.args = tuple(safe_url(str(a)) if isinstance(a, httpx2.URL) else a for a in record.args)
    return True


def build_client(
    token: str | None,
    origins: Collection[str],
    *,
    timeout_s: float = 30.0,
    max_connections: int = 4,
    verify: ssl.SSLContext | bool = True,
) -> httpx2.Client:
    """Make a client that follows redirects and sends `token` only to `origins`.

    Each request uses a new connection. If a server or a proxy answers a request twice, a reused connection would take
    the second answer for the answer to the next request. An upload that never arrived would then count as delivered.

    Args:
        token: The bearer token; None or empty sends none.
        origins: The result of `trusted_origins` (`urls.py`).
        timeout_s: Seconds without a byte in either direction after which a transfer counts as stalled.
        max_connections: Maximum number of open connections.
        verify: The certificate authorities to accept; True means the authorities of the system.

    Raises:
        StartupContractError: A proxy or certificate from the environment cannot be used.

    Threads may share the client. It follows redirects that turn another method into GET, as HTTP requires: a caller
    that uploads must check ``response.request.method``.
    """
    logging.getLogger("httpx2").addFilter(_hide_queries)  # adding it again has no effect
    try:
        return httpx2.Client(
            auth=_OriginAuth(token, origins) if token else None,
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=max_connections, max_keepalive_connections=0),
            follow_redirects=True,
            max_redirects=MAX_REDIRECTS,
            headers={"User-Agent": "genlight"},
            verify=verify,
            # Cookies are never kept: they would be sent to every port of a host.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            event_hooks={"request": [_drop_token_after_redirect]},
        )
    except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:  # its text may hold a proxy's password
        reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise StartupContractError(
            "startup.invalid_job_spec",
            f"The proxy or certificate variables of the environment cannot be used ({reason}). Correct HTTP_PROXY, "
            "HTTPS_PROXY, ALL_PROXY (socks needs the package socksio), NO_PROXY, SSL_CERT_FILE or SSL_CERT_DIR, or "
            "unset them.",
        ) from error
