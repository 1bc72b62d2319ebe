"""Two nodes whose processes are killed; one loses its memory, and the run continues from the copy on the other."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from genlight.adapter import read_events
from support.forked import Forked, fork_server
from support.ports import free_port

pytestmark = [pytest.mark.promise(name="resume"), pytest.mark.slow]

STAND_IN = Path(__file__).parents[1] / "forked_job.py"
KILLED_AT, STEPS = 7, 10
"""The step in which both ranks are killed, and the steps of the run."""

CODE = '''
import os, signal, time
from pathlib import Path
import lightning.pytorch as pl
import torch
from genlight.adapter import StepResult
from genlight.callbacks.checkpoint import memory_tier

memory_tier.ROOT = Path(os.environ["NODE_MEMORY"])


def die(step):
    """End this process as `kill -9` does, once both nodes have the checkpoint of the step before."""
    if Path("dies").exists() and step == KILLED_AT:
        while not list(memory_tier.ROOT.glob(f"*/step-{step - 1:08}.json")):
            time.sleep(0.02)
        Path(f"ready-{os.environ['RANK']}").touch()
        while not (Path("ready-0").exists() and Path("ready-1").exists()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)


class Dies:
    def setup(self, ctx):
        torch.manual_seed(0)

    def configure(self, ctx):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}

    def prepare_batch(self, raw, state, ctx):
        return torch.full((2, 4), float(raw))

    def train_step(self, batch, state, ctx):
        state["step"] += 1
        die(state["step"])
        loss = state["model"](batch).pow(2).mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state):
        return {"step": state["step"]}

    def load_state_dict(self, state, payload, ctx):
        state["step"] = payload["step"]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        die(self.global_step + 1)
        return self.body(torch.randn(4, 4)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return [torch.ones(1)] * 10
'''.replace("KILLED_AT", str(KILLED_AT))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "dies.py").write_text(CODE)
    for node in range(2):
        (tmp_path / f"memory{node}").mkdir()
    return tmp_path


def run_job(folder, **settings):
    """Run a job under one torchrun agent for each node; return their exit codes and logs."""
    job = {"run_id": "r", "trainer": "dies:Dies", "max_steps": STEPS, "mock_batches": list(range(2 * STEPS))}
    job |= {"lightning": {"accelerator": "cpu", "strategy": "ddp"}, **settings}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "processes").mkdir(exist_ok=True)
    port, agents = free_port(), []
    for node in range(2):
        log = folder / f"agent-{node}.log"
        options = ["--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        job = [sys.executable, STAND_IN, fork_server(), log, "job.json", folder / "processes"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "--no-python", *map(str, job)]
        environ = {**os.environ, "NODE_MEMORY": str(folder / f"memory{node}")}
        with log.open("ab") as output:
            agents.append(subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output))
    try:
        return [agent.wait(100) for agent in agents], "".join(path.read_text() for path in folder.glob("*.log"))
    finally:
        for agent in agents:
            agent.kill()


def run_fit(folder, *words, **settings):
    """Run ``genlight fit`` with the variables of torchrun, once for each node; return exit codes and logs."""
    saver = {"class_path": "genlight.callbacks.Checkpoint", "init_args": settings}
    trainer = {"accelerator": "cpu", "strategy": "ddp", "num_nodes": 2, "devices": 1, "max_steps": STEPS}
    trainer |= {"logger": False, "enable_progress_bar": False, "callbacks": [saver]}
    config = {"model": {"class_path": "dies.Net"}, "trainer": trainer, "seed_everything": 1}
    (folder / "config.json").write_text(json.dumps(config))
    port, ranks = free_port(), []
    for node in range(2):
        environ = {"RANK": node, "GROUP_RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2}
        environ |= {"LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ |= {"TORCHELASTIC_RUN_ID": "r", "NODE_MEMORY": folder / f"memory{node}"}
        environ = {**os.environ, **{name: str(value) for name, value in environ.items()}}
        arguments = ["genlight.adapter.cli", "fit", "--config", "config.json", *words]
        ranks.append(Forked(*arguments, environ=environ, folder=folder, log=folder / f"fit-{node}.log"))
    try:
        return [rank.wait(100) for rank in ranks], "".join(path.read_text() for path in folder.glob("*.log"))
    finally:
        for rank in ranks:
            rank.kill_session()
            rank.wait()


def lose_first_node(folder):
    (folder / "dies").unlink()
    shutil.rmtree(folder / "memory0")
    (folder / "memory0").mkdir()


def assert_nothing_in_memory(folder):
    assert [list((folder / f"memory{node}").iterdir()) for node in range(2)] == [[], []]


def weights(checkpoints):
    return (checkpoints / "final" / "model.safetensors").read_bytes()


def test_a_job_under_torchrun_continues_from_the_copy_on_the_second_node(folder):
    assert run_job(folder, run_id="unbroken", checkpoint_every=4)[0] == [0, 0]
    (folder / "dies").touch()
    checkpoints = {"every_n_steps": 4, "memory_every_n_steps": 1, "peer_copies": True}
    codes, log = run_job(folder, checkpoints=checkpoints)
    assert 0 not in codes, log
    lose_first_node(folder)
    codes, log = run_job(folder, checkpoints=checkpoints, resume_from_latest=True)
    assert codes == [0, 0], log
    events = list(read_events(folder / "runs/r/metrics/events.jsonl"))
    resumed = [event["value"] for event in events if event.get("name") == "trainer/resumed_from_step"]
    assert resumed == [KILLED_AT - 1], log
    assert weights(folder / "runs/r/checkpoints") == weights(folder / "runs/unbroken/checkpoints")
    assert_nothing_in_memory(folder)


def test_a_fit_continues_from_the_copy_on_the_second_node(folder):
    codes, log = run_fit(folder, dirpath="unbroken")
    assert codes == [0, 0], log
    (folder / "dies").touch()
    settings = {"dirpath": "c", "every_n_steps": 4, "memory_every_n_steps": 1, "peer_copies": True}
    codes, log = run_fit(folder, **settings)
    assert 0 not in codes, log
    lose_first_node(folder)
    codes, log = run_fit(folder, "--resume", "auto", **settings)
    assert codes == [0, 0], log
    assert f"continuing after step {KILLED_AT - 1}, from the memory of the nodes" in log
    assert weights(folder / "c") == weights(folder / "unbroken")
    assert_nothing_in_memory(folder)
