"""``genlight replay``: the same bits, or the step from which on they differ; the module and the rows of a nan."""

from __future__ import annotations

import json
import math
import os
import pdb  # noqa: T100  # its functions are replaced
import random
import shutil
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from genlight.adapter.check.batches import count_rows, take_rows
from genlight.adapter.cli import main
from genlight.adapter.contract.exceptions import UsageError
from genlight.adapter.discovery.discover import discover
from genlight.adapter.prove import repetition
from genlight.adapter.prove.replay import RowSearch, SavedState, StepView, find_rows, replay
from genlight.callbacks.witness.witness import facts_of_attempt
from support import SUPPORT
from support.jobs import run, write_job
from support.messages import refusal
from support.trainer_class import Trains
from support.witness_files import change_witness

pytestmark = pytest.mark.promise(name="resume")


class Sound(Trains):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor([[float(value) for value in row["x"]] for row in raw])


class Consumes(Sound):
    """Changes its raw batches."""

    def prepare_batch(self, raw, state, ctx):
        rows = super().prepare_batch(raw, state, ctx)
        raw.clear()
        return rows


class OfArrow(Sound):
    def prepare_batch(self, raw, state, ctx):
        return torch.tensor(raw["x"].to_pylist())


class Draws(pl.Callback):
    """Draws random numbers after the step."""

    def on_train_batch_end(self, *_):
        torch.rand(1)


class Forgets(Sound):
    """Has a counter that no checkpoint holds; a replay starts it at zero."""

    steps = 0

    def loss(self, batch, state):
        self.steps += 1
        return super().loss(batch, state) * (1 + self.steps)


class Raises(Sound):
    def train_step(self, batch, state, ctx):
        if float(batch[0, 0]) == 11.0:
            raise ZeroDivisionError("no batch is good enough")
        return super().train_step(batch, state, ctx)


def batches(nan=None, steps=16, rows=8):
    values = [[{"x": [float(step), row / 8], "id": 100 * step + row} for row in range(rows)] for step in range(steps)]
    if nan is not None:
        step, row = nan
        values[step - 1][row]["x"][1] = "nan"
    return values


@pytest.fixture
def train(tmp_path):
    """Run a job of this module's classes with a checkpoint after every fifth step; return the folder of the run."""

    def train(name="Sound", code=0, **fields):
        defaults = {"max_steps": 12, "checkpoint_every": 5, "mock_batches": batches(), "seed": 1}
        job = write_job(tmp_path, trainer=f"{__name__}:{name}", metric_every=1, **{**defaults, **fields})
        assert run(job, "checkpoints.keep_last=0") == code
        return tmp_path / "out"

    return train


def content(folder: Path):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_steps_have_the_same_bits_and_the_run_is_not_touched(train, tmp_path, capfd):
    folder = train()
    before = content(tmp_path)

    assert main(["replay", str(folder), "--step", "8", "--json"]) == 0

    result = json.loads(capfd.readouterr().out)
    assert content(tmp_path) == before
    assert (result["is_same"], result["witness"]) == (True, "steps 6 to 8 have the same bits as in the run")
    assert (result["record"], result["error"], result["search"]) == ("step-00000005", "", None)
    assert (
        result["rows"] == "list of 8: dict: x list of 2, id int, dict: x list of 2, id int, dict: x list of 2, id int"
    )
    modules = {each["name"]: each for each in result["modules"]}
    assert list(modules) == [*(f'state["model"].{layer}' for layer in range(3)), 'state["model"]']
    assert modules['state["model"].0'].keys() == modules['state["model"].2'].keys() == {"name", "output", "gradient"}
    assert modules['state["model"]']["output"] == modules['state["model"].2']["output"] > 0
    log = [json.loads(line) for line in (folder / "metrics" / "events.jsonl").read_text().splitlines()]
    of_run = {event["name"]: event["value"] for event in log if event["event"] == "metric" and event["step"] == 8}
    assert result["metrics"]["train/loss"] == of_run["train/loss"]

    assert main(["replay", str(folder), "--step", "8"]) == 0
    assert "ok  steps 6 to 8 have the same bits" in capfd.readouterr().out


def test_a_forgotten_counter_is_not_the_same_from_its_first_step(train, tmp_path, capfd):
    folder = train("Forgets")

    assert main(["replay", str(folder), "--step", "8", "--json"]) == 1

    result = json.loads(capfd.readouterr().out)
    assert result["is_same"] is False
    assert result["witness"].startswith("step 6 is not the same as in the run: the loss is ")
    assert "Before it" not in result["witness"]


def test_neither_losses_nor_checkpoints_of_another_device_are_compared(train, tmp_path):
    folder = train("Forgets")
    change_witness(folder, device="cuda")

    result = replay(folder, 10, tmp_path / "scratch")

    assert result.is_same
    assert "cuda and cpu round differently" in result.witness


def test_numbers_that_a_callback_draws_after_a_step_are_drawn_again(train, tmp_path):
    callbacks = [{"class_path": f"{__name__}.Draws"}]
    folder = train(lightning={"accelerator": "cpu", "callbacks": callbacks})

    result = replay(folder, 8, tmp_path / "scratch")

    assert result.witness == "steps 6 to 8 have the same bits as in the run"


def test_the_cause_of_a_nan_is_named_by_module_and_row(train, tmp_path):
    folder = train("Consumes", mock_batches=batches(nan=(8, 5)))

    result = replay(folder, 8, tmp_path / "scratch")

    assert result.is_same is True
    assert result.first_nonfinite == 'output of state["model"].0'
    assert (result.search.groups, result.ids, result.search.is_confirmed) == (((5, 5),), [705], True)
    assert result.search.trials <= 2 * math.log2(8) + 4
    assert result.as_json()["metrics"]["train/loss"] == "NaN"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_planted_rows_that_are_not_finite_are_named(train, tmp_path, number):
    """Each kind of value in any row of any step, in lists of rows and in Arrow batches of a file."""
    chosen = random.Random(number)
    step, row, count = chosen.randint(1, 12), chosen.randrange(8), chosen.choice([1, 3, 8])
    bad = chosen.choice(["nan", "inf", "-inf", "1e25"])  # the square of the last one overflows
    rows = batches(rows=count, steps=12)
    for each in (each for batch in rows for each in batch):
        each["x"][0] /= 16  # so that the training does not diverge
    rows[step - 1][row % count]["x"][1] = bad
    if number % 2:
        flat = [{"id": each["id"], "x": [float(value) for value in each["x"]]} for batch in rows for each in batch]
        pq.write_table(pa.Table.from_pylist(flat), tmp_path / "rows.parquet")
        fields = {"dataset": {"parquet_paths": ["rows.parquet"], "batch_size": count}, "mock_batches": ...}
        folder = train("OfArrow", **fields)
    else:
        folder = train("Consumes", mock_batches=rows)

    result = replay(folder, step, tmp_path / "scratch")

    assert result.is_same is not False, result.witness
    assert (result.search.groups, result.ids) == (((row % count,) * 2,), [100 * (step - 1) + row % count])
    assert result.first_nonfinite.startswith("output of" if bad != "1e25" else ("output of", "gradient"))


def test_weights_that_were_not_finite_before_the_step_blame_no_row(train, tmp_path):
    folder = train(mock_batches=batches(nan=(7, 5)))

    result = replay(folder, 8, tmp_path / "scratch")

    assert result.first_nonfinite == 'weight before of state["model"].0.weight; weights are not finite since step 7'
    assert result.search is None


def test_an_exception_of_the_step_is_the_result(train, tmp_path, monkeypatch):
    folder = train("Raises", code=1)
    opened = []
    monkeypatch.setattr(pdb, "post_mortem", opened.append)

    result = replay(folder, 12, tmp_path / "scratch", with_debugger=False)

    assert "step 12: ZeroDivisionError: no batch is good enough (test_replay.py:" in result.error
    assert result.is_same is True
    assert opened == []
    assert main(["replay", str(folder), "--step", "12"]) == 1


def test_a_class_that_cannot_be_set_up_raises_its_error(train, tmp_path, monkeypatch):
    folder = train()
    monkeypatch.setattr(Sound, "model", lambda self: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        replay(folder, 8, tmp_path / "scratch")


def test_the_step_of_a_checkpoint_is_replayed_from_the_one_before(train, tmp_path):
    assert replay(train(), 10, tmp_path / "scratch").record == "step-00000005"


def test_another_number_of_ranks_is_not_compared(train, tmp_path, monkeypatch):
    folder = train()
    monkeypatch.setattr(repetition, "facts_of_attempt", lambda trainer: {**facts_of_attempt(trainer), "ranks": 2})

    result = replay(folder, 8, tmp_path / "scratch")

    assert (result.is_same, result.witness) == (None, "not compared: 1 and 2 ranks get other rows")


def test_the_debugger_opens_in_the_step_and_after_its_exception(train, tmp_path, monkeypatch):
    folder = train("Raises", code=1)
    calls, opened = [], []
    monkeypatch.setattr(pdb, "runcall", lambda function, *given: calls.append(function.__name__) or function(*given))
    monkeypatch.setattr(pdb, "post_mortem", opened.append)

    result = replay(folder, 12, tmp_path / "scratch", with_debugger=True)

    assert (calls, len(opened)) == (["train_step"], 1)
    assert "ZeroDivisionError" in result.error


def test_without_a_witness_nothing_is_compared(train, tmp_path):
    folder = train()
    shutil.rmtree(folder / "checkpoints" / ".witness")

    result = replay(folder, 8, tmp_path / "scratch")

    assert (result.is_same, result.witness) == (
        None,
        "not compared: the witness of the run has no entry for these steps",
    )


def test_a_step_before_the_first_checkpoint_is_replayed_from_the_beginning(train, tmp_path):
    result = replay(train(max_steps=4), 3, tmp_path / "scratch")

    assert (result.record, result.witness) == ("", "steps 1 to 3 have the same bits as in the run")


FSDP2 = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 1, "tensor_parallel_size": 1},
}

RANKED = """
import torch
from support.trainer_class import Trains
from support.witness_files import change_witness

class Ranked(Trains):
    def prepare_batch(self, raw, state, ctx):
        return torch.tensor([[float(value) for value in row] for row in raw])
"""


@pytest.mark.slow
@pytest.mark.promise(name="ranks")
def test_a_step_of_two_ranks_is_replayed_on_two(tmp_path, monkeypatch):
    (tmp_path / "ranked.py").write_text(RANKED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]))
    batches = [[[float(step), row / 8] for row in range(4)] for step in range(16)]
    batches[15][0][0] = "nan"  # in the last step, on rank 1
    lightning = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    fields = {"max_steps": 8, "checkpoint_every": 3, "mock_batches": batches, "seed": 1, "lightning": lightning}
    job = write_job(tmp_path, trainer="ranked:Ranked", metric_every=1, **fields)

    def start(*words):
        command = [sys.executable, "-m", "genlight", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    ran = start("run", str(job), "--set", "artifacts_dir=out")
    assert ran.returncode == 0, ran.stderr
    replayed = start("replay", "out", "--step", "8", "--json")
    assert replayed.returncode == 0, replayed.stderr
    result = json.loads(replayed.stdout)
    assert result["witness"] == "steps 7 to 8 have the same bits as in the run", result
    assert result["record"] == "step-00000006"
    assert result["first_nonfinite"].startswith("rank 0: gradient of ")
    assert 'rank 1: output of state["model"]' in result["first_nonfinite"]
    assert "--set lightning.devices=1" in result["search"]["problem"]


@pytest.mark.parametrize(
    ("step", "overrides", "fields"),
    [
        (99, (), {}),
        (3, (), {"seed": ...}),
        (8, (f"lightning.strategy={json.dumps(FSDP2)}",), {}),
    ],
    ids=["beyond the run", "no seed and no checkpoint", "sharded"],
)
def test_what_cannot_be_replayed_is_refused(train, tmp_path, step, overrides, fields):
    folder = train(**fields)

    with refusal(UsageError):
        replay(folder, step, tmp_path / "scratch", overrides=overrides)


def test_a_run_without_its_job_is_refused(train, tmp_path, capfd):
    folder = train()
    (folder / "job.json").unlink()

    assert main(["replay", str(folder), "--step", "8"]) == 2
    assert "Only a run of `genlight run`" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["replay", str(tmp_path / "nothing"), "--step", "8"])


@pytest.mark.parametrize("count", [1, 7, 64])
def test_each_single_row_is_found_within_the_budget(count):
    for row in range(count):
        found = find_rows(count, lambda rows, row=row: row in rows)

        assert found.groups == ((row, row),)
        assert found.trials <= 2 * math.ceil(math.log2(count)) + 4
        assert found.is_confirmed == (count > 1)


def test_rows_that_cannot_be_told_apart_are_a_group():
    assert find_rows(8, lambda rows: {2, 6} <= set(rows)).groups == ((0, 7),)
    assert find_rows(8, lambda rows: not {1, 6}.isdisjoint(rows)).groups == ((1, 1), (6, 7))
    assert not find_rows(8, lambda rows: 2 in rows or len(rows) == 7).is_confirmed
    assert find_rows(8, lambda rows: False) == RowSearch(trials=1, problem="the repeated step does not fail")


@pytest.mark.parametrize("clears", [True, False])
def test_a_view_reads_gradients_at_the_update_and_leaves_no_hook(clears):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    view = StepView(discover({"model": model, "optimizer": optimizer}, object()))
    with view.watching():
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
    count = len(view.values)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    assert view.by_module()['state["model"]']["gradient"] == pytest.approx(math.sqrt(26))
    assert len(view.values) == count


def test_each_trial_begins_with_the_same_random_states():
    saved = SavedState(discover({}, object()))
    expected = torch.rand(2), random.random()

    saved.restore()

    assert (torch.rand(2).tolist(), random.random()) == (expected[0].tolist(), expected[1])


def test_a_view_tells_backward_from_forward_and_overflow_from_infinity():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Identity())
    view = StepView(discover({"model": model}, object()))
    with view.watching():
        (model(torch.full((4, 1), 1e30)) * math.inf).sum().backward()

    assert view.first_nonfinite.kind == "gradient at output"
    assert math.isinf(next(value.norm for value in view.values if value.kind == "output"))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (pa.record_batch({"id": [1, 2, 3]}), pa.record_batch({"id": [1, 3]})),
        (pa.table({"id": [1, 2, 3]}), pa.table({"id": [1, 3]})),
        ([{"id": 1}, {"id": 2}, {"id": 3}], [{"id": 1}, {"id": 3}]),
    ],
)
def test_rows_of_batches_are_taken(batch, expected):
    assert (count_rows(batch), take_rows(batch, [0, 2])) == (3, expected)


@pytest.mark.parametrize("make", [list, lambda pair: dict(zip("xy", pair, strict=True))], ids=["list", "mapping"])
def test_rows_of_columns_of_tensors_are_taken(make):
    batch = make([torch.arange(6).reshape(3, 2), torch.arange(3)])
    taken = take_rows(batch, [0, 2])

    assert count_rows(batch) == 3
    assert [column.tolist() for column in (taken.values() if isinstance(taken, dict) else taken)] == [
        [[0, 1], [4, 5]],
        [0, 2],
    ]
