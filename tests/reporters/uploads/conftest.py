"""Uploaders that do not wait long, and checkpoints to upload."""

import json

import pytest

from genlight.adapter.plumbing.retry import RetryPolicy
from genlight.reporters.uploads import UploadConfig, Uploader
from support.upload_server import TOKEN

AT_ONCE = RetryPolicy(1_000_000, first_delay_s=0.004, longest_delay_s=0.05, longest_retry_after_s=3600.0)


@pytest.fixture
def config_for(tmp_path):
    """An `UploadConfig` that sends everything to a server and gives a busy machine time."""

    def build(chaos, **changes):
        settings = {
            "run_id": "run-1",
            "owner": "me",
            "token": TOKEN,
            "queue_dir": tmp_path / "run" / "uploads",
            "deadline_s": 120.0,
            "timeout_s": 60.0,
        }
        for kind in ("metrics", "checkpoint", "sample", "terminal"):
            settings[f"{kind}_url"] = f"{chaos.url}/{kind}"
        settings["file_store_url"] = chaos.url
        return UploadConfig(**(settings | changes))

    return build


@pytest.fixture
def uploader_for(config_for, monkeypatch):
    """A started `Uploader` that tries again at once; all are closed at the end of the test."""
    monkeypatch.setattr("genlight.reporters.uploads.uploader.METRICS_GRACE_S", 60.0)
    monkeypatch.setattr("genlight.reporters.uploads.uploader.RETRIES", AT_ONCE)
    opened = []

    def build(chaos, *, start=True, **changes):
        uploader = Uploader(config_for(chaos, **changes))
        opened.append(uploader)
        if start:
            uploader.start()
        return uploader

    yield build
    for uploader in opened:
        uploader.close()


@pytest.fixture
def write_checkpoint(tmp_path):
    def write(step, size=1000, name=None):
        folder = tmp_path / "run" / "checkpoints" / (name or f"step-{step:08d}")
        (folder / "trainer").mkdir(parents=True, exist_ok=True)
        model, lora = folder / "model.safetensors", folder / "trainer" / "lora.safetensors"
        model.write_bytes(bytes((step + i) % 251 for i in range(min(size, 997))) * (size // 997 + 1))
        lora.write_bytes(b"lora %d" % step)
        record = folder.with_suffix(".json")
        record.write_text(json.dumps({"step": step}))
        return record, [model, lora]

    return write


@pytest.fixture
def enqueue(write_checkpoint):
    def write_and_queue(uploader, step=1, *, size=1000, name=None, **options):
        record, files = write_checkpoint(step, size, name)
        uploader.enqueue("checkpoint", record, files, step=step, **options)
        return record, files

    return write_and_queue
