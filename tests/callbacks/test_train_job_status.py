"""The status of a Kubeflow TrainJob arrives at a real server on loopback, whatever else that server does."""

from __future__ import annotations

import logging
import shutil
import ssl
import subprocess
import threading
import time

import lightning.pytorch as pl
import pytest

from genlight.adapter import ContractModule, TrainingCanceled
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import LogMetrics, StopRequests, TrainJobStatus
from support.jobs import events_of, run, write_job
from support.loopback import Server
from support.messages import refusal
from support.trainer_class import Counts
from support.trainers import quiet_trainer

SECRET = "s3cret-t0ken"
PATH = "/apis/trainjobs/demo/status"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The controller's server, and the variables that it sets in a pod; Kubernetes mounts the token behind a link."""
    made = Server(tmp_path)
    (tmp_path / "..data").write_text(SECRET + "\n")
    (tmp_path / "token").symlink_to("..data")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", made.url + PATH)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    yield made
    made.close()


def statuses(server):
    """The statuses that arrived, each as progress, remaining seconds, and the numbers by name."""
    found = [body["trainerStatus"] for body in server.posted(PATH)]
    keys = ("progressPercentage", "estimatedRemainingSeconds")
    return [(*map(each.get, keys), {one["name"]: one["value"] for one in each["metrics"]}) for each in found]


def wait_for(holds):
    while not holds():
        time.sleep(0.002)  # the time limit of the test ends it if this never holds


class Waits(Counts):
    server: Server
    every = 2

    def train_step(self, batch, state, ctx):
        wait_for(lambda: len(self.server.posts) >= state["steps"] // self.every)
        return super().train_step(batch, state, ctx)


def fit(plugin, steps, *callbacks, **settings):
    trainer = quiet_trainer(LogMetrics(2), *callbacks, max_steps=steps, log_every_n_steps=2, **settings)
    trainer.fit(ContractModule(plugin), BatchStream(range(steps)))
    return trainer


def test_a_job_sends_its_status_at_the_cadence_of_metrics(server, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(Waits, "server", server, raising=False)
    every = {"TrainJobStatus": {"every_s": 0.001}}
    job = write_job(tmp_path, trainer=f"{__name__}:Waits", max_steps=6, metric_every=2, callbacks=every)
    assert run(job, "mock_batches=[1,1,1,1,1,1]") == 0

    arrived = statuses(server)
    assert [each[0] for each in arrived if each[0] != 99] == [33, 66, 100]
    assert arrived[0][1] is None, "the speed is not known yet"
    assert arrived[-1][:2] == (100, 0)
    assert arrived[1][2] == {"train/loss": "0.25", "total": "4.0", "current_step": "4", "total_steps": "6"}
    ((_, headers), *_) = server.headers
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert SECRET not in caplog.text
    assert SECRET not in str(events_of(job))


def test_a_server_that_hangs_delays_no_step_and_the_end_by_its_time_limit(server, monkeypatch):
    gate = server.gates[PATH] = threading.Event()  # half an answer, then silence
    monkeypatch.setattr("genlight.callbacks.train_job_status.TIMEOUT_S", 0.1)
    assert fit(Counts(), 40, TrainJobStatus(every_s=0.001)).global_step == 40
    gate.set()


def test_an_outage_is_named_once_and_the_newest_status_arrives_after_it(server, caplog):
    server.status[PATH] = 503

    class Recovers(Counts):
        def train_step(self, batch, state, ctx):
            if state["steps"] == 20:
                asked = len(server.headers)
                wait_for(lambda: len(server.headers) > asked + 3)  # again and again, although no step has a newer one
                server.status.clear()
                wait_for(lambda: server.posts)
            return super().train_step(batch, state, ctx)

    fit(Recovers(), 24, TrainJobStatus(every_s=0.001))
    assert statuses(server)[0][0] == 83, "of step 20"
    assert statuses(server)[-1][0] == 100
    assert len([text for text in caplog.messages if "503); still trying" in text]) == 1
    assert SECRET not in caplog.text


@pytest.mark.parametrize("fault", ["no server", "no token", "odd token", "no certificate", "a refusal"])
def test_a_fault_of_the_pod_fails_no_run(server, tmp_path, monkeypatch, caplog, fault):
    if fault == "no server":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:1" + PATH)
    elif fault == "no token":
        (tmp_path / "..data").unlink()
    elif fault == "odd token":
        (tmp_path / "..data").write_text(f"{SECRET}\n{SECRET}\x01")
    elif fault == "a refusal":
        server.status[PATH] = 403
    else:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "absent.crt"))
    assert fit(Counts(), 4, TrainJobStatus(every_s=0.001)).global_step == 4
    assert server.posts == []
    assert len([text for text in caplog.messages if "still trying" in text]) == 1
    assert SECRET not in caplog.text


def test_a_stopped_run_is_not_shown_as_ended(server):
    class Stops(Waits):
        def train_step(self, batch, state, ctx):
            result = super().train_step(batch, state, ctx)
            stops.sources.canceled = state["steps"] >= 5
            return result

    Stops.server, stops = server, StopRequests()
    with pytest.raises(TrainingCanceled):
        fit(Stops(), 100, stops, TrainJobStatus(every_s=0.001))
    assert [each[0] for each in statuses(server)][:2] == [2, 4]
    assert statuses(server)[-1][0] < 100


class Breaks(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise RuntimeError("no report")


def test_a_run_that_fails_after_its_last_step_is_not_shown_as_ended(server):
    with pytest.raises(RuntimeError):
        fit(Counts(), 4, TrainJobStatus(every_s=0.001), Breaks())
    assert statuses(server)[-1][0] == 99


def test_any_lightning_module_sends_its_status(server, fit_plain):
    fit_plain([TrainJobStatus(every_s=0.001)], steps=4, log_every_n_steps=2)
    assert statuses(server)[-1][0] == 100
    with refusal(ValueError):
        TrainJobStatus(every_s=float("nan"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_the_certificate_of_the_controller_counts(server, tmp_path, monkeypatch):
    """Without it the status is not sent, and neither is the token."""
    files = [str(tmp_path / name) for name in ("key.pem", "server.crt")]
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=demo"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", files[0], "-out", files[1]]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", server.url.replace("http:", "https:") + PATH)
    fit(Counts(), 4, TrainJobStatus(every_s=0.001))
    assert server.headers == []
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", files[1])
    fit(Counts(), 4, TrainJobStatus(every_s=0.001))
    assert statuses(server)[-1][0] == 100


def test_without_the_variable_nothing_runs(server, monkeypatch, fit_plain):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL")
    fit_plain([TrainJobStatus()])
    assert not any(thread.name == "genlight-train-job" for thread in threading.enumerate())
