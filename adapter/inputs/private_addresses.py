"""References of a job must not reach what only this machine can: the cloud's metadata service, a neighbour's database.

A job spec may have been written by a user who cannot reach those. So a connection is checked once it stands and
before a byte is sent: by then no name server can change its mind, and a redirect is checked like any other request.
A proxy decides itself what it reaches; behind one, the name is looked up and its addresses are judged beforehand.
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

__all__ = ["AddressGuard", "is_private"]

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_private(address: str) -> bool:
    """Whether an IP address is not one of the public internet: private, loopback, link-local, reserved, multicast.

    An IPv6 address that stands for an IPv4 one is judged as that.

    Raises:
        ValueError: It is not an IP address.
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
    """Refuses connections to private addresses, but for those that were allowed.

    Args:
        allowed: Host names, addresses and networks (``10.1.0.0/16``) that may be reached all the same.
    """

    allowed: Sequence[str] = ()

    def attach(self, client: httpx2.Client) -> None:
        """Judge every connection that `client` opens from now on; a refusal is an `InputError`."""
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "request": [*hooks["request"], self._before_request]}

    def check_url(self, url: str) -> None:
        """Judge the addresses that the host of `url` has now.

        Raises:
            InputError: One of them is private and was not allowed.
        """
        self._check_host(urlsplit(url).hostname or "")

    def _before_request(self, request: httpx2.Request) -> None:
        host, goes_through_proxy = request.url.host, False

        def trace(event: str, info: dict[str, Any]) -> None:
            nonlocal goes_through_proxy
            if event.endswith("connect_tcp.started"):
                goes_through_proxy = _bare(str(info.get("host", ""))) != _bare(host)
                if goes_through_proxy:
                    self._check_host(host)
                with contextlib.suppress(ValueError):  # a name, whose address shows once the connection stands
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
            found = socket.getaddrinfo(_bare(host), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return  # connecting will report that there is no such host
        for *_, address in found:
            self._check_address(host, str(address[0]))

    def _check_address(self, host: str, address: str) -> None:
        if not is_private(address) or self._is_allowed(host, address):
            return
        raise InputError(
            f"{host} is at {address}, which is a private address, and references of this job may not reach those. "
            "Name the host or its network in `TRAINER_PRIVATE_HOSTS` if they may."
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
