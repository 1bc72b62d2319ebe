"""The data of a job is what a user's function returns, and a run goes on from every step as if never interrupted."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from genlight.adapter import StepContext, TrainingJobSpec
from genlight.adapter.check.checks import CHECKS
from genlight.adapter.cli import main
from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.feed.user_data import RepeatedRead, feed_of
from support.forked import environ_with_tests, run_forked
from support.jobs import write_job
from support.messages import refusal

MODULE = '''
import random

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from genlight.adapter import StepResult
from support.trainer_class import Counts


class Sees(Counts):
    """Keeps what it saw, and draws a number of each generator in each step."""

    def configure(self, ctx):
        return {"seen": [], "model": torch.nn.Linear(1, 1)}
    def train_step(self, batch, state, ctx):
        rows = batch.column("x").to_pylist() if hasattr(batch, "column") else torch.as_tensor(batch).flatten().tolist()
        state["seen"].append([*rows, torch.rand(()).item(), random.random(), float(np.random.rand())])
        with open(f"rank{ctx.rank}.txt", "a") as file:
            file.write(f"{rows}\\n")
        return StepResult(metrics={"loss": 0.0})
    def state_dict(self, state): return {"seen": list(state["seen"])}
    def load_state_dict(self, state, payload, ctx): state["seen"] = list(payload["seen"])


class SeesItsOwn(Sees):
    def setup(self, ctx): self.first = 100
    def train_loader(self, ctx): return DataLoader(torch.arange(self.first, self.first + 7), 2, shuffle=True)


class Noisy(Dataset):
    """Row i is i and noise."""

    def __len__(self): return 10
    def __getitem__(self, index): return torch.tensor([index, torch.rand(()).item() + random.random()])


class Stream(IterableDataset):
    """An order of its own in each pass."""

    def __iter__(self): return iter(torch.randperm(9).split(2))


class NoisyStream(IterableDataset):
    """Each worker draws other numbers in each pass."""

    def __iter__(self): return (torch.rand(1) + np.random.rand() for _ in range(6))


class Chunks:
    """Reads on, as those who train on one large file do."""

    def __init__(self): self.position = 0
    def next_batch(self):
        self.position += 3
        return np.arange(self.position - 3, self.position)


class Passes:
    """Another order in each pass, from its own generator and the number of the pass."""

    def __init__(self): self.generator, self.passes = np.random.default_rng(3), 0
    def __iter__(self):
        self.passes += 1
        return iter([torch.tensor([self.passes, row]) for row in self.generator.permutation(4)])


class Positions:
    """Keeps its position; draws the order of a pass, also of a resumed one, when the pass begins."""

    def __init__(self):
        self.passes = self.taken = self.skipped = 0
        self.generator = np.random.default_rng(4)
    def __iter__(self):
        self.passes, first, self.skipped = self.passes + 1, self.skipped, 0
        order = torch.randperm(4)[torch.from_numpy(self.generator.permutation(4))]
        return map(self.take, range(first, 4), order[first:])
    def take(self, place, row):
        self.taken = place + 1
        return torch.tensor([self.passes, row])
    def state_dict(self): return {"passes": self.passes - 1, "taken": self.taken}
    def load_state_dict(self, state): self.passes, self.skipped = state["passes"], state["taken"]


def passes(): return Passes()
def positions(): return Positions()
def dataset(ctx): return Noisy()
def loader(): return DataLoader(Noisy(), 3, shuffle=True)
def iterable_loader(): return DataLoader(Stream(), batch_size=None)
def worker_loader(): return DataLoader(Noisy(), 3, shuffle=True, num_workers=2, persistent_workers=True)
def worker_stream(): return DataLoader(NoisyStream(), batch_size=2, num_workers=2, persistent_workers=True)
def random_stream(ctx): return lambda: torch.randint(ctx.job.hyperparams["rows"], (2,)) + np.random.randint(9)
def counting_stream(ctx): return Chunks().next_batch
def batches(): return [[1.0, 2.0], [3.0], [4.0, 5.0]]
def table(): return pa.table({"x": list(range(11))})
def generator():
    for row in np.random.permutation(8):
        yield [float(row), random.random()]
'''


def make(folder: Path, name: str, **job: object) -> Path:
    module = f"mine_{name}"
    (folder / f"{module}.py").write_text(MODULE)
    if "data" in job:
        job["data"] = f"{module}:{job['data']}"
    usual = {"trainer": f"{module}:Sees", "max_steps": 9, "seed": 5, "hyperparams": {"rows": 50}, "mock_batches": ...}
    return write_job(folder, **{**usual, **job})


def seen(job: Path, run_id: str) -> list[list[float]]:
    record = json.loads((job.parent / "runs" / run_id / "checkpoints" / "final.json").read_text())
    found: list[list[float]] = record["state"]["seen"]
    return found


SHUFFLED = {"batch_size": 3, "shuffle": True}
KINDS = {
    "dataset": ("dataset", SHUFFLED),
    "workers": ("dataset", {**SHUFFLED, "workers": 2}),
    "loader": ("loader", None),
    "worker_loader": ("worker_loader", None),
    "worker_stream": ("worker_stream", None),
    "iterable_loader": ("iterable_loader", None),
    "random_stream": ("random_stream", None),
    "counting_stream": ("counting_stream", None),
    "batches": ("batches", None),
    "table": ("table", {"batch_size": 2, "shuffle": True}),
    "generator": ("generator", None),
    "passes": ("passes", None),
    "positions": ("positions", None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_interrupted_sees_what_one_without_a_break_sees(kind, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    data, dataset = KINDS[kind]
    job = make(tmp_path, kind, data=data, **({} if dataset is None else {"dataset": dataset}))
    assert main(["run", str(job), "--set", "run_id=whole"]) == 0
    for steps in (2, 7, 8, 9):
        assert main(["run", str(job), "--set", f"max_steps={steps}", "--set", "resume_from_latest=true"]) == 0

    assert seen(job, "r") == seen(job, "whole")
    assert len(seen(job, "r")) == 9
    if kind in ("passes", "positions"):
        assert [rows[0] for rows in seen(job, "r")] == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert "begins with its first batch" not in caplog.text


@pytest.fixture
def _without_ranks(monkeypatch):
    """Let a check start no processes; the tests of ``genlight check`` do."""
    monkeypatch.setitem(CHECKS, "ranks", lambda _: iter(()))


@pytest.mark.usefixtures("_without_ranks")
def test_the_class_itself_brings_its_loader_after_its_setup(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = make(tmp_path, "own", trainer="mine_own:SeesItsOwn")
    assert main(["run", str(job), "--set", "run_id=whole"]) == 0
    for steps in (5, 9):
        assert main(["run", str(job), "--set", f"max_steps={steps}", "--set", "resume_from_latest=true"]) == 0

    assert seen(job, "r") == seen(job, "whole")
    assert main(["check", str(job)]) == 0, capsys.readouterr().out
    assert main(["doctor", str(job), "--set", "run_id=new"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("kind", ["loader", "random_stream"])
@pytest.mark.usefixtures("_without_ranks")
def test_check_compare_and_doctor_take_the_same_data(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data, dataset = KINDS[kind]
    job = make(tmp_path, f"checked_{kind}", data=data, **({} if dataset is None else {"dataset": dataset}))

    assert main(["doctor", str(job)]) == 0, capsys.readouterr().out
    assert main(["check", str(job)]) == 0, capsys.readouterr().out
    assert main(["compare", str(job), "--steps", "5", "--rtol", "0"]) == 0, capsys.readouterr().out


def context(rank=0, world_size=1):
    return StepContext(TrainingJobSpec("r", 4), rank=rank, world_size=world_size, device="cpu")


def take(feed, count):
    batches = []
    for batch in feed:
        batches.append(torch.as_tensor(batch[0] if isinstance(batch, list) else batch).flatten().tolist())
        if len(batches) == count:
            break
    return batches


def flat(batches):
    return [row for batch in batches for row in batch]


def rows():
    return TensorDataset(torch.arange(20))


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (rows, {"batch_size": 4, "shuffle": True, "seed": 3}),
        (lambda: DataLoader(rows(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)), {}),
    ],
)
def test_ranks_share_the_steps_of_a_dataset_and_another_number_of_them_goes_on(function, options):
    ranks = [feed_of(function, context(rank, 2), options) for rank in range(2)]
    one = feed_of(rows, context(), {"batch_size": 8, "shuffle": True, "seed": 3})
    whole = take(one, 3)
    shared = [take(feed, 3) for feed in ranks]

    assert [first + second for first, second in zip(*shared, strict=True)] == whole
    assert sorted(flat(whole)) == list(range(20))

    ranks = [feed_of(function, context(rank, 2), options) for rank in range(2)]
    first = [take(feed, 1) for feed in ranks]
    position = ranks[0].state_dict()
    assert position == ranks[1].state_dict()
    alone = feed_of(rows, context(), {"batch_size": 8, "shuffle": True, "seed": 3})
    alone.load_state_dict(position)
    assert first[0][0] + first[1][0] + flat(take(alone, 2)) == flat(whole)


def test_ranks_draw_numbers_of_their_own_from_a_stream_and_leave_those_of_training_alone():
    def stream(rank):
        return feed_of(lambda: lambda: torch.randint(1000, (4,)), context(rank, 2), {"seed": 7})

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = take(stream(0), 3), take(stream(1), 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(a == b for a in first for b in second)

    again = stream(1)
    taken = take(again, 2)
    resumed = stream(1)
    resumed.load_state_dict(again.state_dict())
    assert taken + take(resumed, 1) == second


def needs_split(split):
    return split


def generate():
    yield [1]


@pytest.mark.parametrize(
    ("function", "world_size", "message"),
    [
        (needs_split, 1, r"requires `split`, .* `def data\(ctx\): return lambda: needs_split"),
        (lambda: (torch.ones(2), torch.ones(2)), 1, r"returned \(tensor.*, a tuple\. Return a source of"),
        (lambda: torch.ones(2), 1, r"returned tensor.*, a Tensor\. Return a source of"),
        (lambda: 3, 1, r"returned 3, a int\. Return a source of batches"),
        (generate, 2, "Each of 2 ranks would train the batches that `generate` returns"),
        (
            lambda: DataLoader(rows(), 4, sampler=WeightedRandomSampler([1.0] * 20, 20)),
            2,
            "with a WeightedRandomSampler, cannot be shared by 2 ranks. .*DistributedSampler",
        ),
    ],
)
def test_what_is_no_data_or_cannot_be_shared_is_refused_by_name(function, world_size, message):
    with pytest.raises(InputError, match=message):
        feed_of(function, context(world_size=world_size), {})


def test_what_cannot_resume_exactly_or_has_no_effect_is_said_by_name(caplog):
    def buffered():
        while True:
            yield np.random.rand(1)

    first = feed_of(buffered, context(), {"shuffle": True})
    assert "`shuffle`: no effect, because `" in caplog.text
    take(first, 4)
    again = feed_of(buffered, context(), {})
    again.load_state_dict(first.state_dict())
    assert isinstance(again, RepeatedRead)
    take(again, 1)
    assert "random numbers were drawn between them" in caplog.text

    short = feed_of(lambda: iter([[1]]), context(), {})
    short.load_state_dict(first.state_dict())
    with refusal(InputError):
        take(short, 1)

    shared = feed_of(lambda ctx: iter([[1], [2]]), context(world_size=2), {})
    with refusal(InputError):
        shared.load_state_dict(first.state_dict())


class Shuffles:
    """Draws the order of each pass from its own generator, and keeps its position in it."""

    def __init__(self):
        self.generator, self.taken, self.skipped = np.random.default_rng(4), 0, 0

    def __iter__(self):
        first, self.skipped = self.skipped, 0
        for place, row in enumerate(self.generator.permutation(6)):
            if place >= first:
                self.taken = (place + 1) % 6
                yield torch.tensor([row])

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.skipped = state["taken"]


@pytest.mark.parametrize("taken", [0, 4])
def test_a_loader_with_its_own_generator_continues_within_a_pass_and_between_two(taken):
    first = feed_of(Shuffles, context(), {})
    list(first)
    rest = iter(first)
    for _ in range(taken):
        next(rest)
    again = feed_of(Shuffles, context(), {})
    again.load_state_dict(first.state_dict())

    assert [batch.item() for batch in again] == [batch.item() for batch in rest]


class KeepsShard(IterableDataset):
    """Reads two shards back and forth, and the one that is open only once."""

    def __init__(self):
        self.number, self.shard, self.passes = 0, [0, 1], 0

    def __iter__(self):
        self.passes += 1
        for number in (0, 1) if self.passes % 2 else (1, 0):
            if number != self.number:
                self.number, self.shard = number, [2 * number, 2 * number + 1]
            yield from self.shard


@pytest.mark.parametrize("in_loader", [True, False])
@pytest.mark.parametrize("passes", [0, 1])
def test_a_number_that_is_restored_without_the_object_it_belongs_to_is_said(in_loader, passes, caplog):
    def source():
        return DataLoader(KeepsShard(), batch_size=None) if in_loader else KeepsShard()

    first = feed_of(source, context(), {})
    for _ in range(passes):
        list(first)
    take(first, 1)
    feed_of(source, context(), {}).load_state_dict(first.state_dict())

    named = "checkpoint has of number, passes, but the checkpoint does not hold shard" in caplog.text
    assert named == (passes > 0)  # the first pass begins as built


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"data": "no_colon"}, 'Invalid `data`. Expected "module:function"'),
        ({"data": "absent_module:f"}, "Invalid `data`. 'absent_module:f' cannot be imported"),
        ({"data": "json:dumps", "mock_batches": [1]}, "`mock_batches` and `data` are given together"),
    ],
)
def test_a_job_that_cannot_have_its_data_does_not_start(job, message, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    path = make(tmp_path, "refused")
    path.write_text(json.dumps({**json.loads(path.read_text()), **job}))

    assert main(["run", str(path)]) == 2
    assert message in caplog.text
    assert main(["doctor", str(path)]) == 2
    assert message in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loader", "random_stream"])
def test_two_ranks_train_other_rows_and_resume_like_a_run_without_a_break(kind, tmp_path):
    """Processes of their own: the first one starts the second."""
    data, dataset = KINDS[kind]
    lightning = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    job = make(tmp_path, "ranks", data=data, lightning=lightning, max_steps=5)
    if dataset is not None:
        job.write_text(json.dumps({**json.loads(job.read_text()), "dataset": dataset}))

    def run(folder, *arguments):
        folder.mkdir(exist_ok=True)
        settings = [word for each in arguments for word in ("--set", each)]
        done = run_forked("run", job, *settings, folder=folder, environ=environ_with_tests())
        assert done.returncode == 0, done.stderr
        return [(folder / f"rank{rank}.txt").read_text().splitlines() for rank in range(2)]

    whole = run(tmp_path / "whole", "run_id=whole")
    run(tmp_path / "cut", "run_id=cut", "max_steps=2")
    assert run(tmp_path / "cut", "run_id=cut", "resume_from_latest=true") == whole
    assert not any(mine == theirs for mine, theirs in zip(*whole, strict=True))
