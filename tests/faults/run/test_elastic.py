"""torchrun with a number of nodes that changes while the job runs."""

import json
import sys
import time
from collections import Counter, defaultdict

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genlight.adapter import read_events
from genlight.adapter.plumbing import durable
from support.forked import environ_with_tests
from support.ports import free_port

pytestmark = [pytest.mark.promise(name="resume"), pytest.mark.slow]

ROWS, BATCH, EPOCHS = 100, 4, 2
LIMIT_S = 200

TRAINER = '''
import json, time
from pathlib import Path
from support.trainer_class import TrainsAndCounts, torch


class Counting(TrainsAndCounts):
    """Writes the rows of each step to a file; waits at the step that a test has set for this number of ranks."""

    def setup(self, ctx):
        super().setup(ctx)
        self.rows = Path(f"rows-{time.time_ns()}-{ctx.rank}.jsonl")

    def prepare_batch(self, raw, state, ctx):
        return raw["id"].to_pylist()

    def train_step(self, ids, state, ctx):
        step, limit = state["step"] + 1, Path(f"limit-{ctx.world_size}")
        with self.rows.open("a") as file:
            file.write(json.dumps([step, ctx.world_size, ctx.rank, ids]) + "\\n")
        while limit.exists() and step >= int(limit.read_text()) and not ctx.is_canceled():
            time.sleep(0.02)
        return super().train_step(torch.tensor([[float(i), 1.0] for i in ids]) / 100, state, ctx)
'''


class Nodes:
    """Agents of torchrun with one rank each; every agent stands for a machine."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.agents = []

    def start(self):
        is_first = not self.agents
        # By default a node counts as lost after 15 s, and the last call for others takes 30 s.
        settings = {
            "is_host": int(is_first),
            "last_call_timeout": 1,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 6,
        }
        rendezvous = {"backend": "c10d", "endpoint": f"localhost:{self.port}", "id": "elastic"}
        options = [f"--rdzv-{name}={value}" for name, value in rendezvous.items()]
        options += ["--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in settings.items())]
        options += ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2"]
        log = self.folder / f"agent-{len(self.agents)}.log"
        # Otherwise a node that joins later waits forever for the address of rank zero (torch 2.13).
        environ = {**environ_with_tests(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "genlight", "run", "job.json"]
        with log.open("ab") as output:
            agent = psutil.Popen(command, cwd=self.folder, env=environ, stdout=output, stderr=output)
        self.agents.append(agent)
        return agent

    def limit(self, world_size, step):
        """Let a job of `world_size` ranks wait at `step`; None releases it."""
        path = self.folder / f"limit-{world_size}"
        if step is None:
            path.unlink()
        else:
            durable.write_bytes_durably(path, str(step).encode())

    def lose(self, agent):
        """Kill all processes of a node."""
        for process in [*agent.children(recursive=True), agent]:
            process.kill()
        agent.wait()

    def until(self, condition, what):
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"not within {LIMIT_S} s: {what}\n{self.logs()}"
            time.sleep(0.05)

    def logs(self):
        return "\n".join(path.read_text()[-6000:] for path in sorted(self.folder.glob("agent-*.log")))

    def lines(self):
        """Yield the lines that the ranks wrote, attempt by attempt."""
        for path in sorted(self.folder.glob("rows-*.jsonl"), key=lambda path: int(path.name.split("-")[1])):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    yield json.loads(line)


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    for agent in made.agents:
        if agent.is_running() and agent.status() != psutil.STATUS_ZOMBIE:
            made.lose(agent)


def test_a_run_with_fewer_and_then_more_nodes_trains_each_row_once_per_epoch(nodes, tmp_path):
    (tmp_path / "counting.py").write_text(TRAINER)
    pq.write_table(pa.table({"id": range(ROWS)}), tmp_path / "rows.parquet", row_group_size=16)
    dataset = {"parquet_paths": ["rows.parquet"], "batch_size": BATCH, "shuffle": True, "epochs": EPOCHS}
    job = {"run_id": "elastic", "trainer": "counting:Counting", "max_steps": 1000, "checkpoint_every": 3}
    job |= {"resume_from_latest": True, "dataset": dataset, "lightning": {"accelerator": "cpu", "strategy": "ddp"}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    nodes.limit(1, 1)  # in case the second node comes late
    nodes.limit(2, 8)

    first, second = nodes.start(), nodes.start()
    nodes.until(lambda: {(8, 2, 0), (8, 2, 1)} <= {tuple(line[:3]) for line in nodes.lines()}, "two nodes train")
    nodes.limit(1, 14)
    nodes.lose(second)
    nodes.limit(2, None)
    nodes.until(lambda: [14, 1, 0] in [line[:3] for line in nodes.lines()], "one node continues")
    third = nodes.start()
    assert (first.wait(LIMIT_S), third.wait(LIMIT_S)) == (0, 0), nodes.logs()

    events = list(read_events(tmp_path / "runs/elastic/metrics/events.jsonl"))
    ends = [event for event in events if event["event"] in ("failed", "completed")]
    resumed = [event["value"] for event in events if event.get("name") == "trainer/resumed_from_step"]
    assert [event.get("category") for event in ends][-3:] == ["train-step", "preempted", None]
    assert ends[-2]["step"] == resumed[-1] == 14

    trained = defaultdict(dict)  # by step; a later attempt replaces steps that an earlier one lost
    for step, world_size, rank, ids in nodes.lines():
        if any(world_size != size for size, _ in trained[step]):
            trained[step].clear()
        trained[step][world_size, rank] = ids
    sizes = [next(iter(ranks))[0] for _, ranks in sorted(trained.items())]
    assert sizes[2:6] + sizes[8:] == [2] * 4 + [1] * 6 + [2] * (len(sizes) - 14)
    counts = Counter(row for ranks in trained.values() for ids in ranks.values() for row in ids)
    assert counts == dict.fromkeys(range(ROWS), EPOCHS)
