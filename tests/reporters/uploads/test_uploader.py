"""The uploader against a server that behaves."""

import errno
import hashlib

from genlight.reporters.uploads import uploader as uploader_module


def test_metrics_arrive_in_order_with_token_and_idempotency_key(chaos, uploader_for):
    uploader = uploader_for(chaos)
    for step in (10, 20, 30):
        uploader.enqueue_metrics({"train/loss": 1 / step}, step)
    assert uploader.settle() is None
    assert chaos.messages("/metrics") == [
        {"run_id": "run-1", "kind": "metrics", "step": step, "metrics": {"train/loss": 1 / step}}
        for step in (10, 20, 30)
    ]
    headers = [request["headers"] for request in chaos.requests("/metrics")]
    assert {header["authorization"] for header in headers} == {"Bearer t0ken-that-must-not-leak"}
    assert len({header["idempotency-key"] for header in headers}) == 3


def test_a_checkpoint_sends_every_file_and_describes_its_record(chaos, uploader_for, enqueue):
    uploader = uploader_for(chaos)
    record, files = enqueue(uploader, 200)
    assert uploader.settle() is None
    names = [
        "step-00000200-model.safetensors",
        "step-00000200-trainer_lora.safetensors",
        "step-00000200-step-00000200.json",
    ]
    assert [item["file"] for item in chaos.state["applied"] if "file" in item] == names
    assert chaos.files() == dict(zip(names, [f.read_bytes() for f in (*files, record)], strict=True))
    assert chaos.requests("/api/")[0]["path"] == f"/api/v1/file/v1/me/runs/run-1/checkpoints/{names[0]}"
    digest = hashlib.sha256(record.read_bytes()).hexdigest()
    size = record.stat().st_size
    assert chaos.messages("/checkpoint") == [
        {
            "run_id": "run-1",
            "kind": "checkpoint",
            "step": 200,
            "final": False,
            "local_path": str(record),
            "size_bytes": size,
            "sha256": digest,
            "uploaded_size_bytes": size,
            "file_ref": f"ref-{names[-1]}",
        }
    ]
    assert uploader.delivered(record).sha256 == digest


def test_a_primary_path_is_described_instead_of_the_record(chaos, uploader_for, write_checkpoint):
    uploader = uploader_for(chaos)
    record, files = write_checkpoint(7)
    uploader.enqueue("checkpoint", record, files, step=7, final=True, primary_path=files[1])
    assert uploader.settle() is None
    (message,) = chaos.messages("/checkpoint")
    assert (message["local_path"], message["size_bytes"]) == (str(files[1]), files[1].stat().st_size)
    assert message["file_ref"] == "ref-final-trainer_lora.safetensors"
    assert message["final"] is True
    assert "final-step-00000007.json" in chaos.files()
    assert uploader.delivered(files[1]).ref == "ref-final-trainer_lora.safetensors"
    assert uploader.has_queued(record)


def test_a_directory_as_primary_path_has_a_size_and_no_digest(chaos, uploader_for, write_checkpoint):
    uploader = uploader_for(chaos)
    record, files = write_checkpoint(7)
    uploader.enqueue("checkpoint", record, [record.with_suffix("")], step=7, primary_path=record.with_suffix(""))
    assert uploader.settle() is None
    (message,) = chaos.messages("/checkpoint")
    assert message["size_bytes"] == sum(file.stat().st_size for file in files)
    assert message["sha256"] is None
    assert len(chaos.files()) == 3


def test_a_sample_is_sent_with_a_message_for_each_of_its_files(chaos, uploader_for, tmp_path):
    folder = tmp_path / "run" / "samples"
    folder.mkdir(parents=True)
    picture, sample = folder / "cat.png", folder / "step-00000005-00.json"
    picture.write_bytes(b"png")
    sample.write_text("{}")
    uploader = uploader_for(chaos)
    uploader.enqueue("sample", sample, [picture], step=5)
    assert uploader.settle() is None
    messages = chaos.messages("/sample")
    assert [(message["kind"], message["local_path"]) for message in messages] == [
        ("sample", str(picture)),
        ("sample", str(sample)),
    ]
    assert [message["file_ref"] for message in messages] == [f"ref-{name}" for name in sorted(chaos.files())]
    assert not any("final" in message for message in messages)
    assert sorted(chaos.files()) == ["step-00000005-cat.png", "step-00000005-step-00000005-00.json"]
    assert "/samples/" in chaos.requests("/api/")[0]["path"]


def test_without_a_file_store_the_message_carries_our_own_digest(chaos, uploader_for, enqueue):
    uploader = uploader_for(chaos, file_store_url=None)
    record, _files = enqueue(uploader, 3)
    assert uploader.settle() is None
    (message,) = chaos.messages("/checkpoint")
    assert message["sha256"] == hashlib.sha256(record.read_bytes()).hexdigest()
    assert (message["file_ref"], message["uploaded_size_bytes"]) == ("", None)


def test_the_terminal_message_names_the_uploaded_final_checkpoint_and_is_sent_once(chaos, uploader_for, enqueue):
    uploader = uploader_for(chaos)
    record, _files = enqueue(uploader, 9, name="final", final=True)
    assert uploader.settle() is None
    assert uploader.deliver_terminal("completed", 9, str(record)) is None
    uploader.close()
    again = uploader_for(chaos)
    assert again.deliver_terminal("completed", 9, str(record)) is None
    assert len(chaos.requests("/terminal")) == 1
    assert chaos.messages("/terminal") == [
        {
            "run_id": "run-1",
            "kind": "terminal",
            "status": "completed",
            "step": 9,
            "final_checkpoint": "ref-final-final.json",
            "final_checkpoint_ref": "ref-final-final.json",
            "final_checkpoint_sha256": hashlib.sha256(record.read_bytes()).hexdigest(),
            "error": "",
        }
    ]


def test_each_attempt_may_fail_once(chaos, uploader_for):
    uploader = uploader_for(chaos)
    for _ in range(2):
        assert uploader.deliver_terminal("failed", 4, error="train-step: boom") is None
    assert len(chaos.messages("/terminal")) == 2


def test_the_newest_metrics_are_kept_when_too_many_wait(chaos, uploader_for, monkeypatch):
    monkeypatch.setattr(uploader_module, "MOST_WAITING_METRICS", 3)
    uploader = uploader_for(chaos, start=False)
    for step in range(10):
        uploader.enqueue_metrics({"a": 1.0}, step)
    result = uploader.settle()
    assert [message["step"] for message in chaos.messages("/metrics")] == [7, 8, 9]
    assert result is None


def refuse_link(*_, **__):
    raise PermissionError(errno.EPERM, "a file system without links")


def test_what_waits_without_links_is_named_until_it_has_arrived(chaos, uploader_for, enqueue, monkeypatch, caplog):
    monkeypatch.setattr("os.link", refuse_link)
    uploader = uploader_for(chaos, start=False)
    record, files = enqueue(uploader)
    assert uploader.queue.unlinked_files() == {record, *files}
    assert "do not delete it until it is uploaded" in caplog.text
    assert uploader.settle() is None
    assert uploader.queue.unlinked_files() == set()


def test_a_checkpoint_that_was_delivered_is_not_sent_again_by_a_resumed_run(chaos, uploader_for, write_checkpoint):
    record, files = write_checkpoint(1)
    for _ in range(2):
        uploader = uploader_for(chaos)
        uploader.enqueue("checkpoint", record, files, step=1)
        assert uploader.settle() is None
        uploader.close()
    assert len(chaos.requests()) == 4
    lora = files[1]
    lora.write_bytes(b"other weights")
    uploader = uploader_for(chaos)
    uploader.enqueue("checkpoint", record, files, step=1)
    assert uploader.settle() is None
    assert chaos.files()["step-00000001-trainer_lora.safetensors"] == b"other weights"
