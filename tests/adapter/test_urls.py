"""What may be shown of a URL, and which origin it belongs to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlight.adapter.urls import origin_of, safe_url, url_fault
from genlight.reporters import http


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pw@host:1/a/b?c=d#e", "https://host:1/a/b?…"),
        ("http://host", "http://host"),
        ("http://u@[::1]:80/x", "http://[::1]:80/x"),
        ("https://host:port/secret", "https://…"),
        ("file:///a/b", "file:///a/b"),
    ],
)
def test_a_url_is_shown_without_user_info_query_and_fragment(url, shown):
    assert safe_url(url) == shown


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_text_can_be_shown(before, after):
    assert isinstance(safe_url(f"{before}://{after}"), str)


@pytest.mark.parametrize(
    "url", ["https://A.example/x", "http://u:p@h:81/?q", "https://h:443", "http://[::1]/", "http://127.0.0.1:8000/a"]
)
def test_origins_are_spelled_as_the_http_client_spells_them(url):
    assert origin_of(url) == http.origin_of(url)


@pytest.mark.parametrize("url", ["", "host", "ftp://h", "https://", "http://h:x", "http://h/a b", "http://h\n"])
def test_what_cannot_be_requested_has_a_reason_and_no_origin(url):
    assert url_fault(url)
    with pytest.raises(ValueError, match="Invalid URL"):
        origin_of(url)
