"""Resumes that are wrong by one planted fault each: the witness notices and names them, and ``genlight prove`` fails.

`support.resume_faults` has the faults.
"""

from __future__ import annotations

import pytest

from genlight.adapter.prove import rehearsal
from support.forked import environ_with_tests
from support.planted import COPYING, proof, restarts
from support.resume_faults import FAULTS

pytestmark = pytest.mark.promise(name="resume")

QUICK = ("counter", "stale reference", "learning rate", "random numbers of NumPy", "rows: stored too late")
"""Faults that the fast suite tries."""


def check(found):
    """Check that the witness names each fault in the step that changed, or in the next one by its loss."""
    for name, each in found.items():
        assert (each["kind"], each["step"] - each["changed"] <= 1) == (each["expected"], True), name


def test_the_witness_names_faults_of_every_kind(tmp_path):
    check(restarts(tmp_path, *QUICK))


@pytest.mark.slow
def test_the_witness_names_all_other_faults(tmp_path):
    check(restarts(tmp_path, *(FAULTS.keys() - QUICK)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["counter", "rows: read once", "random numbers of NumPy", "clock"])
def test_prove_finds_a_fault(name, tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "subprocess", COPYING)
    monkeypatch.setenv("PYTHONPATH", environ_with_tests()["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)

    assert proof(tmp_path, name) != "nothing"
