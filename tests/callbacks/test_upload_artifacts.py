"""UploadArtifacts with a plain LightningModule, `Checkpoint` and a server in a separate process."""

import contextlib
import errno
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.adapter.contract.exceptions import InputError, StartupContractError, TrainingCanceled, UploadError
from genlight.callbacks import LogMetrics, WriteSamples
from genlight.callbacks.checkpoint import Checkpoint, CheckpointRecord, DurableCheckpointIO, RecordMeta
from genlight.callbacks.hook.events import fire, run_state_of
from genlight.callbacks.hook.hook import Hook
from genlight.callbacks.upload_artifacts import UploadArtifacts
from genlight.reporters import EventLogger, read_events
from genlight.reporters.uploads import UploadConfig, Uploader
from support.messages import refusal
from support.plain_module import Fits
from support.trainer_class import Stateless
from support.trainers import quiet_trainer
from support.upload_server import TOKEN

pytestmark = pytest.mark.promise(name="uploads")


@pytest.fixture
def fit(tmp_path, chaos, monkeypatch):
    monkeypatch.setattr("genlight.reporters.uploads.uploader.METRICS_GRACE_S", 60.0)
    monkeypatch.setenv("TRAINER_CAPABILITY_TOKEN", TOKEN)
    for kind in ("METRICS", "CHECKPOINT", "SAMPLE", "TERMINAL"):
        monkeypatch.setenv(f"TRAINER_UPLOAD_{kind}_URL", f"{chaos.url}/{kind.lower()}")
    monkeypatch.setenv("TENSORHUB_URL", chaos.url)

    def run(
        module=None,
        steps=6,
        every=2,
        callbacks=(),
        ckpt_path=None,
        plugins=(),
        without_upload=False,
        logger=False,
        strategy="auto",
        **settings,
    ):
        settings = {"run_id": "run-1", "owner": "me", "metric_every": 2} | settings
        monkeypatch.setenv("TRAINER_UPLOAD_DEADLINE_SECONDS", str(settings.pop("deadline_s", 120.0)))
        if "checkpoint_url" in settings:
            monkeypatch.setenv("TRAINER_UPLOAD_CHECKPOINT_URL", settings.pop("checkpoint_url"))
        upload = UploadArtifacts(**settings)
        folder = tmp_path / "run" / "checkpoints"
        saver = Checkpoint(folder, every_n_steps=every, keep_last=1, save_final=False, asynchronous=False)
        trainer = quiet_trainer(
            *([] if without_upload else [upload]),
            *([saver] if every else []),
            *callbacks,
            max_steps=steps,
            default_root_dir=tmp_path / "run",
            plugins=list(plugins),
            logger=logger,
            strategy=strategy,
        )
        data = DataLoader(torch.ones(64, 2), batch_size=4)
        trainer.fit(module or Fits(), data, ckpt_path=ckpt_path)
        return trainer

    return run


def test_checkpoints_of_lightning_are_not_uploaded_and_are_named(fit, chaos, tmp_path, caplog):
    fit(every=0, callbacks=[ModelCheckpoint(tmp_path / "run" / "stock", every_n_train_steps=2)])
    assert chaos.messages("/checkpoint") == []
    assert "does not send files of ModelCheckpoint: give the trainer a `Checkpoint`" in caplog.text


def test_a_run_that_ends_well_is_reported_completed_after_its_metrics_and_checkpoints(fit, chaos):
    fit()
    assert [message["step"] for message in chaos.messages("/metrics")] == [2, 4, 6]
    assert all(message["metrics"]["loss"] >= 0 for message in chaos.messages("/metrics"))
    (terminal,) = chaos.messages("/terminal")
    assert (terminal["status"], terminal["step"], terminal["error"]) == ("completed", 6, "")
    assert terminal["final_checkpoint"] == "ref-step-00000006-step-00000006.json"
    assert terminal["final_checkpoint_sha256"]
    assert chaos.state["applied"][-1]["path"] == "/terminal"


class Stops(pl.Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3:
            raise self.error


@pytest.mark.parametrize(
    ("error", "text", "category"),
    [
        (RuntimeError(f"a secret {TOKEN} in the text"), "train-step:RuntimeError: a secret <hidden> in the text", None),
        (InputError("x.parquet is gone"), "input:x.parquet is gone", None),
        (TrainingCanceled("timeout"), "timeout", "timeout"),
        (TrainingCanceled("preempted"), "preempted", "preempted"),
        (SIGTERMException(), "preempted", "preempted"),
    ],
)
def test_the_event_and_the_terminal_message_of_a_failure_agree(fit, chaos, tmp_path, error, text, category):
    events = EventLogger(tmp_path / "events.jsonl", run_id="run-1")
    with pytest.raises((type(error), SystemExit)):
        fit(callbacks=[Stops(error)], logger=events)

    (terminal,) = chaos.messages("/terminal")
    *_, last = read_events(events.path)
    expected = text.replace("<hidden>", "$TRAINER_CAPABILITY_TOKEN")
    assert (terminal["status"], terminal["error"], last["error"]) == ("failed", expected, expected)
    assert last["category"] == (category or text.partition(":")[0])
    assert last["resumable"]
    assert [message["step"] for message in chaos.messages("/checkpoint")] == [2]


def test_a_refused_checkpoint_ends_the_run_early_and_is_in_event_and_terminal_message(fit, chaos, tmp_path):
    chaos.control(script=["422"], script_paths="/checkpoint?")

    class Patient(Hook):
        critical = True

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            (upload,) = (c for c in trainer.callbacks if isinstance(c, UploadArtifacts))
            for _ in range(12_000 if trainer.global_step == 4 else 0):
                if upload._uploader.failure:
                    return
                time.sleep(0.01)

    events = EventLogger(tmp_path / "events.jsonl", run_id="run-1")
    with refusal(UploadError):
        fit(callbacks=[Patient()], logger=events, checkpoint_url=f"{chaos.url}/checkpoint?")
    (terminal,) = chaos.messages("/terminal")
    *_, last = read_events(events.path)
    assert terminal["error"] == last["error"]
    assert terminal["status"] == "failed"
    assert 2 <= terminal["step"] <= 5  # of 6
    assert terminal["error"].startswith("upload:checkpoint of step 2")
    assert "HTTP 422" in terminal["error"]


def test_a_hook_that_is_not_critical_lets_the_run_complete(fit, chaos, caplog):
    chaos.control(outage=True)
    trainer = fit(deadline_s=0.2, critical=False)
    assert trainer.global_step == 6
    assert "kept for the next start" in caplog.text


def test_settings_out_of_range_are_refused():
    with refusal(ValueError):
        UploadArtifacts()
    with refusal(ValueError):
        UploadArtifacts(run_id="r", metric_every=-1)


def test_invalid_destinations_are_refused_together_before_a_fit(monkeypatch):
    """Otherwise uploads would be retried until the end of the fit, and then fail it."""
    with monkeypatch.context() as environment:
        environment.setenv("TRAINER_UPLOAD_METRICS_URL", "nope?signature=s3cret")
        environment.setenv("TRAINER_UPLOAD_CHECKPOINT_URL", "https://")
        with refusal(ValueError):
            UploadArtifacts(run_id="r")
    with refusal(ValueError):
        UploadArtifacts(run_id="r", targets="s3://bucket")
    with refusal(ValueError):
        UploadArtifacts(run_id="r", targets=["abacus://a"])
    with refusal(ValueError):
        UploadArtifacts(run_id="r", targets=["memory://a", "hf://b"])


def test_a_queue_that_cannot_be_written_is_refused_before_training(fit, tmp_path):
    (tmp_path / "run").write_text("")
    with refusal(StartupContractError):
        fit(every=0)


@pytest.mark.parametrize(("owner", "remedy"), [("me", "set `TRAINER_CAPABILITY_TOKEN`"), ("", "set `owner` and `TR")])
def test_a_file_store_without_credentials_causes_a_warning(tmp_path, monkeypatch, caplog, owner, remedy):
    monkeypatch.delenv("TRAINER_CAPABILITY_TOKEN", raising=False)
    trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setenv("TENSORHUB_URL", "http://127.0.0.1:9/store")
    uploads = UploadArtifacts(run_id="r", owner=owner)
    uploads.setup(trainer, None, "fit")
    uploads._uploader.close()
    assert "no files are sent to the file store http://127.0.0.1:9" in caplog.text
    assert remedy in caplog.text


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_a_resumed_run_does_not_report_the_metrics_of_its_checkpoint_as_its_own(fit, chaos, tmp_path):
    """The run state of the checkpoint has the metrics of step 4; they were once sent again for step 5."""

    def train(steps, **settings):
        saves = Checkpoint(tmp_path / "run" / "saved", every_n_steps=4, save_final=False)
        module = ContractModule(Stateless(), TrainingJobSpec("run-1", steps))
        fit(module, steps, every=0, callbacks=[LogMetrics(2), saves], **settings)

    train(4, without_upload=True)
    train(6, metric_every=0, ckpt_path=tmp_path / "run" / "saved" / "step-00000004.json")
    assert [(m["step"], m["metrics"]["train/loss"]) for m in chaos.messages("/metrics")] == [(6, 0.5)]


def refuse_link(*_, **__):
    raise PermissionError(errno.EPERM, "a file system without links")


@pytest.mark.parametrize("has_links", [True, False])
def test_checkpoints_that_retention_removes_in_an_outage_are_still_sent(chaos, tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr("os.link", refuse_link)
    queue, own = tmp_path / "run" / "uploads", tmp_path / "run" / "own"
    uploader = Uploader(UploadConfig(run_id="run-1", queue_dir=queue, checkpoint_url=f"{chaos.url}/checkpoint"))
    waiting = []

    class Outage(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 4:
                checkpoint.wait(trainer)
                waiting.extend(entry.step for entry in uploader.queue.entries("checkpoint"))
                uploader.start()
                uploader.settle(60.0)

    checkpoint = Checkpoint(own, every_n_steps=1, keep_last=1, save_final=False)
    trainer = quiet_trainer(UploadArtifacts(uploader), Outage(), checkpoint, max_steps=6)
    with contextlib.closing(uploader):
        trainer.fit(Fits(), DataLoader(torch.ones(64, 2), batch_size=4))
        assert uploader.settle(60.0) is None

    assert waiting == [1, 2, 3, 4]
    assert [path.name for path in own.glob("*.json")] == ["step-00000006.json"]
    assert [message["step"] for message in chaos.messages("/checkpoint")] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_that_was_deleted_before_it_could_be_queued_is_named(fit, chaos, tmp_path):
    class Forgetful(Hook):
        critical = True

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                gone = CheckpointRecord(
                    path=tmp_path / "gone.json", step=2, run_id="run-1", state={}, folder=None, files=()
                )
                fire(trainer, "on_checkpoint_durable", gone)

    with pytest.raises(UploadError, match=f"{tmp_path}/gone.json cannot be uploaded"):
        fit(every=0, callbacks=[Forgetful()])


class Draws(Stateless):
    def configure(self, ctx):
        return {"generate_sample": self.draw}

    def draw(self, prompt, output_dir):
        (Path(output_dir) / "cat.png").write_text(prompt)


def test_files_with_the_same_name_in_samples_of_one_step_stay_separate(fit, chaos, tmp_path):
    samples = WriteSamples(tmp_path / "run" / "own", 4, requests=[{"prompt": "0"}, {"prompt": "1"}])
    fit(ContractModule(Draws(), TrainingJobSpec("run-1", 6)), every=0, callbacks=[samples])
    assert [m["step"] for m in chaos.messages("/sample")] == [4] * 4
    assert len({request["key"] for request in chaos.requests("/sample")}) == 4 + 4
    assert chaos.files()["step-00000004-step-00000004-00_cat.png"] == b"0"
    assert chaos.files()["step-00000004-step-00000004-01_cat.png"] == b"1"


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_a_resumed_run_knows_the_path_of_its_checkpoint(fit, chaos, tmp_path):
    """The run state in the checkpoint cannot name it, because it was not durable yet."""
    own = tmp_path / "run" / "own"

    class Sees(Hook):
        optional_reads = ("latest_checkpoint_uri",)
        first = None

        def on_train_start(self, trainer, *_):
            self.first = run_state_of(trainer).latest_checkpoint_uri

    def saves():
        return Checkpoint(own, every_n_steps=2, keep_last=None, save_final=False)

    fit(steps=4, every=0, callbacks=[saves()])
    fit(steps=5, every=0, callbacks=[saves(), sees := Sees()], ckpt_path=own / "step-00000004.json")
    assert sees.first == str(own / "step-00000004.json")
    assert chaos.messages("/terminal")[-1]["final_checkpoint"] == "ref-step-00000004-step-00000004.json"


def test_a_users_uploader_is_neither_settled_nor_closed(chaos, tmp_path, fit):
    config = UploadConfig(run_id="r", queue_dir=tmp_path / "queue", metrics_url=f"{chaos.url}/metrics")
    with Uploader(config) as uploader:
        fit(uploader=uploader)
        assert uploader.settle() is None
    assert len(chaos.messages("/metrics")) == 3
    assert chaos.messages("/terminal") == []


class RestoresLate(SingleDeviceStrategy):
    """Restores modules and callbacks after a fit has started, like FSDP."""

    restore_checkpoint_after_setup = True


@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before")
@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, RestoresLate])
@pytest.mark.parametrize(("owner_of_record", "sent"), [("run-1", [3]), ("another", [])])
def test_the_record_of_a_resume_is_sent_if_it_is_of_this_run(fit, chaos, tmp_path, owner_of_record, sent, strategy):
    own = Checkpoint(tmp_path / "run" / "own", every_n_steps=3, save_final=False)
    own.run = RecordMeta(run_id=owner_of_record)
    fit(steps=3, every=0, callbacks=[own], without_upload=True)
    record = tmp_path / "run" / "own" / "step-00000003.json"
    fit(steps=4, every=0, ckpt_path=record, plugins=[DurableCheckpointIO()], strategy=strategy("cpu"))
    assert [message["step"] for message in chaos.messages("/checkpoint")] == sent
