"""Spot notices: AWS, GCP and Azure announce at a machine's metadata address that they take the machine back."""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from ...adapter.contract.exceptions import StopReason
from ...adapter.plumbing.text import require
from ...adapter.plumbing.threads import started

log = logging.getLogger(__name__)

Cloud = Literal["aws", "gcp", "azure"]
ADDRESSES: dict[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
POLL_S = 5.0
"""Seconds between two requests. AWS gives 120 s of notice, GCP and Azure 30 s."""
_TIMEOUT_S = 2.0
_LARGEST = 1 << 16
_OPENER = build_opener(ProxyHandler({}))  # the address is on this machine, whatever the proxy


class SpotNotice:
    """Asks whether the cloud has announced that it takes back this spot machine.

    Args:
        cloud: The cloud whose metadata address is read.
        address: Another address to read, without a path; for tests.

    Raises:
        ValueError: `cloud` is none of the three.
    """

    def __init__(self, cloud: Cloud, address: str | None = None) -> None:
        require((cloud in ADDRESSES, "spot", f"one of {', '.join(map(repr, ADDRESSES))}", cloud))
        self.cloud = cloud
        self.address = ADDRESSES[cloud] if address is None else address
        self._is_noticed = self._has_warned = False

    def reason(self) -> StopReason | None:
        """Return ``preempted`` once there was a notice. Makes no request."""
        return "preempted" if self._is_noticed else None

    @contextmanager
    def polling(self, every_s: float | None = None) -> Iterator[None]:
        """Ask every `every_s` seconds (None: `POLL_S`), in a thread, until the block ends or there is a notice."""
        end = threading.Event()

        def poll() -> None:
            while not self._is_noticed and not end.is_set():
                self._ask()
                end.wait(POLL_S if every_s is None else every_s)

        started(threading.Thread(target=poll, name="genlight-spot", daemon=True))
        try:
            yield
        finally:
            end.set()

    def _ask(self) -> None:
        try:
            self._is_noticed = self._has_notice()
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("no notice of %s can be read from %s (%s); still trying", self.cloud, self.address, error)
        if self._is_noticed:
            log.warning("%s takes back this machine: the run saves a checkpoint and stops", self.cloud)

    def _has_notice(self) -> bool:
        if self.cloud == "aws":  # answers 404 until there is a notice
            token = self._read("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
            headers = {"X-aws-ec2-metadata-token": token}
            try:
                action = json.loads(self._read("/latest/meta-data/spot/instance-action", headers))["action"]
            except HTTPError as error:
                if error.code == http.client.NOT_FOUND:
                    return False
                raise
            return action in ("terminate", "stop", "hibernate")
        if self.cloud == "gcp":
            return self._read("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == "TRUE"
        events = json.loads(self._read("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}))
        return any(event.get("EventType") in ("Preempt", "Terminate") for event in events.get("Events", ()))

    def _read(self, path: str, headers: dict[str, str], method: str = "GET") -> str:
        request = Request(self.address + path, headers=headers, method=method)  # noqa: S310 - a constant http address
        with _OPENER.open(request, timeout=_TIMEOUT_S) as answer:
            text: bytes = answer.read(_LARGEST)
        return text.decode().strip()
