"""A control plane in bad faith: it takes neither the memory nor the time of a run, and gets no token elsewhere."""

from __future__ import annotations

import json
import threading
import time

import pytest

from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.contract.types import LifecycleLease
from genlight.adapter.run.control_plane import LARGEST_ANSWER, HttpLifecycleClient, LifecycleSession

TOKEN = "c4nary-0f-the-le4se"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer(body):
    return WHOLE % (len(body), body)


def redirect(code, location):
    return b"HTTP/1.1 %d Elsewhere\r\nLocation: %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % (
        code,
        location.encode(),
    )


@pytest.fixture
def claim():
    """Claims a run from a URL, once."""

    def ask(url, timeout_s=60.0):
        client = HttpLifecycleClient(url, token=TOKEN, attempts=1, timeout_s=timeout_s)
        try:
            return client.claim(run_id="r")
        finally:
            client.close()

    return ask


@pytest.mark.parametrize(
    ("first", "repeated", "said"),
    [
        (answer(b" " * (2 * LARGEST_ANSWER)), b"", f"more than {LARGEST_ANSWER:,} bytes"),
        (answer(b"[" * 1_000_000), b"", "other than a JSON object"),
        (answer(b'{"lease_id": "\xff"}'), b"", "other than a JSON object"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd", b"", "unusably"),
        (redirect(302, "/other"), b"", "unusably: TooManyRedirects"),
        (b"nothing of the kind\r\n\r\n", b"", "did not accept"),
    ],
    ids=["long", "nested", "no text", "not packed", "in circles", "no HTTP"],
)
def test_an_answer_that_is_none_is_an_error(hostile_server, claim, first, repeated, said):
    with pytest.raises(InputError, match=said) as caught:
        claim(hostile_server(first, repeated))
    assert TOKEN not in str(caught.value)


def test_an_answer_that_does_not_end_is_none(hostile_server, claim):
    """A byte comes often enough, so that the connection never counts as stalled."""
    with pytest.raises(InputError, match="the answer does not end"):
        claim(hostile_server(CHUNKED, b"1\r\n \r\n"), timeout_s=0.2)


def test_what_was_only_read_somewhere_is_no_lease(hostile_server, claim):
    """A 303 has the client ask with GET, which claims nothing."""
    elsewhere = hostile_server(answer(json.dumps({"lease_id": "found"}).encode()), b"")
    with pytest.raises(InputError, match="let it answer 307 or 308"):
        claim(hostile_server(redirect(303, elsewhere), b""))


def test_the_token_does_not_follow_a_redirect_to_another_origin(hostile_server, claim, server):
    server.put("/runs/r/claim", b'{"lease_id": "x"}')
    with pytest.raises(InputError):  # that server takes no POST
        claim(hostile_server(redirect(307, f"{server.url}/runs/r/claim"), b""))
    assert TOKEN not in repr(server.requests)


class Hangs:
    """Answers the claim; its heartbeat never returns, as that of a client that has no time limit."""

    def __init__(self):
        self.asked, self.released = threading.Event(), threading.Event()

    def claim(self, *, run_id):
        return LifecycleLease(run_id, "lease")

    def heartbeat(self, *, lease):
        self.asked.set()
        self.released.wait(120)
        return True


def test_a_heartbeat_that_never_returns_loses_the_lease():
    client = Hangs()
    with LifecycleSession(client, "r", interval_s=0.01, patience_s=0.1) as session:
        assert client.asked.wait(60)
        end = time.monotonic() + 60
        while session.reason() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert session.reason() == "canceled"
        client.released.set()
