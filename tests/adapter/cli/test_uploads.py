"""``genlight uploads`` on the queue that a run left behind."""

import json

import pytest

from genlight.reporters.uploads import UploadConfig, Uploader
from support.upload_server import TOKEN

pytestmark = pytest.mark.promise(name="uploads")


@pytest.fixture
def left_over(tmp_path):
    """The artifacts of a run that could deliver nothing."""
    run = tmp_path / "run"
    data = run / "checkpoints" / "step-00000003"
    data.mkdir(parents=True)
    (data / "model.safetensors").write_bytes(b"weights")
    record = data.with_suffix(".json")
    record.write_text("{}")
    away = "http://127.0.0.1:9"
    config = UploadConfig(
        run_id="run-1",
        owner="me",
        token=TOKEN,
        queue_dir=run / "uploads",
        metrics_url=away,
        checkpoint_url=away,
        terminal_url=away,
        file_store_url=away,
    )
    with Uploader(config) as uploader:
        uploader.enqueue_metrics({"train/loss": 0.5}, 3)
        uploader.enqueue("checkpoint", record, [data], step=3)
        uploader.deliver_terminal("failed", 3, str(record), "upload: away", deadline_s=0.05)
    return run


@pytest.fixture
def environment(chaos, monkeypatch):
    monkeypatch.setenv("TRAINER_CAPABILITY_TOKEN", TOKEN)
    monkeypatch.setenv("TENSORHUB_URL", chaos.url)
    for kind in ("METRICS", "CHECKPOINT", "TERMINAL"):
        monkeypatch.setenv(f"TRAINER_UPLOAD_{kind}_URL", f"{chaos.url}/{kind.lower()}")


def test_list_shows_waiting_uploads(left_over, genlight_uploads):
    code, out, _ = genlight_uploads("list", left_over)
    assert code == 0
    lines = out.splitlines()
    assert lines[-1] == "3 waiting"
    assert [line.split()[0] for line in lines[:-1]] == ["metrics", "checkpoint", "terminal"]
    assert "step-00000003.json" in lines[1]

    _, out, _ = genlight_uploads("list", left_over, "--json")
    entry = json.loads(out.splitlines()[1])
    assert (entry["files"], entry["files_sent"], entry["size_bytes"]) == (2, 0, len("weights") + len("{}"))


def test_it_delivers_everything_the_terminal_message_last(left_over, chaos, environment, genlight_uploads):
    code, out, _ = genlight_uploads("retry", left_over)
    assert code == 0
    assert "3 delivered, 0 left" in out
    assert chaos.files()["step-00000003-model.safetensors"] == b"weights"
    assert chaos.state["applied"][-1]["body"]["error"] == "upload: away"
    assert genlight_uploads("list", left_over)[1] == "nothing is waiting\n"


def test_it_takes_urls_and_token_from_the_job_spec(left_over, chaos, tmp_path, genlight_uploads, monkeypatch):
    monkeypatch.setenv("TENSORHUB_URL", chaos.url)
    urls = {f"{kind}_url": f"{chaos.url}/{kind}" for kind in ("metrics", "checkpoint", "terminal")}
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"run_id": "run-1", "max_steps": 5, "capability_token": TOKEN, "uploads": urls}))
    assert genlight_uploads("retry", left_over, "--job", job)[0] == 0
    assert len(chaos.messages("/checkpoint")) == 1
    assert chaos.requests("/checkpoint")[0]["headers"]["authorization"] == f"Bearer {TOKEN}"


def test_an_undeliverable_upload_is_named_and_stays(left_over, chaos, environment, genlight_uploads):
    chaos.control(tokens=["another"])
    code, out, err = genlight_uploads("retry", left_over, "--set", "upload_deadline_seconds=5")
    assert code == 1
    assert "HTTP 401" in err
    assert "3 left" in out
    assert TOKEN not in out + err
    assert genlight_uploads("list", left_over)[1].endswith("3 waiting\n")


@pytest.mark.parametrize("has_urls", [False, True])
def test_nothing_is_sent_unless_every_destination_is_known(
    left_over, chaos, environment, genlight_uploads, monkeypatch, has_urls
):
    monkeypatch.delenv("TENSORHUB_URL")
    for kind in () if has_urls else ("METRICS", "CHECKPOINT", "TERMINAL"):
        monkeypatch.delenv(f"TRAINER_UPLOAD_{kind}_URL")
    code, _, err = genlight_uploads("retry", left_over)
    assert code == 2
    assert "TENSORHUB_URL" in err
    assert ("TRAINER_UPLOAD_CHECKPOINT_URL" in err and "TRAINER_UPLOAD_TERMINAL_URL" in err) != has_urls
    assert chaos.requests() == []


def test_a_run_that_is_alive_keeps_its_queue(left_over, environment, genlight_uploads):
    config = UploadConfig(run_id="run-1", owner="me", queue_dir=left_over / "uploads")
    with Uploader(config, keep_terminal=True):
        code, _, err = genlight_uploads("retry", left_over)
    assert code == 2
    assert "in use by another run" in err


def test_a_terminal_message_waits_until_the_rest_is_delivered(left_over, chaos, environment, genlight_uploads):
    chaos.control(script=["400"] * 9, script_paths="/checkpoint")
    code, out, _ = genlight_uploads("retry", left_over)
    assert code == 1
    assert "1 delivered, 2 left" in out
    assert chaos.messages("/terminal") == []


@pytest.mark.parametrize("action", ["list", "retry"])
def test_uploads_list_is_empty_for_a_run_without_uploads(tmp_path, genlight_uploads, action):
    code, out, err = genlight_uploads(action, tmp_path)
    assert (code, out) == (0, "")
    assert f"nothing is waiting: {tmp_path} has no upload queue" in err


def test_a_run_whose_folder_was_moved_still_delivers(left_over, chaos, environment, tmp_path, genlight_uploads):
    moved = left_over.rename(tmp_path / "moved")
    assert genlight_uploads("retry", moved)[0] == 0
    (message,) = chaos.messages("/checkpoint")
    assert message["local_path"] == str(moved / "checkpoints" / "step-00000003.json")


def test_every_fault_of_environment_and_job_spec_is_named(left_over, tmp_path, genlight_uploads, monkeypatch):
    monkeypatch.setenv("TRAINER_UPLOAD_METRICS_URL", "no url")
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"uploads": {"checkpoint_url": 5}, "capability_token": ["t0ken"]}))
    code, _, err = genlight_uploads("retry", left_over, "--job", "nowhere.json")
    assert (code, "There is no job spec at " in err) == (2, True)
    code, _, err = genlight_uploads("retry", left_over, "--job", job)
    assert code == 2
    assert "Invalid `TRAINER_UPLOAD_METRICS_URL`" in err
    assert "Invalid `uploads.checkpoint_url`. Expected an http:// or https:// URL, but received 5." in err
    assert "Invalid `capability_token`" in err
    assert "t0ken" not in err
