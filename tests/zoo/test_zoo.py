"""The table of classes and strategies in adapter/classes.md is true."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise(name="equal")

TESTS = Path(__file__).parents[1]

PROGRAM = """
import json, sys, tempfile
from pathlib import Path
from zoo.harness import run_cells, zoo
from zoo.table import CELLS, in_memory, jobs_of, status

alone, index = sys.argv[1] == "one", {name: i for i, name in enumerate(zoo())}
# Every class in fp32, and every twelfth class in the other precisions; in one process also the classes that are hard
# in half precision. In one process all are resumed; this shows what a class has to store. On ranks every third is
# resumed, under one of the two strategies. `make zoo` runs everything.
half = {"bf16-mixed": 0, "16-mixed": 6}
hard = {
    "SamTwoSteps", "SamWithClosure", "FirstOrderMaml", "PerSampleGradients", "QuantizationAware", "DoublePrecision",
    "CompiledStep", "LbfgsClosure", "OwnMomentumList", "ComplexWeights",
}
jobs = [
    job for job in jobs_of(index)
    if (job[1] == "one") == alone
    and (job[2] == "fp32" or index[job[0]] % 12 == half[job[2]] or (alone and job[0] in hard))
]
resumed = {0: "ddp", 3: "fsdp"}
spared = {job for job in jobs if job[2] == "fp32" and job[1] not in ("one", resumed.get(index[job[0]] % 6))}
stored = json.loads(CELLS.read_text())
with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
    measured = [(cell, status(cell)) for cell in run_cells(Path(folder), jobs, without_resume=spared)]
found = {
    "ran": len(measured),
    "untrue": [
        f"{cell.name}, {cell.mode}: the table says {stored[cell.name].get(cell.mode)!r}, but {text!r} "
        f"({cell.verdict} {cell.detail} | {cell.resume})"
        for cell, text in measured if text != stored[cell.name].get(cell.mode)
    ],
}
print(json.dumps(found))
"""

FACTS = """
import json
from zoo.harness import zoo
from zoo.table import BEGIN, CELLS, DEVICE_CELLS, END, MODES, PAGE, section

cells, on_device = json.loads(CELLS.read_text()), json.loads(DEVICE_CELLS.read_text())
print(json.dumps({
    "classes": len(zoo()),
    "complete": all(set(cells.get(name, ())) == {" ".join(mode) for mode in MODES} for name in zoo()),
    "wrong": [
        f"{name}, {mode}" for table in (cells, on_device) for name, row in table.items()
        for mode, text in row.items() if text == "wrong"
    ],
    "written": PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() == section(cells).strip(),
}))
"""


def in_worker(program: str, *arguments: str) -> dict:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", ["one", "two"])
def test_table_is_true(processes):
    found = in_worker(PROGRAM, processes)

    assert found["ran"] > {"one": 120, "two": 240}[processes]
    assert not found["untrue"], "run `python -m zoo.table` in tests/ after a look at:\n" + "\n".join(found["untrue"])


@pytest.mark.slow
def test_table_is_complete_and_has_no_wrong_cell():
    facts = in_worker(FACTS)

    assert facts["classes"] >= 100
    assert facts["complete"]
    assert not facts["wrong"]
    assert facts["written"], "adapter/classes.md is not what `python -m zoo.table` writes"
