"""Targets that are not in the contract: file systems of fsspec and a Hugging Face repository."""

import base64
import errno
import http.server
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from typing import ClassVar

import fsspec
import fsspec.implementations.memory
import pytest

from genlight.adapter.contract.exceptions import UploadError
from genlight.reporters.uploads import UploadConfig
from genlight.reporters.uploads.destinations import MOST_TRIES, open_target
from support.messages import refusal

pytestmark = pytest.mark.promise(name="uploads")


@pytest.fixture
def files(tmp_path):
    model, record = tmp_path / "model.bin", tmp_path / "step-00000003.json"
    model.write_bytes(b"weights")
    record.write_text("{}")
    return [("run-1/step-00000003/model.bin", model), ("run-1/step-00000003.json", record)]


def test_a_folder_gets_the_files_in_their_layout(files, tmp_path):
    deliver = open_target(f"file://{tmp_path}/archive")
    deliver(files, "")
    deliver(files, "")
    archive = tmp_path / "archive" / "run-1"
    assert sorted(p.relative_to(archive).as_posix() for p in archive.rglob("*") if p.is_file()) == [
        "step-00000003.json",
        "step-00000003/model.bin",
    ]
    assert (archive / "step-00000003" / "model.bin").read_bytes() == b"weights"


@pytest.fixture
def send(chaos, uploader_for, enqueue, tmp_path):
    """Queue a checkpoint for a target and return the uploader; `prepare` may change the target or the files."""

    def queued(prepare=lambda record, files: None):
        uploader = uploader_for(chaos, start=False, targets=[f"file://{tmp_path}/archive"], file_store_url=None)
        record, files = enqueue(uploader, 3)
        prepare(record, files)
        uploader.start()
        return uploader

    return queued


def test_a_file_that_is_gone_is_final(send, tmp_path):
    def lose(record, files):
        shutil.rmtree(tmp_path / "run" / "uploads" / "links")
        files[0].unlink()

    assert "model.safetensors no longer exists" in str(send(lose).settle())


def test_a_fault_of_the_file_system_may_pass(send, tmp_path):
    uploader = send(lambda *_: (tmp_path / "archive").write_text("a file where a folder must be"))
    while "archive cannot be used: " not in str(uploader.settle(0.1)):
        assert not uploader.failure
    (tmp_path / "archive").unlink()
    assert uploader.settle() is None


def test_a_target_that_may_not_be_written_is_final(send, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.put_file", refuse)
    left = send().settle()
    assert "archive cannot be used: Permission denied" in str(left)
    assert left.auth


def test_closing_stops_between_two_files(chaos, uploader_for, enqueue, tmp_path):
    uploader = uploader_for(chaos, start=False, targets=[f"file://{tmp_path}/archive"], file_store_url=None)
    _record, _files = enqueue(uploader, 3)
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


def test_an_uploader_sends_to_every_target_and_then_the_message(chaos, uploader_for, enqueue, tmp_path):
    uploader = uploader_for(chaos, targets=[f"file://{tmp_path}/archive"], file_store_url=None)
    record, files = enqueue(uploader, 3)
    assert uploader.settle() is None
    archive = tmp_path / "archive" / "run-1" / "checkpoints"
    for file in (record, *files):
        assert (archive / file.relative_to(record.parent)).read_bytes() == file.read_bytes()
    assert len(chaos.messages("/checkpoint")) == 1


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
    ],
)
def test_a_target_that_cannot_be_used_is_named_and_holds_up_no_other_destination(
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
    assert Broken.tries == MOST_TRIES + 2, "later checkpoints are tried once each"
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


def test_a_target_works_without_any_endpoint(chaos, uploader_for, enqueue, tmp_path):
    urls = dict.fromkeys(("metrics_url", "checkpoint_url", "sample_url", "terminal_url", "file_store_url", "token"))
    uploader = uploader_for(chaos, targets=[f"file://{tmp_path}/archive"], **urls)
    record, _files = enqueue(uploader, 3)
    assert uploader.settle() is None
    assert (tmp_path / "archive" / "run-1" / "checkpoints" / record.name).exists()
    assert chaos.requests() == []


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's API that a commit needs."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))
        status, answer = self.server.fails.pop(0) if self.server.fails else (200, self.answer_to(body))
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer_to(self, body):
        if self.path == "/api/repos/create":
            return {"url": f"http://{self.headers['Host']}/me/model"}
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        return {"commitUrl": f"http://{self.headers['Host']}/me/model/commit/abc", "commitOid": "abc", "hookOutput": ""}

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.seen, server.fails = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


DELIVER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from genlight.adapter.plumbing.retry import TransientError
    from genlight.reporters.uploads.destinations import Refused
    from genlight.reporters.uploads.destinations import open_target

    folder = Path(sys.argv[1])
    names = ("step-00000003/model.bin", "step-00000003.json")
    files = [(f"run-1/checkpoints/{name}", folder / Path(name).name) for name in names]
    try:
        open_target("hf://me/model" + sys.argv[2])(files, "run-1: checkpoint step-00000003")
    except (Refused, TransientError) as error:
        print(type(error).__name__, getattr(error, "auth", ""), error)
    except Exception as error:  # which counts as one that may pass
        print(type(error).__name__)
    """
)


@pytest.fixture
def deliver_to_hub(hub, tmp_path):
    """Runs in a separate process, because huggingface_hub reads its endpoint once, at import."""

    def deliver(branch="", endpoint=f"http://127.0.0.1:{hub.server_port}"):
        environment = os.environ | {
            "HF_ENDPOINT": endpoint,
            "HF_TOKEN": "hf_own",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", DELIVER, str(tmp_path), branch], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return deliver


def test_a_repository_gets_one_commit_with_all_files_under_its_own_token(files, hub, deliver_to_hub):
    assert deliver_to_hub() == ""
    assert deliver_to_hub("@dev") == ""
    assert len([path for path, *_ in hub.seen if "/commit/dev" in path]) == 1
    commits = [body for path, body, _ in hub.seen if "/commit/main" in path]
    assert len(commits) == 1
    header, *files = [json.loads(line) for line in commits[0].splitlines()]
    assert header["value"]["summary"] == "run-1: checkpoint step-00000003"
    assert {file["value"]["path"]: base64.b64decode(file["value"]["content"]) for file in files} == {
        "run-1/checkpoints/step-00000003/model.bin": b"weights",
        "run-1/checkpoints/step-00000003.json": b"{}",
    }
    assert {token for _, _, token in hub.seen} == {"Bearer hf_own"}


@pytest.mark.parametrize(
    ("status", "outcome"), [(403, "Refused True HTTP 403 from hf://me/model"), (400, "Refused False HTTP 400")]
)
def test_a_repository_that_refuses_is_final(files, hub, deliver_to_hub, status, outcome):
    hub.fails = [(status, {"error": "no"})] * 9
    assert deliver_to_hub().startswith(outcome)


def test_a_hub_that_is_away_may_come_back(files, deliver_to_hub):
    assert deliver_to_hub(endpoint="http://127.0.0.1:9") == "ConnectError"
