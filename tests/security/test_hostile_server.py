"""Servers that send another answer than requested, too much, or without end."""

import contextlib
import json
import os
import socket
import threading
from datetime import UTC, datetime
from urllib.parse import quote

import pytest
from hypothesis import given, strategies as st

from genlight.adapter.contract.exceptions import InputError, StartupContractError
from genlight.adapter.inputs.http import Download, Transport, download
from genlight.adapter.inputs.materialize import materialize_inputs
from genlight.adapter.inputs.private_addresses import AddressGuard, is_private
from genlight.adapter.inputs.refs import parse_ref
from genlight.adapter.inputs.transfer import HttpResolveClient
from genlight.adapter.plumbing.http import build_client
from genlight.adapter.plumbing.retry import retry_after_s
from genlight.reporters.uploads import UploadConfig, Uploader
from support.messages import refusal

GOOD, EVIL = b"good" * 1000, b"evil" * 1000


@pytest.fixture
def client():
    with build_client(None, ()) as opened:
        yield opened


@pytest.fixture
def transport(client, retry):
    return Transport(client, retry)


@pytest.fixture
def fetch_repository(server, transport, tmp_path):
    """Fetches ``cozy:owner/repo`` below ``<tmp>/deep/cozy``."""
    resolver = HttpResolveClient(server.url, transport, tmp_path / "deep" / "cozy")
    return lambda: resolver.fetch(parse_ref("cozy:owner/repo"))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Downloads are kept in ``<tmp>/cache``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _nothing_was_fetched(tmp_path):
    """Only the server's answers are missing; they are read from the cache."""
    return [path.name for path in (tmp_path / "deep" / "cozy").iterdir()] == [".answers"]


@pytest.fixture
def publish(server, sha256):
    """Puts a repository with the given manifest on the server."""

    def run(files, **answer):
        manifest = files if isinstance(files, bytes) else json.dumps({"files": files}).encode()
        digest = f"sha256:{sha256(manifest)}"
        facts = {"owner": "owner", "repo": "repo", "digest": digest, **answer}
        server.put("/api/v1/resolve/owner/repo", facts)
        server.put(f"/api/v1/manifest/{facts['owner']}/{facts['repo']}/{digest.replace(':', '%3A')}", manifest)
        server.put(f"/api/v1/manifest/owner/repo/{digest.replace(':', '%3A')}", manifest)
        return digest

    return run


# the tensor hub


@pytest.mark.parametrize(
    "answer",
    [
        {"owner": "/tmp/planted-by-genlight-test"},
        {"owner": "../../.."},
        {"repo": "other"},
        {"owner": "Owner"},
        {"repo": "/etc"},
        {"owner": ""},
        {"digest": "sha256:../../x"},
        {"digest": "sha256:" + "0" * 63},
    ],
    ids=repr,
)
def test_an_answer_about_another_repository_is_refused(publish, fetch_repository, tmp_path, answer):
    publish([], **answer)
    with refusal(InputError):
        fetch_repository()
    assert _nothing_was_fetched(tmp_path)


def entry(path="a", **change):
    return {"path": path, "sha256": "0" * 64, "size_bytes": 1, **change}


ODD_NAMES = [
    "../x",
    "/x",
    "a/../../x",
    "a//b",
    "",
    ".",
    "..",
    "a/.",
    "a\\b",
    "a:b",
    "a\nb",
    "a\x1b[2J",
    "x" * 300,
    "a\0",
]
ODD_FACTS = [{"sha256": "../x"}, {"sha256": "g" * 64}, {"size_bytes": -1}, {"size_bytes": 2**70}, {"size_bytes": "1"}]
SAME_PLACES = [("a", "a"), ("a", "a/b"), ("a/b/c", "a/b")]


@pytest.mark.parametrize(
    "files",
    [
        *([entry(name)] for name in (*ODD_NAMES, "x" * 300)),
        *([entry(**change)] for change in ODD_FACTS),
        *([entry(path) for path in paths] for paths in SAME_PLACES),
        b'{"files":' + b"[" * 1_000_000,
    ],
)
def test_a_manifest_with_odd_names_facts_or_places_is_refused(publish, fetch_repository, tmp_path, files):
    publish(files)
    with pytest.raises(InputError):
        fetch_repository()
    assert _nothing_was_fetched(tmp_path)


@pytest.mark.parametrize(
    "path", ["model.safetensors", "unet/config.json", ".gitattributes", "a-b_c+d=e (1).txt", "ü.json"]
)
def test_names_that_files_have_are_taken(publish, fetch_repository, server, sha256, path):
    digest = publish([{"path": path, "sha256": sha256(GOOD), "size_bytes": len(GOOD)}])
    server.put(f"/api/v1/file/v1/owner/repo/{digest.replace(':', '%3A')}/{quote(path)}", GOOD)
    folder, _ = fetch_repository()
    assert (folder / path).read_bytes() == GOOD


# the cache


def _plant(folder, content):
    """A cache entry with a note that the server will confirm, as whoever may write the cache can make it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").write_bytes(content)
    (folder / ".file.json").write_text(json.dumps({"etag": '"v1"', "size": len(content)}))


def test_a_digest_is_proven_on_a_hit_as_well(server, transport, tmp_path, sha256):
    _plant(tmp_path / "cache", EVIL)
    request = Download(server.put("/a", GOOD), tmp_path / "cache" / "file", f"sha256:{sha256(GOOD)}")
    assert download(request, transport).read_bytes() == GOOD


@pytest.mark.parametrize("name", ["file.part", ".file.lock"])
def test_a_link_in_the_cache_is_not_written_through(server, transport, tmp_path, name):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).symlink_to(tmp_path / "victim")
    with refusal(OSError):
        download(Download(server.put("/a", GOOD), tmp_path / "cache" / "file"), transport)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_note_of_another_user_does_not_count(server, transport, tmp_path, stranger):
    _plant(tmp_path / "cache", EVIL)
    os.chown(tmp_path / "cache" / ".file.json", stranger, -1)
    request = Download(server.put("/a", GOOD), tmp_path / "cache" / "file")
    assert download(request, transport).read_bytes() == GOOD


# sizes


@pytest.mark.parametrize("known", [{"size_bytes": 7}, {"most_bytes": 7}])
def test_a_transfer_ends_when_it_brings_more_than_there_is(server, transport, tmp_path, known):
    request = Download(server.put("/a", bytes(20_000_000)), tmp_path / "cache" / "file", **known)
    with refusal(InputError):
        download(request, transport)
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) < 1000


def test_so_does_one_whose_length_is_not_announced(tmp_path, client, transport):
    """An answer in chunks without end; it is over after the first piece."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sent = []

        def serve():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(10_000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                while True:
                    connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                    sent.append(1 << 20)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a"
        with refusal(InputError):
            download(Download(url, tmp_path / "cache" / "file", size_bytes=7), transport)
        client.close()
        thread.join()
    assert sum(sent) < 200 << 20
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) < 1000


# the protocol


def test_no_cookie_is_kept(server, other_server, client):
    for running in (server, other_server):
        running.put("/a", b"x", headers={"Set-Cookie": "session=s3cret; Path=/"})
        client.get(f"{running.url}/a")
        client.get(f"{running.url}/a")
    assert all("cookie" not in request.headers for request in server.requests + other_server.requests)


@pytest.mark.parametrize(
    "text",
    [
        "Fri, 31 Dec 99999999999999999999 23:59:59 GMT",
        "Fri, 31 Dec 999999999 23:59:59 GMT",
        "Fri, 31 Dec 9999 23:59:59 -9999",
        "Fri, 31 Dec 9999 23:59:59 GMT",
        "9" * 5000,
        "-1",
        "1e400",
        "²",
        "",
    ],
)
def test_a_time_to_wait_until_that_no_calendar_has_is_none_or_bounded(text):
    seconds = retry_after_s(text, datetime.now(UTC))
    assert seconds is None or 0 <= seconds <= 3600


@given(st.text(max_size=60))
def test_whatever_a_server_asks_to_wait_is_none_or_bounded(text):
    seconds = retry_after_s(text, datetime.now(UTC))
    assert seconds is None or 0 <= seconds <= 3600


# private addresses


PRIVATE = [
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("::1", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "::"),
    "2002:7f00:0001::",
]
PUBLIC = ["1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]


def test_addresses_that_only_this_machine_or_its_network_reaches_are_private():
    assert [address for address in (*PRIVATE, *PUBLIC) if is_private(address)] == PRIVATE


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_connection_to_a_private_address_is_refused_before_a_byte_is_sent(server, client, transport, tmp_path, host):
    url = server.put("/a", GOOD).replace("127.0.0.1", host)
    AddressGuard().attach(client)
    with refusal(InputError):
        download(Download(url, tmp_path / "file"), transport)
    assert server.requests == []


def test_a_name_server_that_answers_otherwise_the_second_time_leads_nowhere(
    server, client, transport, tmp_path, monkeypatch
):
    """A public address for whoever asks beforehand, this machine for the connection."""
    real, asked = socket.getaddrinfo, []

    def rebinding(host, port, *args, **kwargs):
        asked.append((host, port))
        if host != "rebinding.example":
            return real(host, port, *args, **kwargs)
        return real("127.0.0.1" if port else "1.1.1.1", port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    url = server.put("/a", GOOD).replace("127.0.0.1", "rebinding.example")
    AddressGuard().attach(client)
    with refusal(InputError):
        download(Download(url, tmp_path / "file"), transport)
    assert server.requests == []
    assert ("rebinding.example", None) not in asked  # only the address of the connection counts


def test_so_is_a_redirect_to_one(server, other_server, client, transport, tmp_path):
    """The first server is allowed by name, and sends the request on to one that is not."""
    secret = other_server.put("/secret", b"credentials").replace("127.0.0.1", "127.0.0.2")
    url = server.put("/a", location=secret)
    AddressGuard(["127.0.0.1"]).attach(client)
    with refusal(InputError):
        download(Download(url, tmp_path / "file"), transport)
    assert other_server.requests == []


@pytest.mark.parametrize("allowed", ["127.0.0.1", "127.0.0.0/8"])
def test_what_is_allowed_may_be_reached(server, client, transport, tmp_path, allowed):
    AddressGuard([allowed]).attach(client)
    assert download(Download(server.put("/a", GOOD), tmp_path / "file"), transport).read_bytes() == GOOD


@pytest.mark.parametrize("host", ["169.254.169.254", "localhost"])
def test_behind_a_proxy_the_name_is_judged(server, tmp_path, retry, monkeypatch, host):
    """The proxy may be private itself, and would connect to any requested host."""
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv("http_proxy", server.url)
    with build_client(None, ()) as client:
        AddressGuard().attach(client)
        metadata = Download(f"http://{host}/latest/meta-data", tmp_path / "file")
        with refusal(InputError):
            download(metadata, Transport(client, retry))
    assert server.requests == []


@pytest.mark.usefixtures("own_cache")
def test_an_orchestrated_run_keeps_its_references_from_private_addresses(server, config_of):
    trusted = {"orchestrated": True, "capability_token": "t"}
    job = {**trusted, "inputs": {"base_model_ref": server.put("/a.bin", GOOD)}}
    for refused in (job, {**trusted, "dataset": {"parquet_paths": [f"{server.url}/a.parquet"]}}):
        with refusal(InputError):
            materialize_inputs(config_of(**refused))
    assert server.requests == []
    for environ in (
        {"TRAINER_PRIVATE_HOSTS": "127.0.0.0/8"},
        {"TRAINER_PRIVATE_HOSTS": "*"},
        {"TENSORHUB_URL": server.url},
    ):
        assert materialize_inputs(config_of(environ=environ, **job)).model_dir is not None


@pytest.mark.usefixtures("own_cache")
def test_a_run_by_hand_may_reach_them_unless_told_otherwise(server, config_of):
    job = {"inputs": {"base_model_ref": server.put("/a.bin", GOOD)}}
    assert materialize_inputs(config_of(**job)).model_dir is not None
    with refusal(InputError):
        materialize_inputs(config_of(environ={"TRAINER_PRIVATE_HOSTS": "10.0.0.1"}, **job))


def test_the_job_spec_cannot_allow_itself_anything(config_of):
    assert config_of(orchestrated=True, capability_token="t", private_hosts=["*"]).private_hosts == ()


@pytest.mark.parametrize("text", ["http://h/", "10.0.0.0/99", "a b/c", "-x"])
def test_a_list_that_holds_something_else_is_a_fault(config_of, text):
    with refusal(StartupContractError):
        config_of(environ={"TRAINER_PRIVATE_HOSTS": text})


ENDLESS = {
    "one header byte now and then": (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"),
    "100 Continue without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body of one byte now and then": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("answer", ENDLESS)
def test_a_server_that_never_ends_its_answer_is_left_at_the_deadline(hostile_server, tmp_path, monkeypatch, answer):
    monkeypatch.setattr("genlight.reporters.uploads.uploader.CLOSE_WAIT_S", 0.1)
    url = hostile_server(*ENDLESS[answer])
    config = UploadConfig("r", tmp_path / "queue", terminal_url=f"{url}/end", timeout_s=3600.0)
    with Uploader(config) as uploader:
        result = uploader.deliver_terminal("completed", 1, deadline_s=0.3)

    assert result is not None
    assert "/end did not answer within 0.3 s" in str(result)
