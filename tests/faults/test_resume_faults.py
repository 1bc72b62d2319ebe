"""Resumes that are wrong by one planted fault each: the witness notices and names them, and ``genlight prove`` fails.

`support.resume_faults` has the faults. `support.fault_table` tries all of them and writes ``resume_faults.md``, the
table of what the witness and ``genlight prove`` say of each.
"""

from __future__ import annotations

import json
import os

import pytest

from genlight.adapter.prove import rehearsal
from support.fault_table import COPYING, TABLE, environ, proof, restarts
from support.forked import run_forked
from support.resume_faults import FAULTS

pytestmark = pytest.mark.promise(name="resume")

LONG = bool(os.environ.get("GENLIGHT_LONG_FAULTS"))
SAMPLE = (
    "counter: class attribute",
    "counter: file that survives",
    "iterator: itertools.cycle",
    "cache: functools.lru_cache",
    "stale: weakref",
    "state: target network",
    "rate: plateau",
    "random: NumPy",
    "rows: order by process",
    "rows: stored too late",
)
"""Faults that the fast suite tries."""
PROVEN = ("counter: module global", "rows: rows read once", "random: NumPy", "state: clock")
"""Faults that ``prove`` is tried with."""


def test_the_witness_names_faults_of_every_kind(tmp_path):
    found = restarts(tmp_path, *SAMPLE)

    for name, each in found.items():
        # Weights that differ after a step show in the loss of the next one.
        assert (each["kind"], each["step"] - each["changed"] <= 1) == (each["expected"], True), name


@pytest.mark.slow
def test_the_witness_notices_95_percent_of_all_faults_and_names_90_percent(tmp_path):
    found = restarts(tmp_path)

    changed = {name for name, each in found.items() if each["changed"] is not None}
    noticed = {name for name in changed if found[name]["step"] is not None}
    named = {name for name in noticed if found[name]["kind"] == found[name]["expected"]}
    assert len(changed) >= 57
    assert len(noticed) >= 0.95 * len(changed), changed - noticed
    assert len(named) >= 0.9 * len(changed), noticed - named
    assert [name for name, each in found.items() if each["changed"] is None and each["step"] is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PROVEN)
def test_prove_finds_a_fault(name, tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "subprocess", COPYING)
    monkeypatch.setenv("PYTHONPATH", environ()["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)

    assert proof(tmp_path, name) != "nothing"


def test_in_the_table_prove_finds_every_fault_that_changes_a_job():
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines()]
    said = {row[0]: (row[2], row[4]) for row in rows if row[0] in FAULTS}

    assert said.keys() == FAULTS.keys()
    missed = {name for name, (changed, by_prove) in said.items() if by_prove == "nothing" and changed != "none"}
    # A job reads the rows of a loader without a position again, and drops those that were trained.
    assert missed == {"rows: endless"}


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="takes minutes; set GENLIGHT_LONG_FAULTS=1")
@pytest.mark.timeout(1800)
def test_no_false_alarm_in_500_restarts_of_the_zoo(tmp_path):
    done = run_forked(tmp_path, program="zoo.restarts", folder=tmp_path, environ=environ(), timeout=1700)

    found = json.loads(done.stdout.splitlines()[-1])
    assert found["restarts"] >= 500
    assert found["alarms"] == {}
    # TorchScript rounds differently in the first calls of a process.
    assert {name.partition("-")[0] for name in found["changed"]} <= {"Scripted"}
