"""If a server refuses or is unreachable, the message of the run names the correction, and nothing secret."""

from __future__ import annotations

import contextlib
import socket

import pytest

from genlight.adapter.contract.exceptions import AuthError
from genlight.adapter.inputs.http import Download, Transport, download
from genlight.adapter.plumbing.failures import safe_text
from genlight.adapter.plumbing.http import build_client
from genlight.reporters.uploads import UploadConfig, Uploader
from support.loopback import serving

pytestmark = pytest.mark.promise(name="security")

TOKEN = "c4nary-0f-th3-r3fus4l"


@pytest.fixture
def refusing_server(tmp_path):
    """A server that answers 401 to everything; its URL."""
    with serving(tmp_path) as server:
        server.status["*"] = 401
        yield server.url


@pytest.mark.parametrize(
    ("token", "advice"),
    [
        (TOKEN, "it refuses the token of `TRAINER_CAPABILITY_TOKEN`, or of the job's `capability_token`"),
        (None, "no token was sent; set `TRAINER_CAPABILITY_TOKEN`"),
    ],
)
def test_a_401_names_the_variable_that_holds_the_token_and_shows_its_address(refusing_server, tmp_path, token, advice):
    config = UploadConfig("r", tmp_path / "queue", token=token, terminal_url=f"{refusing_server}/m")
    with Uploader(config) as uploader:
        error = uploader.deliver_terminal("completed", 1)
    environ = {"TRAINER_TOKEN_ORIGINS": refusing_server, "TRAINER_CAPABILITY_TOKEN": TOKEN}

    assert f"HTTP 401 from {refusing_server}/m; {advice}" in safe_text(error, environ=environ)


def test_an_input_that_is_refused_names_the_variable_that_holds_the_token(refusing_server, tmp_path):
    with build_client(TOKEN, [refusing_server.lower()]) as client, pytest.raises(AuthError) as caught:
        download(Download(f"{refusing_server}/x", tmp_path / "file"), Transport(client))

    assert "It refuses the credentials that were sent: the token of `TRAINER_CAPABILITY_TOKEN`" in str(caught.value)


def test_an_upload_target_that_cannot_be_reached_is_called_that_and_is_tried_again(tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]  # and nobody listens there once it is closed
    record = tmp_path / "run" / "final.json"
    record.parent.mkdir()
    record.write_text("{}")
    config = UploadConfig("r", tmp_path / "run" / "uploads", targets=[f"ftp://127.0.0.1:{port}/x"])
    with Uploader(config) as uploader:
        uploader.enqueue("checkpoint", record, step=1)
        error = None
        while error is None or "not sent before the deadline" in str(error):
            error = uploader.settle(0.2)

    assert f"ftp://127.0.0.1:{port}/x cannot be used: Connection refused" in str(error)
