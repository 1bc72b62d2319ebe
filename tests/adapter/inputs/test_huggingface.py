"""Inputs from a server that speaks the Hugging Face hub's endpoints."""

import logging

import httpx2
import pytest

from genlight.adapter.cli import main
from genlight.adapter.contract.exceptions import AuthError, InputError
from genlight.adapter.inputs.http import Transport
from genlight.adapter.inputs.refs import parse_ref
from genlight.adapter.inputs.transfer import fetch_from_hub
from genlight.adapter.plumbing.text import HUB_LOGIN
from support.jobs import write_job
from support.messages import refusal

FILES = {"config.json": b"{}", "unet/model.safetensors": b"weights" * 1000, "data/a.parquet": b"PAR1"}


@pytest.fixture
def hub(hub_with):
    return hub_with(FILES)


@pytest.fixture
def fetch(hub, retry):
    with httpx2.Client() as client:  # huggingface_hub uses a separate client
        transport = Transport(client, retry)
        yield lambda text, kind="model": fetch_from_hub(kind, parse_ref(text), transport)


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_arrives_with_all_its_files(fetch):
    assert files_in(fetch("owner/name")) == FILES


def test_a_path_limits_what_is_fetched(fetch):
    assert set(files_in(fetch("hf:owner/name@v1:unet"))) == {"unet/model.safetensors"}
    assert set(files_in(fetch("hf:owner/name:data/*.parquet", kind="dataset"))) == {"data/a.parquet"}


def test_a_second_start_transfers_nothing_again(fetch, hub):
    fetch("owner/name")
    hub.requests.clear()
    fetch("owner/name")
    assert [path for path in hub.paths() if "/resolve/" in path] == []


def test_the_hub_sees_its_own_token(fetch, hub):
    fetch("owner/name")
    assert {request.headers.get("authorization") for request in hub.requests} == {"Bearer hf_canary"}


@pytest.mark.parametrize(
    ("status", "headers", "kind", "text"),
    [
        (401, {}, AuthError, "HF_TOKEN"),
        (403, {}, AuthError, "HF_TOKEN"),
        (403, {"X-Error-Code": "GatedRepo"}, AuthError, "gated .* request access"),
        (404, {"X-Error-Code": "RepoNotFound"}, InputError, "no such model or revision, and there is no such path"),
        (404, {"X-Error-Code": "RevisionNotFound"}, InputError, "hf:owner/name: the hub has no such model or revision"),
        (400, {}, InputError, "hf:owner/name cannot be fetched from the hub: "),
    ],
)
def test_each_refusal_of_the_hub_says_what_to_do(fetch, hub, status, headers, kind, text):
    hub.put("/api/models/owner/name/revision/main", status=status, fail_first=[status] * 9, headers=headers)
    with pytest.raises(kind, match=text) as caught:
        fetch("owner/name")
    assert isinstance(caught.value, AuthError) == (kind is AuthError)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {"mock_batches": [1], "inputs": {"base_model_ref": "hf://owner/name"}},
        {"inputs": {"dataset_parquet_refs": ["hf://owner/name:data/a.parquet"]}},
        {"dataset": {"parquet_paths": ["hf://datasets/owner/name/data/a.parquet"]}},
    ],
    ids=["model", "dataset reference", "data file"],
)
def test_a_run_that_is_not_logged_in_says_in_one_message_how_to(hub, tmp_path, monkeypatch, caplog, capsys, data):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)  # which the file system read at its import
    monkeypatch.delenv("HF_TOKEN")
    for path in list(hub.resources):
        hub.put(path, status=401, fail_first=[401] * 99)
    assert main(["run", str(write_job(tmp_path, **{"mock_batches": ..., **data}))]) != 0

    errors = [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert len(errors) == 1
    assert HUB_LOGIN in errors[0].getMessage()
    assert errors[0].exc_info is None
    shown = capsys.readouterr()
    assert "Traceback" not in caplog.text + shown.out + shown.err
    assert hub.requests, "the hub was asked"


def test_a_hub_that_recovers_is_waited_for(fetch, hub):
    path = "/api/models/owner/name/revision/main"
    hub.resources[path].fail_first = [503]
    assert files_in(fetch("owner/name")) == FILES
    assert hub.paths().count(path) >= 2


def test_a_hub_that_may_not_be_asked_is_an_input_error(fetch, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with refusal(InputError):
        fetch("owner/name")


def test_a_hub_that_is_not_there_is_an_input_error(fetch, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with refusal(InputError):
        fetch("owner/name")


def test_the_whole_size_is_logged_at_the_end(fetch, caplog):
    caplog.set_level(logging.INFO, logger="genlight.adapter.inputs")
    fetch("owner/name")
    assert caplog.messages == ["hf:owner/name is here (7.0 kB)"]
