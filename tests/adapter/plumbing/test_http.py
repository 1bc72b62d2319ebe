"""Receivers of the token, and answers that belong to their requests."""

import logging
import socket
import threading

import httpx2
import pytest

from genlight.adapter.plumbing.http import build_client, failure_text
from genlight.adapter.plumbing.urls import trusted_origins

pytestmark = pytest.mark.promise(name="security")

TOKEN = "t0ken-that-must-not-leak"


class Answers:
    """A server that reads one request at a time and sends prepared bytes."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.requests = []
        self.answers = []
        self.opened = []
        self.thread = threading.Thread(target=self.accept)
        self.thread.start()

    def accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.opened.append(connection)
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        while True:
            try:
                request = connection.recv(1 << 16)
            except OSError:
                return
            if not request:
                return
            self.requests.append(request.decode())
            connection.sendall(self.answers.pop(0))

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        for opened in (self.socket, *self.opened):
            opened.close()
        self.thread.join()


@pytest.fixture
def start_answers():
    servers = []

    def start():
        servers.append(Answers())
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ok(body=b"", extra=b""):
    return b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (extra, len(body), body)


def to(location, code=307):
    return b"HTTP/1.1 %d X\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % (code, location.encode())


def test_the_token_is_sent_only_to_a_trusted_origin(start_answers):
    trusted, other = start_answers(), start_answers()
    trusted.answers, other.answers = [ok()], [ok()]
    with build_client(TOKEN, trusted_origins([trusted.url])) as client:
        client.get(f"{trusted.url}/a")
        client.get(f"{other.url}/a")
    assert f"Authorization: Bearer {TOKEN}" in trusted.requests[0]
    assert TOKEN not in other.requests[0]


@pytest.mark.parametrize("both_trusted", [False, True])
def test_a_redirect_to_another_origin_drops_the_token_even_if_it_is_trusted(start_answers, both_trusted):
    first, second = start_answers(), start_answers()
    first.answers, second.answers = [to(f"{second.url}/b")], [ok(b"there")]
    origins = trusted_origins([first.url, second.url if both_trusted else None])
    with build_client(TOKEN, origins) as client:
        assert client.get(f"{first.url}/a").text == "there"
    assert TOKEN in first.requests[0]
    assert TOKEN not in second.requests[0]


def test_a_redirect_back_to_the_first_origin_does_not_restore_the_token(start_answers):
    first, second = start_answers(), start_answers()
    first.answers, second.answers = [to(f"{second.url}/b"), ok()], [to(f"{first.url}/c")]
    with build_client(TOKEN, trusted_origins([first.url])) as client:
        client.get(f"{first.url}/a")
    assert TOKEN not in first.requests[1]


def test_a_redirect_within_an_origin_keeps_the_token(start_answers):
    server = start_answers()
    server.answers = [to("/b"), ok()]
    with build_client(TOKEN, trusted_origins([server.url])) as client:
        client.get(f"{server.url}/a")
    assert TOKEN in server.requests[1]


def test_a_redirect_from_http_to_https_drops_the_token():
    seen = []

    def answer(request):
        seen.append((request.url.scheme, "authorization" in request.headers))
        if request.url.scheme == "http":
            return httpx2.Response(307, headers={"Location": "https://h/"})
        return httpx2.Response(200)

    with build_client(TOKEN, trusted_origins(["http://h", "https://h"])) as client:
        client._transport = httpx2.MockTransport(answer)
        client._mounts = {}
        client.get("http://h/")
    assert seen == [("http", True), ("https", False)]


def test_redirects_without_end_are_an_error(start_answers):
    server = start_answers()
    server.answers = [to("/again")] * 20
    with build_client(None, ()) as client, pytest.raises(httpx2.TooManyRedirects):
        client.get(server.url)


def test_user_info_of_a_url_is_used_if_the_token_is_not_for_its_origin(start_answers):
    server = start_answers()
    server.answers = [ok()]
    with build_client(TOKEN, ()) as client:
        client.get(server.url.replace("://", "://user:word@"))
    assert "Authorization: Basic dXNlcjp3b3Jk" in server.requests[0]


def test_a_second_answer_is_not_used_for_the_next_request(start_answers):
    server = start_answers()
    server.answers = [ok(b"one") + ok(b"one again"), ok(b"two")]
    with build_client(None, ()) as client:
        assert [client.get(server.url).text for _ in range(2)] == ["one", "two"]
    assert len(server.opened) == 2


def test_logs_of_the_http_library_show_no_query(start_answers, caplog):
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="httpx2")  # the command line reduces its level
    server = start_answers()
    server.answers = [ok()]
    with build_client(TOKEN, trusted_origins([server.url])) as client:
        client.get(f"{server.url}/path?signature=s3cret")
    assert "/path" in caplog.text
    assert "s3cret" not in caplog.text
    assert TOKEN not in caplog.text


def test_the_token_is_in_no_repr():
    with build_client(TOKEN, ["https://a:443"]) as client:
        assert TOKEN not in repr(client) + repr(client.auth)
        assert "***" in repr(client.auth)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"])
def test_a_proxy_that_is_down_is_named_without_its_password(monkeypatch, scheme, variable):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(variable, "http://user:pr0xy-canary@127.0.0.1:9")
    is_used = variable.lower() in (f"{scheme}_proxy", "all_proxy")
    with build_client(None, ()) as client, pytest.raises(httpx2.ConnectError) as caught:
        client.get(f"{scheme}://127.0.0.2:9/x")
    named = f" through the proxy http://127.0.0.1:9 that {variable} names" if is_used else ""
    assert failure_text(caught.value) == f"ConnectError: Connection refused{named}"

    monkeypatch.setenv("NO_PROXY", "127.0.0.2")
    with build_client(None, ()) as client, pytest.raises(httpx2.ConnectError) as caught:
        client.get(f"{scheme}://127.0.0.2:9/x")
    assert failure_text(caught.value) == "ConnectError: Connection refused"


def test_failure_text_has_type_and_system_error_but_no_address():
    with build_client(None, ()) as client, pytest.raises(httpx2.ConnectError) as caught:
        client.get("http://127.0.0.1:9/secret?x")
    assert failure_text(caught.value) == "ConnectError: Connection refused"
    assert failure_text(RuntimeError(TOKEN)) == "RuntimeError"
