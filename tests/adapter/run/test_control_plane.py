"""A run under a control plane: claimed, kept alive, cancelled, reported."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from genlight.adapter.contract.exceptions import AuthError, InputError, StartupContractError
from genlight.adapter.contract.types import JobLifecycleClient, LifecycleLease
from genlight.adapter.run.control_plane import HttpLifecycleClient, LifecycleSession
from genlight.adapter.run.run import RunOptions, run_job
from genlight.reporters import read_events

TOKEN = "lease-token-canary"


class ControlPlane:
    """Answers each request by its last path segment; `answers` holds a status, a body, or a list of them."""

    def __init__(self):
        self.answers = {"claim": {"lease_id": "lease-1"}, "heartbeat": {"alive": True}, "cancel": {"cancel": False}}
        self.requests, self.tokens = [], []
        plane = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                plane.tokens.append(self.headers["Authorization"])
                what = self.path.rpartition("/")[2]
                plane.requests.append((self.path, body))
                answer = plane.answers.get(what, {})
                if isinstance(answer, list):
                    answer = answer.pop(0) if len(answer) > 1 else answer[0]
                code, text = (answer, b"") if isinstance(answer, int) else (200, json.dumps(answer).encode())
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_): ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/api"

    def asked(self, what):
        return [body for path, body in self.requests if path.endswith(f"/{what}")]

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def plane():
    served = ControlPlane()
    yield served
    served.close()


@pytest.fixture
def client(plane):
    made = HttpLifecycleClient(plane.url, token=TOKEN, attempts=3, timeout_s=60.0)
    yield made
    made.close()


LEASE = LifecycleLease("a run/1", "lease-1")


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_the_client_speaks_the_documented_protocol(client: JobLifecycleClient, plane):
    lease = client.claim(run_id="a run/1")

    assert lease == LEASE
    assert client.heartbeat(lease=lease) is True
    assert client.request_cancel(lease=lease) is False
    client.mark_completed(lease=lease, step=7, final_checkpoint="/final.json")
    client.mark_failed(lease=lease, step=3, error="train-step:x")
    assert plane.requests == [
        ("/api/runs/a%20run%2F1/claim", {}),
        ("/api/runs/a%20run%2F1/heartbeat", {"lease_id": "lease-1"}),
        ("/api/runs/a%20run%2F1/cancel", {"lease_id": "lease-1"}),
        ("/api/runs/a%20run%2F1/completed", {"lease_id": "lease-1", "step": 7, "final_checkpoint": "/final.json"}),
        ("/api/runs/a%20run%2F1/failed", {"lease_id": "lease-1", "step": 3, "error": "train-step:x"}),
    ]
    assert set(plane.tokens) == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("code", [404, 409, 410])
def test_a_run_that_another_holds_cannot_be_claimed_and_its_lease_is_lost(client, plane, code):
    plane.answers = {"claim": code, "heartbeat": code, "completed": code}

    with pytest.raises(StartupContractError, match="another worker holds its lease"):
        client.claim(run_id="r")
    assert client.heartbeat(lease=LEASE) is False
    with pytest.raises(InputError, match="the lease is lost"):
        client.mark_completed(lease=LEASE, step=1, final_checkpoint=None)


@pytest.mark.parametrize("code", [401, 403])
def test_refused_credentials_are_told_apart(client, plane, code):
    plane.answers["claim"] = code

    with pytest.raises(AuthError, match=f"status {code}") as caught:
        client.claim(run_id="r")
    assert TOKEN not in str(caught.value)


def test_what_is_transient_is_tried_again_for_claims_and_reports(client, plane):
    plane.answers = {"claim": [503, 429, {"lease_id": "late"}], "failed": [500, {}]}

    assert client.claim(run_id="r").lease_id == "late"
    client.mark_failed(lease=LEASE, step=1, error="x")
    assert len(plane.asked("claim")) == 3
    assert len(plane.asked("failed")) == 2


def test_a_control_plane_that_stays_away_is_an_error_after_some_attempts(client, plane):
    plane.answers["claim"] = 503

    with pytest.raises(InputError, match="status 503"):
        client.claim(run_id="r")
    assert len(plane.asked("claim")) == 3


@pytest.mark.parametrize("answer", [{}, {"lease_id": 3}, {"lease_id": ""}, ["lease"]])
def test_an_answer_without_a_lease_is_an_error(client, plane, answer):
    plane.answers["claim"] = [answer]

    with pytest.raises(InputError, match=r"lease_id|JSON object"):
        client.claim(run_id="r")


def test_a_malformed_address_is_refused():
    with pytest.raises(ValueError, match="Invalid URL"):
        HttpLifecycleClient("ftp://host")


# the session


@pytest.mark.parametrize(
    "answers",
    [{"heartbeat": [{}, 409]}, {"heartbeat": [{}, {"alive": False}]}, {"cancel": [{}, {"cancel": True}]}],
    ids=["lease gone", "not alive", "cancel"],
)
def test_a_lost_lease_and_a_wish_to_cancel_are_reasons_to_stop(client, plane, answers):
    plane.answers |= answers
    with LifecycleSession(client, "r", interval_s=0.01) as session:
        wait_for(lambda: session.reason() is not None)

        assert session.reason() == "canceled"


def test_a_control_plane_that_is_away_for_a_moment_stops_nothing(client, plane):
    plane.answers["heartbeat"] = [503, 503, {"alive": True}]
    with LifecycleSession(client, "r", interval_s=0.01) as session:
        wait_for(lambda: len(plane.asked("heartbeat")) >= 5)

        assert session.reason() is None


def test_a_lease_that_cannot_be_renewed_for_long_is_lost(client, plane):
    plane.answers["heartbeat"] = 503
    with LifecycleSession(client, "r", interval_s=0.01, patience_s=0.05) as session:
        wait_for(lambda: session.reason() == "canceled")


def test_no_heartbeat_comes_after_the_end(client, plane):
    with LifecycleSession(client, "r", interval_s=0.01) as session:
        wait_for(lambda: plane.asked("heartbeat"))
        session.completed(3, None)
    session._thread.join(60)  # one may be on its way
    beats = len(plane.asked("heartbeat"))
    time.sleep(0.05)

    assert len(plane.asked("heartbeat")) == beats
    assert plane.asked("completed") == [{"lease_id": "lease-1", "step": 3, "final_checkpoint": None}]


def test_an_end_that_is_not_taken_is_logged_without_secrets(client, plane, caplog):
    plane.answers["failed"] = 410
    with LifecycleSession(client, "r", interval_s=60.0) as session:
        session.failed(3, "train-step:x")

    assert "the end of the run could not be reported" in caplog.text
    assert TOKEN not in caplog.text


# a run with one

TRAINER = """
import time
from pathlib import Path
from gen_worker.trainer import StepResult


class Waiting:
    def setup(self, ctx): ...
    def configure(self, ctx): return {}
    def prepare_batch(self, raw, state, ctx): return raw
    def train_step(self, batch, state, ctx):
        end = time.monotonic() + 60
        while ctx.job.hyperparams.get("waits") and not ctx.is_canceled() and time.monotonic() < end:
            time.sleep(0.005)
        return StepResult(metrics={"loss": 1.0})
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): ...
"""


@pytest.fixture
def run_waiting(tmp_path, monkeypatch, client):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lifecycle_trainer.py").write_text(TRAINER)

    def run(**hyperparams):
        job = {"run_id": "leased", "trainer": "lifecycle_trainer:Waiting", "max_steps": 3, "mock_batches": [1, 2, 3]}
        job |= {"hyperparams": hyperparams, "lightning": {"accelerator": "cpu"}}
        (tmp_path / "job.json").write_text(json.dumps(job))
        code = run_job(
            RunOptions(spec_path=tmp_path / "job.json", overrides=(f"artifacts_dir={tmp_path}/out",), lifecycle=client)
        )
        return code, list(read_events(tmp_path / "out" / "metrics" / "events.jsonl"))[-1]

    return run


def test_a_run_is_claimed_and_its_completion_is_reported(run_waiting, plane, tmp_path):
    code, event = run_waiting()

    assert (code, event["event"]) == (0, "completed")
    assert plane.asked("claim") == [{}]
    final = str(tmp_path / "out" / "checkpoints" / "final.json")
    assert plane.asked("completed") == [{"lease_id": "lease-1", "step": 3, "final_checkpoint": final}]


def test_a_run_that_the_orchestrator_cancels_stops_with_a_checkpoint(run_waiting, plane, tmp_path, monkeypatch):
    monkeypatch.setattr("genlight.adapter.run.control_plane.INTERVAL_S", 0.02)
    plane.answers["cancel"] = [{"cancel": False}] * 3 + [{"cancel": True}]

    code, event = run_waiting(waits=True)

    assert (code, event["error"], event["resumable"]) == (75, "canceled", True)
    assert (tmp_path / "out" / "checkpoints" / f"step-{event['step']:08d}.json").exists() == (event["step"] > 0)
    assert plane.asked("failed")[-1]["error"] == "canceled"


@pytest.mark.parametrize(("answer", "code", "category"), [(409, 2, "startup"), (403, 1, "auth")])
def test_a_run_that_cannot_be_claimed_trains_nothing(run_waiting, plane, answer, code, category):
    plane.answers["claim"] = answer

    ended, event = run_waiting()

    assert (ended, event["category"], event["step"]) == (code, category, 0)


class Silent:
    """A control plane that takes a request and says nothing."""

    def __init__(self):
        self.asked, self.released = threading.Event(), threading.Event()

    def claim(self, *, run_id):
        self.asked.set()
        self.released.wait(120)

    def mark_failed(self, *, lease, step, error):
        self.claim(run_id="")


@pytest.fixture
def silent():
    made = Silent()
    yield made
    made.released.set()


def test_a_stop_ends_the_wait_for_a_claim(silent):
    class Stop(Exception):
        pass

    def stop():
        if silent.asked.is_set():
            raise Stop

    with pytest.raises(Stop), LifecycleSession(silent, "leased", raise_if_stopped=stop):
        pass


def test_a_claim_that_nobody_answers_is_given_up(silent):
    with pytest.raises(InputError, match="did not answer"), LifecycleSession(silent, "leased", answer_s=0.05):
        pass


def test_a_report_that_nobody_answers_is_given_up_and_logged(silent, caplog):
    session = LifecycleSession(silent, "leased", answer_s=0.05)
    session._lease = LEASE
    session.failed(3, "train-step:ValueError")
    assert silent.asked.wait(60)
    assert "could not be reported to the control plane: the control plane did not answer" in caplog.text
