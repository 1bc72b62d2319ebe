"""The uploader against a server and a network that fail, one fault at a time."""

import os
import shutil
import time

import pytest

from genlight.adapter.contract.exceptions import StartupContractError, UploadError
from genlight.adapter.plumbing.retry import RetryPolicy
from genlight.reporters.uploads import UploadConfig, uploader as uploader_module
from genlight.reporters.uploads.queue import LINKS, read_entries
from support.full_disk import full_disk
from support.messages import refusal


def timeout_for(fault):
    """The timeout is short for a server that sends nothing, and long for any other."""
    return {"timeout_s": 0.4} if fault == "stall" else {}


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "gave up waiting"
        time.sleep(0.005)


def settle_once_tried(uploader):
    """Settle after the oldest remaining entry was tried at least once; return the error."""
    result = None

    def is_tried():
        nonlocal result
        result = uploader.settle(0.1)
        return "not sent before the deadline" not in str(result)

    wait_until(is_tried)
    return result


@pytest.mark.parametrize(
    ("control", "requests", "reason"),
    [
        ({"script": ["400"]}, 1, "HTTP 400 from "),
        ({"script": ["413"]}, 1, "HTTP 413 from "),
        ({"script": ["401"]}, 1, "; it refuses the token of `TRAINER_CAPABILITY_TOKEN`, or of"),
        ({"script": ["403"]}, 1, "HTTP 403 from "),
        ({"script": ["huge"]}, 1, "answered with more than 1048576 bytes"),
        ({"script": ["302"]}, 1, "redirects (HTTP 301, 302 or 303)"),
        ({"redirect_to": "/again"}, 6, "TooManyRedirects"),
        ({"rate": 1.0, "faults": ["wrong-digest"]}, 5, "reports sha256"),
        ({"rate": 1.0, "faults": ["wrong-size"]}, 5, "bytes, but the file has"),
    ],
    ids=lambda value: "".join(value.get("script", value.get("faults", ["loop"]))) if isinstance(value, dict) else None,
)
def test_a_final_refusal_is_seen_by_the_run_and_kept(chaos, uploader_for, enqueue, control, requests, reason):
    chaos.control(**control)
    uploader = uploader_for(chaos)
    enqueue(uploader)
    result = uploader.settle()
    assert len(chaos.requests()) == requests
    assert len(uploader.queue.entries()) == 1
    assert reason in str(result)
    assert str(uploader.failure).startswith("checkpoint of step 1 (step-00000001.json): ")
    assert result.auth == uploader.failure.auth == (control.get("script") in (["401"], ["403"]))


def test_an_expired_token_is_final_and_a_start_with_a_new_one_delivers_in_order(chaos, uploader_for, enqueue):
    chaos.control(tokens=["new"])
    uploader = uploader_for(chaos)
    for step in (1, 2, 3):
        enqueue(uploader, step)
    uploader.enqueue_metrics({"a": 1.0}, 3)
    assert uploader.settle().auth
    uploader.close()
    uploader = uploader_for(chaos, token="new")
    enqueue(uploader, 4)
    assert uploader.settle() is None
    assert [message["step"] for message in chaos.messages("/checkpoint")] == [1, 2, 3, 4]
    assert [message["step"] for message in chaos.messages("/metrics")] == [3]


def test_a_file_that_changed_while_it_was_sent_is_sent_as_it_is_now(chaos, uploader_for, enqueue, monkeypatch):
    chaos.control(script=["wrong-digest"] * 2)
    uploader = uploader_for(chaos, start=False)
    monkeypatch.setattr(uploader_module, "RETRIES", RetryPolicy(9, first_delay_s=0.2, longest_delay_s=0.2))
    _record, files = enqueue(uploader)
    uploader.start()
    wait_until(lambda: chaos.requests("/api/"))
    old = files[0].stat()
    files[0].write_bytes(bytes(old.st_size))
    os.utime(files[0], ns=(old.st_atime_ns, old.st_mtime_ns))  # neither size nor time tell of it
    assert uploader.settle() is None
    assert chaos.files()["step-00000001-model.safetensors"] == bytes(old.st_size)


def test_retry_after_is_honoured_in_place_of_a_shorter_back_off_and_said(chaos, uploader_for, caplog):
    chaos.control(script=["429"], retry_after="30")
    uploader = uploader_for(chaos)
    uploader.enqueue_metrics({"a": 1.0}, 1)
    wait_until(lambda: chaos.requests("/metrics"))
    result = uploader.settle(0.3)
    assert len(chaos.requests("/metrics")) == 1
    assert "(Retry-After: 30 s)" in caplog.text
    assert result is None
    assert len(uploader.queue.entries("metrics")) == 1


def test_metrics_that_are_refused_do_not_fail_the_run(chaos, uploader_for, caplog):
    chaos.control(script=["400"])
    uploader = uploader_for(chaos)
    uploader.enqueue_metrics({"a": 1.0}, 1)
    uploader.enqueue_metrics({"a": 2.0}, 2)
    result = uploader.settle()
    assert result is None
    assert [message["step"] for message in chaos.messages("/metrics")] == [2]


def test_a_metrics_endpoint_that_is_away_does_not_hold_up_a_checkpoint(chaos, uploader_for, enqueue, monkeypatch):
    chaos.control(script=["500"] * 1000, script_paths="/metrics")
    uploader = uploader_for(chaos)
    monkeypatch.setattr("genlight.reporters.uploads.uploader.METRICS_GRACE_S", 0.2)
    uploader.enqueue_metrics({"a": 1.0}, 1)
    enqueue(uploader)
    assert uploader.settle() is None
    assert len(chaos.messages("/checkpoint")) == 1
    assert chaos.messages("/metrics") == []


def test_a_transfer_that_stalls_does_not_keep_metrics_waiting(chaos, uploader_for, enqueue, monkeypatch):
    monkeypatch.setattr(uploader_module, "CLOSE_WAIT_S", 0.1)
    chaos.control(script=["stall"], script_paths="/api/", stall_s=100.0)
    uploader = uploader_for(chaos)
    enqueue(uploader)
    wait_until(lambda: chaos.requests("/api/"))
    uploader.enqueue_metrics({"a": 1.0}, 1)
    wait_until(lambda: chaos.messages("/metrics"))
    assert chaos.messages("/checkpoint") == []


def test_a_full_outage_leaves_everything_in_the_queue_for_the_next_process(chaos, uploader_for, enqueue):
    chaos.control(outage=True)
    uploader = uploader_for(chaos)
    enqueue(uploader)
    uploader.enqueue_metrics({"a": 1.0}, 1)
    lines = []
    result = uploader.settle(1.3, progress=lines.append)
    assert result is not None
    assert lines
    assert lines[0].startswith("uploads: 1 left")
    assert uploader.deliver_terminal("failed", 1, error="upload: x", deadline_s=0.1) is not None
    uploader.close()
    chaos.control(outage=False)
    uploader = uploader_for(chaos)
    assert "terminal" not in {entry.kind for entry in read_entries(uploader.config.queue_dir)}
    assert uploader.settle() is None
    assert chaos.messages("/terminal") == []  # that attempt's message is out of date
    assert uploader.deliver_terminal("completed", 2) is None
    assert [message["status"] for message in chaos.messages("/terminal")] == ["completed"]
    assert len(chaos.messages("/checkpoint")) == len(chaos.messages("/metrics")) == 1


def test_what_a_full_disk_does_not_take_is_sent_all_the_same_and_once(chaos, uploader_for, write_checkpoint):
    uploader = uploader_for(chaos)
    (first, files), (second, others) = write_checkpoint(1), write_checkpoint(2)
    uploader.enqueue("checkpoint", first, files, step=1)
    with full_disk():
        uploader.enqueue_metrics({"a": 1.0}, 1)
        with refusal(UploadError):
            uploader.enqueue("checkpoint", second, others, step=2)
        assert uploader.settle() is None
        assert uploader.deliver_terminal("failed", 1, error="upload: disk") is None
        assert uploader.settle() is None
        assert len(chaos.messages("/terminal")) == 1
        assert [message["step"] for message in chaos.messages("/checkpoint")] == [1, 2]
        assert len(chaos.messages("/metrics")) == 1
        assert len(chaos.requests("/file/v1")) == len({*files, *others, first, second})


def test_uploads_that_neither_arrived_nor_could_be_kept_are_reported(chaos, uploader_for, write_checkpoint):
    uploader = uploader_for(chaos, checkpoint_url="http://127.0.0.1:9/checkpoint", file_store_url=None)
    record, files = write_checkpoint(1)
    with full_disk():
        with pytest.raises(UploadError):
            uploader.enqueue("checkpoint", record, files, step=1)
        error = str(settle_once_tried(uploader))
    assert error.startswith("checkpoint of step 1 (step-00000001.json): ConnectError")
    assert "not delivered, nor stored for the next start, because the queue cannot be written: File too large" in error
    assert str(uploader.settle(0.1)).endswith("not delivered, but kept for the next start")


def test_a_file_that_the_disk_cannot_read_is_named_and_tried_again(chaos, uploader_for, enqueue, caplog):
    """A network file system may lose a file for a moment."""
    uploader = uploader_for(chaos, start=False)
    _record, _files = enqueue(uploader)
    (sent,) = uploader.queue.directory.rglob("model.safetensors")
    real = sent.rename(sent.with_suffix(".away"))
    sent.symlink_to("/proc/self/mem")  # which opens, and fails when it is read
    assert "its files cannot be read: Input/output error" in str(settle_once_tried(uploader))
    assert "Traceback" not in caplog.text
    real.replace(sent)
    assert uploader.settle() is None


def test_closing_ends_a_transfer_that_the_next_start_repeats(chaos, uploader_for, write_checkpoint, monkeypatch):
    monkeypatch.setattr("genlight.reporters.uploads.uploader.CLOSE_WAIT_S", 60.0)  # else closing cuts the connection
    chaos.control(script=["slow-read"])
    uploader = uploader_for(chaos)
    record, files = write_checkpoint(1)
    os.truncate(files[0], 40 << 20)
    uploader.enqueue("checkpoint", record, files, step=1)
    wait_until(lambda: chaos.requests("/api/"))
    uploader.close()
    assert chaos.files() == {}
    assert uploader_for(chaos).settle() is None
    assert len(chaos.files()["step-00000001-model.safetensors"]) == 40 << 20


def test_a_file_that_is_gone_fails_its_upload_and_names_it(chaos, uploader_for, enqueue):
    uploader = uploader_for(chaos, start=False)
    _record, files = enqueue(uploader)
    shutil.rmtree(uploader.queue.directory / LINKS)
    files[0].unlink()
    result = uploader.settle()
    assert "model.safetensors" in str(result)


def test_what_vanished_between_two_attempts_is_dropped_with_a_warning(chaos, uploader_for, enqueue, caplog):
    uploader = uploader_for(chaos, start=False)
    _record, files = enqueue(uploader)
    uploader.close()
    shutil.rmtree(uploader.queue.directory / LINKS)
    files[0].unlink()
    assert uploader_for(chaos).settle() is None
    assert "no longer exist" in caplog.text


def test_what_waits_for_another_run_is_never_sent_under_this_ones_name(chaos, uploader_for, enqueue, caplog):
    uploader = uploader_for(chaos, start=False)
    record, files = enqueue(uploader)
    uploader.close()
    other = uploader_for(chaos, run_id="run-2")
    other.enqueue("checkpoint", record, files, step=2)
    assert other.settle() is None
    other.close()
    assert [message["run_id"] for message in chaos.messages("/checkpoint")] == ["run-2"]
    assert "uploads of run 'run-1' to file store and endpoint wait in" in caplog.text
    assert uploader_for(chaos).settle() is None
    assert [message["run_id"] for message in chaos.messages("/checkpoint")] == ["run-2", "run-1"]


def test_the_terminal_message_does_not_wait_for_a_transfer_that_stalls(chaos, uploader_for, enqueue):
    chaos.control(script=["stall"] * 9, script_paths="/api/", stall_s=100.0)
    uploader = uploader_for(chaos, timeout_s=100.0)
    enqueue(uploader)
    wait_until(lambda: chaos.requests("/api/"))
    assert uploader.settle(0.2) is not None
    assert uploader.deliver_terminal("failed", 1, error="upload: slow", deadline_s=60.0) is None
    assert [message["status"] for message in chaos.messages("/terminal")] == ["failed"]
    assert len(chaos.requests("/api/")) == 1
    chaos.control(stall_s=0.0)


@pytest.mark.parametrize("fault", ["500", "reset-after", "duplicate", "stall"])
def test_the_terminal_message_is_tried_again_until_it_is_acknowledged(chaos, uploader_for, fault):
    chaos.control(script=[fault] * 2)
    assert uploader_for(chaos, **timeout_for(fault)).deliver_terminal("completed", 1) is None
    assert len(chaos.messages("/terminal")) == 1


def test_a_terminal_message_that_is_refused_is_not_tried_again(chaos, uploader_for):
    chaos.control(script=["403"])
    result = uploader_for(chaos).deliver_terminal("completed", 1)
    assert result.auth
    assert len(chaos.requests("/terminal")) == 1


def test_what_waits_is_kept_by_a_start_that_has_no_url_for_it(chaos, uploader_for, enqueue):
    uploader = uploader_for(chaos, start=False)
    enqueue(uploader)
    uploader.enqueue_metrics({"a": 1.0}, 1)
    uploader.close()
    uploader = uploader_for(chaos, checkpoint_url=None, file_store_url=None, metrics_url=None)
    assert uploader.settle() is None
    uploader.close()
    assert chaos.requests() == []
    assert uploader_for(chaos).settle() is None
    assert len(chaos.messages("/checkpoint")) == len(chaos.messages("/metrics")) == 1


def test_a_checkpoint_that_is_replaced_while_it_is_tried_is_given_up_for_the_newer_one(chaos, uploader_for, enqueue):
    chaos.control(outage=True)
    uploader = uploader_for(chaos)
    record, files = enqueue(uploader, name="final", final=True)
    wait_until(lambda: chaos.requests() or uploader.queue.entries()[0].reason)
    files[0].write_bytes(b"newer")
    uploader.enqueue("checkpoint", record, files, step=2, final=True)
    chaos.control(outage=False)
    assert uploader.settle() is None
    assert uploader.failure is None
    assert [message["step"] for message in chaos.messages("/checkpoint")] == [2]
    assert chaos.files()["final-model.safetensors"] == b"newer"


def test_a_redirect_takes_the_bytes_along_and_leaves_the_token_behind(chaos, start_chaos, uploader_for, enqueue):
    other = start_chaos("other")
    chaos.control(redirect_to=other.url)
    uploader = uploader_for(chaos)
    _record, files = enqueue(uploader, size=400_000)
    assert uploader.settle() is None
    assert other.files()["step-00000001-model.safetensors"] == files[0].read_bytes()
    assert len(other.requests()) == 4
    assert all("authorization" in request["headers"] for request in chaos.requests())
    assert not any("authorization" in request["headers"] for request in other.requests())


def test_a_store_that_knows_nothing_of_a_file_contradicts_nothing(chaos, uploader_for, enqueue):
    chaos.control(script=["nulls"] * 3, script_paths="/api/")
    uploader = uploader_for(chaos)
    record, _files = enqueue(uploader)
    assert uploader.settle() is None
    (message,) = chaos.messages("/checkpoint")
    assert message["file_ref"] == ""
    assert message["size_bytes"] == message["uploaded_size_bytes"] == record.stat().st_size


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"ALL_PROXY": "socks5://user:pr0xy-canary@127.0.0.1:9"}, "(ImportError)"),
        ({"HTTPS_PROXY": "htp://user:pr0xy-canary@127.0.0.1:9"}, "(ValueError)"),
        ({"SSL_CERT_FILE": "/nowhere/pr0xy-canary"}, "(No such file or directory)"),
    ],
)
def test_unusable_proxies_and_certificates_are_named_without_values(
    chaos, uploader_for, monkeypatch, variables, reason
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # the queue is not left locked
        with refusal(StartupContractError) as caught:
            uploader_for(chaos)
        assert reason in str(caught.value)
        assert "canary" not in str(caught.value)


def test_blanks_around_what_the_environment_gives_are_no_part_of_it(tmp_path):
    environ = {"TRAINER_CAPABILITY_TOKEN": " secret\n", "TENSORHUB_URL": " ", "TRAINER_TOKEN_ORIGINS": " "}
    config = UploadConfig.from_environment(environ, run_id="r", queue_dir=tmp_path)
    assert (config.token, config.file_store_url, config.token_origins) == ("secret", None, frozenset())
