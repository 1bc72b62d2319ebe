"""Targets that are not in the contract: file systems of fsspec and a Hugging Face repository."""

import base64
import errno
from typing import ClassVar

import fsspec
import fsspec.implementations.memory
import httpx2
import pytest

from genlight.adapter.contract.exceptions import UploadError
from genlight.reporters.uploads import UploadConfig
from genlight.reporters.uploads.destinations import MOST_TRIES, Refused, open_target
from support.loopback import serving
from support.messages import refusal


@pytest.fixture
def files(tmp_path):
    model, record = tmp_path / "model.bin", tmp_path / "step-00000003.json"
    model.write_bytes(b"weights")
    record.write_text("{}")
    return [("run-1/step-00000003/model.bin", model), ("run-1/step-00000003.json", record)]


def test_a_fault_of_the_file_system_may_pass(chaos, uploader_for, enqueue, tmp_path):
    (tmp_path / "archive").write_text("a file where a folder must be")
    uploader = uploader_for(chaos, targets=[f"file://{tmp_path}/archive"], file_store_url=None)
    enqueue(uploader, 3)
    while "archive cannot be used: " not in str(uploader.settle(0.1)):
        assert not uploader.failure

    (tmp_path / "archive").unlink()

    assert uploader.settle() is None


def test_closing_stops_between_two_files(chaos, uploader_for, enqueue, tmp_path):
    uploader = uploader_for(chaos, start=False, targets=[f"file://{tmp_path}/archive"], file_store_url=None)
    enqueue(uploader, 3)
    put = []

    def closing(files, title):
        put.append(next(files))
        uploader._closing.set()
        put.extend(files)

    uploader._delivery._targets = dict.fromkeys(uploader._delivery._targets, closing)
    uploader.start()
    uploader._threads["checkpoint", tuple(uploader._delivery._targets)].join(60)
    assert len(put) == 1
    assert len(uploader.queue.entries()) == 1


def test_a_scheme_whose_package_is_missing_is_an_error_that_names_it():
    with refusal(UploadError):
        open_target("s3://key:secret@bucket/prefix")


@pytest.mark.parametrize("url", ["", "bucket", "://x", "hf://", "hf://only-a-name", "hf://a/b/c"])
def test_what_is_no_target_is_refused(url, tmp_path):
    with refusal(ValueError):
        UploadConfig(run_id="r", queue_dir=tmp_path, targets=[url])


def test_a_scheme_that_nothing_knows_is_refused():
    with refusal(ValueError):
        open_target("nothing://x")


URLS = ("metrics_url", "checkpoint_url", "sample_url", "terminal_url", "file_store_url", "token")


@pytest.mark.parametrize(("urls", "messages"), [(URLS, 0), (["file_store_url"], 1)])
def test_a_target_gets_the_files_in_their_layout(chaos, uploader_for, enqueue, tmp_path, urls, messages):
    uploader = uploader_for(chaos, targets=[f"file://{tmp_path}/archive"], **dict.fromkeys(urls))
    record, files = enqueue(uploader, 3)
    assert uploader.settle() is None
    archive = tmp_path / "archive" / "run-1" / "checkpoints"
    for file in (record, *files):
        assert (archive / file.relative_to(record.parent)).read_bytes() == file.read_bytes()
    assert len(chaos.messages("/checkpoint")) == len(chaos.requests()) == messages


class NoCredentialsError(Exception):
    """An error like botocore's, which is not a `PermissionError`."""


class EndpointConnectionError(Exception):
    """An error like botocore's, which is not a `ConnectionError`."""


class Broken(fsspec.implementations.memory.MemoryFileSystem):
    """A target that raises `errors` in turn and repeats the last one; None accepts a file."""

    protocol = "broken"
    errors: ClassVar[list[Exception | None]] = []
    tries: ClassVar[int] = 0

    def put_file(self, *args, **kwargs):
        Broken.tries += 1
        error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        if error is not None:
            raise error
        super().put_file(*args, **kwargs)


@pytest.fixture
def broken():
    """Register ``broken://`` as a target that raises the given errors."""
    fsspec.register_implementation("broken", Broken, clobber=True)
    Broken.store.clear()

    def raise_in_turn(*errors):
        Broken.errors, Broken.tries = [*errors], 0

    return raise_in_turn


@pytest.mark.parametrize(
    ("error", "said", "is_auth"),
    [
        (NoCredentialsError("Unable to locate credentials"), "NoCredentialsError: Unable to locate", True),
        (
            FileNotFoundError("The specified bucket does not exist"),
            "FileNotFoundError: The specified bucket does not exist",
            False,
        ),
        (RuntimeError("unexpected keyword region"), "RuntimeError: unexpected keyword region", False),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied", True),  # final at the first try
    ],
)
def test_an_unusable_target_is_named_and_delays_no_other(
    chaos, uploader_for, enqueue, tmp_path, broken, error, said, is_auth
):
    broken(error)
    targets = ["broken://bucket/x", f"file://{tmp_path}/archive"]
    uploader = uploader_for(chaos, targets=targets)
    for step in (1, 2, 3):
        enqueue(uploader, step)
    failure = uploader.settle()

    assert [message["step"] for message in chaos.messages("/checkpoint")] == [1, 2, 3]
    assert len(list((tmp_path / "archive").rglob("step-*.json"))) == 3
    assert failure is not None
    assert f"broken://bucket/x cannot be used: {said}" in str(failure)
    assert (failure.auth, uploader.failure.auth) == (is_auth, is_auth)
    tries = 1 if isinstance(error, PermissionError) else MOST_TRIES
    assert Broken.tries == tries + 2, "later checkpoints are tried once each"
    uploader.close()

    broken(None)
    again = uploader_for(chaos, targets=targets)
    assert again.settle() is None
    assert len(chaos.messages("/checkpoint")) == 3, "what has arrived is not sent again"
    assert sum(path.endswith(".json") for path in Broken.store) == 3


def test_an_error_of_the_network_is_tried_until_it_passes(chaos, uploader_for, enqueue, broken):
    broken(*[EndpointConnectionError("no route")] * 20, *[NoCredentialsError()] * (MOST_TRIES - 1), None)
    uploader = uploader_for(chaos, targets=["broken://bucket/y"], file_store_url=None)
    enqueue(uploader)
    assert uploader.settle() is None


@pytest.mark.parametrize("kind", ["checkpoint", "sample"])
def test_an_endpoint_that_is_away_holds_up_no_target(chaos, uploader_for, write_checkpoint, tmp_path, kind):
    gone = "http://127.0.0.1:9/"
    uploader = uploader_for(chaos, targets=[f"file://{tmp_path}/archive"], file_store_url=gone)
    for step in (1, 2):
        record, files = write_checkpoint(step)
        uploader.enqueue(kind, record, files, step=step)
    while len(list((tmp_path / "archive").rglob("step-*.json"))) < 2:
        assert uploader.settle(0.05) is not None
    assert chaos.messages(f"/{kind}") == []


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server that answers as the hub does to a commit, and to which huggingface_hub sends its requests."""
    from huggingface_hub import constants

    names = ("step-00000003/model.bin", "step-00000003.json")
    uploads = [{"path": f"run-1/{name}", "uploadMode": "regular", "shouldIgnore": False} for name in names]
    with serving(tmp_path) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_own")
        api = "/api/models/me/model"
        server.answers["/api/repos/create"] = {"url": f"{server.url}/me/model"}
        for branch in ("main", "dev"):
            server.answers[f"{api}/preupload/{branch}"] = {"files": uploads}
            url = f"{server.url}/me/model/commit/abc"
            server.answers[f"{api}/commit/{branch}"] = {"commitUrl": url, "commitOid": "abc", "hookOutput": ""}
        yield server


def test_a_repository_gets_one_commit_with_all_files_under_its_own_token(files, hub):
    for branch in ("", "@dev"):
        open_target(f"hf://me/model{branch}")(files, "run-1: checkpoint step-00000003")
    assert len(hub.posted("/api/models/me/model/commit/dev")) == 1
    ((header, *contents),) = hub.posted("/api/models/me/model/commit/main")
    assert header["value"]["summary"] == "run-1: checkpoint step-00000003"
    assert {file["value"]["path"]: base64.b64decode(file["value"]["content"]) for file in contents} == {
        "run-1/step-00000003/model.bin": b"weights",
        "run-1/step-00000003.json": b"{}",
    }
    tokens = {
        headers.get("authorization") for path, headers in hub.headers if path.startswith(("/api/repos", "/api/models"))
    }
    assert tokens == {"Bearer hf_own"}


@pytest.mark.parametrize("status", [403, 400])
def test_a_repository_that_refuses_is_final(files, hub, status):
    hub.status["*"] = status
    with pytest.raises(Refused, match=f"HTTP {status} from hf://me/model") as caught:
        open_target("hf://me/model")(files, "")
    assert caught.value.auth == (status == 403)


def test_a_hub_that_is_away_may_come_back(files, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(httpx2.ConnectError):  # which counts as an error of the network
        open_target("hf://me/model")(files, "")
