"""A job of a few steps in its own folder, and a loopback server whose answers a test sets."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genlight.adapter.run.run import RunOptions, run_job
from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events
from support.forked import Forked
from support.loopback import serving
from support.ports import free_port

HERE = Path(__file__).parent


class Job:
    """A job in a folder: `run` runs it in this process, `start` in a new one, `fork` in one of the fork server."""

    def __init__(self, folder, server):
        self.folder, self.server = folder, server
        self.out = folder / "out"
        self.spec = folder / "job.json"
        self.environ, self.processes = {}, []

    @property
    def events_path(self):
        return self.out / "metrics" / "events.jsonl"

    def write(self, *, plan=None, **fields):
        job = {
            "run_id": "faulty",
            "trainer": "fault_trainer:Faulty",
            "max_steps": 5,
            "metric_every": 2,
            "checkpoint_every": 2,
            "mock_batches": [1, 2, 3, 4, 5],
            "lightning": {"accelerator": "cpu"},
            "hyperparams": plan or {},
            "uploads": {"terminal_url": f"{self.server.url}/terminal"},
            **fields,
        }
        job = {key: value for key, value in job.items() if value is not ...}
        self.spec.write_text(json.dumps(job).replace("SERVER", self.server.url))

    def write_for_two_ranks(self, plan=None, *, steps=4000, **fields):
        """Write a job that resumes and trains on two ranks with DDP, in steps of 20 ms."""
        self.write(
            plan={"step_s": 0.02, **(plan or {})},
            lightning={"accelerator": "cpu", "devices": 2, "strategy": "ddp"},
            max_steps=steps,
            mock_batches=list(range(2 * steps)),
            checkpoint_every=5,
            resume_from_latest=True,
            **fields,
        )

    def run(self, *overrides, **options):
        environ = {**os.environ, **self.environ}
        overrides = (f"artifacts_dir={self.out}", *overrides)
        return run_job(RunOptions(spec_path=self.spec, overrides=overrides, environ=environ, **options))

    def process_environ(self, **more):
        cache = {"XDG_CACHE_HOME": str(self.folder / "cache")}
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        places = {"PYTHONPATH": paths, "TRAINER_ARTIFACTS_DIR": str(self.out)}
        return {**os.environ, **cache, **places, **self.environ, **more}

    def start(self, *arguments):
        command = [sys.executable, "-m", "genlight.adapter.cli", "run", str(self.spec), *arguments]
        with (self.folder / "stderr").open("wb") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=self.process_environ(), stderr=log, stdout=log)
        self.processes.append(process)
        return process

    def fork(self, *arguments, program="genlight.adapter.cli", **environ):
        """Start a process of the fork server; its output goes to the file ``stderr``."""
        environ, log = self.process_environ(**environ), self.folder / "stderr"
        self.processes.append(Forked(program, *arguments, environ=environ, folder=self.folder, log=log))
        return self.processes[-1]

    def fork_run(self, **environ):
        """Start ``genlight run`` in a process of the fork server."""
        return self.fork("run", str(self.spec), **environ)

    def output(self):
        """Return the output of all processes so far."""
        log = self.folder / "stderr"
        return log.read_text() if log.exists() else ""

    def kill_processes(self):
        """Kill the processes that still run, with their sessions."""
        for process in self.processes:
            if hasattr(process, "kill_session"):
                process.kill_session()
            elif process.poll() is None:
                process.kill()
                process.wait()

    def reached(self, rank=0):
        """Whether the trainer of this rank has reached the place where it waits."""
        return (self.folder / f"reached-{rank}").exists()

    def go(self):
        """Release the trainers that wait."""
        (self.folder / "go").touch()

    def wait_until(self, condition, process=None, limit_s=120):
        end = time.monotonic() + limit_s
        while not condition():
            assert process is None or process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.02)

    def events(self):
        """Return the events, after validating the log."""
        assert validate_events(self.events_path) == []
        return list(read_events(self.events_path))

    def terminal_event(self):
        """Return the last event of the attempt, after checking that it is the only terminal one."""
        events = self.events()
        ends = [i for i, event in enumerate(events[:-1]) if event["event"] in ("completed", "failed")]
        attempt = events[max(ends, default=-1) + 1 :]
        assert [event["event"] in ("completed", "failed") for event in attempt] == [False] * (len(attempt) - 1) + [True]
        return attempt[-1]


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as served:
        yield served


@pytest.fixture
def job(tmp_path, monkeypatch, server):
    """A job in a folder with a valid Parquet file and a truncated one; its processes end with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(HERE)
    pq.write_table(pa.table({"x": list(range(20))}), tmp_path / "x.parquet", row_group_size=6)
    data = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "truncated.parquet").write_bytes(data[: len(data) // 2])
    made = Job(tmp_path, server)
    made.write()
    yield made
    made.kill_processes()


@pytest.fixture
def torchrun_environs():
    """Return the environment variables that torchrun sets for each of `world` processes."""

    def environs(world):
        names = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        own = [names | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
        return [{name: str(value) for name, value in rank.items()} for rank in own]

    return environs


@pytest.fixture
def two_ranks(job, torchrun_environs):
    """Start ``genlight run`` as two ranks that torchrun numbered and nobody watches, like pods and tasks of srun."""
    return lambda: [job.fork_run(**environ) for environ in torchrun_environs(2)]


@pytest.fixture
def fit(job):
    """Start ``genlight fit`` with a data module, arguments of the Trainer, and environment variables."""

    def started(data, *, at="train_step:3", rank=0, plan=None, environ=None, **trainer):
        checkpoint = {"class_path": "genlight.callbacks.Checkpoint", "init_args": {"dirpath": "checkpoints"}}
        usual = {"max_steps": 4000, "accelerator": "cpu", "logger": False, "callbacks": [checkpoint]}
        trained = {
            "run_id": "faulty",
            "max_steps": 4000,
            "hyperparams": {"at": at, "rank": rank, **(plan or {"holds": 60.0})},
        }
        module = {"plugin": "fault_trainer:Faulty", "job": trained}
        config = {
            "trainer": usual | trainer,
            "model": {"class_path": "genlight.adapter.ContractModule", "init_args": module},
            "data": data,
        }
        (job.folder / "fit.yaml").write_text(json.dumps(config))
        return job.fork("fit", "--config", "fit.yaml", **(environ or {}))

    return started
