"""A resume checkpoint by URL brings the files of its record along."""

from pathlib import Path

import pytest

from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.inputs.http import Transport
from genlight.adapter.inputs.refs import parse_ref
from genlight.adapter.inputs.transfer import fetch_checkpoint
from genlight.adapter.plumbing.http import build_client
from genlight.adapter.plumbing.urls import origin_of
from genlight.callbacks.checkpoint.format.record import CheckpointRecord, FileEntry, digest_of, serialise_record
from support.messages import refusal

FILES = {"step-00000200/model.safetensors": b"weights" * 999, "step-00000200/trainer/lora.safetensors": b"lora"}


def record(files=FILES, final=False):
    found = CheckpointRecord(
        path=Path("step-00000200.json"),
        run_id="r",
        final=final,
        step=200,
        state={"a": 1},
        folder="step-00000200",
        files=tuple(FileEntry(path, len(content), digest_of(content)) for path, content in files.items()),
    )
    return serialise_record(found)


@pytest.fixture
def fetch(server, tmp_path, retry):
    def run(url, token=None):
        with build_client(token, {origin_of(server.url)}) as client:
            return fetch_checkpoint(parse_ref(url), tmp_path / "cache", Transport(client, retry))

    return run


def test_the_files_beside_the_record_come_by_their_relative_names(server, fetch):
    for path, content in FILES.items():
        server.put(f"/runs/r/{path}", content, token="t")
    path = fetch(server.put("/runs/r/step-00000200.json", record(), token="t"), token="t")
    assert path.name == "step-00000200.json"
    assert {name: (path.parent / name).read_bytes() for name in FILES} == FILES


def test_the_files_of_a_file_store_come_by_their_flat_names(server, fetch):
    server.put("/checkpoints/step-00000200-model.safetensors", FILES["step-00000200/model.safetensors"])
    server.put("/checkpoints/step-00000200-trainer_lora.safetensors", b"lora")
    path = fetch(server.put("/checkpoints/step-00000200-step-00000200.json", record()))
    assert {name: (path.parent / name).read_bytes() for name in FILES} == FILES


def test_the_final_record_of_a_file_store_has_its_own_prefix(server, fetch):
    files = {"step-00000200/model.safetensors": b"w"}
    server.put("/checkpoints/final-model.safetensors", b"w")
    path = fetch(server.put("/checkpoints/final-final.json", record(files, final=True)))
    assert (path.parent / "step-00000200/model.safetensors").read_bytes() == b"w"


def test_a_signature_in_the_query_goes_with_every_file(server, fetch):
    for path, content in FILES.items():
        server.put(f"/{path}?sig=s", content)
    fetch(server.put("/step-00000200.json?sig=s", record()))
    assert all(path.endswith("?sig=s") for path in server.paths())


def test_a_record_of_an_older_runtime_comes_alone(server, fetch):
    path = fetch(server.put("/c.json", {"step": 3, "state": {"a": 1}}))
    assert path.read_bytes() == b'{"step": 3, "state": {"a": 1}}'
    assert len(server.requests) == 1


def test_a_file_that_is_not_what_the_record_says_is_refused(server, fetch):
    for path in FILES:
        server.put(f"/{path}", b"other")
    with pytest.raises(InputError, match=r"(was|were) expected"):
        fetch(server.put("/step-00000200.json", record()))


@pytest.mark.parametrize("content", [b"not json", b"[]", record().replace(b'"step":200', b'"step":201')])
def test_a_broken_record_is_an_input_error_that_says_why(server, fetch, content):
    with refusal(InputError):
        fetch(server.put("/c.json", content))


def test_a_record_cannot_write_outside_of_its_folder(server, fetch, tmp_path):
    with refusal(InputError):
        fetch(server.put("/c.json", record({"../../outside": b"x"})))
    assert not (tmp_path / "outside").exists()
