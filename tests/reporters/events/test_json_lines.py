"""The event log against kills, full disks, forks, interrupts and power cuts."""

import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from genlight.adapter.contract.exceptions import EventLogError
from genlight.reporters.events.event_log import EventLog
from genlight.reporters.events.json_lines import LineFile, encode_json
from genlight.reporters.events.reader import read_events
from genlight.reporters.events.validation import validate_events
from support.messages import refusal

WRITER = """
import itertools, sys
from genlight.reporters.events.event_log import EventLog
log = EventLog(sys.argv[1], run_id="r")
log.started()
for step in itertools.count():
    if sys.argv[2] == "at once":
        log.metric(name="train/loss", value=step / 7, step=step)
    else:
        log.metrics({"train/loss": step / 7, "train/lr": 0.5}, step=step)
    if step % 50 == 49:
        log.checkpoint(path=f"/c/{step}", step=step)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def wait_until(condition, *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.002)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def refusing(code: int) -> Callable[..., None]:
    """A system call that fails."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def kill_while_writing(path: Path, how: str, delay_s: float) -> None:
    before = size_of(path)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path), how]) as process:
        try:
            wait_until(lambda: size_of(path) > before or process.poll() is not None)
            time.sleep(delay_s)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def test_a_log_whose_writer_is_killed_ten_times_stays_sound(path):
    randomness = random.Random(0)
    for how in ("at once", "in bursts") * 5:
        kill_while_writing(path, how, randomness.uniform(0, 0.06))
    with EventLog(path, run_id="r") as log:
        assert log.attempt == 11
        log.started()
        log.completed(step=1, final_checkpoint=None)
    assert validate_events(path) == []
    events = list(read_events(path))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert sum(event["event"] == "started" for event in events) == 11


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_disk_that_takes_half_a_line_costs_it_and_never_tears_one(path, monkeypatch, can_truncate):
    truncate, write, refuse = os.ftruncate, os.write, refusing(errno.EIO)

    with EventLog(path, run_id="r") as log:
        log.started()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:10])) and refuse())
            if not can_truncate:  # then the line is cut off before the next one
                patch.setattr(os, "ftruncate", refuse)
            with refusal(EventLogError):
                log.metric(name="a", value=1, step=1)
            with refusal(EventLogError):
                log.metric(name="a", value=1, step=1)
        assert os.ftruncate is truncate
        log.metric(name="b", value=1, step=1)
    assert [event.get("name") for event in read_events(path)] == [None, "b"]
    assert validate_events(path) == []


class Interrupt(BaseException):
    """Used instead of a KeyboardInterrupt, because that would end pytest."""


@pytest.mark.timeout(300, method="thread")  # the signal method needs the very timer that interrupts here
@pytest.mark.parametrize("write", ["metric", "metrics"])
def test_an_interrupt_at_any_moment_leaves_a_sound_log(path, write):
    def interrupt(_signal, _frame):
        raise Interrupt

    interrupts = 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # an interrupt that lands in a finalizer is lost, and told as an error of that
    try:
        with EventLog(path, run_id="r") as log:
            log.started()
            randomness = random.Random(0)
            for step in range(600):
                try:
                    signal.setitimer(signal.ITIMER_REAL, randomness.uniform(1e-6, 3e-5))
                    for _ in range(100):
                        if write == "metric":
                            log.metric(name="a", value=1.0, step=step)
                        else:
                            log.metrics({"a": 1.0, "b": 2.0}, step=step)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:
                    interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            log.completed(step=600, final_checkpoint=None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.enable()
    assert interrupts > 300
    assert validate_events(path) == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_log_is_closed_in_a_forked_child_and_stays_open_in_its_parent(path):
    with EventLog(path, run_id="r") as log:
        log.started()
        if (child := os.fork()) == 0:  # a data loader worker
            try:
                log.metric(name="a", value=1, step=1)
            except EventLogError as error:
                os._exit(0 if log.closed and str(os.getpid()) in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        log.metric(name="a", value=1, step=1)
        assert [event["event"] for event in read_events(path)] == ["started", "metric"]
        with refusal(EventLogError):
            EventLog(path, run_id="r")


@pytest.fixture
def synced_sizes(monkeypatch, path):
    """Sizes of the file at the moments at which it was made durable."""
    sizes = []
    sync = os.fdatasync

    def record(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        sync(descriptor)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            sizes.append(size)

    monkeypatch.setattr(os, "fdatasync", record)
    return sizes


def test_all_but_metrics_are_durable_when_the_call_returns_and_metrics_with_the_next_of_them(path, synced_sizes):
    with EventLog(path, run_id="r") as log:
        for write in (
            lambda: log.started(),
            lambda: log.checkpoint(path="c", step=1),
            lambda: log.completed(step=2, final_checkpoint=None),
        ):
            write()
            assert size_of(path) in synced_sizes
            if log.phase == "started":
                log.metrics({"a": 1.0, "b": 2.0}, step=2)
                assert size_of(path) not in synced_sizes
    with EventLog(path, run_id="q") as log:
        log.failed(step=0, error="boom")
        assert size_of(path) in synced_sizes
    with EventLog(path, run_id="p") as log:
        log.started()
        log.metric(name="a", value=1, step=2)
    assert size_of(path) in synced_sizes


def test_a_disk_that_refuses_to_sync_is_reported_by_the_event_that_must_be_durable(path, monkeypatch):
    with EventLog(path, run_id="r") as log:
        log.started()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", refusing(errno.EIO))
            log.metric(name="a", value=1, step=1)
            with refusal(EventLogError):
                log.checkpoint(path="c", step=1)
        log.metric(name="a", value=1, step=3)
        log.completed(step=3, final_checkpoint=None)
    assert [event.get("step") for event in read_events(path)] == [None, 1, 1, 3, 3]
    assert validate_events(path) == []


def test_new_directories_are_durable_with_their_names(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.startswith(str(tmp_path)):
            synced.append(name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    LineFile(tmp_path / "a" / "b" / "events.jsonl").close()
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def test_json_is_compact_sorted_and_utf8():
    value = {"step": 3, "metrics": {"b": 1.5, "a": float("-inf")}, "path": ["/runs/\udcff/final.json"]}
    assert encode_json(value) == b'{"metrics":{"a":null,"b":1.5},"path":["/runs/\\\\udcff/final.json"],"step":3}'
    assert json.loads(encode_json({"\u2028": 1.0})) == {"\u2028": 1.0}
