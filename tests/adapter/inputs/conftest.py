"""A job with inputs, and a server that speaks the hub's endpoints."""

import hashlib
import json

import pytest

from genlight.adapter.job.config import resolve_run_config
from support.file_server import other_server as other_server, retry as retry, server as server, sha256 as sha256


@pytest.fixture
def config_of(tmp_path):
    """Makes a `RunConfig` of a minimal job and further fields."""

    def resolve(environ=None, **fields):
        path = tmp_path / "job" / "job.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"run_id": "r", "trainer": "t:T", "max_steps": 1, **fields}))
        return resolve_run_config(
            spec_path=path, overrides=[f"artifacts_dir={tmp_path / 'artifacts'}"], environ=environ or {}
        )

    return resolve


COMMIT = "a" * 40


@pytest.fixture
def hub_with(server, tmp_path, monkeypatch):
    """Makes the server a hub with a model and a dataset `owner/name`, each in revisions main and v1."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_canary")

    def publish(files):
        blobs = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
        tree = [{"type": "file", "path": n, "size": len(c), "oid": blobs[n]} for n, c in files.items()]
        for kind, prefix in (("models", ""), ("datasets", "/datasets")):
            info = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            for revision in ("main", "v1"):
                server.put(f"/api/{kind}/owner/name/revision/{revision}", info)
            server.put(f"/api/{kind}/owner/name/tree/{COMMIT}", tree)
            for name, content in files.items():
                path = f"{prefix}/owner/name/resolve/{COMMIT}/{name}"
                server.put(path, content, etag=f'"{blobs[name]}"', headers={"X-Repo-Commit": COMMIT})
        return server

    return publish
