"""No server keeps the end of a run waiting beyond its deadline: without the bound these tests never end."""

from __future__ import annotations

import pytest

from genlight.reporters.uploads import UploadConfig, Uploader

pytestmark = pytest.mark.promise(name="security")

ENDLESS = {
    "one header byte now and then": (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"),
    "100 Continue without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body of one byte now and then": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("answer", ENDLESS)
def test_a_server_that_never_ends_its_answer_is_left_at_the_deadline(hostile_server, tmp_path, answer):
    url = hostile_server(*ENDLESS[answer])
    config = UploadConfig("r", tmp_path / "queue", terminal_url=f"{url}/end", timeout_s=3600.0)
    with Uploader(config) as uploader:
        result = uploader.deliver_terminal("completed", 1, deadline_s=0.3)

    assert result is not None
    assert "/end did not answer within 0.3 s" in str(result)
