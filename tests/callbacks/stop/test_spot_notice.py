"""Notices of the clouds, from servers on loopback that answer as their metadata addresses do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from genlight.adapter import ContractModule, TrainingCanceled
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import StopRequests
from genlight.callbacks.stop.stop_requests import SpotNotice
from support.messages import refusal
from support.trainer_class import Counts
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="stop")

NOTICES = {
    "aws": {"action": "terminate", "time": "2026-11-28T08:22:00Z"},
    "gcp": "TRUE",
    "azure": {"DocumentIncarnation": 1, "Events": [{"EventType": "Preempt", "ResourceType": "VirtualMachine"}]},
}
QUIET = {"aws": None, "gcp": "FALSE", "azure": {"DocumentIncarnation": 0, "Events": [{"EventType": "Reboot"}]}}


class Metadata:
    """The metadata address of a cloud; refuses requests without the header that the cloud requires."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = dict(QUIET)
        self.asked = threading.Semaphore(0)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                is_right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self._answer(200 if is_right else 400, "secret")

            def do_GET(self) -> None:
                cloud, is_right = {
                    "/latest/meta-data/spot/instance-action": ("aws", ("X-aws-ec2-metadata-token", "secret")),
                    "/computeMetadata/v1/instance/preempted": ("gcp", ("Metadata-Flavor", "Google")),
                    "/metadata/scheduledevents?api-version=2020-07-01": ("azure", ("Metadata", "true")),
                }[self.path]
                answer = server.answers[cloud]
                text = answer if isinstance(answer, str) else json.dumps(answer)
                found = 404 if answer is None else 200
                self._answer(found if self.headers[is_right[0]] == is_right[1] else 401, text)
                server.asked.release()

            def _answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata()
    server.thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()


class Waits(Counts):
    metadata: Metadata
    notice: SpotNotice

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        if ctx.step == 2:
            self.metadata.answers[self.notice.cloud] = NOTICES[self.notice.cloud]
            while not ctx.is_canceled():
                time.sleep(0.01)  # the time limit of the test ends it if no notice is read
        return super().train_step(batch, state, ctx)


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_notice_stops_the_run_after_the_step(metadata: Metadata, monkeypatch, cloud: Any) -> None:
    monkeypatch.setattr("genlight.callbacks.stop.stop_requests.POLL_S", 0.01)
    notice = SpotNotice(cloud, metadata.address)
    plugin = Waits()
    plugin.metadata, plugin.notice = metadata, notice
    trainer = quiet_trainer(StopRequests(spot=notice), max_steps=9)
    with pytest.raises(TrainingCanceled) as stopped:
        trainer.fit(ContractModule(plugin), BatchStream(range(9)))
    assert (stopped.value.reason, trainer.global_step) == ("preempted", 3)


def test_an_address_that_does_not_answer_is_named_once_and_stops_nothing(metadata: Metadata, caplog) -> None:
    metadata.answers["azure"] = "not JSON"
    notice = SpotNotice("azure", metadata.address)
    with notice.polling(0.001):
        for _ in range(3):
            assert metadata.asked.acquire(timeout=30)
    assert notice.reason() is None
    assert len([text for text in caplog.messages if "still trying" in text]) == 1
    with refusal(ValueError):
        StopRequests(spot="oracle")  # type: ignore[arg-type]
