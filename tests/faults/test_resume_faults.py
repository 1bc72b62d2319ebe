"""Resumes that are wrong by one planted fault each: the witness notices and names them, and ``genlight prove`` fails.

`support.resume_faults` has the faults, and ``resume_faults.md`` the table of what the witness said of each.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from genlight.adapter.cli import main
from genlight.adapter.prove import rehearsal
from support import SUPPORT
from support.forked import Forked, run_forked
from support.resume_faults import FAULTS

pytestmark = pytest.mark.promise(name="resume")

LONG = bool(os.environ.get("GENLIGHT_LONG_FAULTS"))
PROGRAM = SUPPORT / "resume_faults.py"
TABLE = Path(__file__).with_name("resume_faults.md")
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
PROVEN = ("counter: module global", "rows: rows read once", "random: generator of a module", "state: clock")
"""Faults that ``prove`` is tried with, unless the long tests run."""


def changing() -> list[str]:
    """Return the faults that change a repeated step, according to the table."""
    unchanged = [line.split("|")[1].strip() for line in TABLE.read_text().splitlines() if "| none |" in line]
    return [name for name in FAULTS if name not in unchanged]


def path_of_tests() -> str:
    """Return a ``PYTHONPATH`` that has the tests."""
    return os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])


def restarts(folder: Path, *names: str) -> dict[str, Any]:
    """Return the results of faults, by name."""
    environ = {**os.environ, "PYTHONPATH": path_of_tests()}
    done = run_forked(folder, *names, program=str(PROGRAM), folder=folder, environ=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, Any]) -> str:
    """Return the results as a page."""
    rows = [
        f"| {name} | {each['expected']} | {each['changed'] or 'none'} | {each['kind'] or 'no difference'} |"
        for name, each in found.items()
    ]
    head = (
        "# Planted faults of a resume",
        "",
        "Written by `tests/faults/test_resume_faults.py` with `GENLIGHT_LONG_FAULTS=1`. A run is killed after step 17",
        "and continues from the checkpoint of step 10.",
        "",
        "| fault | its kind | first repeated step that changes | what the witness says |",
        "|---|---|---|---|",
    )
    return "\n".join([*head, *rows]) + "\n"


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
    assert len(changed) >= 60
    assert len(noticed) >= 0.95 * len(changed), changed - noticed
    assert len(named) >= 0.9 * len(changed), noticed - named
    assert [name for name, each in found.items() if each["changed"] is None and each["step"] is not None] == []
    if LONG:
        TABLE.write_text(table(found))
    assert [name for name in found if f"| {name} |" not in TABLE.read_text()] == []


class Copied(Forked):
    """A process of a rehearsal, as a copy of the fork server."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: Any, **_: Any) -> None:
        assert command[1:3] == ["-m", "genlight"]
        folder, log = Path.cwd(), Path(stdout.name)
        super().__init__("genlight.adapter.cli", *command[3:], environ=env, folder=folder, log=log)


@pytest.mark.slow
@pytest.mark.parametrize("name", changing() if LONG else PROVEN)
def test_prove_finds_a_fault(name, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(rehearsal.subprocess, "Popen", Copied)
    monkeypatch.setenv("PYTHONPATH", path_of_tests())
    monkeypatch.chdir(tmp_path)
    fault = FAULTS[name]
    job = {"run_id": "r", "trainer": f"support.resume_faults:{fault.trainer.__name__}", "max_steps": 1000}
    job |= {"data": f"support.resume_faults:{fault.data.__name__}", "lightning": {"accelerator": "cpu"}}
    Path("job.json").write_text(json.dumps(job))

    code = main(["prove", "job.json", "--json", "--steps", "36", "--only", "kill"])

    findings = json.loads(capfd.readouterr().out)["findings"]
    # Two unbroken runs of a job whose steps depend on the clock or the process differ already.
    assert code == 1 or findings[0]["level"] == "warn", findings


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="takes minutes; set GENLIGHT_LONG_FAULTS=1")
@pytest.mark.timeout(1800)
def test_no_false_alarm_in_500_restarts_of_the_zoo(tmp_path):
    environ = {**os.environ, "PYTHONPATH": path_of_tests()}
    done = run_forked(tmp_path, program="zoo.restarts", folder=tmp_path, environ=environ, timeout=1700)

    found = json.loads(done.stdout.splitlines()[-1])
    assert found["restarts"] >= 500
    assert found["found"] == {}
