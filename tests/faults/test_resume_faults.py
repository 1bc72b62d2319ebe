"""Resumes that are wrong by one planted fault each: the witness notices and names them, and ``genlight prove`` fails.

`support.resume_faults` has the faults. `support.fault_table` tries all of them and writes ``resume_faults.md``, the
table of what the witness and ``genlight prove`` say of each.
"""

from __future__ import annotations

import pytest

from genlight.adapter.prove import rehearsal
from support.fault_table import COPYING, TABLE, environ, proof, restarts
from support.resume_faults import FAULTS

pytestmark = pytest.mark.promise(name="resume")

UNSEEN = ("own loss scale", "rows: order by pass")
"""The last repeated step rounds differently, which no later step could show; and a fault of later passes only."""
NAMED_OTHERWISE = {"curriculum": "random numbers"}
"""Shorter batches draw fewer numbers for the dropout."""
QUICK = ("counter", "stale reference", "learning rate", "random numbers of NumPy", "rows: stored too late")
"""Faults that the fast suite tries."""


def check(found):
    """Check that the witness names each fault in the step that changed, or in the next one by its loss."""
    for name, each in found.items():
        if name in UNSEEN:
            assert each["step"] is None, name
        else:
            kind = NAMED_OTHERWISE.get(name, each["expected"])
            assert (each["kind"], each["step"] - each["changed"] <= 1) == (kind, True), name


def test_the_witness_names_faults_of_every_kind(tmp_path):
    check(restarts(tmp_path, *QUICK))


@pytest.mark.slow
def test_the_witness_names_all_other_faults(tmp_path):
    check(restarts(tmp_path, *(FAULTS.keys() - QUICK)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["counter", "rows: read once", "random numbers of NumPy", "clock"])
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
