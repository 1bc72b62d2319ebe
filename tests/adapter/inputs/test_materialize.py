"""All inputs of a job on this machine before training, or one error that says which is missing."""

import functools
import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from genlight.adapter.contract.exceptions import AuthError, InputError
from genlight.adapter.inputs.materialize import materialize_inputs
from genlight.adapter.plumbing.http import build_client
from genlight.adapter.plumbing.retry import RetryPolicy
from support.full_disk import full_disk
from support.messages import refusal


@pytest.fixture
def materialize(tmp_path, retry, monkeypatch):
    monkeypatch.setattr("genlight.adapter.inputs.transfer.ABANDONED_AFTER_S", 60.0)
    monkeypatch.setattr("genlight.adapter.inputs.transfer.RETRY", retry)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return materialize_inputs


def test_a_job_without_inputs_needs_none_and_touches_nothing(config_of, materialize, tmp_path):
    found = materialize(config_of())
    assert (found.model_dir, found.model_ref, found.parquet_paths, found.resume_checkpoint) == (None, None, (), None)
    assert found.model_handles() == {}
    assert not (tmp_path / "cache").exists()


def test_local_inputs_are_taken_where_they_lie(config_of, materialize, tmp_path):
    job = tmp_path / "job"
    (job / "model").mkdir(parents=True)
    for name in ("b.parquet", "a.parquet", "c.json"):
        (job / name).touch()
    config = config_of(inputs={"base_model_ref": "model", "dataset_parquet_refs": ["b.parquet", "a.parquet"]})
    found = materialize(config)
    assert found.model_handles() == {"base_model_dir": str(job / "model"), "base_model_ref": str(job / "model")}
    assert found.parquet_paths == (job / "b.parquet", job / "a.parquet")
    found = materialize(config_of(dataset={"parquet_paths": ["."]}, resume_checkpoint_path="c"))
    assert found.parquet_paths == (job / "a.parquet", job / "b.parquet")
    assert found.resume_checkpoint == job / "c.json"
    assert materialize(config_of(dataset={"parquet_paths": ["?.parquet"]})).parquet_paths == found.parquet_paths
    refs = {"dataset_parquet_refs": ["?.parquet"]}
    assert materialize(config_of(inputs=refs)).parquet_paths == found.parquet_paths


def test_urls_of_data_are_left_to_the_feed_and_folders_stand_for_the_files_that_it_would_read(
    config_of, materialize, tmp_path
):
    for name in ("a.parquet", "b.parq", "._a.parquet", "_temporary/c.parquet"):
        (tmp_path / "job" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "job" / name).touch()
    urls = ["hf://datasets/owner/name/*.parquet", "s3://bucket/data", "file:///data/x%20y.parquet"]
    found = materialize(config_of(dataset={"parquet_paths": [*urls, "."]}))
    assert found.parquet_paths == (*urls, tmp_path / "job" / "a.parquet", tmp_path / "job" / "b.parq")


def test_inputs_from_the_network_come_in_the_order_of_the_job(config_of, materialize, server, tmp_path):
    urls = [server.put(f"/{name}.parquet", name.encode()) for name in "dacb"]
    model = server.put("/weights/model.safetensors?sig=s", b"w")
    record = server.put("/c.json", {"step": 3, "state": {}})
    config = config_of(inputs={"base_model_url": model, "dataset_parquet_urls": urls, "resume_checkpoint_url": record})
    found = materialize(config)
    assert [path.read_bytes() for path in found.parquet_paths] == [b"d", b"a", b"c", b"b"]
    assert all(path.is_relative_to(tmp_path / "cache" / "genlight" / "inputs") for path in found.parquet_paths)
    assert found.model_dir is not None
    assert (found.model_dir / "model.safetensors").read_bytes() == b"w"
    assert found.model_ref == f"{server.url}/weights/model.safetensors"
    assert found.resume_checkpoint is not None
    assert found.resume_checkpoint.name == "c.json"


def test_every_local_input_that_is_missing_is_named_in_one_error_before_anything_is_fetched(
    config_of, materialize, server
):
    config = config_of(
        dataset={"parquet_paths": ["none-1.parquet", "none-2.parquet"]},
        inputs={"base_model_ref": "./none-3", "resume_checkpoint_url": server.put("/c.json", {"state": {}})},
    )
    with pytest.raises(InputError) as caught:
        materialize(config)
    assert all(f"none-{number}" in str(caught.value) for number in (1, 2, 3))
    assert server.requests == []


def test_refused_credentials_end_the_other_transfers(config_of, materialize, server, monkeypatch):
    config = config_of(
        inputs={
            "base_model_url": server.put("/m", fail_first=[401] * 3),
            "dataset_parquet_urls": [server.put("/d", fail_first=[503] * 2000)],
        }
    )
    patient = RetryPolicy(attempts=5000, first_delay_s=0.001, longest_delay_s=0.001)
    monkeypatch.setattr("genlight.adapter.inputs.transfer.RETRY", patient)
    with pytest.raises(AuthError):
        materialize(config)
    assert server.paths().count("/d") < 1000


def test_the_token_goes_to_configured_origins_alone(config_of, materialize, server, other_server):
    config = config_of(
        environ={"TENSORHUB_URL": server.url, "TRAINER_CAPABILITY_TOKEN": "canary"},
        inputs={
            "dataset_parquet_urls": [server.put("/a.parquet", token="canary"), other_server.put("/b.parquet")],
        },
    )
    assert len(materialize(config).parquet_paths) == 2
    assert "authorization" not in other_server.requests[0].headers


def test_a_tensor_hub_reference_without_a_hub_says_what_to_set(config_of, materialize):
    with refusal(InputError):
        materialize(config_of(inputs={"base_model_ref": "cozy:owner/repo"}))


def test_a_stop_ends_all_transfers_and_is_raised_itself(config_of, materialize, server):
    class Stop(Exception):
        pass

    def stop():
        if server.requests:
            raise Stop

    urls = [server.put(f"/{n}.parquet", b"x", fail_first=[503] * 99) for n in range(6)]
    with pytest.raises(Stop):
        materialize(config_of(inputs={"dataset_parquet_urls": urls}), raise_if_stopped=stop)


def stalled(kind, server, hub_with):
    """The inputs of a job whose server begins to answer, or takes a request, and says no more."""
    if kind == "body":
        return {"base_model_url": server.put("/m", b"0123456789", stall_after=4)}
    if kind == "answer":
        return {"base_model_url": server.put("/m", b"x", before_answer=server.stall)}
    if kind == "tensor hub":
        server.put("/api/v1/resolve/o/r?tag=latest", before_answer=server.stall)
        return {"base_model_ref": "cozy:o/r"}
    hub = hub_with({"weights.bin": b"0123456789"})
    path = next(path for path in hub.resources if path.endswith("weights.bin"))
    hub.resources[path].stall_after = 4
    return {"base_model_ref": "owner/name"}


@pytest.fixture
def patient_clients(monkeypatch):
    """Clients that give up later than a server that stalls."""
    import huggingface_hub.constants

    patient = functools.partial(build_client, timeout_s=300.0)
    monkeypatch.setattr("genlight.adapter.inputs.transfer.build_client", patient)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 300.0)


@pytest.mark.usefixtures("patient_clients")
@pytest.mark.parametrize("kind", ["body", "answer", "tensor hub", "hub"])
def test_a_stop_waits_for_no_server_that_says_nothing(config_of, materialize, server, hub_with, kind, monkeypatch):
    class Stop(Exception):
        pass

    def stop():
        if not server.stalled.empty():
            raise Stop

    config = config_of(inputs=stalled(kind, server, hub_with), environ={"TENSORHUB_URL": server.url})
    monkeypatch.setattr("genlight.adapter.inputs.transfer.ABANDONED_AFTER_S", 0.1)
    earlier = set(threading.enumerate())
    with pytest.raises(Stop):
        materialize(config, raise_if_stopped=stop)
    assert not server.waited_in_vain
    server.closing.set()
    begun = [t for t in set(threading.enumerate()) - earlier if t.name.startswith("genlight-input")]
    for thread in begun:
        thread.join()


def test_nothing_that_is_written_or_logged_holds_a_secret(config_of, materialize, server, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    host = server.url.removeprefix("http://")
    server.put("/a.parquet", b"x", token="canary-token")
    server.put("/m", fail_first=[404])
    inputs = {"dataset_parquet_urls": [f"http://u:canary-pw@{host}/a.parquet?sig=canary-query"]}
    environ = {"TENSORHUB_URL": server.url, "TRAINER_CAPABILITY_TOKEN": "canary-token"}
    found = materialize(config_of(environ, inputs=inputs))
    inputs["base_model_url"] = f"http://u:canary-pw@{host}/m?sig=canary-query"
    with pytest.raises(InputError) as caught:
        materialize(config_of(environ, inputs=inputs))
    assert "canary" not in f"{found!r} {caught.value} {caught.value!r} {caplog.text}"
    for path in (tmp_path / "cache").rglob("*"):
        assert "canary" not in str(path.relative_to(tmp_path))
        assert not path.is_file() or b"canary" not in path.read_bytes()


def test_all_kinds_of_inputs_come_from_the_hub(config_of, materialize, hub_with):
    files = {"unet/model.safetensors": b"w", "data/b.parquet": b"b", "data/a.parquet": b"a", "README.md": b"#"}
    hub_with({**files, "c/step-00000003.json": b'{"state": {}}', "c/step-00000003/trainer/x": b"x"})
    inputs = {
        "base_model_ref": "owner/name@v1",
        "dataset_parquet_refs": ["hf:owner/name"],
        "resume_checkpoint_ref": "hf:owner/name:c/step-00000003.json",
    }
    found = materialize(config_of(inputs=inputs))
    assert [path.name for path in found.parquet_paths] == ["a.parquet", "b.parquet"]
    assert found.model_ref == "hf:owner/name@v1"
    assert found.model_dir is not None
    assert (found.model_dir / "unet" / "model.safetensors").read_bytes() == b"w"
    assert found.resume_checkpoint is not None
    assert (found.resume_checkpoint.parent / "step-00000003" / "trainer" / "x").read_bytes() == b"x"
    inputs["dataset_parquet_refs"] = ["hf:owner/name:data/b*.parquet"]
    assert [path.name for path in materialize(config_of(inputs=inputs)).parquet_paths] == ["b.parquet"]
    inputs["base_model_ref"] = "owner/name:vae"
    with refusal(InputError):
        materialize(config_of(inputs=inputs))


def test_a_tensor_hub_hands_out_models_data_and_checkpoints(config_of, materialize, server, sha256):
    files = {"model.safetensors": b"w", "a.parquet": b"a", "final.json": b'{"state": {}}'}
    entries = [{"path": n, "sha256": sha256(c), "size_bytes": len(c)} for n, c in files.items()]
    manifest = json.dumps({"files": entries}).encode()
    server.put(f"/api/v1/manifest/o/r/sha256%3A{sha256(manifest)}", manifest)
    for name, content in files.items():
        server.put(f"/api/v1/file/v1/o/r/sha256%3A{sha256(manifest)}/{name}", content)
    server.put("/api/v1/resolve/o/r", {"owner": "o", "repo": "r", "digest": f"sha256:{sha256(manifest)}"})
    ref = "cozy:o/r"
    inputs = {"base_model_ref": ref, "dataset_parquet_refs": [ref], "resume_checkpoint_ref": ref}
    found = materialize(config_of({"TENSORHUB_URL": server.url}, inputs=inputs))
    assert found.model_ref == f"cozy:o/r@sha256:{sha256(manifest)}"
    assert [path.name for path in found.parquet_paths] == ["a.parquet"]
    assert found.resume_checkpoint is not None
    assert found.resume_checkpoint.name == "final.json"


RANK = """
import os
import sys
from pathlib import Path
from genlight.adapter.inputs import http
from genlight.adapter.inputs.materialize import materialize_inputs
from genlight.adapter.job.config import resolve_run_config


class NotedLock(http.FileLock):
    def __init__(self, path):
        try:
            super().__init__(path)
        finally:
            Path(f"{path}.{os.getpid()}").touch()


http.FileLock = NotedLock
config = resolve_run_config(spec_path=sys.argv[1], environ={})
print(len(materialize_inputs(config).parquet_paths))
"""


def test_of_the_processes_of_a_node_one_downloads_each_input_and_the_others_wait(config_of, server, tmp_path):
    all_wait = threading.Event()
    urls = [server.put(f"/{n}.parquet", bytes(3_000_000), etag=None) for n in range(3)]
    for resource in server.resources.values():
        resource.before_answer = lambda: all_wait.wait(240)
    config = config_of(inputs={"dataset_parquet_urls": urls})
    command = [sys.executable, "-c", RANK, str(config.spec_path)]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    while len(list((tmp_path / "cache").rglob("*.lock.*"))) < 6:  # each holds or waits for each of three locks
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.01)
    all_wait.set()
    assert [rank.communicate()[0].strip() for rank in ranks] == ["3", "3"]
    assert sorted(server.paths()) == ["/0.parquet", "/1.parquet", "/2.parquet"]


def test_a_disk_that_takes_no_more_is_an_input_error_with_the_way_out(config_of, materialize, server):
    config = config_of(inputs={"dataset_parquet_urls": [server.put("/a.parquet", bytes(3_000_000))]})
    with full_disk(), pytest.raises(InputError, match=r"a\.parquet cannot be stored below .* `XDG_CACHE_HOME`"):
        materialize(config)


def test_a_cache_that_cannot_be_made_is_an_input_error(config_of, server, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    (tmp_path / "artifacts").touch()
    config = config_of(inputs={"dataset_parquet_urls": [server.put("/a.parquet", b"x")]})
    with refusal(InputError):
        materialize_inputs(config)


def test_one_file_at_two_addresses_never_makes_a_folder_of_both(config_of, materialize, server, sha256):
    urls = [server.put(f"/{name}.safetensors", b"w") + f"#sha256={sha256(b'w')}" for name in "ab"]
    folders = [materialize(config_of(inputs={"base_model_url": url})).model_dir for url in urls]
    assert [[path.name for path in folder.glob("*.safetensors")] for folder in folders] == [
        ["a.safetensors"],
        ["b.safetensors"],
    ]


def test_where_the_users_cache_cannot_be_written_the_artifacts_directory_takes_it(
    config_of, server, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    config = config_of(inputs={"dataset_parquet_urls": [server.put("/a.parquet", b"x")]})
    (path,) = materialize_inputs(config).parquet_paths
    assert path.is_relative_to(tmp_path / "artifacts")
