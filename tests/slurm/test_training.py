"""Training under a real Slurm: two nodes, preemption, time limits, dead nodes, arrays."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from genlight.callbacks.checkpoint import newest_valid
from support.forked import is_alive

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
]

DIGITS = Path(__file__).parents[2] / "examples/digits"

TRAINER = '''
import json, os
from pathlib import Path
from trainer import DigitsTrainer

class OnNodes(DigitsTrainer):
    """Notes where each of its ranks stands, and waits in a step for the file that a test makes."""

    def setup(self, ctx):
        place = ctx.job_context
        note = [ctx.rank, ctx.world_size, place.hostnames[place.node_rank], place.local_rank, place.job_id]
        Path(f"place-{ctx.job.run_id}-{ctx.rank}").write_text(json.dumps(note))
        self.hold = ctx.job.hyperparams.get("hold")
        self.steps = 0
        super().setup(ctx)

    def train_step(self, batch, state, ctx):
        self.steps += 1
        if self.steps == 4 and self.hold:
            Path(f"reached-{ctx.rank}").write_text(str(os.getpid()))
            import time
            while not ctx.is_canceled() and not Path(self.hold).exists():
                time.sleep(0.02)
        return super().train_step(batch, state, ctx)
'''


class Jobs:
    """Jobs in a folder that all nodes share."""

    def __init__(self, slurm, folder):
        self.slurm, self.folder = slurm, folder
        (folder / "trainer.py").write_text((DIGITS / "trainer.py").read_text())
        (folder / "on_nodes.py").write_text(TRAINER)

    def write(self, run_id, **fields):
        job = json.loads((DIGITS / "job.json").read_text())
        job |= {"run_id": run_id, "trainer": "on_nodes:OnNodes", "max_steps": 60, "metric_every": 2}
        job |= {"checkpoint_every": 0, "sample_every": 0, "sample_prompts": [], "lightning": {"accelerator": "cpu"}}
        job["dataset"] |= {"parquet_paths": [str(DIGITS / "digits.parquet")], "batch_size": 16}
        job["hyperparams"] |= {"width": 8, "depth": 1, **fields.pop("hyperparams", {})}
        path = self.folder / f"{run_id}.json"
        path.write_text(json.dumps(job | fields))
        return path

    def genlight(self, *arguments):
        return self.slurm.call(sys.executable, "-m", "genlight.adapter.cli", *arguments, cwd=self.folder)

    def submit(self, path, *options):
        said = self.genlight("slurm", "submit", path, *options)
        return said.strip()

    def events(self, run_id):
        path = self.folder / "runs" / run_id / "metrics/events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def weights(self, run_id):
        return (self.folder / "runs" / run_id / "checkpoints/final/model.safetensors").read_bytes()

    def until_reached(self, ranks=2):
        paths = [self.folder / f"reached-{rank}" for rank in range(ranks)]
        self.slurm.until(lambda: all(path.exists() and path.read_text() for path in paths), "all ranks train")
        return [int(path.read_text()) for path in paths]


@pytest.fixture
def jobs(slurm, tmp_path):
    made = Jobs(slurm, tmp_path)
    yield made
    for path in tmp_path.glob("*.out"):  # shown if a test fails
        print(path.name, path.read_text()[-3000:])


@pytest.fixture(scope="module", autouse=True)
def limited(slurm, tmp_path_factory):
    """A job that trains until its time is over, long after everything else here."""
    jobs = Jobs(slurm, tmp_path_factory.mktemp("limited"))
    path = jobs.write("limited", hyperparams={"hold": "never"})
    return jobs, jobs.submit(path, "--sbatch", "time=2", "--grace=30", "--no-requeue")


@pytest.fixture(scope="module", autouse=True)
def apart(slurm, tmp_path_factory):
    """A job whose nodes have separate folders and separate code."""
    jobs = Jobs(slurm, tmp_path_factory.mktemp("apart"))
    jobs.write("apart")
    for rank in range(2):
        copy = jobs.folder / f"copy-{rank}"
        copy.mkdir()
        for name in ("apart.json", "trainer.py", "on_nodes.py"):
            own = "\n# changed here\n" if rank and name == "on_nodes.py" else ""
            (copy / name).write_text((jobs.folder / name).read_text() + own)
    command = f"cd copy-$SLURM_PROCID && exec {sys.executable} -m genlight.adapter.cli run apart.json"
    options = ("--nodes=2", "--ntasks=2", "--output=apart-%j.out", f"--wrap=srun bash -c '{command}'")
    return jobs, slurm.submit(*options, cwd=jobs.folder)


@pytest.mark.promise(name="resume")
def test_supervisors_that_srun_starts_restart_the_ranks_of_both_nodes(jobs):
    straight = jobs.submit(jobs.write("straight", checkpoint_every=2), "--nodes=2")
    jobs.write("killed", checkpoint_every=2, hyperparams={"hold": "go"})
    command = f"srun {sys.executable} -m genlight.adapter.cli run killed.json --restarts 1"
    options = ("--nodes=2", "--ntasks-per-node=1", "--no-requeue", "--output=killed-%j.out", f"--wrap={command}")
    killed = jobs.slurm.submit(*options, cwd=jobs.folder)
    os.kill(jobs.until_reached()[1], signal.SIGKILL)
    (jobs.folder / "go").touch()

    assert jobs.slurm.wait(killed) == jobs.slurm.wait(straight) == ("COMPLETED", 0)
    assert [event["value"] for event in jobs.events("killed") if event.get("name") == "trainer/resumed_from_step"] == [
        2
    ]
    assert jobs.weights("killed") == jobs.weights("straight")


def test_two_nodes_train_are_preempted_requeued_and_end_as_if_nothing_had_been(jobs):
    stopped = jobs.submit(jobs.write("stopped", hyperparams={"hold": "go"}), "--nodes=2")
    straight = jobs.submit(jobs.write("straight"), "--nodes=2")
    jobs.until_reached()
    jobs.slurm.call("scancel", "--signal=TERM", stopped)
    jobs.slurm.until(lambda: "preempted" in str(jobs.events("stopped")), "the run has stopped")
    (jobs.folder / "go").touch()
    failed = next(event for event in jobs.events("stopped") if event["event"] == "failed")
    assert (failed["category"], failed["resumable"]) == ("preempted", True)
    assert 4 <= failed["step"] < 60

    assert jobs.slurm.wait(straight) == ("COMPLETED", 0)
    places = [json.loads((jobs.folder / f"place-straight-{rank}").read_text()) for rank in range(2)]
    assert places == [[0, 2, "n9", 0, straight], [1, 2, "n10", 0, straight]]
    before = len(jobs.events("straight"))
    jobs.slurm.call("scontrol", "requeue", straight)

    jobs.slurm.until(lambda: jobs.slurm.job(stopped, "Restarts") == "1", "the stopped job runs again")
    assert jobs.slurm.wait(stopped) == ("COMPLETED", 0)
    resumed = [e["value"] for e in jobs.events("stopped") if e.get("name") == "trainer/resumed_from_step"]
    assert resumed == [failed["step"]]
    assert jobs.weights("stopped") == jobs.weights("straight")

    jobs.slurm.until(lambda: jobs.slurm.job(straight, "Restarts") == "1", "the job that has ended runs again")
    assert jobs.slurm.wait(straight) == ("COMPLETED", 0)
    assert [event["event"] for event in jobs.events("straight")[before:]] == ["started", "completed"]


def test_a_task_of_an_array_trains_in_its_own_folder_and_is_requeued_without_the_others(jobs):
    """The preempted task has the number of the array; with that number, Slurm would requeue all tasks."""
    slurm = jobs.slurm
    array = jobs.submit(jobs.write("array", hyperparams={"hold": "go"}), "--sbatch", "array=0-1")
    runs = [f"array-{task}" for task in range(2)]
    slurm.until(lambda: all("started" in str(jobs.events(run)) for run in runs), "both tasks train")
    ids = {task: slurm.job(f"{array}_{task}", "JobId") for task in range(2)}
    first = next(task for task, job in ids.items() if job == array)
    slurm.until(lambda: (jobs.folder / f"place-{runs[first]}-0").exists(), "it has a place")
    slurm.call("scancel", "--signal=TERM", f"{array}_{first}")
    slurm.until(lambda: "preempted" in str(jobs.events(runs[first])), "the task has stopped")
    (jobs.folder / "go").touch()

    slurm.until(lambda: slurm.job(f"{array}_{first}", "Restarts") == "1", "the task runs again")
    assert [slurm.wait(f"{array}_{task}") for task in range(2)] == [("COMPLETED", 0)] * 2
    assert slurm.job(f"{array}_{1 - first}", "Restarts") == "0"
    assert [[e["run_id"] for e in jobs.events(run) if e["event"] == "completed"] for run in runs] == [
        [run] for run in runs
    ]
    assert [str(jobs.events(run)).count("started") for run in runs] == ([2, 1] if first == 0 else [1, 2])
    assert not (jobs.folder / "runs/array").exists() or not jobs.events("array")


def test_a_job_whose_node_is_set_down_or_dies_comes_back_and_the_cause_is_named(jobs):
    slurm = jobs.slurm
    job = jobs.submit(jobs.write("dying", checkpoint_every=2, hyperparams={"hold": "go"}), "--nodes=2")
    first = jobs.until_reached()
    slurm.set_down("n10")
    slurm.until(lambda: not any(map(is_alive, first)), "the ranks of both nodes have ended")
    for rank in range(2):
        (jobs.folder / f"reached-{rank}").unlink()
    slurm.resume("n10")

    pids = jobs.until_reached()
    slurm.kill_node("n10")
    os.kill(pids[1], signal.SIGKILL)
    (jobs.folder / "go").touch()
    slurm.until(lambda: "ended without a report" in str(jobs.events("dying")), "rank 0 has noticed")
    slurm.start_node("n10")
    assert slurm.wait(job) == ("COMPLETED", 0)
    events = [event["event"] for event in jobs.events("dying")]
    assert events.count("started") == 3
    assert events[-1] == "completed"
    failed = [event["error"] for event in jobs.events("dying") if event["event"] == "failed"]
    assert "RankFailedError: rank 1 on n10 ended without a report" in failed[-1]


def test_the_end_of_its_time_leaves_a_durable_checkpoint_and_is_no_preemption(limited):
    jobs, job = limited
    assert jobs.slurm.wait(job) == ("FAILED", 75)

    failed = jobs.events("limited")[-1]
    assert (failed["event"], failed["category"], failed["resumable"]) == ("failed", "timeout", True)
    record, warnings = newest_valid(jobs.folder / "runs/limited/checkpoints")
    assert (record.step, warnings) == (failed["step"], [])


def test_nodes_that_do_not_share_the_folder_or_the_code_are_named_before_training(apart):
    jobs, job = apart
    assert jobs.slurm.wait(job) == ("FAILED", 2)

    path = jobs.folder / "copy-0/runs/apart/metrics/events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["failed"]
    assert events[0]["category"] == "startup"
    assert "the run's folder is another one (" in events[0]["error"]
    assert ") on n10, and shared on n9" in events[0]["error"]
    assert "on_nodes.py is " in events[0]["error"]
