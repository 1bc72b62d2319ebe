"""``genlight report``: one page that holds everything, shows it as text, and reacts."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil

import numpy as np
import pytest

from genlight.adapter.cli import main
from genlight.adapter.view.differences import differences
from genlight.adapter.view.history import MOST_KEPT, Budget, Curve, history_of, thin_curve
from genlight.adapter.view.page import LARGEST_PAGE, report
from genlight.reporters.events.event_log import EventLog

pytestmark = pytest.mark.promise(name="events")


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    """The page of all three runs."""
    target = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", *(str(runs / name) for name in ("done", "broken", "killed")), "--to", str(target)]) == 0
    return target.read_text()


def test_a_page_loads_nothing_and_says_what_happened_and_what_differs(page):
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    done, broken, killed = data["runs"]

    assert len(page) < LARGEST_PAGE
    assert "default-src 'none'" in page
    assert "<b>luck" not in page, "no text of a run is markup"
    assert not re.findall(r'(?:src|href)="(?!data:)[^"]*"', page)
    assert done["words"] == ["It completed at step 40 of 40."]
    assert "no <b>luck</b>" in broken["words"][0]
    assert killed["words"][0].startswith("It was lost")
    assert {row[0]: row[1:] for row in data["differences"]}["hyperparams.lr"] == [0.1, 0.2, 0.1]
    assert [each["step"] for each in done["checkpoints"]] == [10, 20, 30, 40, 40][-len(done["checkpoints"]) :]
    assert done["checkpoints"][-1]["state"] == "final"
    assert done["checkpoints"][-1]["export"].startswith("genlight checkpoints export ")
    assert done["spans"][0]["last_step"] == 40
    assert 0 < done["goodput"] <= 1
    steps = done["curves"]["train/loss"]["steps"]
    assert (steps[0], steps[-1]) == (2, 40)
    assert [each["level"] for each in broken["findings"]] == ["fail"]
    files = {file["name"].rpartition("/")[2]: file for file in done["samples"][-1]["files"]}
    assert files["picture.png"]["source"].startswith("data:image/png;base64,")
    assert files["fake.png"] == {"name": "step-00000040-00/fake.png", "text": "<script>alert(1)</script>"}


def test_huge_pictures_and_links_out_of_the_run_are_named_and_not_shown(runs, tmp_path):
    folder = shutil.copytree(runs / "done", tmp_path / "done")
    record = max((folder / "samples").glob("step-*.json"))
    huge, outside = folder / "samples" / "huge.png", tmp_path / "outside.png"
    huge.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(3_000_000))
    outside.write_bytes(b"\x89PNG\r\n\x1a\nsecret")
    (folder / "samples" / "link.png").symlink_to(outside)
    names = ["huge.png", "../../outside.png", "link.png", "/etc/passwd", "absent.png"]
    record.write_text(json.dumps({"step": 40, "name": "n", "files": names}))

    files = history_of(folder).as_json(Budget())["samples"][-1]["files"]
    assert not [file for file in files if "source" in file]
    assert "3,000,008 bytes" in files[0]["note"]
    assert [file["note"] for file in files[1:4]] == ["it is outside the run's samples"] * 3


def test_texts_tables_and_recordings_are_shown_by_their_content(runs, tmp_path):
    folder = shutil.copytree(runs / "done", tmp_path / "done")
    contents = {
        "story.txt": "once upon a time, 'ü'\n".encode() * 300,
        "cut.txt": "ü".encode() * 3000,
        "scores.csv": b"name,score\n" + b'"a, b",0.5\n' * 30,
        "say.bin": b"RIFF\0\0\0\0WAVEfmt ",
        "page.svg": b"<svg onload='alert(1)'/>",
        "weights.bin": b"\0\1\2\xff",
        "latin.txt": "caf\xe9".encode("latin-1"),
    }
    for name, content in contents.items():
        (folder / "samples" / name).write_bytes(content)
    record = max((folder / "samples").glob("step-*.json"))
    record.write_text(
        json.dumps({"step": 40, "name": "n", "files": [*contents], "reward": 0.5, "answer": "<b>", "seed": 1})
    )

    sample = history_of(folder).as_json(Budget())["samples"][-1]
    files = {file.pop("name"): file for file in sample["files"]}
    assert sample["returned"] == {"reward": 0.5, "answer": "<b>"}
    assert files["story.txt"]["text"].startswith("once upon")
    assert "more bytes" in files["story.txt"]["note"]
    assert set(files["cut.txt"]["text"]) == {"ü"}
    assert files["scores.csv"]["table"][:2] == [["name", "score"], ["a, b", "0.5"]]
    assert len(files["scores.csv"]["table"]) == 21
    assert (files["say.bin"]["kind"], files["say.bin"]["source"][:22]) == ("audio/wav", "data:audio/wav;base64,")
    assert files["page.svg"] == {"text": "<svg onload='alert(1)'/>"}
    assert [set(files[name]) for name in ("weights.bin", "latin.txt")] == [{"note"}, {"note"}]


def test_thinning_keeps_every_peak_and_both_ends():
    values = np.sin(np.arange(100_000) / 50)
    values[12_345], values[77_777], values[50] = 100.0, -100.0, math.nan
    kept = thin_curve(np.arange(len(values)), values, 400)

    assert len(kept) <= 400
    assert {0, 12_345, 77_777, 99_999} <= set(kept.tolist())


def test_a_long_curve_takes_bounded_memory_and_keeps_its_peaks():
    curve, chance = Curve(), random.Random(0)
    for step in range(5 * MOST_KEPT):
        curve.add(step, step, 1e6 if step == 77_777 else chance.random())
    points = curve.points(500)

    assert len(curve.values) < MOST_KEPT
    assert max(points["values"]) == 1e6
    assert (points["steps"][0], points["steps"][-1]) == (0, 5 * MOST_KEPT - 1)
    gaps = np.diff(points["steps"])
    assert gaps.max() < 4 * 5 * MOST_KEPT / 500, "the beginning, which is thinned most often, is as dense as the end"


def test_repeated_steps_replace_the_earlier_ones(tmp_path):
    log = tmp_path / "run" / "events.jsonl"
    log.parent.mkdir()
    with EventLog(log, run_id="r") as first:
        first.started()
        for step in range(1, 9):
            first.metric(name="train/loss", value=float(step), step=step)
    with EventLog(log, run_id="r") as second:
        second.started()
        second.metric(name="trainer/resumed_from_step", value=4, step=4)
        second.metric(name="diagnosis/loss_spike", value=1, step=5)
        second.metric(name="train/loss", value=float("nan"), step=5)
    seen = history_of(log.parent).as_json(Budget())

    assert seen["curves"]["train/loss"]["steps"] == [1, 2, 3, 4, 5]
    assert seen["curves"]["train/loss"]["values"][-1] is None
    assert [each["text"] for each in seen["findings"]] == [
        "train/loss was nan for the first time",
        "loss spike from step 5 on",
    ]
    assert [each["ended"] for each in seen["spans"]] == [False, False]
    assert differences([seen, seen]) == []


def test_a_growing_log_gives_the_same_history_as_one_read_at_once(runs, tmp_path):
    folder = shutil.copytree(runs / "done", tmp_path / "done")
    log = folder / "metrics" / "events.jsonl"
    content = log.read_bytes()
    log.write_bytes(b"")
    history = history_of(folder)
    for begin in range(0, len(content), 777):
        with log.open("ab") as file:
            file.write(content[begin : begin + 777])  # in the middle of lines
        before, history = history, history_of(folder, history)
        assert history is before
    assert history.as_json(Budget()) == history_of(folder).as_json(Budget())

    os.replace(shutil.copy(runs / "broken/metrics/events.jsonl", tmp_path / "other"), log)
    assert history_of(folder, history).as_json(Budget())["run_id"] == "broken", "another file has taken its place"

    shutil.move(folder / "metrics", tmp_path / "aside")
    history = history_of(folder, history)
    assert not history.curves
    shutil.move(tmp_path / "aside", folder / "metrics")
    assert "train/loss" in history_of(folder, history).curves, "a log that comes later"


def test_a_damaged_log_is_shown_up_to_the_damage_and_reported(runs, tmp_path):
    folder = shutil.copytree(runs / "done", tmp_path / "done")
    log = folder / "metrics" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:10], b"rubbish\n", *lines[10:]]))
    seen = history_of(folder)
    assert seen.curves
    assert any("line 11" in each["text"] for each in seen.findings)
    assert report([seen])
