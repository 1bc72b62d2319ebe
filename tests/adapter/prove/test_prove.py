"""``genlight prove``: a sound job holds, a planted fault is named, and an interrupted command leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from genlight.adapter.cli import main
from genlight.adapter.contract.exceptions import UsageError
from genlight.adapter.prove import rehearsal
from genlight.adapter.prove.prove import prove as rehearse
from genlight.adapter.prove.rehearsal import Scene
from support import SUPPORT
from support.jobs import write_job
from support.messages import refusal
from support.planted import COPYING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.promise(name="resume")]

TRAINER = """
import itertools, random, torch
from support.trainer_class import Counts, Trains

class Sound(Trains):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))

    def configure(self, ctx):
        return {**super().configure(ctx), "frozen": torch.nn.Linear(1, 1).requires_grad_(False)}

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor(raw)

class ForgetsItsCounter(Sound):
    steps = 0

    def loss(self, batch, state):
        self.steps += 1
        return super().loss(batch, state) * (1 + self.steps)

    def __init__(self):
        self.counter = itertools.count(1)

    def train_step(self, batch, state, ctx):
        state["optimizer"].param_groups[0]["lr"] = 0.1 / next(COUNTER)
        return super().train_step(batch, state, ctx)

COUNTER = itertools.count(1)

class Unseeded(Sound):
    def setup(self, ctx):
        torch.manual_seed(random.SystemRandom().randrange(1 << 30))

class Fails(Sound):
    def train_step(self, batch, state, ctx):
        raise ZeroDivisionError("no batch is good enough")
"""


@pytest.fixture
def prove(tmp_path, monkeypatch, capfd):
    """Rehearse a class of `TRAINER`; return the exit code and the findings by rehearsal."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TRAINER_UPLOAD_TERMINAL_URL", "http://127.0.0.1:1/nobody-listens")
    monkeypatch.setattr(rehearsal, "subprocess", COPYING)
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        rows = [[[i / 30, 1.0], [0.5, -i / 30]] for i in range(30)]
        write_job(tmp_path, run_id="proven", trainer=f"trainer:{name}", max_steps=1000, mock_batches=rows)
        code = main(["prove", "job.json", "--json", *arguments])
        findings = json.loads(capfd.readouterr().out)["findings"]
        return code, {each["check"]: each for each in findings}

    return run


def test_a_sound_job_holds_and_gets_a_certificate(prove, tmp_path, monkeypatch, caplog):
    code, findings = prove("Sound", "--set", "checkpoints.weights=trained")

    assert code == 0, findings
    assert {name: each["level"] for name, each in findings.items()} == dict.fromkeys(
        ["unbroken", "kill", "kill while saving", "stop", "two kills", "cut file", "flipped bit", "full disk"], "pass"
    )
    proof = json.loads((tmp_path / "runs" / "proven" / "proof.json").read_text())
    assert [each["check"] for each in proof["results"]] == list(findings)
    assert os.listdir(tmp_path / "runs" / "proven") == ["proof.json"]

    caplog.set_level("INFO")
    monkeypatch.delenv("TRAINER_UPLOAD_TERMINAL_URL")
    assert main(["run", "job.json", "--set", "max_steps=1"]) == 0
    assert "genlight prove" not in caplog.text
    assert main(["run", "job.json", "--fresh", "--set", "max_steps=1", "--set", "seed=1"]) == 0
    assert "the job has changed since `genlight prove` (seed)" in caplog.text


def test_a_forgotten_counter_is_named_by_its_first_effect(prove):
    code, findings = prove("ForgetsItsCounter", "--only", "kill", "--only", "killed rank")

    assert code == 1
    assert findings["killed rank"]["level"] == "skip"
    assert findings["unbroken"]["level"] == "pass"
    assert findings["kill"]["level"] == "fail"
    assert "the learning rate is 0." in findings["kill"]["detail"]


def test_a_job_of_other_random_numbers_in_each_run_completes_but_is_not_compared(prove):
    code, findings = prove("Unseeded", "--only", "kill")

    assert (code, findings["unbroken"]["level"], findings["kill"]["level"]) == (0, "warn", "warn")
    assert "torch on the CPU" in findings["unbroken"]["detail"]


def test_a_job_that_fails_without_a_fault_is_not_rehearsed(prove):
    code, findings = prove("Fails")

    assert (code, list(findings)) == (1, ["unbroken"])
    assert "no batch is good enough" in findings["unbroken"]["detail"]


def test_on_two_ranks_one_is_killed_or_paused_and_another_number_resumes(prove):
    rehearsals = ("killed rank", "paused rank", "fewer ranks")
    chosen = [word for rehearsal in rehearsals for word in ("--only", rehearsal)]
    code, findings = prove("Sound", "--ranks", "2", *chosen, "--set", "lightning.strategy=ddp")

    assert code == 0, findings
    assert {name: each["level"] for name, each in findings.items()} == dict.fromkeys(["unbroken", *rehearsals], "pass")


def test_an_interrupted_command_leaves_neither_files_nor_processes(prove, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "job.json").write_text(json.dumps({"run_id": "r", "trainer": "trainer:Sound", "max_steps": 9}))
    command = subprocess.Popen(
        [sys.executable, "-m", "genlight", "prove", "job.json", "--set", "mock_batches=[[[1, 2]]]"]
    )
    while not list((tmp_path / "scratch").glob("genlight-prove-*/unbroken-1/attempt-1.log")):
        assert command.poll() is None
        time.sleep(0.05)
    command.send_signal(signal.SIGTERM)

    assert command.wait(60) == 130
    assert os.listdir(tmp_path / "scratch") == []
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listed


def test_an_unknown_rehearsal_is_refused_before_anything_runs(tmp_path):
    scene = Scene(tmp_path / "job.json", (), (), steps=12, every_n_steps=4)

    with refusal(UsageError):
        next(rehearse(scene, tmp_path, minutes=1, only=["nap"], interrupted=threading.Event()))
