"""The table of classes and strategies in adapter/classes.md is true."""

import json
import tempfile
from pathlib import Path

import pytest

from zoo.harness import run_cells, zoo
from zoo.table import BEGIN, CELLS, END, MODES, PAGE, in_memory, jobs_of, section, status

pytestmark = [pytest.mark.promise(name="equal"), pytest.mark.slow]

HALF = {"bf16-mixed": 0, "16-mixed": 6}
"""Every twelfth class runs in these precisions too, beginning with that one."""
HARD = {
    *("SamTwoSteps", "SamWithClosure", "FirstOrderMaml", "DoublePrecision", "CompiledStep"),
    *("LbfgsClosure", "ComplexWeights"),
}
"""Classes that are hard in half precision; they run in all precisions in one process."""
RESUMED = {0: "ddp", 3: "fsdp"}
"""On ranks every third class is resumed, under one of the two strategies. In one process all are: this shows what a
class has to store. `make zoo` runs everything."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", ["one", "two"])
def test_table_is_true(processes):
    index = {name: number for number, name in enumerate(zoo())}

    def is_chosen(name, strategy, precision):
        is_alone = strategy == "one"
        if is_alone != (processes == "one"):
            return False
        return precision == "fp32" or index[name] % 12 == HALF[precision] or (is_alone and name in HARD)

    jobs = [job for job in jobs_of(index) if is_chosen(*job)]
    spared = {job for job in jobs if job[2] == "fp32" and job[1] not in ("one", RESUMED.get(index[job[0]] % 6))}
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        cells = run_cells(Path(folder), jobs, without_resume=spared)

    stored = json.loads(CELLS.read_text())
    untrue = [
        f"{cell.name}, {cell.mode}: the table says {stored[cell.name].get(cell.mode)!r}, but {status(cell)!r} "
        f"({cell.verdict} {cell.detail} | {cell.resume})"
        for cell in cells
        if status(cell) != stored[cell.name].get(cell.mode)
    ]
    assert len(cells) == len(jobs) > 60
    assert not untrue, "run `python -m zoo.table` in tests/ after a look at:\n" + "\n".join(untrue)


def test_table_is_complete_and_has_no_wrong_cell():
    cells = json.loads(CELLS.read_text())

    assert len(zoo()) >= 60
    assert {(name, mode) for name in zoo() for mode in map(" ".join, MODES)} == {
        (name, mode) for name, row in cells.items() for mode in row
    }
    assert [f"{name}, {mode}" for name, row in cells.items() for mode, text in row.items() if text == "wrong"] == []
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert written == section(cells).strip(), "adapter/classes.md is not what `python -m zoo.table` writes"
