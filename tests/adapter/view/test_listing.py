"""``genlight ls`` and ``genlight stop``: state and progress of runs, and requests to stop."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time

import pytest

from genlight.adapter.cli import main
from genlight.adapter.view.log_search import Searches
from genlight.adapter.view.summary import find_runs, summary_of
from genlight.reporters.events.event_log import EventLog
from support.messages import refusal
from support.seen_runs import start, wait_for_step

pytestmark = pytest.mark.promise(name="events")


@pytest.fixture
def copy(runs, tmp_path):
    """Copies one of the runs to a folder that a test may change."""
    return lambda name: shutil.copytree(runs / name, tmp_path / name)


def test_a_listing_tells_how_each_run_ended(runs, capsys):
    assert main(["ls", str(runs), "--json"]) == 0
    listed = {each["run_id"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}

    assert {name: each["state"] for name, each in listed.items()} == {
        "done": "completed",
        "broken": "failed",
        "killed": "lost",
    }
    done = listed["done"]
    assert (done["step"], done["max_steps"], done["attempts"]) == (40, 40, 1)
    assert 0 <= done["loss"] < 1
    assert done["steps_per_s"] > 0
    assert done["score"] == {"name": "score", "value": 40}, "by the job's monitor and mode"
    assert listed["killed"]["score"] is None, "nothing says which is better"
    assert done["size_bytes"] > 1000
    assert "no <b>luck</b>" in listed["broken"]["detail"]
    assert "no longer exists" in listed["killed"]["detail"]

    assert main(["ls", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:3] == ["STATE", "RUN", "STEP"]
    assert "\x1b" not in "".join(lines)


def attempt(log: EventLog, end: str = "") -> None:
    log.started(metadata={"job": {"max_steps": 9}})
    log.metric(name="train/loss", value=0.5, step=3)
    if end == "completed":
        log.completed(step=3, final_checkpoint=None)
    elif end:
        log.failed(step=3, error=end, category=end, resumable=True)


@pytest.mark.parametrize(
    ("end", "state"), [("completed", "completed"), ("preempted", "stopped"), ("", "lost")], ids=lambda each: each
)
@pytest.mark.parametrize("category", ["startup", "input"])
def test_a_failed_start_is_shown_next_to_the_state_of_the_run(tmp_path, capsys, end, state, category):
    log = tmp_path / "run" / "metrics" / "events.jsonl"
    with EventLog(log, run_id="r") as events:
        attempt(events, end)
    before = summary_of(tmp_path / "run")
    for error in (f"{category}: first", f"{category}: max_stepz is unknown"):
        with EventLog(log, run_id="r") as events:
            events.failed(step=0, error=error, category=category, resumable=False)

    after = summary_of(tmp_path / "run")
    assert (after.state, after.step, after.loss, after.resumable) == (state, 3, 0.5, before.resumable)
    assert after.later_failure == f"{category}: max_stepz is unknown"
    assert any("max_stepz" in sentence for sentence in after.words)
    main(["ls", str(tmp_path)])
    assert "a later start failed" in capsys.readouterr().out

    with EventLog(log, run_id="r") as events:
        attempt(events, "completed")
        assert (summary_of(tmp_path / "run").state, summary_of(tmp_path / "run").later_failure) == ("completed", "")


def test_a_failed_start_is_no_end_of_an_earlier_attempt_without_a_step(tmp_path):
    with EventLog(tmp_path / "events.jsonl", run_id="r") as events:
        events.started()
    with EventLog(tmp_path / "events.jsonl", run_id="r") as events:
        events.failed(step=0, error="startup: no trainer", category="startup", resumable=False)
    seen = summary_of(tmp_path)
    assert (seen.state, seen.later_failure) == ("lost", "startup: no trainer")


def test_a_run_that_never_trained_shows_its_last_failure(tmp_path):
    for error in ("startup: first", "startup: second"):
        with EventLog(tmp_path / "events.jsonl", run_id="r") as events:
            events.failed(step=0, error=error, category="startup", resumable=False)
    assert (summary_of(tmp_path).state, summary_of(tmp_path).detail) == ("failed", "startup: second")


def test_views_and_their_help_load_only_what_they_need(runs):
    script = """
import contextlib, sys
from genlight.adapter.cli import main
for words in (["ls", sys.argv[1]], ["stop", sys.argv[1] + "/done"], *([name, "--help"] for name in ("watch", "serve"))):
    with contextlib.suppress(SystemExit):
        main(words)
    heavy = {"torch", "lightning", "numpy", "textual", "plotext", "starlette", "uvicorn"} & {*sys.modules}
    assert not heavy, (words, heavy)
"""
    done = subprocess.run([sys.executable, "-c", script, str(runs)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_live_run_stops_saves_and_continues_when_started_again(tmp_path, capsys):
    process = start(tmp_path, "live", max_steps=50_000, hyperparams={"pause_s": 0.002})
    folder = tmp_path / "runs/live"
    wait_for_step(folder, 4)
    assert summary_of(folder).state == "running"
    assert summary_of(folder).left_s > 0
    assert summary_of(folder).ranks == 1, "before there is a checkpoint"

    assert main(["stop", str(folder)]) == 0
    said = capsys.readouterr().out
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert "It was stopped (canceled) at step" in said
    assert "Start it again to continue" in said
    stopped_at = summary_of(folder).step
    assert summary_of(folder).state == "stopped"
    assert not (folder / ".stop").exists()

    (folder / ".stop").write_text("1")  # of a `genlight stop` that was killed
    resumed = start(tmp_path, "live", max_steps=stopped_at + 4, hyperparams={"pause_s": 0.002})
    _, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors
    assert (summary_of(folder).state, summary_of(folder).attempts) == ("completed", 2)
    assert summary_of(folder).step == stopped_at + 4


def test_a_killed_run_of_another_host_is_lost_after_a_long_silence(copy):
    folder = copy("killed")
    (folder / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "run_id": "killed"}))
    now_ms = int(time.time() * 1000)

    assert summary_of(folder, now_ms=now_ms).state == "running", "its lock may not be seen here"
    later = summary_of(folder, now_ms=now_ms + 24 * 3600 * 1000)
    assert later.state == "lost"
    assert "no activity from elsewhere" in later.detail


def test_readable_lines_of_a_damaged_log_count(copy):
    folder = copy("done")
    log = folder / "metrics" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], b"\0\0\0\n", *lines[1:-1], b'{"event": "comple']))

    seen = summary_of(folder)
    assert (seen.state, seen.step, seen.attempts) == ("lost", 40, 1)


@pytest.mark.parametrize("content", [b"", b"[]\n{}\n\xff\xfe\n", b'{"event":"started"\n'])
def test_a_log_without_an_event_is_no_error(copy, content):
    folder = copy("done")
    (folder / "metrics" / "events.jsonl").write_bytes(content)
    seen = summary_of(folder)
    assert (seen.state, seen.attempts) == ("lost", 0)
    assert seen.step == 40, "of its newest checkpoint"


def test_uploads_that_wait_are_counted_and_names_of_folders_do_not_command_the_terminal(copy, tmp_path, capsys):
    folder = copy("done").rename(tmp_path / "bell\x07\x1b[31m")
    for name in ("uploads/000000003.json", "uploads/000000012.json", "uploads/delivered/000000001.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    assert summary_of(folder).waiting_uploads == 2
    main(["ls", str(tmp_path)])
    said = capsys.readouterr().out
    assert "2 wait" in said
    assert "\x1b" not in said
    assert "bell\\x07" in said


def test_a_log_is_not_searched_twice_and_a_new_start_is_found(copy):
    log, searches = copy("done") / "metrics" / "events.jsonl", {}
    assert summary_of(log.parent.parent, searches=searches).attempts == 1
    with EventLog(log, run_id="done") as events:
        events.started(metadata={"notes": "x" * 100_000})
        assert summary_of(log.parent.parent, searches=searches).attempts == 2
        events.metric(name="train/loss", value=1.0, step=41)
    assert summary_of(log.parent.parent, searches=searches).metadata["notes"] == "x" * 100_000
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:20]))
    assert summary_of(log.parent.parent, searches=searches).attempts == 1


def test_the_proof_of_the_newest_attempt_is_found_in_a_long_log(tmp_path):
    (folder := tmp_path / "run" / "metrics").mkdir(parents=True)

    def write(text: str, *, lines: int) -> None:
        with EventLog(folder / "events.jsonl", run_id="r") as log:
            log.started(metadata={"notes": "x"})
            if text:
                log.finding(kind="resume_proof", level="ok", step=3, text=text)
            for step in range(lines):
                log.metric(name="train/loss", value=0.5, step=step)

    searches: Searches = {}
    write("", lines=10)
    assert summary_of(tmp_path / "run", searches=searches).proof is None
    write("proven", lines=20_000)
    for _ in range(2):
        summary = summary_of(tmp_path / "run", searches=searches)
        assert summary.proof == {"level": "ok", "step": 3, "text": "proven"}
    assert "Resumed: proven." in summary.words
    write("", lines=10)
    assert summary_of(tmp_path / "run", searches=searches).proof is None


@pytest.mark.parametrize("lines", [1, 20_000], ids=["short log", "long log"])
def test_device_hours_cost_and_goodput_add_up_over_attempts(tmp_path, capsys, lines):
    folder, written = tmp_path / "run", []
    (folder / "metrics").mkdir(parents=True)

    def write(event: str, at_s: float, **fields: object) -> None:
        about = {"event": event, "run_id": "r", "schema_version": "trainer_event.v1", "seq": len(written) + 1}
        written.append(json.dumps({**about, "timestamp_ms": int(at_s * 1000), **fields}, separators=(",", ":")))

    def begin(at_s: float, ranks: int, **job: float) -> None:
        write("started", at_s, metadata={"ranks": ranks, "job": job})

    begin(0, 4, price_per_device_hour=2.0)
    for at in range(lines):
        write("metric", 1800 * (at + 1) / lines, name="train/loss", step=at + 1, value=1.0)
    begin(5000, 8, price_per_device_hour=3.0)  # the first attempt was killed after half an hour
    write("metric", 5000 + 3600, name="time/steps", step=lines, value=3330.0)
    write("metric", 5000 + 3600, name="time/start_up", step=lines, value=100.0)
    write("failed", 5000 + 3600, step=lines, error="canceled", category="canceled", resumable=True)
    begin(8650, 1)
    searches: Searches = {}
    content = "".join(f"{line}\n" for line in written)
    for end in (len(content) - len(written[-1]) - 1, len(content) - 9, len(content)):  # the log grows
        (folder / "metrics/events.jsonl").write_text(content[:end])
        summary = summary_of(folder, searches=searches)
    assert summary == summary_of(folder), "a search that continues finds the same"
    assert (summary.device_hours, summary.cost) == (2 + 8, 2 * 2 + 8 * 3)
    assert summary.attempt_goodput is None, "the newest attempt has not reported it"
    (folder / "metrics/events.jsonl").write_text("\n".join(written[:-1]) + "\n")
    assert summary_of(folder).attempt_goodput == 0.9
    main(["ls", str(tmp_path)])
    assert {"10.00", "28.00"} < set(capsys.readouterr().out.splitlines()[1].split())


@pytest.mark.parametrize("lines", [100, 20_000], ids=["short log", "long log"])
def test_a_few_losses_sketch_the_run_without_steps_that_were_repeated(tmp_path, lines):
    log = tmp_path / "run" / "metrics" / "events.jsonl"
    for first in (1, lines // 2):
        with EventLog(log, run_id="r") as events:
            events.started()
            for step in range(first, lines + 1):
                events.metric(name="train/loss", value=float("nan") if step == 1 else float(step * first), step=step)
                events.metric(name="other", value=-1.0, step=step)
    losses = summary_of(tmp_path / "run").losses
    assert 16 <= len(losses) <= 32
    assert all(map(math.isfinite, losses))
    assert list(losses) == sorted(losses)
    assert not [each for each in losses if lines // 2 <= each <= lines], "steps that were repeated"
    assert losses[-1] >= 0.9 * lines * (lines // 2)
    assert losses[len(losses) // 2 - 1] <= lines


def test_a_folder_that_is_no_run_is_refused(runs, tmp_path, capsys):
    for words in (["ls", str(tmp_path / "absent")], ["stop", str(tmp_path)]):
        with refusal(SystemExit):
            main(words)
    said = capsys.readouterr().err
    assert "does not exist" in said
    assert "is not the folder of a run" in said
    assert main(["ls", str(tmp_path)]) == 0

    (tmp_path / "link").symlink_to(runs, target_is_directory=True)
    (tmp_path / "a/b/c/d/e/f").mkdir(parents=True)
    assert find_runs(tmp_path) == []
