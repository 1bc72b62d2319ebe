"""Keep references of a job away from private addresses, such as a cloud's metadata service or an internal database.

The author of a job may not be allowed to reach every address that this machine can reach. So each connection, also
after a redirect, is checked when it is open and before a byte is sent. At that point a name server can no longer change
the address. A proxy opens its own connections; with a proxy, the host's addresses are looked up and checked first.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..contract.exceptions import InputError

if TYPE_CHECKING:
    import httpx2


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_private(address: str) -> bool:
    """Return whether an IP address is not public: private, loopback, link-local, reserved or multicast.

    If an IPv6 address contains an IPv4 address, the IPv4 address decides.

    Raises:
        ValueError: `address` is not an IP address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        ip = inner or ip
    return not ip.is_global or ip.is_multicast


@dataclass(frozen=True)
class AddressGuard:
    """Refuses connections to private addresses.

    Args:
        allowed: Private hosts that may be reached: host names, addresses and networks (``10.1.0.0/16``).
    """

    allowed: Sequence[str] = ()

    def attach(self, client: httpx2.Client) -> None:
        """Check every connection that `client` opens from now on; a refusal is an `InputError`."""
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "request": [*hooks["request"], self._before_request]}

    def check_url(self, url: str) -> None:
        """Check the current addresses of the host of `url`.

        Raises:
            InputError: One of them is private and not allowed.
        """
        self._check_host(urlsplit(url).hostname or "")

    def _before_request(self, request: httpx2.Request) -> None:
        """Have the transport report how it connects for this request, and check the address."""
        host, goes_through_proxy = request.url.host, False

        def trace(event: str, info: dict[str, Any]) -> None:
            nonlocal goes_through_proxy
            if event.endswith("connect_tcp.started"):
                goes_through_proxy = _bare(str(info.get("host", ""))) != _bare(host)
                if goes_through_proxy:
                    self._check_host(host)
                with contextlib.suppress(ValueError):  # a host name; its address is checked once the connection is open
                    self._check_address(host, _bare(host))
            elif event.endswith("connect_tcp.complete") and not goes_through_proxy:
                stream = info["return_value"]
                try:
                    self._check_address(host, str(stream.get_extra_info("server_addr")[0]))
                except InputError:
                    stream.close()
                    raise

        request.extensions = {**request.extensions, "trace": trace}

    def _check_host(self, host: str) -> None:
        try:
            addresses = socket.getaddrinfo(_bare(host), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return  # connecting will report that there is no such host
        for *_, address in addresses:
            self._check_address(host, str(address[0]))

    def _check_address(self, host: str, address: str) -> None:
        if not is_private(address) or self._is_allowed(host, address):
            return
        raise InputError(
            f"{host} has the private address {address}, and this job may not reach private addresses. "
            "To allow it, add the host or its network to `TRAINER_PRIVATE_HOSTS`."
        )

    def _is_allowed(self, host: str, address: str) -> bool:
        ip = ipaddress.ip_address(address.partition("%")[0])
        for entry in self.allowed:
            if entry.lower() == _bare(host).lower():
                return True
            with contextlib.suppress(ValueError):  # a host name
                if ip in ipaddress.ip_network(entry, strict=False):
                    return True
        return False


def _bare(host: str) -> str:
    return host.strip("[]").rstrip(".")
