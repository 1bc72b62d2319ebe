"""Restarts of trainings with planted faults, and ``genlight prove`` of them, in copies of the fork server."""

from __future__ import annotations

import json
import subprocess
import threading
import types
from pathlib import Path
from typing import Any

from genlight.adapter.prove import rehearsal
from genlight.adapter.prove.prove import prove
from support import SUPPORT
from support.forked import Forked, environ_with_tests, run_forked
from support.resume_faults import FAULTS


class Copied(Forked):
    """A process of a rehearsal, as a copy of the fork server."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: Any, **_: Any) -> None:
        assert command[1:3] == ["-m", "genlight"]
        folder, log = Path.cwd(), Path(stdout.name)
        super().__init__("genlight.adapter.cli", *command[3:], environ=env, folder=folder, log=log)


COPYING: Any = types.SimpleNamespace(**{**vars(subprocess), "Popen": Copied})
"""Replaces `rehearsal.subprocess`, so that the processes of rehearsals are copies of the fork server."""


def restarts(folder: Path, *names: str) -> dict[str, Any]:
    """Kill and restart a training with each fault; return the results by name."""
    program = str(SUPPORT / "resume_faults.py")
    done = run_forked(folder, *names, program=program, folder=folder, environ=environ_with_tests(), timeout=600)
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
