"""Valid URLs, their origins, and their text without secrets."""

from urllib.parse import urlsplit

import httpx2
import pytest
from hypothesis import example, given, settings, strategies as st

from genlight.adapter.plumbing.http import build_client
from genlight.adapter.plumbing.urls import (
    hide_urls,
    is_http_url,
    origin_of,
    origin_text,
    safe_url,
    trusted_origins,
    url_fault,
)
from support.messages import refusal

pytestmark = pytest.mark.promise(name="security")

TOKEN = "t0ken-that-must-not-leak"
ODD = [
    *("http://", "//", "/", "\\", "@", ":", "::1", "[", "]", "?", "#", "..", "%40", "%2f", "%00", "%", ";", ",", "&"),
    *("\t", "\n", "\r", " ", "\x00", "\u200b", "\u3002", "\uff0e", "\u2100", "\uff54", "+80", "8_0", "\uff18", "-1"),
]
HOSTS = [
    *("trusted.example", "evil.example", "TRUSTED.example", "trusted.example.", "xn--bcher-kva", "a_b", "h"),
    *("127.0.0.1", "127.1", "0x7f.1", "127.000.0.1", "[::1]", "[FE80::A]", "[::ffff:127.0.0.1]", "b\u00fccher.example"),
]
odd = st.lists(st.sampled_from(ODD) | st.text(max_size=2), max_size=2).map("".join)
sometimes = st.just("") | st.just("") | odd
plain_or_odd = [
    st.sampled_from(["http://", "https://", "HTTPs://"]),
    st.sampled_from(["", "", "user@", "user:pass@", "trusted.example:80@"]),
    sometimes,
    st.sampled_from(HOSTS),
    sometimes,
    st.sampled_from(["", "", ":", ":80", ":443", ":0443", ":8080", ":65536", ":0"]),
    sometimes,
    st.sampled_from(["", "/", "/a@evil.example", "?q@evil.example", "#@evil.example", "/\\evil.example"]),
]
web_urls = st.tuples(*plain_or_odd).map("".join)


class WhereTo(httpx2.BaseTransport):
    """Records the address that the client would connect to, and the credentials."""

    def __init__(self):
        self.seen = []

    def handle_request(self, request):
        origin = (request.url.raw_scheme.decode(), request.url.raw_host.decode(), request.url.port)
        self.seen.append((origin, request.headers.get("Authorization", ""), request.headers.get("Host", "")))
        return httpx2.Response(200)


@pytest.fixture(scope="module")
def client():
    with build_client(TOKEN, ()) as opened:  # only once, because a client reads the certificates of the machine
        opened._transport, opened._mounts = WhereTo(), {}
        yield opened


def connects_to(client, url, origins):
    client._transport.seen, client.auth._origins = [], origins
    client.get(url)
    return client._transport.seen[0]


@settings(max_examples=200)
@given(web_urls)
@example("http://u:p@trusted.example:080/x?y#z")
@example("http://[FE80::A]:443")
@example("http://trusted.example:")
@example("HTTPS://Trusted.Example.:443/\\evil.example")
def test_an_accepted_url_connects_to_its_origin_with_the_token(client, url):
    if url_fault(url) is not None:
        return
    try:
        (scheme, host, port), credentials, _ = connects_to(client, url, trusted_origins([url]))
    except UnicodeError:  # the client refuses a few more names that only look like xn-- ones
        assert "xn--" in url
        return
    assert origin_text(scheme, host, port) == origin_of(url)
    assert credentials == f"Bearer {TOKEN}"
    assert urlsplit(url).hostname == host.lower()  # the standard library joins our URLs and reads the same host


@settings(max_examples=200)
@given(web_urls, web_urls)
@example("http://trusted.example", "http://trusted.example:0")
@example("http://trusted.example", "http://trusted.example\\@evil.example")
@example("http://trusted.example", "http://trusted.example@evil.example")
@example("http://trusted.example:80", "http://evil.example:80@trusted.example:81")
def test_the_token_is_sent_only_to_the_trusted_origin_however_a_url_is_written(client, trusted, url):
    if url_fault(trusted) is not None:
        return
    try:
        (scheme, host, port), credentials, header = connects_to(client, url, trusted_origins([trusted]))
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, UnicodeError):
        return
    if TOKEN in credentials:
        assert origin_text(scheme, host, port) == origin_of(trusted)
        assert header.startswith(f"[{host}]" if ":" in host else host)


BAD = {
    "does not begin": ["", "host", "ftp://h", "https:/h"],
    "white space": ["http://h/a b", "http://h\n", "http://h\t.example", "http://h/\udc80"],
    "cannot be used": [
        *("https://", "https://u@:80/", "https:///path", "http://h:x", "http://h:65536", "http://h:0", "http://127.1/"),
        *(
            "http://[1.2.3.4]/",
            "http://\u212aing/",
            "http://h:\uff18\uff10",
            "http://1.2.3.256/",
            "http://127.000.0.1/",
        ),
        *("http://[::1", "http://[::1]evil", "http://[::1%25eth0]/", "http://trusted\\@evil/", "http://a%2eb/"),
        *("http://a..b/", "http://.a/", "http://xn--a/", "http://me:p@ss@h/", "http://bücher.example/"),
        *("http://\uff48/", "http://h/" + "a" * 70_000),
    ],
}


@pytest.mark.parametrize("reason", BAD)
def test_ambiguous_and_unusable_urls_are_refused_with_a_reason(reason):
    for url in BAD[reason]:
        assert reason in url_fault(url)
        with refusal(ValueError):
            origin_of(url)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://Store.Example/x?y", "https://store.example:443"),
        ("HTTP://u:p@127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("https://[0:0::1]/x", "https://[::1]:443"),
        ("https://store.example:443", "https://store.example:443"),
        ("https://store.example:/@x", "https://store.example:443"),
        ("http://h?a@b", "http://h:80"),
    ],
)
def test_an_origin_has_one_spelling(url, origin):
    assert origin_of(url) == origin


def test_the_error_for_a_url_does_not_show_its_secrets():
    with refusal(ValueError) as caught:
        origin_of("ftp://user:s3cret@host/path?sig=s3cret")
    assert "s3cret" not in str(caught.value)


def test_trusted_origins_skip_unset_urls_and_other_schemes():
    urls = [None, "", "hf://me/model", "https://a.example/x", "HTTPS://c.example"]
    origins = {"https://a.example:443", "https://c.example:443", "http://b.example:80"}
    assert trusted_origins(urls, ["http://b.example"]) == origins
    with refusal(ValueError):
        trusted_origins([], ["ftp://b"])
    assert trusted_origins([], ["A.example"]) == {"https://a.example:443"}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pw@host:1/a/b?c=d#e", "https://host:1/a/b"),
        ("http://host", "http://host"),
        ("http://u@[::1]:80/x", "http://[::1]:80/x"),
        ("https://me:p@ss@host/a@b", "https://host/a@b"),
        ("https://me:pass/word@host/", "https://…"),
        ("https://me:pass?word@host/", "https://…"),
        ("s3://AKIA:se/cret@bucket/key", "s3://…"),
        ("https://host:port/secret", "https://…"),
        ("file:///a/b", "file:///a/b"),
        ("no url?x", "no url"),
    ],
)
def test_a_url_is_shown_without_user_info_query_and_fragment(url, shown):
    assert safe_url(url) == shown


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_text_has_a_safe_form(before, after):
    assert isinstance(safe_url(f"{before}://{after}"), str)
    assert isinstance(is_http_url(before), bool)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://me:p@ss@h:8/a?sig=1#f failed", "GET https://h:8/a failed"),
        ("('s3://key:secret@bucket/a',)", "('s3://bucket/a',)"),
        ("from 'http://me:it's@h/x' on", "from 'http://h/x' on"),
        ("nothing: here", "nothing: here"),
    ],
)
def test_urls_in_a_text_are_shown_the_same_way(text, shown):
    assert hide_urls(text) == shown


def test_the_search_for_urls_in_a_long_text_without_blanks_is_fast():
    text = "a+b" * 100_000  # a search that tries every start to the end would take an hour
    assert hide_urls(text) == text
