"""What the witness and ``genlight prove`` say of each planted fault of `support.resume_faults`, as a table.

    cd tests && python -m support.fault_table [NAME …]

tries all faults, or those whose names begin with a NAME, and writes their rows into ``faults/resume_faults.md``. All
take about five minutes on two idle cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

from genlight.adapter.prove import rehearsal
from genlight.adapter.prove.prove import prove
from support import SUPPORT
from support.forked import Forked, run_forked
from support.resume_faults import FAULTS

TABLE = SUPPORT.parent / "faults" / "resume_faults.md"
HEAD = """# Planted faults of a resume

Written by `python -m support.fault_table`, in the folder of the tests. For the witness, a run is killed after step 17
and continues from the checkpoint of step 10. `prove` has its default options; if its rehearsal `kill` holds, all others
are tried, and the first one that fails is named. `unbroken` means that two runs without a fault differ already.

| fault | its kind | first repeated step that changes | what the witness says | what `prove` says |
|---|---|---|---|---|
"""


class Copied(Forked):
    """A process of a rehearsal, as a copy of the fork server."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: Any, **_: Any) -> None:
        assert command[1:3] == ["-m", "genlight"]
        folder, log = Path.cwd(), Path(stdout.name)
        super().__init__("genlight.adapter.cli", *command[3:], environ=env, folder=folder, log=log)


COPYING: Any = types.SimpleNamespace(**{**vars(subprocess), "Popen": Copied})
"""Replaces `rehearsal.subprocess`, so that the processes of rehearsals are copies of the fork server."""


def environ() -> dict[str, str]:
    """Return the environment of a process that imports the tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])}


def restarts(folder: Path, *names: str) -> dict[str, Any]:
    """Kill and restart a training with each fault; return the results by name."""
    program = str(SUPPORT / "resume_faults.py")
    done = run_forked(folder, *names, program=program, folder=folder, environ=environ(), timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def proof(folder: Path, name: str) -> str:
    """Rehearse a job with a fault, in the current folder; return what ``genlight prove`` says of it."""
    fault = FAULTS[name]
    job = {"run_id": "r", "trainer": f"support.resume_faults:{fault.trainer.__name__}", "max_steps": 1000}
    job |= {"data": f"support.resume_faults:{fault.data.__name__}", "lightning": {"accelerator": "cpu"}}
    (folder / "job.json").write_text(json.dumps(job))
    scene = rehearsal.Scene(folder / "job.json", (), (), steps=12, every_n_steps=4, seed=0)
    for only in (("kill",), ()):
        for found in prove(scene, folder / "-".join(only), minutes=15, only=only, interrupted=threading.Event()):
            if found.level != "pass":
                return f"{found.check}: {' '.join(found.detail.split())}"
    return "nothing"


def write(rows: dict[str, list[str]]) -> None:
    """Replace these rows of the table."""
    old = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines()] if TABLE.exists() else []
    rows = {cells[0]: cells[1:] for cells in old if cells[0] in FAULTS} | rows
    lines = (f"| {' | '.join([name, *rows[name]])} |\n" for name in FAULTS if name in rows)
    TABLE.write_text(HEAD + "".join(lines))


def main(beginnings: list[str]) -> None:
    os.environ["PYTHONPATH"], rehearsal.subprocess = environ()["PYTHONPATH"], COPYING
    names = [name for name in FAULTS if name.startswith(tuple(beginnings or [""]))]
    with tempfile.TemporaryDirectory() as scratch:
        found = restarts(Path(scratch), *names)
        for at, name in enumerate(names):
            folder = Path(scratch, f"prove-{at}")
            folder.mkdir()
            os.chdir(folder)
            each, said = found[name], proof(folder, name)
            print(f"{name}: {said}", file=sys.stderr, flush=True)
            columns = [each["expected"], str(each["changed"] or "none"), each["kind"] or "no difference"]
            write({name: [*columns, said.partition(":")[0]]})


if __name__ == "__main__":
    main(sys.argv[1:])
