"""Canaries in each place where a job keeps a secret reach neither files nor messages nor standard error."""

import json
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.adapter.cli import main
from genlight.callbacks import Checkpoint, Heartbeat, SystemMonitor
from genlight.reporters import EventLogger, read_events
from support import SUPPORT
from support.forked import run_forked
from support.plain_module import Plain
from support.trainer_class import Counts

CANARIES = {
    "token": "c4nary-0f-th3-t0ken",
    "api_key": "c4nary-0f-th3-4pi-k3y",
    "password": "c4nary-0f-th3-p4ssw0rd",
    "nested": "c4nary-n3st3d",
    "url": "c4nary-0f-4-url",
    "variable": "c4nary-0f-4-v4ri4ble",
    "signature": "c4nary-0f-4-sign4ture",
}
HYPERPARAMS = {
    "api_key": CANARIES["api_key"],
    "login": {"user": "me", "password": CANARIES["password"]},
    "stores": [{"auth": {"hf_token": [CANARIES["nested"]]}}],
    "data": f"https://me:{CANARIES['url']}@host/x",
    "lr": 0.001,
}
SAYINGS = {
    "exception": "raise ValueError(said)",
    "exception of several lines": "raise KeyError('x\\n' + said)",
    "warning": "warnings.warn(said)",
    "log": "logging.getLogger('a').warning('%s', said)",
    "malformed log": "logging.getLogger('a').warning('%d', said)",
    "extra": "logging.getLogger('a').warning('x', extra={'said': said, 'in': {'a': [said]}})",
    "thread": "t = threading.Thread(target=int, args=(said,)); t.start(); t.join()",
}


@pytest.fixture
def secret_job(job, receiver):
    """Make a job whose trainer reveals every secret in the given way."""
    job.environ |= {"TRAINER_CAPABILITY_TOKEN": CANARIES["token"], "MY_API_KEY": CANARIES["variable"]}
    said = " ".join([CANARIES["token"], CANARIES["variable"]])

    def run(saying, **fields):
        urls = {f"{kind}_url": f"{receiver.url}/{kind}?sig={CANARIES['signature']}" for kind in ("metrics", "terminal")}
        relative = f"url: /terminal?sig={CANARIES['signature']}"
        does = f"said = repr([{said!r}, {relative!r}, p]); {saying}"
        return job.run(does, uploads=urls, hyperparams=HYPERPARAMS, **fields)

    return run


def leaks(*blobs):
    return {name for name, canary in CANARIES.items() for blob in blobs if canary.encode() in blob}


@pytest.mark.parametrize("saying", SAYINGS)
def test_whatever_a_trainer_does_with_its_secrets_none_leaves_the_process(job, receiver, secret_job, capfd, saying):
    """But what the trainer itself stores in its state, of which this one stores none."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s %(said)s", defaults={"said": ""}))
    logging.getLogger().addHandler(handler)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        code = secret_job(SAYINGS[saying], checkpoint_every=1)
    logging.getLogger().removeHandler(handler)

    assert code == (1 if saying.startswith("exception") else 0)
    shown = "".join([*capfd.readouterr(), *(str(warning.message) for warning in warned)])
    files = [path.read_bytes() for path in job.out.rglob("*") if path.is_file()]
    bodies = json.dumps([body for _, body in receiver.posts]).encode()
    assert leaks(*files, bodies, shown.encode()) == set()
    assert "<hidden>" in shown
    assert receiver.posts


@pytest.mark.parametrize(("path", "status"), [("/files/x.parquet", 403), ("/checkpoint", 401), ("/terminal", 422)])
def test_a_request_that_a_server_refuses_shows_no_secret_of_its_url(job, receiver, capfd, caplog, path, status):
    caplog.set_level(logging.DEBUG)
    receiver.status[path] = status
    job.environ["TRAINER_CAPABILITY_TOKEN"] = CANARIES["token"]

    def url(path):
        address = receiver.url.removeprefix("http://")
        return f"http://me:{CANARIES['url']}@{address}{path}?sig={CANARIES['signature']}"

    fields = {"uploads": {f"{kind}_url": url(f"/{kind}") for kind in ("metrics", "checkpoint", "terminal")}}
    if path.startswith("/files"):
        fields |= {"mock_batches": ..., "dataset": {"batch_size": 4}, "inputs": {"dataset_parquet_urls": [url(path)]}}
    assert job.run(**fields) == 1

    shown = "".join([caplog.text, *capfd.readouterr(), str(receiver.posts)])
    assert leaks(*(path.read_bytes() for path in job.out.rglob("*") if path.is_file()), shown.encode()) == set()
    assert path in shown


def test_loggers_are_told_hyperparameters_without_secrets(job):
    csv = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(job.folder / "csv")}}
    assert job.run(hyperparams=HYPERPARAMS, lightning={"accelerator": "cpu", "logger": csv}) == 0
    (written,) = (job.folder / "csv").rglob("hparams.yaml")
    assert leaks(written.read_bytes()) == set()
    assert "lr: 0.001" in written.read_text()


def test_so_they_are_of_a_lightning_module(job, monkeypatch):
    """Saves its hyperparameters itself, so W&B and other loggers get them from Lightning."""
    monkeypatch.chdir(job.folder)
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(job.folder / "csv")}}
    trainer = {"max_steps": 2, "accelerator": "cpu", "logger": logger, "enable_progress_bar": False, "callbacks": []}
    given = {name: HYPERPARAMS[name] for name in ("api_key", "data", "login", "lr")}
    model = {"class_path": "support.plain_module.Plain", "init_args": given}
    (job.folder / "fit.json").write_text(json.dumps({"trainer": trainer, "model": model}))

    arguments = ["fit", "--config", "fit.json"]
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # about Lightning's own use of it
    monkeypatch.setattr(sys, "argv", ["genlight", *arguments])
    assert main(arguments) == 0
    (written,) = (job.folder / "csv").rglob("hparams.yaml")
    files = [path.read_bytes() for path in job.folder.rglob("*.yaml")]
    assert leaks(*files) == set()
    assert "lr: 0.001" in written.read_text()


def test_in_a_trainer_of_ones_own_only_the_state_of_a_checkpoint_has_what_a_module_saves(tmp_path):
    """Lightning rebuilds the module from its checkpoint; event log, record and other files of genlight have none."""
    module = Plain(**{name: HYPERPARAMS[name] for name in ("api_key", "data", "login", "lr")})
    trainer = pl.Trainer(
        max_steps=2,
        accelerator="cpu",
        enable_progress_bar=False,
        logger=EventLogger(tmp_path / "out" / "events.jsonl", run_id="own"),
        callbacks=[Checkpoint(tmp_path / "out" / "checkpoints"), Heartbeat(1), SystemMonitor(0.01)],
        default_root_dir=tmp_path / "out",
    )
    trainer.fit(module)

    found = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file() and leaks(path.read_bytes())}
    assert found == {"training_state.json"}
    assert [event["event"] for event in read_events(tmp_path / "out" / "events.jsonl")][-1] == "completed"


def test_of_a_trainer_class_foreign_loggers_of_ones_own_trainer_are_told_no_secrets(tmp_path):
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", enable_progress_bar=False, logger=CSVLogger(tmp_path), default_root_dir=tmp_path
    )
    module = ContractModule(Counts(), TrainingJobSpec(run_id="own", max_steps=1, hyperparams=HYPERPARAMS))
    trainer.fit(module, [1])

    (written,) = tmp_path.rglob("hparams.yaml")
    assert leaks(written.read_bytes()) == set()
    assert "lr: 0.001" in written.read_text()


def test_a_hyperparameter_cannot_be_guessed_from_a_record(job):
    """It has one digest of all of them."""
    assert job.run(hyperparams=HYPERPARAMS) == 0
    assert json.loads((job.out / "checkpoints" / "final.json").read_text())["spec"] == {}


def test_a_job_continues_with_a_renewed_credential_and_not_with_another_learning_rate(job, caplog):
    assert job.run(hyperparams=HYPERPARAMS) == 0
    assert job.run(hyperparams={**HYPERPARAMS, "api_key": "another one"}, max_steps=6, resume_from_latest=True) == 0
    assert job.run(hyperparams={**HYPERPARAMS, "lr": 0.1}, max_steps=8, resume_from_latest=True) == 2
    assert "Changed since final: hyperparams.lr (" in caplog.text


def fit_config(job, does, events):
    trained = {"run_id": "r", "max_steps": 4, "hyperparams": {**HYPERPARAMS, "does": f"said = repr(p); {does}"}}
    logger = {
        "class_path": "genlight.reporters.EventLogger",
        "init_args": {"run_id": "r", "path": str(events / "events.jsonl")},
    }
    config = {
        "trainer": {"max_steps": 4, "accelerator": "cpu", "logger": logger, "enable_progress_bar": False},
        "model": {
            "class_path": "genlight.adapter.ContractModule",
            "init_args": {"plugin": f"{job.module}:Trainer", "job": trained},
        },
        "data": {"class_path": "genlight.adapter.MockDataModule", "init_args": {"batches": [1, 2, 3, 4]}},
    }
    path = job.folder / "fit.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("saying", ["exception", "log", "thread"])
def test_neither_does_a_fit_show_them(job, saying):
    """A separate process, so that its interpreter prints uncaught exceptions."""
    config = fit_config(job, SAYINGS[saying], job.folder / "events")
    environ = {
        **os.environ,
        "PYTHONPATH": f"{job.folder}{os.pathsep}{SUPPORT.parent}",
        "MY_API_KEY": CANARIES["variable"],
    }
    done = run_forked("fit", "--config", config, folder=job.folder, environ=environ)

    raises = saying.startswith("exception")
    assert done.returncode == (1 if raises else 0), done.stderr
    log = (job.folder / "events" / "events.jsonl").read_bytes()
    assert leaks(done.stdout.encode(), done.stderr.encode(), log) == set()
    assert "<hidden>" in done.stderr
