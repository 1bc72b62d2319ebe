"""One call on the event log or the upload queue fails once: the loss is reported, and the run ends as it should.

Each kind of call of a clean run fails in turn, at its first, a middle and its last occurrence.
"""

import collections
import errno
import os
import re
from typing import NamedTuple

import pytest

from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events
from genlight.reporters.uploads import QUEUE_DIRECTORY

pytestmark = pytest.mark.slow

BY_DESCRIPTOR = ("write", "fsync", "fdatasync", "ftruncate")
BY_PATH = ("open", "rename", "replace", "link", "unlink", "mkdir")
FOLDERS = {"events": "/metrics", "uploads": f"/{QUEUE_DIRECTORY}"}


class Calls:
    """Counts the changing calls below a folder, by call and file; one of them may fail."""

    def __init__(self, part, fails=None, code=errno.EIO):
        self.part, self.fails, self.code = part, fails, code
        self.counts = collections.Counter()

    def install(self, patch):
        for name in (*BY_DESCRIPTOR, *BY_PATH):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, real):
        def call(target, *args, **kwargs):
            path = os.readlink(f"/proc/self/fd/{target}") if name in BY_DESCRIPTOR else os.fspath(target)
            is_change = name != "open" or (args and args[0] & os.O_CREAT)
            if is_change and self.part in str(path):
                kind = (name, re.sub(r"\.tmp-.*|[0-9]+", "N", os.path.basename(path)))
                self.counts[kind] += 1
                if self.fails == (*kind, self.counts[kind]):
                    raise OSError(self.code, os.strerror(self.code))
            return real(target, *args, **kwargs)

        return call


@pytest.fixture
def run(job, monkeypatch):
    """Run the job in a new folder while `calls` counts; return the exit code."""

    def started(name, calls):
        job.out = job.folder / name
        job.server.posts.clear()
        job.write(uploads={f"{kind}_url": f"SERVER/{kind}" for kind in ("terminal", "checkpoint", "metrics")})
        with pytest.MonkeyPatch.context() as patch:
            calls.install(patch)
            return job.run()

    return started


@pytest.mark.parametrize(("area", "code"), [("events", errno.EINVAL), ("uploads", errno.ENOSPC)])
def test_a_loss_is_reported_and_the_log_stays_valid(job, run, area, code, caplog, capfd):
    clean = Calls(FOLDERS[area])
    assert run("clean", clean) == 0
    expected = read_outcome(job)
    assert expected.ends == expected.posted == ["completed"]
    assert clean.counts.total() > 10

    wrong = []
    for (name, file), count in clean.counts.items():
        for nth in sorted({1, (count + 1) // 2, count}):
            caplog.clear()
            ended = run(f"{name}-{file}-{nth}", Calls(FOLDERS[area], (name, file, nth), code))
            output, outcome = caplog.text + "".join(capfd.readouterr()), read_outcome(job)
            is_reported = os.strerror(code) in output
            is_right = "Traceback" not in output and not outcome.faults
            if ended == 0:
                is_right &= outcome.ends == outcome.posted == ["completed"] and outcome.sent == expected.sent
                is_right &= outcome.metrics == expected.metrics or is_reported
            elif ended == 2:
                is_right &= is_reported and "completed" not in outcome.posted + outcome.ends
            else:
                # A complete log may not be durable; closing it reports that, at the very end. And its last line is
                # written after the message to the server.
                at_the_end = (expected, expected._replace(ends=[]))
                is_right &= ended == 1 and is_reported and (outcome.posted == ["failed"] or outcome in at_the_end)
            if not is_right:
                wrong.append((name, file, nth, count, ended, outcome, output))
    assert wrong == []


class Outcome(NamedTuple):
    """Contents of the event log, and the messages that the server got."""

    faults: list
    ends: list
    metrics: set
    posted: list
    sent: list


def read_outcome(job):
    path = job.events_path
    events = list(read_events(path)) if path.exists() else []
    return Outcome(
        faults=validate_events(path) if path.exists() else [],
        ends=[event["event"] for event in events if event["event"] in ("completed", "failed")],
        metrics={(event["name"], event["step"]) for event in events if event["event"] == "metric"},
        posted=[body["status"] for body in job.server.posted("/terminal")],
        sent=[body["step"] for body in job.server.posted("/checkpoint")],
    )
