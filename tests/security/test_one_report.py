"""One attempt leaves one terminal event and one terminal message, whatever goes wrong at its end."""

import errno
import os

import pytest

from genlight.reporters.events.validation import validate_events


def terminal_messages(receiver):
    return [body for path, body in receiver.posts if path == "/end"]


def test_an_exception_that_cannot_say_what_it_is_has_one_report(job, receiver):
    assert job.run("raise Unspeakable", uploads={"terminal_url": f"{receiver.url}/end"}) == 1

    (end,) = job.ends
    (message,) = terminal_messages(receiver)
    assert end["error"] == message["error"]
    assert end["error"].startswith("train-step:Unspeakable: <its text raised RuntimeError>")
    assert validate_events(job.out / "metrics" / "events.jsonl") == []


@pytest.mark.parametrize("outcome", ["completed", "failed"])
def test_a_log_whose_last_sync_fails_is_not_reported_a_second_time(job, receiver, monkeypatch, outcome):
    """The disk refuses from the terminal message on, so that the terminal event and the closing of the log meet it."""
    sync, log = os.fdatasync, job.out / "metrics" / "events.jsonl"

    def refuse(descriptor):
        if terminal_messages(receiver) and os.path.samestat(os.fstat(descriptor), os.stat(log)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", refuse)
    does = "" if outcome == "completed" else "raise ValueError('bad')"

    assert job.run(does, uploads={"terminal_url": f"{receiver.url}/end"}) == 1
    assert [message["status"] for message in terminal_messages(receiver)] == [outcome]
    assert [event["event"] for event in job.ends] == [outcome]
    assert validate_events(log) == []


@pytest.mark.parametrize("key", ["run_id", "owner", "sample_prompts"])
def test_half_a_surrogate_pair_in_a_job_is_a_startup_error_with_event_and_message(job, receiver, key):
    odd = {"run_id": "\ud800", "owner": "\ud800", "sample_prompts": ["a", {"prompt": "\udfff"}]}[key]

    assert job.run(uploads={"terminal_url": f"{receiver.url}/end"}, **{key: odd}) == 2
    (end,) = job.ends
    (message,) = terminal_messages(receiver)
    assert end["error"] == message["error"]
    assert end["error"].startswith("startup:startup.invalid_job_spec: ")
    assert key in end["error"]
