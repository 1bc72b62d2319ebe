"""Ranks that torchrun or Slurm started: the first cause is reported, and the other ranks end soon after it."""

import random
import signal
import socket
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.slow


def environ_of(rank, job_id):
    """Return the environment variables that srun sets for a task."""
    names = {"SLURM_JOB_ID": job_id, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0}
    names |= {"SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 1, "SLURM_NODELIST": "localhost"}
    names |= {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 1}
    return {name: str(value) for name, value in names.items()} | {"SLURM_JOB_NAME": "test"}


@pytest.fixture
def tasks(job):
    """Start two tasks as srun does, except that nobody ends the second one when the first ends."""

    def start():
        job_id = random.randrange(10**6, 10**7)
        return [job.fork_run(**environ_of(rank, job_id)) for rank in range(2)]

    return start


@pytest.mark.parametrize(("fault", "rank"), [("raises", 1), ("dies", 0), ("dies", 1)])
def test_one_task_fails_and_both_end_with_the_cause(job, tasks, fault, rank):
    plan = {"dies": True} if fault == "dies" else {"raises": "ValueError", "text": "bad row"}
    job.write_for_two_ranks({"at": "train_step:12", "rank": rank, **plan})
    started = tasks()
    codes = [process.wait(120) for process in started]

    assert codes[rank] == (9 if fault == "dies" else 1)
    assert codes[1 - rank] == 1
    if (fault, rank) != ("dies", 0):  # rank 0 died, and only it reports
        failed = job.terminal_event()
        assert (failed["category"], failed["resumable"]) == ("train-step", True)
        assert ("ValueError: bad row (rank 1)" in failed["error"]) == (fault == "raises")


def test_a_task_that_cannot_load_its_trainer_is_reported(job, tasks):
    """The other task waits for it to join."""
    job.write_for_two_ranks(trainer="fails_on_rank_1:Trainer")
    (job.folder / "fails_on_rank_1.py").write_text(
        "import os\nfrom fault_trainer import Faulty as Trainer\n"
        "if os.environ['SLURM_PROCID'] == '1':\n    raise ImportError('no such library here')\n"
    )
    codes = [process.wait(120) for process in tasks()]

    assert codes == [2, 2]
    failed = job.terminal_event()
    assert (failed["category"], failed["resumable"]) == ("startup", False)
    assert "no such library here (rank 1)" in failed["error"]


def test_tasks_that_are_cancelled_before_they_start_do_not_wait_for_each_other(job, tasks):
    job.write_for_two_ranks()
    job.environ = {"TRAINER_CANCELLED": "1"}
    codes = [process.wait(120) for process in tasks()]

    assert codes == [75, 75]
    failed = job.terminal_event()
    assert (failed["error"], failed["step"], failed["resumable"]) == ("canceled", 0, True)


NOTES_ITS_CODE = """
import os, sys
from pathlib import Path
from genlight.adapter.cli import main

code = main()
Path(f"code-{os.environ['RANK']}").write_text(str(code))
sys.exit(code)
"""


def test_a_port_that_is_in_use_is_named(job, torchrun_environs):
    job.write_for_two_ranks()
    with socket.socket() as another:
        another.bind(("127.0.0.1", 0))
        another.listen()
        port = another.getsockname()[1]
        environ = torchrun_environs(2)[0] | {"MASTER_PORT": str(port)}
        process = job.fork_run(**environ)
        assert process.wait(120) == 2, job.output()

    failed = job.terminal_event()
    assert failed["category"] == "startup"
    assert f"port {port} of {socket.gethostname()} is in use" in failed["error"]


@pytest.fixture
def torchrun(job):
    """Start two ranks with torchrun, which waits `waits_s` for them to end after a stop signal."""

    def start(*, waits_s=30):
        (job.folder / "main.py").write_text(NOTES_ITS_CODE)
        command = ["--standalone", "--nproc-per-node", "2", "main.py", "run", str(job.spec)]
        with (job.folder / "stderr").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *command],
                cwd=job.folder,
                env=job.process_environ(TORCH_ELASTIC_SHUTDOWN_TIMEOUT=str(waits_s)),
                stderr=output,
                stdout=output,
            )
        job.processes.append(process)
        return process

    return start


def test_ranks_whose_torchrun_is_killed_save_and_end(job, torchrun):
    job.write_for_two_ranks({"at": "train_step:6", "rank": 1, "holds": 60.0})
    process = torchrun()
    job.wait_until(lambda: job.reached(1), process)
    ranks = psutil.Process(process.pid).children()
    try:
        process.kill()
        job.go()
        assert psutil.wait_procs(ranks, timeout=120)[1] == [], job.output()
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
    failed = job.terminal_event()
    assert (failed["error"], failed["resumable"]) == ("preempted", True)
    assert (job.out / "checkpoints" / f"step-{failed['step']:08d}.json").exists()


def test_a_signal_to_torchrun_and_its_ranks_stops_all_ranks_at_one_step(job, torchrun):
    """Schedulers signal every process of a job, and torchrun forwards its own signal to the ranks once more."""
    job.write_for_two_ranks({"at": "train_step:6", "rank": 1, "holds": 60.0})
    process = torchrun()
    job.wait_until(lambda: job.reached(1), process)
    for each in (*psutil.Process(process.pid).children(), process):
        each.send_signal(signal.SIGTERM)
    job.wait_until(lambda: "Sending process" in job.output(), process)
    job.go()

    assert process.wait(150) != 0  # torchrun itself exits with 1
    assert [(job.folder / f"code-{rank}").read_text() for rank in range(2)] == ["75", "75"]
    failed = job.terminal_event()
    assert (failed["error"], failed["resumable"]) == ("preempted", True)
    assert (job.out / "checkpoints" / f"step-{failed['step']:08d}.json").exists()


# exit codes of all ranks


def test_exit_code_if_uploads_fail_after_training(job, two_ranks):
    job.server.status["/terminal"] = 403
    job.write_for_two_ranks(steps=3)

    assert [process.wait(120) for process in two_ranks()] == [1, 1]
    assert job.terminal_event()["category"] == "auth"


def test_exit_code_if_rank_zero_is_killed_while_it_uploads(job, two_ranks):
    """The other rank has trained to the end, but no event says that the run completed."""
    job.server.delay_s["/terminal"] = 600
    job.write_for_two_ranks(steps=3)
    both = two_ranks()
    job.wait_until(lambda: any(path == "/terminal" for path, _ in job.server.headers), both[0])
    assert both[1].poll() is None
    both[0].send_signal(signal.SIGKILL)

    assert [process.wait(120) for process in both] == [-9, 1]


REAPS = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: a process whose parent ends becomes a child of this one
run = subprocess.Popen([sys.executable, "-m", "genlight.adapter.cli", "run", sys.argv[1]])
codes = [run.wait()]
try:
    while True:
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
except ChildProcessError:
    print("codes", codes)
"""


def test_exit_code_of_a_rank_that_genlight_started(job):
    job.write_for_two_ranks({"cancels": 8}, cancel_file_path="cancel")
    done = subprocess.run(
        [sys.executable, "-c", REAPS, str(job.spec)],
        cwd=job.folder, env=job.process_environ(), capture_output=True, text=True, timeout=150,
    )  # fmt: skip

    assert "codes [75, 75]" in done.stdout, done.stderr
    assert job.terminal_event()["error"] == "canceled"
