"""A run under a control plane: claimed, kept alive, cancelled, reported."""

from __future__ import annotations

import threading
import time

import pytest

from genlight.adapter.contract.exceptions import AuthError, InputError, StartupContractError
from genlight.adapter.contract.types import LifecycleLease
from genlight.adapter.run import control_plane
from genlight.adapter.run.control_plane import Lease
from support.jobs import events_of, run, write_job
from support.messages import refusal
from support.trainer_class import Counts

SECRET = "lease-token-canary"


class Client:
    """A client as an orchestrator brings one; `answers` holds a value, an error to raise, or a list of them."""

    def __init__(self):
        self.answers = {"claim": "lease-1", "heartbeat": True, "cancel": False}
        self.requests = []

    def answer(self, what, **facts):
        self.requests.append((what, facts))
        answer = self.answers.get(what)
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def asked(self, what):
        return [facts for asked, facts in self.requests if asked == what]

    def claim(self, *, run_id):
        return LifecycleLease(run_id, self.answer("claim"))

    def heartbeat(self, *, lease):
        return self.answer("heartbeat")

    def request_cancel(self, *, lease):
        return self.answer("cancel")

    def mark_completed(self, *, lease, step, final_checkpoint):
        self.answer("completed", lease=lease.lease_id, step=step, final_checkpoint=final_checkpoint)

    def mark_failed(self, *, lease, step, error):
        self.answer("failed", lease=lease.lease_id, step=step, error=error)


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def lease(monkeypatch):
    """Claims a run for as long as the test takes; heartbeats come every 10 ms."""
    monkeypatch.setattr(control_plane, "INTERVAL_S", 0.01)
    claimed = []

    def claim(client, *, answer_s=60.0, raise_if_stopped=lambda: None):
        claimed.append(Lease(client, "r", answer_s=answer_s, raise_if_stopped=raise_if_stopped))
        return claimed[-1]

    yield claim
    for each in claimed:
        each.close()


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


AWAY = ConnectionError(f"no answer to {SECRET}")


@pytest.mark.parametrize(
    "answers", [{"heartbeat": [True, False]}, {"cancel": [False, True]}], ids=["lease gone", "cancel"]
)
def test_a_lost_lease_and_a_wish_to_cancel_are_reasons_to_stop(lease, client, answers):
    client.answers |= answers
    held = lease(client)
    wait_for(lambda: held.reason() == "canceled")


def test_a_short_outage_of_the_control_plane_stops_nothing(lease, client):
    client.answers["heartbeat"] = [AWAY, AWAY, True]
    held = lease(client)
    wait_for(lambda: len(client.asked("heartbeat")) >= 5)
    assert held.reason() is None


def test_a_lease_that_cannot_be_renewed_for_long_is_lost(lease, client, monkeypatch):
    monkeypatch.setattr(control_plane, "PATIENCE_S", 0.05)
    client.answers["heartbeat"] = AWAY
    held = lease(client)
    wait_for(lambda: held.reason() == "canceled")


def test_no_heartbeat_comes_after_the_end(lease, client):
    held = lease(client)
    wait_for(lambda: client.asked("heartbeat"))
    held.completed(3, None, within_s=5.0)
    held._thread.join(60)  # one may be on its way
    beats = len(client.asked("heartbeat"))
    time.sleep(0.05)

    assert len(client.asked("heartbeat")) == beats
    assert client.asked("completed") == [{"lease": "lease-1", "step": 3, "final_checkpoint": None}]


def test_a_refused_report_of_the_end_is_logged_without_secrets(lease, client, caplog):
    client.answers["failed"] = AWAY
    lease(client).failed(3, "train-step:x", within_s=5.0)

    assert "the end of the run could not be reported" in caplog.text
    assert SECRET not in caplog.text


class Waits(Counts):
    """Trains only once its run is to stop."""

    def train_step(self, batch, state, ctx):
        end = time.monotonic() + 60
        while not ctx.is_canceled() and time.monotonic() < end:
            time.sleep(0.005)
        return super().train_step(batch, state, ctx)


@pytest.fixture
def run_leased(tmp_path, client):
    """Runs a job under the control plane; returns its exit code and its last event."""

    def start(**fields):
        job = write_job(tmp_path, **fields)
        code = run(job, lifecycle=client)
        return code, events_of(job)[-1]

    return start


def test_a_run_is_claimed_and_its_completion_is_reported(run_leased, client, tmp_path):
    code, event = run_leased()

    assert (code, event["event"]) == (0, "completed")
    assert client.asked("claim") == [{}]
    final = str(tmp_path / "out" / "checkpoints" / "final.json")
    assert client.asked("completed") == [{"lease": "lease-1", "step": 3, "final_checkpoint": final}]


def test_a_run_that_the_orchestrator_cancels_stops_with_a_checkpoint(run_leased, client, tmp_path, monkeypatch):
    monkeypatch.setattr("genlight.adapter.run.control_plane.INTERVAL_S", 0.02)
    client.answers["cancel"] = [False] * 3 + [True]

    code, event = run_leased(trainer=f"{__name__}:Waits")

    assert (code, event["error"], event["resumable"]) == (75, "canceled", True)
    assert (tmp_path / "out" / "checkpoints" / f"step-{event['step']:08d}.json").exists() == (event["step"] > 0)
    assert client.asked("failed")[-1]["error"] == "canceled"


TAKEN = StartupContractError("startup.artifacts_in_use", "another worker holds its lease")


@pytest.mark.parametrize(("error", "code", "category"), [(TAKEN, 2, "startup"), (AuthError("no"), 1, "auth")])
def test_a_run_that_cannot_be_claimed_trains_nothing(run_leased, client, error, code, category):
    client.answers["claim"] = error

    ended, event = run_leased()

    assert (ended, event["category"], event["step"]) == (code, category, 0)


class Silent:
    """A control plane that takes a request and says nothing."""

    def __init__(self):
        self.asked, self.released = threading.Event(), threading.Event()

    def claim(self, *, run_id):
        self.asked.set()
        self.released.wait(120)


@pytest.fixture
def silent():
    made = Silent()
    yield made
    made.released.set()


def test_a_stop_ends_the_wait_for_a_claim(lease, silent):
    class Stop(Exception):
        pass

    def stop():
        if silent.asked.is_set():
            raise Stop

    with pytest.raises(Stop):
        lease(silent, raise_if_stopped=stop)


def test_the_wait_for_a_claim_ends_without_an_answer(lease, silent):
    with refusal(InputError):
        lease(silent, answer_s=0.05)


class Hangs(Silent):
    """Answers the claim and nothing else, as a client that has no time limit."""

    def claim(self, *, run_id):
        return LifecycleLease(run_id, "lease")

    def heartbeat(self, *, lease):
        self.asked.set()
        self.released.wait(120)
        return True

    def mark_failed(self, *, lease, step, error):
        self.released.wait(120)


def test_a_heartbeat_that_never_returns_loses_the_lease_and_a_report_is_given_up(lease, monkeypatch, caplog):
    monkeypatch.setattr(control_plane, "PATIENCE_S", 0.1)
    client = Hangs()
    held = lease(client)
    assert client.asked.wait(60)
    wait_for(lambda: held.reason() == "canceled")
    held.failed(3, "train-step:ValueError", within_s=0.05)
    assert "could not be reported to the control plane: the control plane did not answer" in caplog.text
    client.released.set()
