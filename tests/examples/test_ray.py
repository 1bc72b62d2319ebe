"""The page about Ray Train: its program trains, and continues after a worker was killed or its node was taken back."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from genlight.adapter import read_events
from support.forked import Forked
from support.ports import free_port
from support.snippets import blocks

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = Path(sys.prefix) / "guides"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None and not (PACKAGES / "ray").is_dir(),
        reason="`make` installs ray into .venv/guides",
    ),
    pytest.mark.timeout(600),
]

TRAINER = '''
import os, signal
from pathlib import Path
from trainer import DigitsTrainer


class Killed(DigitsTrainer):
    """Its rank 1 is killed once, by nobody's fault."""

    steps = 0

    def train_step(self, batch, state, ctx):
        self.steps += 1
        mark = Path(__file__).with_name("was-killed")
        if ctx.rank == 1 and self.steps == 12 and "straight" not in ctx.job.run_id and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch, state, ctx)
'''

DRIVER = """
import runpy
import ray

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
try:
    runpy.run_path("train.py")
finally:
    ray.shutdown()
"""


@pytest.fixture
def ray_folder():
    """Folder for the files of Ray's daemons, short enough for their sockets; no daemon outlives the test."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield folder
    for process in daemons_in(folder):
        process.kill()
    shutil.rmtree(folder)


def daemons_in(folder):
    """Ray's processes: their command lines contain the session's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def write_job(folder):
    (folder / "trainer.py").write_text((EXAMPLES / "digits/trainer.py").read_text())
    (folder / "killed.py").write_text(TRAINER)
    job = json.loads((EXAMPLES / "digits/job.json").read_text())
    job |= {"run_id": "first", "trainer": "killed:Killed", "metric_every": 1, "checkpoint_every": 5, "sample_every": 0}
    job |= {"sample_prompts": [], "lightning": {"accelerator": "cpu"}}
    job["hyperparams"] |= {"width": 8, "depth": 1}
    job["dataset"] |= {"parquet_paths": [str(EXAMPLES / "digits/digits.parquet")], "batch_size": 60}
    (folder / "job.json").write_text(json.dumps(job))


def drive(folder, ray_folder, **more):
    """Run ``driver.py`` in `folder` to its end."""
    environ = {**os.environ, "RAY_TMPDIR": str(ray_folder), "HOME": str(folder), **more}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(PACKAGES)]))
    environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    }
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "driver.py"]
        code = subprocess.run(command, cwd=folder, env=environ, stdout=log, stderr=log, timeout=500).returncode
    assert code == 0, (folder / "log").read_text()[-20_000:]


def run_straight(folder):
    """The job on two ranks that torchrun's variables tell of themselves; their exit codes."""
    settings = ("lightning.devices=2", "lightning.strategy=ddp", "run_id=straight", "max_steps=40")
    words = ["run", "demo/job.json", *(word for setting in settings for word in ("--set", setting))]
    names = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "straight"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = []
    for rank in range(2):
        environ = os.environ | {
            name: str(value) for name, value in (names | {"RANK": rank, "LOCAL_RANK": rank}).items()
        }
        program = "genlight.adapter.cli"
        ranks.append(Forked(program, *words, environ=environ, folder=folder, log=folder / "straight"))
    try:
        return [rank.wait(200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill_session()


def weights(run):
    return (run / "checkpoints/final/model.safetensors").read_bytes()


def test_a_run_with_a_killed_worker_ends_like_an_uninterrupted_one(tmp_path, ray_folder):
    (program,) = [text for _, title, text in blocks(EXAMPLES / "ray/README.md") if title == "train.py"]
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "driver.py").write_text(DRIVER)
    job_folder = tmp_path / "demo"
    job_folder.mkdir()
    write_job(job_folder)
    drive(tmp_path, ray_folder, RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0")  # a process less
    gone = psutil.wait_procs(daemons_in(ray_folder), timeout=30)[1]
    assert gone == []
    assert run_straight(tmp_path) == [0, 0], (tmp_path / "straight").read_text()

    events = list(read_events(job_folder / "runs/first/metrics/events.jsonl"))
    ends = [event["event"] for event in events if event["event"] in ("started", "completed")]
    assert ends == ["started", "started", "completed"]
    failed = [event["error"] for event in events if event["event"] == "failed"]
    assert len(failed) <= 1  # there is none if Ray ended rank 0 before it could report
    assert all("RankFailedError: rank 1 on" in error for error in failed)
    (resumed,) = [event["value"] for event in events if event.get("name") == "trainer/resumed_from_step"]
    assert resumed in (5, 10)
    assert weights(job_folder / "runs/first") == weights(job_folder / "runs/straight")


PREEMPTED = """
import time
from pathlib import Path
import ray
from support.trainer_class import Counts


class Preempted(Counts):
    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        mark = Path(__file__).with_name("node")
        if state["steps"] == 7 and not mark.exists():  # the driver has this node taken back, and the notice arrives
            mark.write_text(ray.get_runtime_context().get_node_id())
            while not ctx.is_canceled():
                time.sleep(0.01)
        return result
"""

TAKES_BACK = """
import threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from genlight.adapter.ray import train_loop

options = {"include_dashboard": False, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
for _ in range(2):
    cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
ray.init(address=cluster.address)


def take_back():  # in five minutes; at once as soon as the run has saved
    mark, log = Path("demo/node"), Path("demo/runs/first/metrics/events.jsonl")
    wait_for(lambda: mark.exists() and mark.read_text())
    drain(mark.read_text(), time.time() + 300)
    wait_for(lambda: '"event":"failed"' in log.read_text())
    drain(mark.read_text(), time.time())


def wait_for(holds):
    while not holds():
        time.sleep(0.05)


def drain(node, ends_at_s):
    gcs, kind = ray._private.worker.global_worker.gcs_client, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
    assert gcs.drain_node(node, kind, "taken back", int(ends_at_s * 1000))[0]


threading.Thread(target=take_back, daemon=True).start()
try:
    loop = train_loop("demo/job.json")
    TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig()).fit()
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.promise(name="stop")
def test_a_run_whose_node_is_taken_back_saves_that_step_and_continues_elsewhere(tmp_path, ray_folder):
    """The run config allows no failure: for Ray this is none."""
    (tmp_path / "driver.py").write_text(TAKES_BACK)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/preempted.py").write_text(PREEMPTED)
    job = {"run_id": "first", "trainer": "preempted:Preempted", "max_steps": 9, "mock_batches": list(range(9))}
    (tmp_path / "demo/job.json").write_text(json.dumps(job | {"lightning": {"accelerator": "cpu"}}))
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1])])
    drive(tmp_path, ray_folder, RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S="0.2", PYTHONPATH=path)

    events = list(read_events(tmp_path / "demo/runs/first/metrics/events.jsonl"))
    ends = [(e["event"], e.get("step"), e.get("category")) for e in events if e["event"] in ("failed", "completed")]
    assert ends == [("failed", 7, "preempted"), ("completed", 9, None)]
    assert [e["value"] for e in events if e.get("name") == "trainer/resumed_from_step"] == [7]
