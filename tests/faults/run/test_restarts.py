"""``genlight run --restarts``: real processes that are killed, and runs and fits that would be killed forever."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from genlight.adapter import read_events
from genlight.reporters.events.validation import validate_events
from support.forked import Forked, environ_with_tests, run_forked
from support.ports import free_port

pytestmark = [pytest.mark.promise(name="resume"), pytest.mark.slow]

TRAINER = '''
import os, signal, sys, time
from pathlib import Path
import lightning.pytorch as pl
from support.trainer_class import TrainsAndCounts, torch

if Path("broken").exists():
    raise RuntimeError("this module is broken")


class Dies(TrainsAndCounts):
    """Does in a step what the files of the folder say: ``RANK-STEP-N`` holds a signal for the Nth time."""

    def prepare_batch(self, raw, state, ctx):
        return torch.full((2, 2), float(raw))

    def train_step(self, batch, state, ctx):
        step = state["step"] + 1
        Path(f"at-{ctx.rank}-{step}").touch()
        for path in sorted(Path().glob(f"{ctx.rank}-{step}-*")):
            number = int(path.read_text())
            path.unlink()
            if number:
                record = Path(f"runs/r/checkpoints/step-{(step - 1) // 2 * 2:08}.json")
                while "checkpoint_every=0" not in sys.argv and step > 2 and not record.exists():
                    time.sleep(0.02)
                os.kill(os.getpid(), number)
                break
            raise ValueError("a mistake in the code")
        while Path("wait").exists() and step >= 5 and not ctx.is_canceled():
            time.sleep(0.02)
        Path(f"past-{ctx.rank}-{step}").touch()
        return super().train_step(batch, state, ctx)

    def load_state_dict(self, state, payload, ctx):
        super().load_state_dict(state, payload, ctx)
        if Path("kills-at-load").exists():
            (folder := Path("loads")).mkdir(exist_ok=True)
            Path(folder, str(time.time())).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Numbers(pl.LightningDataModule):
    def train_dataloader(self):
        return list(range(100))
'''
STEPS = 10
RUN_ID = f"restarts-{os.getpid()}"
"""Memory of a run has its id; other processes may run these tests too."""
PARTS = {f"restart/{part}" for part in ("end_s", "fork_s", "prepare_s", "meet_s", "load_s", "first_batch_s", "seconds")}


class Job:
    """A job in a folder, and what its log says."""

    def __init__(self, folder, ranks=1):
        self.folder = folder
        (folder / "dies.py").write_text(TRAINER)
        lightning = {"accelerator": "cpu", **({"devices": ranks, "strategy": "ddp"} if ranks > 1 else {})}
        job = {"run_id": RUN_ID, "trainer": "dies:Dies", "max_steps": STEPS, "checkpoint_every": 2, "metric_every": 1}
        job |= {"mock_batches": list(range(ranks * STEPS)), "lightning": lightning}
        (folder / "job.json").write_text(json.dumps(job))

    @property
    def environ(self):
        return environ_with_tests() | {"TRAINER_ARTIFACTS_DIR": str(self.folder / "runs/r")}

    def write_fit(self):
        """Write a configuration of ``genlight fit`` that trains the same in the same folders."""
        logger = {"class_path": "genlight.reporters.EventLogger"}
        logger["init_args"] = {"path": "runs/r/metrics/events.jsonl", "run_id": "r"}
        callback = {"class_path": "genlight.callbacks.Checkpoint"}
        callback["init_args"] = {"dirpath": "runs/r/checkpoints", "every_n_steps": 2}
        trainer = {"accelerator": "cpu", "devices": 1}
        trainer |= {"max_steps": STEPS, "logger": logger, "callbacks": [callback]}
        module = {"plugin": "dies:Dies", "job": {"run_id": "r", "max_steps": STEPS}}
        model = {"class_path": "genlight.adapter.ContractModule", "init_args": module}
        fit = {"trainer": trainer, "model": model, "data": {"class_path": "dies.Numbers"}}
        (self.folder / "fit.json").write_text(json.dumps(fit))

    def fit(self, *words):
        return run_forked("fit", "--config", "fit.json", *words, folder=self.folder, environ=environ_with_tests())

    def dies(self, rank, step, times=1, number=signal.SIGKILL):
        for index in range(times):
            (self.folder / f"{rank}-{step}-{index}").write_text(str(int(number)))

    def run(self, *words):
        return run_forked("run", "job.json", *words, folder=self.folder, environ=self.environ)

    @contextlib.contextmanager
    def started(self, *words):
        process = Forked(
            "genlight.adapter.cli", "run", "job.json", *words,
            environ=self.environ, folder=self.folder, log=self.folder / "log",
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill_session()

    @property
    def events(self):
        path = self.folder / "runs/r/metrics/events.jsonl"
        assert validate_events(path) == []
        return list(read_events(path))

    @property
    def ends(self):
        ends = [event for event in self.events if event["event"] in ("failed", "completed")]
        return [event.get("category", "completed") for event in ends]

    @property
    def losses(self):
        losses = {event["step"]: event["value"] for event in self.events if event.get("name") == "train/loss"}
        assert sorted(losses) == list(range(1, STEPS + 1))
        return losses

    @property
    def resumed(self):
        return [e["step"] for e in self.events if e.get("name") == "trainer/resumed_from_step"]


def start_until_it_is_not_killed(start):
    """Return how the first start ended that was not killed, and the number of starts before it."""
    kills = 0
    while (done := start()).returncode < 0:
        kills += 1
    return done, kills


def wait_until(condition, what):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Losses of a run on two ranks that nothing interrupts."""
    job = Job(tmp_path_factory.mktemp("whole"), 2)
    done = job.run()
    assert done.returncode == 0, done.stderr
    return job.losses


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_started_again_and_the_run_has_the_same_bits(losses, rank, tmp_path):
    job = Job(tmp_path, 2)
    job.dies(rank, 6)
    done = job.run("--restarts", "2")

    assert done.returncode == 0, done.stderr
    assert job.ends == (["completed"] if rank == 0 else ["train-step", "completed"])
    assert job.losses == losses
    names = {event["name"]: event["value"] for event in job.events if event.get("name", "").startswith("restart/")}
    assert {*names} == PARTS
    assert names["restart/seconds"] == pytest.approx(sum(names.values()) - names["restart/seconds"])


@pytest.mark.parametrize("rank", [0, 1])
def test_restarts_are_used_up(rank, tmp_path):
    job = Job(tmp_path, 2)
    for step in (3, 5, 7):
        job.dies(rank, step)
    done = job.run("--restarts", "1")

    assert done.returncode == (128 + signal.SIGKILL if rank == 0 else 1)
    assert "restart 1 of 1" in done.stderr
    assert not (tmp_path / "at-0-7").exists()


def test_a_preempted_rank_is_started_again(tmp_path):
    job = Job(tmp_path, 2)
    job.dies(1, 6, number=signal.SIGTERM)
    done = job.run("--restarts", "2")
    assert (done.returncode, job.ends) == (0, ["preempted", "completed"]), done.stderr


@pytest.mark.parametrize(
    ("ranks", "number", "category"),
    [(2, signal.SIGTERM, "preempted"), (1, signal.SIGINT, "canceled"), (1, None, "canceled")],
    ids=["a signal", "Ctrl-C", "a file"],
)
def test_a_stop_of_the_supervisor_stops_all_ranks_and_restarts_nothing(ranks, number, category, tmp_path):
    job = Job(tmp_path, ranks)
    (tmp_path / "wait").touch()
    with job.started("--restarts", "2", "--set", f"cancel_file_path={tmp_path / 'cancel'}") as process:
        wait_until(lambda: all((tmp_path / f"at-{rank}-5").exists() for rank in range(ranks)), "all ranks train")
        if number is None:
            (tmp_path / "cancel").touch()
        else:
            process.send_signal(number)
        assert process.wait(120) == 75, (tmp_path / "log").read_text()
    assert job.ends == [category]


def test_the_ranks_end_with_their_supervisor(tmp_path):
    job = Job(tmp_path, 2)
    (tmp_path / "wait").touch()
    with job.started("--restarts", "2") as process:
        wait_until(lambda: all((tmp_path / f"at-{rank}-5").exists() for rank in range(2)), "both ranks train")
        ranks = psutil.Process(process.pid).children()
        process.kill()
        process.wait(120)
        _, alive = psutil.wait_procs(ranks, timeout=120)

    assert (len(ranks), alive) == (2, [])
    assert job.ends == ["preempted"]


def test_mistakes_in_code_are_not_retried(tmp_path):
    job = Job(tmp_path)
    job.dies(0, 6, number=0)
    done = job.run("--restarts", "2")
    assert (done.returncode, job.ends) == (1, ["train-step"])
    assert "restart 1" not in done.stderr


def test_a_class_that_cannot_be_imported_fails_as_without_restarts(tmp_path):
    job = Job(tmp_path)
    (tmp_path / "broken").touch()
    plain, supervised = job.run(), job.run("--restarts", "2")
    assert (supervised.returncode, supervised.stderr) == (plain.returncode, plain.stderr)
    assert plain.returncode == 2


@pytest.mark.parametrize("command", ["run", "fit"])
def test_a_training_that_is_started_again_and_again_goes_back_once_and_then_ends(command, tmp_path):
    job = Job(tmp_path)
    job.write_fit()
    deaths = tmp_path / ("runs/r/.deaths" if command == "run" else "runs/r/checkpoints/.deaths")

    def start():
        return job.run("--set", "resume_from_latest=true") if command == "run" else job.fit("--resume", "auto")

    job.dies(0, 9, times=9)
    done, kills = start_until_it_is_not_killed(start)
    assert (done.returncode, 1 + kills) == (1, 5), done.stderr
    assert job.resumed == [8, 8, 6], done.stderr
    for part in ("step 9", "batch 8 of epoch 0", "its batch: int"):
        assert part in done.stderr
    if command == "run":
        assert (job.ends, job.events[-1]["resumable"]) == (["train-step"], False)

    assert start().returncode == 1  # until somebody has looked
    for path in (*tmp_path.glob("0-9-*"), *deaths.iterdir()):
        path.unlink()
    done = start()
    assert done.returncode == 0, done.stderr
    assert not deaths.exists()


def test_a_fit_forgets_deaths_when_somebody_chooses_where_it_begins(tmp_path):
    job = Job(tmp_path)
    job.write_fit()
    job.dies(0, 7, times=5)
    _, kills = start_until_it_is_not_killed(lambda: job.fit("--resume", "auto"))
    assert kills == 4
    job.fit("--resume", "never")  # is killed once more
    done = job.fit("--resume", "auto")
    assert done.returncode == 0, done.stderr


def memory_folders():
    return sorted(Path("/dev/shm").glob(f"genlight-{RUN_ID}-*"))


def test_a_restart_continues_from_memory(losses, tmp_path):
    before = memory_folders()
    job = Job(tmp_path, 2)
    job.dies(1, 8)  # memory has the seventh step, or an earlier one if saves were in flight
    memory = ("--set", "checkpoint_every=0", "--set", "checkpoints.every_n_steps=6")
    memory += ("--set", "checkpoints.memory_every_n_steps=1")
    done = job.run("--restarts", "2", *memory)
    assert done.returncode == 0, done.stderr
    assert job.losses == losses
    assert job.resumed in ([5], [6], [7])
    assert memory_folders() == before


def test_memory_goes_to_the_disk_when_all_restarts_are_used_up(tmp_path):
    before = memory_folders()
    job = Job(tmp_path)
    job.dies(0, 6, times=2)
    done = job.run("--restarts", "1", "--set", "checkpoint_every=0", "--set", "checkpoints.memory_every_n_steps=1")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert memory_folders() == before
    (saved,) = (tmp_path / "runs/r/checkpoints").glob("*.json")
    assert saved.stem in ("step-00000004", "step-00000005")
    done = job.run("--set", "resume_from_latest=true")
    assert (done.returncode, job.resumed[-1]) == (0, int(saved.stem[5:])), done.stderr


def test_a_run_that_is_killed_before_its_first_step_goes_back_once_and_then_ends(tmp_path):
    job = Job(tmp_path)
    job.dies(0, 9)
    (tmp_path / "kills-at-load").touch()
    done = job.run("--restarts", "9")
    assert done.returncode == 1, done.stderr
    assert job.ends == ["train-step"]
    assert "before their first step" in job.events[-1]["error"]
    assert len(list((tmp_path / "loads").iterdir())) >= 4 + 1  # the last from the checkpoint before
    (tmp_path / "kills-at-load").unlink()
    assert job.run("--set", "resume_from_latest=true").returncode == 1  # until somebody has looked


NODE = """
import os, sys
from pathlib import Path
from genlight.adapter.cli import main
from genlight.callbacks.checkpoint import memory_tier

memory_tier.ROOT = Path(os.environ["NODE_MEMORY"])
sys.exit(main())
"""


class Nodes(Job):
    """A job on two nodes of this machine, each with a supervisor and a folder for its memory."""

    def __init__(self, folder, ranks=1):
        super().__init__(folder, ranks)
        job = json.loads((folder / "job.json").read_text()) | {"mock_batches": list(range(2 * ranks * STEPS))}
        lightning = {"accelerator": "cpu", "strategy": "ddp", "devices": ranks}
        (folder / "job.json").write_text(json.dumps(job | {"lightning": lightning}))
        (folder / "node.py").write_text(NODE)
        self.memory = [folder / "memory0", folder / "memory1"]
        for each in self.memory:
            each.mkdir()

    @contextlib.contextmanager
    def supervisors(self, *words):
        """Start one supervisor for each node."""
        port, started = free_port(), []
        for node in range(2):
            variables = {"RANK": node, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables["NODE_MEMORY"] = self.memory[node]
            environ = {**self.environ, **{name: str(value) for name, value in variables.items()}}
            arguments = [str(self.folder / "node.py"), "run", "job.json", *words]
            log = self.folder / f"log-{node}"
            started.append(Forked(*arguments, environ=environ, folder=self.folder, log=log))
        try:
            yield started
        finally:
            for process in started:
                process.kill_session()

    def run(self, *words):
        """Return the exit code of each node, and what all of them have printed."""
        with self.supervisors(*words) as started:
            codes = [process.wait(120) for process in started]
        return codes, "".join(path.read_text() for path in sorted(self.folder.glob("log*")))


@pytest.fixture(scope="module")
def uninterrupted_on_nodes(tmp_path_factory):
    job = Nodes(tmp_path_factory.mktemp("nodes"))
    codes, log = job.run("--restarts", "1")
    assert codes == [0, 0], log
    assert job.ends == ["completed"]
    return job.losses


def test_agents_of_torchrun_on_two_nodes_go_through_attempts_together(uninterrupted_on_nodes, tmp_path):
    """A rank of the other node and then one of the first are killed; each costs one restart and no bit."""
    job = Nodes(tmp_path)
    job.dies(1, 4)
    job.dies(0, 8)
    options, agents = [f"--master-port={free_port()}", "--master-addr=127.0.0.1", "--nnodes=2", "--no-python"], []
    program = [sys.executable, "-m", "genlight.adapter.cli", "run", "job.json", "--restarts", "2"]
    environ = {**job.environ, "OMP_NUM_THREADS": "1"}
    for node in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", *options, f"--node-rank={node}", *program]
        with (tmp_path / f"log-{node}").open("wb") as log:
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=log, stderr=log))
    try:
        codes = [agent.wait(200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()  # which ends its supervisor
    log = (tmp_path / "log-0").read_text()
    assert codes == [0, 0], log + (tmp_path / "log-1").read_text()
    assert (job.ends, job.losses) == (["train-step", "completed"], uninterrupted_on_nodes)
    (lost,) = [event["error"] for event in job.events if event["event"] == "failed"]
    assert "rank 1" in lost
    assert log.count("starting it again") == 2
    assert {event["name"] for event in job.events if event.get("name", "").startswith("restart/")} == PARTS


def test_nodes_of_several_ranks_restart_together(tmp_path):
    job = Nodes(tmp_path, ranks=2)
    job.dies(3, 6)
    job.dies(1, 8)
    codes, log = job.run("--restarts", "3")
    assert codes == [0, 0], log
    assert job.ends == ["train-step", "train-step", "completed"]
    assert job.resumed == [4, 6], log


@pytest.mark.parametrize("node", [0, 1])
def test_a_lost_supervisor_ends_the_others_and_all_can_be_started_again(node, uninterrupted_on_nodes, tmp_path):
    job = Nodes(tmp_path)
    (tmp_path / "wait").touch()
    with job.supervisors("--restarts", "5") as started:
        wait_until(lambda: all((tmp_path / f"at-{rank}-5").exists() for rank in range(2)), "both ranks train")
        ranks = [child for process in started for child in psutil.Process(process.pid).children()]
        started[node].send_signal(signal.SIGKILL)
        code = started[1 - node].wait(120)
        _, alive = psutil.wait_procs(ranks, timeout=120)
    log = (tmp_path / f"log-{1 - node}").read_text()
    assert (code, alive, len(job.ends)) == (75, [], 1), log
    assert f"node {node}" in log
    assert "restart 1" not in log
    (tmp_path / "wait").unlink()
    codes, log = job.run("--restarts", "5", "--set", "resume_from_latest=true")
    assert codes == [0, 0], log
    assert (job.ends[1:], job.losses) == (["completed"], uninterrupted_on_nodes)


@pytest.mark.parametrize(("broken", "code", "ends"), [(True, 2, []), (False, 1, ["train-step"])])
def test_mistakes_are_not_retried_on_nodes(broken, code, ends, tmp_path):
    job = Nodes(tmp_path)
    if broken:
        (tmp_path / "broken").touch()
    job.dies(1, 6, number=0)
    codes, log = job.run("--restarts", "2")
    assert codes == [code, code], log
    assert "restart 1" not in log
    assert [end for end in job.ends if end != "startup"] == ends


def test_restarts_on_nodes_are_used_up(tmp_path):
    job = Nodes(tmp_path)
    for step in (4, 6, 8):
        job.dies(1, step)
    codes, log = job.run("--restarts", "1")
    assert codes == [1, 1], log
    assert not (tmp_path / "at-0-8").exists()


@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_one_supervisor_stops_all_nodes(node, tmp_path):
    job = Nodes(tmp_path)
    (tmp_path / "wait").touch()
    with job.supervisors("--restarts", "2") as started:
        wait_until(lambda: all((tmp_path / f"at-{rank}-5").exists() for rank in range(2)), "both ranks train")
        started[node].send_signal(signal.SIGTERM)
        wait_until((tmp_path / f"past-{node}-5").exists, "the rank of that node has the signal")
        (tmp_path / "wait").unlink()
        codes = [process.wait(120) for process in started]
    assert codes == [75, 75], (tmp_path / "log-0").read_text()
    assert job.ends == ["preempted"]
    assert "restart 1" not in (tmp_path / "log-0").read_text()


def test_a_preempted_rank_of_another_node_is_started_again(tmp_path):
    job = Nodes(tmp_path)
    job.dies(1, 6, number=signal.SIGTERM)
    codes, log = job.run("--restarts", "2")
    assert (codes, job.ends) == ([0, 0], ["preempted", "completed"]), log


MEMORY = ("checkpoint_every=0", "checkpoints.memory_every_n_steps=1", "checkpoints.peer_copies=true")
IN_MEMORY = [word for setting in MEMORY for word in ("--set", setting)]


def test_memory_of_all_nodes_is_removed_when_restarts_are_used_up(tmp_path):
    job = Nodes(tmp_path)
    for step in (4, 6):
        job.dies(1, step)
    codes, log = job.run("--restarts", "1", *IN_MEMORY)
    assert codes == [1, 1], log
    assert [list(each.iterdir()) for each in job.memory] == [[], []]
    assert list((tmp_path / "runs/r/checkpoints").glob("*.json")), log


def test_a_node_that_lost_its_memory_continues_from_the_other(uninterrupted_on_nodes, tmp_path):
    job = Nodes(tmp_path)
    (tmp_path / "wait").touch()
    with job.supervisors("--restarts", "5", *IN_MEMORY) as started:
        wait_until(lambda: list(job.memory[1].glob("*/step-00000004.json")), "the other node has a copy")
        for process in started:
            process.kill_session()
            process.wait()
    shutil.rmtree(job.memory[0])
    job.memory[0].mkdir()
    (tmp_path / "wait").unlink()
    codes, log = job.run("--restarts", "5", *IN_MEMORY, "--set", "resume_from_latest=true")
    assert codes == [0, 0], log
    assert (job.resumed, job.losses) == ([4], uninterrupted_on_nodes)
    assert [list(each.iterdir()) for each in job.memory] == [[], []]
