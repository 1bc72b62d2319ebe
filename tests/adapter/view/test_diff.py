"""Differences between two runs, in the command and on the page."""

from __future__ import annotations

import json
import shutil

import pytest

from genlight.adapter.cli import main

pytestmark = pytest.mark.promise(name="events")


def rows_of(capsys):
    return {(row["about"], row["name"]): row["values"] for row in map(json.loads, capsys.readouterr().out.splitlines())}


def test_differing_settings_and_results_show_both_values(runs, capsys):
    assert main(["diff", str(runs / "done"), str(runs / "broken"), "--json"]) == 0
    rows = rows_of(capsys)
    assert rows["configuration", "hyperparams.lr"] == [0.1, 0.2]
    assert rows["configuration", "hyperparams.fails_at"] == [None, 15]
    assert rows["configuration", "checkpoints.monitor"] == ["score", None]
    assert rows["results", "state"] == ["completed", "failed"]
    assert rows["results", "best score"] == [40.0, None]
    assert not any(name in ("run_id", "metric_every", "torch", "commit") for _, name in rows)

    assert main(["diff", str(runs / "done"), str(runs / "broken")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["done", "broken"]
    assert lines[1] == "configuration"
    assert lines.index("configuration") < lines.index("results")
    assert ["hyperparams.lr", "0.1", "0.2"] in [line.split() for line in lines]

    for option, out in ([], "no known difference\n"), (["--json"], ""):
        assert main(["diff", str(runs / "done"), str(runs / "done"), *option]) == 0
        assert capsys.readouterr().out == out


def test_code_data_and_versions_of_log_and_job_are_compared(runs, tmp_path, capsys):
    folder = shutil.copytree(runs / "done", tmp_path / "done")
    log = folder / "metrics" / "events.jsonl"
    first, *others = log.read_text().splitlines(keepends=True)
    started = json.loads(first)
    started["metadata"]["source"] = "sha256:0000000000000000"
    started["metadata"]["git"] = {"commit": "a" * 40, "dirty": True}
    started["metadata"]["packages"]["numpy"] = "0.1"
    log.write_text("".join([f"{json.dumps(started)}\n", *others]))
    job = json.loads((folder / "job.json").read_text())
    job["mock_batches"][0] = [[0.5, 0.5]]
    (folder / "job.json").write_text(json.dumps(job))

    assert main(["diff", str(runs / "done"), str(folder), "--json"]) == 0
    rows = rows_of(capsys)
    assert rows["code", "source of the class"][1] == "sha256:0000000000000000"
    assert rows["code", "source of the class"][0].startswith("sha256:")
    assert rows["code", "commit"][1] == "a" * 40
    assert rows["versions", "numpy"][1] == "0.1"
    before, now = rows["data", "mock_batches"]
    assert before != now
    assert before.startswith("40 entries, sha256:")


def test_if_one_run_has_no_job_the_logs_are_compared_with_a_note(runs, tmp_path, capsys):
    folder = shutil.copytree(runs / "broken", tmp_path / "broken")
    (folder / "job.json").unlink()
    assert main(["diff", str(runs / "done"), str(folder)]) == 0
    shown = capsys.readouterr()
    assert ["hyperparams.lr", "0.1", "0.2"] in [line.split() for line in shown.out.splitlines()]
    assert "metric_every" not in shown.out
    assert shown.err == f"genlight diff: {folder} has no job.json: only numeric hyperparameters are compared\n"
