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


def to(url):
    return httpx2.Response(307, headers={"Location": url})


@pytest.fixture
def send():
    """Send a GET through the answers for its URLs; return the ``Authorization`` of each request."""

    def get(url, answers, *trusted):
        seen = []

        def answer(request):
            seen.append(request.headers.get("authorization", ""))
            return answers.get(str(request.url)) or httpx2.Response(200)

        with build_client(TOKEN, trusted_origins(trusted)) as client:
            client._transport, client._mounts = httpx2.MockTransport(answer), {}
            client.get(url)
        return seen

    return get


A, B = "http://a/", "http://b/"


@pytest.mark.parametrize(
    ("answers", "trusted", "with_token"),
    [
        ({}, [A], [True]),
        ({}, [B], [False]),
        ({A: to(B)}, [A], [True, False]),
        ({A: to(B)}, [A, B], [True, False]),
        ({A: to(B), B: to(f"{A}again")}, [A, B], [True, False, False]),
        ({A: to("/again")}, [A], [True, True]),
        ({A: to("https://a/")}, [A, "https://a/"], [True, False]),
    ],
)
def test_the_token_is_sent_to_a_trusted_origin_and_by_redirects_only_within_it(send, answers, trusted, with_token):
    assert send(A, answers, *trusted) == [f"Bearer {TOKEN}" if has_token else "" for has_token in with_token]


def test_redirects_without_end_are_an_error(send):
    with pytest.raises(httpx2.TooManyRedirects):
        send(A, {A: to(A)})


def test_user_info_of_a_url_is_used_if_the_token_is_not_for_its_origin(send):
    assert send("http://user:word@a/", {}) == ["Basic dXNlcjp3b3Jk"]


def test_a_second_answer_is_not_used_for_the_next_request():
    """A server that answers every request twice."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            for number in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer % number * 2)
                    connection.recv(1)  # until the client closes it

        thread = threading.Thread(target=serve)
        thread.start()
        with build_client(None, ()) as client:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert [client.get(url).text for _ in range(2)] == ["0", "1"]
        thread.join()


def test_logs_of_the_http_library_show_no_query(send, caplog):
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="httpx2")  # the command line reduces its level
    send("http://a/path?signature=s3cret", {}, A)
    assert "/path" in caplog.text
    assert "s3cret" not in caplog.text
    assert TOKEN not in caplog.text


def test_the_token_is_in_no_repr():
    with build_client(TOKEN, ["https://a:443"]) as client:
        assert TOKEN not in repr(client) + repr(client.auth)
        assert "***" in repr(client.auth)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "https_proxy", "ALL_PROXY"])
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


def test_failure_text_does_not_show_the_text_of_an_error():
    assert failure_text(RuntimeError(TOKEN)) == "RuntimeError"
