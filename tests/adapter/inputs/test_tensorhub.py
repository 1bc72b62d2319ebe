"""Repositories of a tensor hub: tags become digests, and a digest always names the same files."""

import json

import pytest

from genlight.adapter.contract.exceptions import AuthError, InputError
from genlight.adapter.inputs.http import Transport
from genlight.adapter.inputs.refs import parse_ref
from genlight.adapter.inputs.transfer import HttpResolveClient
from genlight.adapter.plumbing.http import build_client
from genlight.adapter.plumbing.urls import origin_of
from support.messages import refusal

FILES = {"model.safetensors": b"weights" * 1000, "unet/config.json": b"{}"}


@pytest.fixture
def publish(server, sha256):
    """Puts a repository `owner/repo` on the server and returns its digest."""

    def run(tag="latest", files=FILES):
        entries = [{"path": n, "sha256": sha256(c), "size_bytes": len(c)} for n, c in files.items()]
        manifest = json.dumps({"files": entries}).encode()
        digest = f"sha256:{sha256(manifest)}"
        server.put(f"/base/api/v1/resolve/owner/repo?tag={tag}", {"owner": "owner", "repo": "repo", "digest": digest})
        server.put(f"/base/api/v1/manifest/owner/repo/{digest.replace(':', '%3A')}", manifest)
        for name, content in files.items():
            server.put(f"/base/api/v1/file/v1/owner/repo/{digest.replace(':', '%3A')}/{name}", content, token="canary")
        return digest

    return run


@pytest.fixture
def resolver(server, tmp_path, retry):
    with build_client("canary", {origin_of(server.url)}) as client:
        yield HttpResolveClient(f"{server.url}/base", Transport(client, retry), tmp_path / "cozy")


@pytest.fixture
def fetch(resolver):
    return lambda text: resolver.fetch(parse_ref(text))


def test_a_tag_is_resolved_and_all_files_arrive(publish, fetch):
    digest = publish("v2")
    folder, label = fetch("cozy:owner/repo:v2")
    assert label == f"cozy:owner/repo@{digest}"
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


def test_without_a_tag_the_latest_is_meant(publish, resolver):
    digest = publish("latest")
    assert resolver.resolve(ref="cozy:owner/repo").digest == digest
    assert resolver.resolve(ref="owner/repo").digest == digest


def test_a_digest_needs_no_server_once_its_files_are_here(publish, fetch, server):
    digest = publish()
    folder, _ = fetch(f"cozy:owner/repo@{digest}")
    server.requests.clear()
    assert fetch(f"cozy:owner/repo@{digest}")[0] == folder
    assert server.requests == []


def test_a_manifest_that_is_not_what_its_digest_says_is_refused(publish, fetch, server):
    digest = publish()
    server.put(f"/base/api/v1/manifest/owner/repo/{digest.replace(':', '%3A')}", {"files": []})
    with refusal(InputError):
        fetch("cozy:owner/repo")


@pytest.mark.parametrize("answer", [{}, [], {"owner": "o", "repo": "r", "digest": "md5:1"}, {"owner": 1}])
def test_a_malformed_answer_is_an_input_error(server, resolver, answer):
    server.put("/base/api/v1/resolve/owner/repo", answer)
    with refusal(InputError):
        resolver.resolve(ref="cozy:owner/repo")


def test_a_repository_that_is_not_there_and_one_that_may_not_be_read(server, resolver):
    with refusal(InputError):
        resolver.resolve(ref="cozy:owner/none")
    server.put("/base/api/v1/resolve/owner/private", fail_first=[403])
    with pytest.raises(AuthError):
        resolver.resolve(ref="cozy:owner/private")
