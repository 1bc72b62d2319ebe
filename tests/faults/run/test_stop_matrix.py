"""A stop of every kind, on every rank, in every phase: the run ends at one step, with its reason and a checkpoint.

The short matrix has in each phase a signal and one of the other triggers, which take turns, as do the processes;
``GENLIGHT_LONG_FAULTS=1``, as set by ``make faults``, runs all cells.
"""

import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PLANE = "/plane/runs/faulty"
FILE = "/files/x.parquet"
HELD_S = 60.0
"""Longest time that a trainer waits to be released."""
LIMIT_S = 150
"""A process that has not ended after this time hangs."""

SIGNALS = {"SIGTERM": "preempted", "SIGUSR1": "preempted", "SIGINT": "canceled"}
TRIGGERS = {**SIGNALS, "cancel file": "canceled", "limit": "timeout", "cancel": "canceled", "lease lost": "canceled"}
KINDS = [tuple(SIGNALS), ("cancel file", "limit", "cancel", "lease lost")]
"""Triggers that come as a signal, and those that a run asks for; the short matrix has one of each group in a phase."""


@dataclass(frozen=True)
class Phase:
    """The place where the trainers wait for the trigger, or the request that the server does not answer."""

    plan: dict = field(default_factory=dict)
    fields: dict = field(default_factory=dict)
    gate: str | None = None
    ranks: tuple = (0, 1)
    """Ranks that reach this place."""
    opens: bool = False
    """Whether the server answers after the trigger."""
    ends: tuple = ("failed", 75)
    resumes: bool = False
    """Whether the run resumes from a checkpoint of step 4."""


def sampled(at):
    return Phase({"at": at, "samples": True}, {"sample_every": 3, "sample_prompts": ["a cat"]}, ranks=(0,))


EARLY = {
    "import": Phase(fields={"trainer": "holds_on_import:Faulty"}),
    "configure": Phase({"at": "configure"}),
    "resume": Phase({"at": "load_checkpoint"}, resumes=True),
}
"""The short matrix has only one cell for each of these."""
PHASES = {
    "inputs": Phase(
        fields={
            "mock_batches": ...,
            "dataset": {"batch_size": 1},
            "inputs": {"dataset_parquet_urls": [f"SERVER{FILE}"]},
        },
        gate=FILE,
    ),
    "setup": Phase({"at": "setup"}),
    "first step": Phase({"at": "train_step:1"}),
    "later step": Phase({"at": "train_step:5"}),
    "batch": Phase({"at": "prepare_batch:3"}),
    "accumulation": Phase({"at": "train_step:6", "accumulates": 4}),
    "sample": sampled("generate_sample:3"),
    "save": Phase({"at": "save_checkpoint:2"}, ranks=(0,)),
    "state": Phase({"at": "state_dict:4"}),
    "evaluate": Phase({"at": "evaluate:3"}, {"validate": {"every_n_steps": 3}}),
    "upload": Phase(fields={"checkpoint_every": 2}, gate="/checkpoint", opens=True, ranks=(0,)),
    "end": Phase(fields={"max_steps": 6, "checkpoint_every": 0}, gate="/checkpoint", ranks=(0,)),
    "teardown": Phase({"at": "save_final"}, {"max_steps": 6}, ranks=(0,), ends=("completed", 0)),
    **EARLY,
}


@dataclass(frozen=True)
class Processes:
    """Number of processes, their launcher, and the ranks that the trigger hits."""

    world: int = 1
    launched: bool = False
    """Lightning starts the second process; otherwise both are started as by torchrun."""
    hit: tuple = (0,)


PROCESSES = {
    "one": Processes(),
    "two, first": Processes(2),
    "two, second": Processes(2, hit=(1,)),
    "two, both": Processes(2, hit=(0, 1)),
    "launched, first": Processes(2, launched=True),
    "launched, second": Processes(2, launched=True, hit=(1,)),
    "launched, both": Processes(2, launched=True, hit=(0, 1)),
}


def makes_sense(cell):
    trigger, processes, phase = cell
    hit = PROCESSES[processes].hit
    # Lightning starts the second process after the first has its inputs and trainer; it ends before uploads do.
    comes_late = PROCESSES[processes].launched and phase in ("inputs", "import") and 1 in hit
    if comes_late or (phase == "end" and hit != (0,)):
        return False
    # While only the first process works, the second waits for it: only a signal can hit just the second.
    return trigger in SIGNALS or hit == (0,) or PHASES[phase].ranks != (0,)


CELLS = [cell for cell in itertools.product(TRIGGERS, PROCESSES, PHASES) if makes_sense(cell)]


def _short():
    """Yield one cell for each kind of trigger and each phase; triggers and processes take turns."""
    for (k, kind), (p, phase) in itertools.product(
        enumerate(KINDS), enumerate(phase for phase in PHASES if phase not in EARLY)
    ):
        trigger = kind[p % len(kind)]
        # Processes that Lightning launches take seconds to start, so there are few of them.
        launched = ("launched, first", "launched, second", "launched, both")[p % 3]
        names = ("one", "two, second", "two, first", "two, both", "one", launched)
        turns = ((trigger, names[(k * 2 + p + turn) % len(names)], phase) for turn in range(len(names)))
        yield next(cell for cell in turns if cell in CELLS)


SHORT = {*_short(), *(("SIGTERM", "two, first", phase) for phase in EARLY)}


class Stop:
    """One run that is stopped."""

    def __init__(self, job, torchrun_environs, cell):
        self.job = job
        self.torchrun_environs = torchrun_environs
        self.trigger, processes, phase = cell
        self.phase, self.processes = PHASES[phase], PROCESSES[processes]

    @property
    def holding(self):
        return [rank for rank in self.processes.hit if rank in self.phase.ranks] or [0]

    def write(self, limit_s, **fields):
        lightning = {"accelerator": "cpu", "devices": self.processes.world}
        plan = {**self.phase.plan, "step_s": 0.02}
        if "at" in plan:
            plan["holds"] = HELD_S
            plan |= {"rank": self.holding[0]} if len(self.holding) == 1 else {}
        job_fields = {
            "max_steps": 4000,
            "mock_batches": list(range(4000 * self.processes.world)),
            "cancel_file_path": "cancel",
            "lightning": {**lightning, **({"strategy": "ddp"} if self.processes.world > 1 else {})},
            "uploads": {f"{kind}_url": f"SERVER/{kind}" for kind in ("terminal", "checkpoint")},
            "max_runtime_seconds": limit_s if self.trigger == "limit" else 0,
            "resume_from_latest": True,
            **self.phase.fields,
            **fields,
        }
        self.job.write(plan=plan, **job_fields)

    def leave_checkpoint(self):
        """Save a checkpoint as an earlier attempt, if the phase resumes from one."""
        if self.phase.resumes:
            self.write(0, max_steps=4, lightning={"accelerator": "cpu"})
            assert self.job.run() == 0

    def start(self):
        """Start the run; return its processes, rank 0 first."""
        under_plane = self.trigger in ("cancel", "lease lost")
        program = str(HERE / "under_control_plane.py") if under_plane else "genlight.adapter.cli"
        self.job.server.answers[f"{PLANE}/claim"] = {"lease_id": "one"}
        settings = {"TRAINER_JOB_SPEC_PATH": str(self.job.spec), "CONTROL_PLANE": f"{self.job.server.url}/plane"}
        started = []
        by_hand = self.processes.world if not self.processes.launched else 1
        for ranks in self.torchrun_environs(by_hand) if by_hand > 1 else [{}]:
            arguments = [] if under_plane else ["run", str(self.job.spec)]
            started.append(self.job.fork(*arguments, program=program, **settings, **ranks))
        return started

    def is_reached(self, started):
        if self.phase.gate == FILE:  # the second process waits until the first has fetched it
            return FILE in self.job.server.at_gate and all(is_at_its_inputs(process.pid) for process in started)
        if self.phase.gate is not None:
            return self.phase.gate in self.job.server.at_gate
        return all(self.job.reached(rank) for rank in self.holding)

    def pull(self, started):
        """Trigger the stop."""
        job = self.job
        if self.trigger in SIGNALS:
            children = [child.pid for child in psutil.Process(started[0].pid).children()]
            pids = [process.pid for process in started] + [pid for pid in children if self.processes.launched]
            for rank in self.processes.hit:
                os.kill(pids[rank], getattr(signal, self.trigger))
        elif self.trigger == "cancel file":
            (job.folder / "cancel").touch()
        elif self.trigger == "cancel":
            job.server.answers[f"{PLANE}/cancel"] = {"cancel": True}
        elif self.trigger == "lease lost":
            job.server.status[f"{PLANE}/heartbeat"] = 410

    def let_go(self):
        self.job.go()
        if self.phase.opens:
            self.job.server.gates[self.phase.gate].set()


def is_at_its_inputs(pid):
    """Whether a process holds the lock that it takes just before its inputs: of the queue, or of its rank.

    Waiting for the download of another process is not visible from outside.
    """
    try:
        held = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(path.endswith("/uploads/lock") or "/.ranks/rank-" in path for path in held)


CHOSEN = CELLS if os.environ.get("GENLIGHT_LONG_FAULTS") == "1" else [cell for cell in CELLS if cell in SHORT]


@pytest.mark.parametrize("cell", CHOSEN, ids=" / ".join)
def test_a_stop_ends_the_run(job, torchrun_environs, cell):
    stop = Stop(job, torchrun_environs, cell)
    started = stop_it(stop)

    codes = [process.wait(LIMIT_S) for process in started]
    event, code = stop.phase.ends
    assert codes == [code] * len(codes), job.output()
    ended = job.terminal_event()
    assert ended["event"] == event
    if event == "failed":
        reason = TRIGGERS[stop.trigger]
        assert (ended["error"], ended["category"], ended["resumable"]) == (reason, reason, True)
        assert job.server.posted("/terminal")[-1]["error"] == reason
        names = [f"step-{ended['step']:08d}.json", "final.json"]
        assert any((job.out / "checkpoints" / name).exists() for name in names) == (ended["step"] > 0)
    assert ended["step"] < 4000


def stop_it(stop):
    """Start the run and stop it in its phase; return the processes.

    A time limit counts from the start of a process. If the process does not reach the phase in time, try a longer one.
    """
    limit_s = 4.0
    stop.leave_checkpoint()
    while True:
        started, is_reached = run_into_phase(stop, limit_s)
        if is_reached:
            break
        assert stop.trigger == "limit", stop.job.output()
        for process in started:
            process.wait(LIMIT_S)
        for file in stop.job.folder.glob("reached-*"):
            file.unlink()
        stop.job.server.at_gate.clear()
        stop.job.events_path.unlink(missing_ok=True)  # a second stop before the first step is reported differently
        limit_s *= 2
    if stop.trigger == "limit":
        time.sleep(max(0.0, stop.began + limit_s + 0.5 - time.monotonic()))
    else:
        stop.pull(started)
        time.sleep(0.3)
    stop.let_go()
    return started


def run_into_phase(stop, limit_s):
    """Start the run; return the processes, and whether they reached the phase."""
    stop.write(limit_s)
    if stop.phase.gate is not None:
        stop.job.server.gates[stop.phase.gate] = threading.Event()
    started = stop.start()
    stop.began = time.monotonic()
    is_reached = False

    def is_there():
        nonlocal is_reached
        is_reached = stop.is_reached(started)
        return is_reached or has_ended(started)

    stop.job.wait_until(is_there)
    return started, is_reached


def has_ended(started):
    """Whether a run is over; other ranks may end before rank 0, when all steps are done."""
    first, *others = [process.poll() for process in started]
    return first is not None or any(others)
