"""Files from web servers: complete, checked, cached, resumed; the token is sent only to its origins."""

import logging
import os
import threading
from concurrent.futures import CancelledError

import pytest

from genlight.adapter.contract.exceptions import AuthError, InputError
from genlight.adapter.inputs.http import Download, Transport, download
from genlight.adapter.plumbing.http import build_client
from genlight.adapter.plumbing.urls import origin_of
from support.messages import refusal

CONTENT = bytes(range(256)) * 40_000


@pytest.fixture
def fetch(tmp_path, retry):
    """Downloads a URL to ``<tmp>/cache/file`` with a client that shows the token to the given origins."""

    def run(url, *, token=None, origins=(), ended=None, **known):
        with build_client(token, {origin_of(origin) for origin in origins}) as client:
            request = Download(url, tmp_path / "cache" / "file", **known)
            return download(request, Transport(client, retry, ended or threading.Event()))

    return run


class AfterEachPiece(threading.Event):
    """Calls `act` with itself after each piece that has arrived."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def wait(self, timeout=None):
        self.act(self)
        return super().wait(timeout)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_file_arrives_whole_under_its_name_with_nothing_left_beside_it(server, fetch):
    path = fetch(server.put("/a", CONTENT))
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["file"]


def test_without_a_digest_the_server_confirms_the_cached_copy(server, fetch):
    url = server.put("/a", CONTENT)
    fetch(url)
    assert fetch(url).read_bytes() == CONTENT
    assert server.requests[1].headers["if-none-match"] == '"v1"'
    server.put("/a", b"new", etag='"v2"')
    assert fetch(url).read_bytes() == b"new"


def test_where_the_server_gives_nothing_to_ask_with_the_file_is_fetched_anew(server, fetch):
    url = server.put("/a", CONTENT, etag=None)
    fetch(url)
    server.put("/a", b"new", etag=None)
    assert fetch(url).read_bytes() == b"new"


def test_a_copy_that_lost_bytes_is_not_confirmed(server, fetch):
    url = server.put("/a", CONTENT)
    os.truncate(fetch(url), 10)
    assert fetch(url).read_bytes() == CONTENT


def test_a_copy_of_an_older_version_is_not_confirmed_after_a_transfer_that_was_refused(server, fetch):
    url = server.put("/a", b"old")
    fetch(url)
    new = server.put("/a", CONTENT, etag='"v2"')
    with refusal(InputError):
        fetch(new, most_bytes=3)
    assert fetch(url).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "known", [{"digest": "sha256:" + "0" * 64}, {"size_bytes": 3}, {"digest": "xxh3_128:" + "0" * 32}]
)
def test_content_that_is_not_what_was_asked_for_is_refused_and_removed(server, fetch, tmp_path, known):
    with pytest.raises(InputError, match=r"(was|were) expected"):
        fetch(server.put("/a", CONTENT), **known)
    assert names(tmp_path / "cache") == []
    assert len(server.requests) == 1


def test_a_broken_transfer_goes_on_where_it_broke(server, fetch):
    url = server.put("/a", CONTENT, break_after=[3_000_000, 2_000_000])
    assert fetch(url).read_bytes() == CONTENT
    ranges = [request.headers.get("range") for request in server.requests]
    assert ranges[0] is None
    starts = [int(text.removeprefix("bytes=").removesuffix("-")) for text in ranges[1:]]
    assert 0 < starts[0] <= 3_000_000
    assert starts[0] < starts[1] <= 5_000_000
    assert server.requests[1].headers["if-range"] == '"v1"'


@pytest.fixture
def died_complete(server, fetch, tmp_path):
    """Serves a file whose last process died between its last byte and its name."""
    part = tmp_path / "cache" / "file.part"

    def serve(**options):
        url = server.put("/a", CONTENT, **options)

        def end(ended):
            if part.exists() and part.stat().st_size == len(CONTENT):
                ended.set()

        with pytest.raises(CancelledError):
            fetch(url, ended=AfterEachPiece(end))
        assert part.stat().st_size == len(CONTENT)
        server.requests.clear()
        return url

    return serve


@pytest.mark.parametrize("options", [{}, {"etag": None}], ids=["with an ETag", "without"])
@pytest.mark.parametrize("known", [(), ("digest",), ("size_bytes",), ("digest", "size_bytes")], ids=str)
def test_a_download_that_was_complete_when_its_process_died_brings_one_byte(
    server, fetch, sha256, died_complete, options, known
):
    url = died_complete(**options)
    facts = {name: {"digest": f"sha256:{sha256(CONTENT)}", "size_bytes": len(CONTENT)}[name] for name in known}
    assert fetch(url, **facts).read_bytes() == CONTENT
    (request,) = server.requests
    can_join = "etag" not in options or "digest" in known
    assert request.headers.get("range") == (f"bytes={len(CONTENT) - 1}-" if can_join else None)


def test_a_complete_part_of_an_older_version_is_fetched_anew(server, fetch, died_complete):
    url = died_complete()
    new = b"n" * len(CONTENT)
    server.put("/a", new, etag='"v2"')
    assert fetch(url).read_bytes() == new


def test_a_file_that_changed_meanwhile_is_fetched_anew_and_never_mixed(server, fetch):
    url = server.put("/a", CONTENT, break_after=[4_000_000])
    new = b"n" * len(CONTENT)
    pieces = []

    def change(_):
        if not pieces:
            server.put("/a", new, etag='"v2"')
        pieces.append(None)

    assert fetch(url, ended=AfterEachPiece(change)).read_bytes() == new


def test_the_rest_of_another_version_is_not_taken_from_a_server_that_ignores_the_condition(server, fetch):
    url = server.put("/a", CONTENT, break_after=[4_000_000, 0, 0, 0])
    with pytest.raises(InputError):
        fetch(url)
    new = b"n" * len(CONTENT)
    server.put("/a", new, etag='"v2"', heeds_if_range=False)
    assert fetch(url).read_bytes() == new


def test_a_server_that_sends_less_than_was_asked_for_is_asked_again(server, fetch):
    url = server.put("/a", CONTENT, break_after=[2_000_000], longest_range=3_000_000)
    assert fetch(url).read_bytes() == CONTENT
    assert len(server.requests) >= 4


@pytest.mark.parametrize("content_range", ["bytes 0-1/9", "bytes */9", "", "items 1-2/3"])
def test_an_answer_with_another_range_than_the_asked_is_not_taken(server, fetch, content_range):
    url = server.put("/a", CONTENT, break_after=[4_000_000, 0, 0, 0])
    with pytest.raises(InputError):
        fetch(url)
    server.put("/a", CONTENT, headers={"Content-Range": content_range}, status=206, ranges=False)
    with refusal(InputError):
        fetch(url)


@pytest.mark.parametrize("etag", [None, 'W/"v1"'])
def test_without_a_strong_validator_or_digest_a_broken_transfer_starts_over(server, fetch, etag):
    url = server.put("/a", CONTENT, etag=etag, break_after=[4_000_000])
    assert fetch(url).read_bytes() == CONTENT
    assert [request.headers.get("range") for request in server.requests] == [None, None]


def test_a_partial_file_that_lost_bytes_goes_on_and_one_that_gained_some_is_fetched_anew(server, fetch, tmp_path):
    for size in (10, 3 * len(CONTENT)):
        url = server.put("/a", CONTENT, break_after=[4_000_000, 0, 0, 0])
        with pytest.raises(InputError):
            fetch(url)
        os.truncate(tmp_path / "cache" / "file.part", size)
        assert fetch(url).read_bytes() == CONTENT
        (tmp_path / "cache" / "file").unlink()


def test_a_part_that_a_system_wrote_before_it_went_down_counts_only_with_a_digest(server, fetch, sha256, monkeypatch):
    """Bytes that were not yet on the disk may be missing, even in the middle."""
    for known in ({}, {"digest": f"sha256:{sha256(CONTENT)}"}):
        url = server.put("/a", CONTENT, break_after=[4_000_000, 0, 0, 0])
        with pytest.raises(InputError):
            fetch(url, **known)
        server.requests.clear()
        with monkeypatch.context() as patch:
            patch.setattr("genlight.adapter.inputs.http._boot_id", lambda: "another")
            path = fetch(url, **known)
        assert path.read_bytes() == CONTENT
        assert ("range" in server.requests[0].headers) == bool(known)
        path.unlink()


def test_a_mixture_that_only_the_digest_reveals_is_fetched_anew(server, fetch, sha256):
    url = server.put("/a", b"o" * len(CONTENT), etag=None, break_after=[4_000_000, 0, 0, 0])
    with pytest.raises(InputError):
        fetch(url, digest=f"sha256:{sha256(CONTENT)}")
    server.put("/a", CONTENT, etag=None)
    assert fetch(url, digest=f"sha256:{sha256(CONTENT)}").read_bytes() == CONTENT


def test_a_server_that_ignores_ranges_still_delivers(server, fetch):
    url = server.put("/a", CONTENT, break_after=[4_000_000], ranges=False)
    assert fetch(url).read_bytes() == CONTENT


def test_a_passing_failure_is_retried(server, fetch):
    url = server.put("/a", b"", fail_first=[429, 503], headers={"Retry-After": "0"})
    assert fetch(url).read_bytes() == b""
    assert len(server.requests) == 3


def test_a_failure_that_stays_ends_after_the_given_attempts(server, fetch):
    with refusal(InputError):
        fetch(server.put("/a", CONTENT, fail_first=[503] * 9))
    assert len(server.requests) == 3


def test_a_final_refusal_is_not_retried(server, fetch):
    with pytest.raises(InputError, match="status 404"):
        fetch(server.put("/a", CONTENT, fail_first=[404]))
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_an_auth_error_with_the_way_out(server, fetch, status):
    url = server.put("/a", CONTENT, fail_first=[status])
    with refusal(AuthError):
        fetch(url)
    server.put("/a", CONTENT, fail_first=[status])
    with refusal(AuthError):
        fetch(url, token="canary", origins=[url])


def test_a_server_that_is_not_there_is_an_input_error(fetch):
    with refusal(InputError):
        fetch("http://127.0.0.1:1/a")


@pytest.mark.parametrize("location", ["ftp://h/x", "file:///etc/passwd", "/a"])
def test_a_redirect_that_leads_nowhere_is_an_input_error(server, fetch, location):
    with pytest.raises(InputError):
        fetch(server.put("/a", location=location))


def test_a_content_encoding_that_was_not_asked_for_is_refused(server, fetch):
    with refusal(InputError):
        fetch(server.put("/a", CONTENT, headers={"Content-Encoding": "gzip"}))
    assert server.requests[0].headers["accept-encoding"] == "identity"


def test_progress_is_logged_by_name_now_and_then_and_at_the_end(server, fetch, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="genlight.adapter.inputs")
    fetch(server.put("/a", CONTENT))
    assert caplog.messages == [f"{server.url}/a is here (10.2 MB)"]
    monkeypatch.setattr("genlight.adapter.inputs.http.LINE_EVERY_S", 0.0)
    fetch(server.put("/b?canary", CONTENT, etag='"v2"'))
    assert caplog.messages[1].startswith(f"{server.url}/b: ")
    assert " of 10.2 MB" in caplog.messages[1]
    assert caplog.messages[-2].endswith(": 10.2 MB of 10.2 MB")
    assert "canary" not in caplog.text


def test_a_stop_ends_the_transfer_at_the_next_piece_and_keeps_what_arrived(server, fetch, tmp_path):
    pieces = []

    def end_after_two(ended):
        pieces.append(None)
        if len(pieces) == 2:
            ended.set()

    url = server.put("/a", CONTENT)
    with pytest.raises(CancelledError):
        fetch(url, ended=AfterEachPiece(end_after_two))
    assert names(tmp_path / "cache") == ["file.part"]
    assert fetch(url).read_bytes() == CONTENT
    assert "range" in server.requests[1].headers
