"""Parsing of references."""

from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.inputs.refs import CozyRef, HttpRef, HubRef, parse_ref

PREFIXES = ("hf:", "cozy:", "file:", "file://", "http://", "https://", "a/b", "/", "~", "http://h/#sha256=")
DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("https://h/a.parquet", HttpRef("https://h/a.parquet", "https://h/a.parquet")),
        (f"http://h/a?b=c#sha256={DIGEST.upper()}", HttpRef("http://h/a", "http://h/a?b=c", f"sha256:{DIGEST}")),
        ("http://h/a#page", HttpRef("http://h/a", "http://h/a")),
        ("hf:owner/name", HubRef("hf:owner/name", "owner/name")),
        ("owner/name", HubRef("hf:owner/name", "owner/name")),
        ("owner/name@v1.0", HubRef("hf:owner/name@v1.0", "owner/name", "v1.0")),
        (
            "hf:owner/name@refs/pr/1:sub/dir",
            HubRef("hf:owner/name@refs/pr/1:sub/dir", "owner/name", "refs/pr/1", "sub/dir"),
        ),
        ("hf:owner/name:data/*.parquet", HubRef("hf:owner/name:data/*.parquet", "owner/name", None, "data/*.parquet")),
        ("cozy:owner/repo", CozyRef("cozy:owner/repo", "owner", "repo")),
        ("cozy:owner/repo:v2", CozyRef("cozy:owner/repo:v2", "owner", "repo", "v2")),
        (f"cozy:o/r@sha256:{DIGEST}", CozyRef(f"cozy:o/r@sha256:{DIGEST}", "o", "r", None, f"sha256:{DIGEST}")),
        (f"cozy:o/r:t@sha256:{DIGEST}", CozyRef(f"cozy:o/r:t@sha256:{DIGEST}", "o", "r", "t", f"sha256:{DIGEST}")),
        ("data/*.parquet", Path("data/*.parquet")),
    ],
)
def test_each_kind_of_reference_is_told_by_its_form(text, ref):
    assert parse_ref(text) == ref
    assert parse_ref(f"  {text}\n") == ref


def test_a_path_that_exists_is_that_path_whatever_it_looks_like(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert parse_ref("owner/name") == tmp_path / "owner" / "name"
    assert parse_ref(f"file://{tmp_path}/owner/name") == tmp_path / "owner" / "name"
    assert parse_ref(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "text",
    [
        *("/none/at/all", "./none", "data/none.parquet", "a/b/c", "none.json", "word", "s3://bucket/key", "hf:name"),
        *("file:///none/at/all", "file://host/x", "cozy:repo", "cozy:o/r@sha256:xyz", "http://", "a b/c", ""),
        *("http://h/a#sha256=12", "https://host:port/x", "file:relative"),
    ],
)
def test_what_is_no_reference_is_an_input_error_that_names_it(text):
    with pytest.raises(InputError) as caught:
        parse_ref(text)
    shown = text.partition("#")[0].partition("host:port")[0].removeprefix("file:")
    assert shown.removeprefix("//") in str(caught.value)


@example("~\x00")
@example("~\ud800")
@example("file:///a%00b")
@given(st.text(max_size=30) | st.builds("{}{}".format, st.sampled_from(PREFIXES), st.text(max_size=20)))
def test_any_text_is_a_reference_or_an_input_error(text):
    try:
        ref = parse_ref(text)
    except InputError:
        return
    assert isinstance(ref, Path) or ref.label


def test_neither_repr_nor_label_nor_error_shows_credentials():
    ref = parse_ref("https://user:canary@h/a?canary#canary")
    assert "canary" not in repr(ref) + ref.label
    for text in ("s3://key:canary@bucket/x?canary", "https://u:canary@host:port/x?canary"):
        with pytest.raises(InputError) as caught:
            parse_ref(text)
        assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://h/a/b.parquet?x=/c", "b.parquet"),
        ("http://h/", "download"),
        ("http://h", "download"),
        ("http://h/%2e%2e", "download"),
        ("http://h/..%2F..%2Fetc%2Fpasswd", "passwd"),
        ("http://h/a b&c", "a_b_c"),
    ],
)
def test_a_file_name_from_a_url_cannot_leave_its_folder(url, name):
    assert HttpRef(url, url).file_name == name
