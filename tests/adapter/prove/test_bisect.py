"""``genlight bisect``: planted differences of two runs are found by step and kind, or the reason is said."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import sys
import time

import numpy as np
import pytest
import torch

from genlight.adapter.cli import main
from genlight.adapter.contract.exceptions import UsageError
from genlight.adapter.contract.types import StepResult
from genlight.adapter.prove import bisect as bisect_module
from genlight.adapter.prove.bisect import bisect
from genlight.callbacks.witness.entry import file_of_rank
from support.jobs import run, write_job
from support.messages import refusal
from support.trainer_class import Trains
from support.witness_files import change_witness

pytestmark = pytest.mark.promise(name="resume")

STEPS, EVERY = 12, 5


def flip(tensor):
    """Flip a bit of the first element, large enough that later updates do not round it away."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 14)


class Planted(Trains):
    """Has a difference in the step ``at`` of its hyperparameters, of the kind ``plant``."""

    def setup(self, ctx):
        super().setup(ctx)
        self.plant, self.at = ctx.job.hyperparams.get("plant"), ctx.job.hyperparams.get("at", 0)

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "average": torch.zeros(4), "steps": 0}

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor([[float(value) for value in row["x"]] for row in raw])

    def train_step(self, batch, state, ctx):
        state["steps"] += 1
        plant = self.plant if state["steps"] == self.at else None
        model, optimizer = state["model"], state["optimizer"]
        if plant == "dropout in evaluation":
            model.eval()
        if plant == "draw of torch":
            torch.rand(1)
        if plant == "draw of numpy":
            np.random.rand()
        if plant == "draw of python":
            random.random()
        if plant == "rate":
            optimizer.param_groups[0]["lr"] *= 1.001
        if plant == "rate for one update":
            optimizer.param_groups[0]["lr"] *= 2
        optimizer.zero_grad()
        loss = model(batch).square().mean() * (1.001 if plant == "constant" else 1)
        loss.backward()
        if plant == "gradient":
            flip(model[0].weight.grad)
        if plant != "no update":
            optimizer.step()
        if plant == "rate for one update":
            optimizer.param_groups[0]["lr"] /= 2
        if plant == "weight":
            flip(model[2].weight)
        if plant == "momentum":
            flip(optimizer.state[model[0].bias]["momentum_buffer"])
        if plant == "decay":
            with torch.no_grad():
                model[0].weight.mul_(0.999)
        state["average"] += model[0].bias.detach()
        if plant == "average":
            flip(state["average"])
        model.train()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state):
        plain = {name: state[name] for name in ("average", "steps")}
        return {**plain, **{name: state[name].state_dict() for name in ("model", "optimizer")}}

    def load_state_dict(self, state, payload, ctx):
        state["steps"] = payload["steps"]
        state["average"].copy_(payload["average"])
        for name in ("model", "optimizer"):
            state[name].load_state_dict(payload[name])


KIND_OF = {
    "dropout in evaluation": "random numbers",
    "draw of torch": "random numbers",
    "draw of numpy": "random numbers",
    "draw of python": "random numbers",
    "rate": "setting",
    "rate for one update": "weight",
    "constant": "metric",
    "gradient": "optimizer state",
    "no update": "optimizer state",
    "weight": "weight",
    "momentum": "optimizer state",
    "decay": "weight",
    "average": "value",
    "rows": "rows",
}


class Wider(Planted):
    """Begins with other weights, from as many random numbers."""

    def configure(self, ctx):
        state = super().configure(ctx)
        flip(state["model"][0].weight)
        return state


class Timed(Planted):
    """Holds the time of its start, which no checkpoint has."""

    def configure(self, ctx):
        return {**super().configure(ctx), "began": time.time()}


class Draws(Planted):
    """Its loss depends on numbers that nothing repeats."""

    def train_step(self, batch, state, ctx):
        batch = batch + random.SystemRandom().random()
        return super().train_step(batch, state, ctx)


class Struck(Planted):
    """Has a bit flipped by its machine after the step `STRUCK_AT`, and never again."""

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        if state["steps"] == STRUCK_AT:
            with torch.no_grad():
                state["model"][2].weight[0, 0] += 1.0
        return result


STRUCK_AT = None


def batches(changed=None):
    values = [[{"x": [step / 9 + row / 8, row / 8]} for row in range(4)] for step in range(STEPS)]
    if changed is not None:
        values[changed - 1][0] = {"x": [1.5, -0.5]}
    return values


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Run a job of this module's classes, with a checkpoint after every fifth step; return the folder of the run."""
    folder, numbers = tmp_path_factory.mktemp("runs"), itertools.count()

    def train(name="Planted", plant=None, at=0, **fields):
        if plant == "rows":
            fields["mock_batches"] = batches(changed=at)
        elif plant is not None:
            fields["hyperparams"] = {"plant": plant, "at": at}
        defaults = {"max_steps": STEPS, "checkpoint_every": EVERY, "mock_batches": batches(), "seed": 1}
        place = folder / f"out-{next(numbers)}"
        job = write_job(folder, **{"trainer": f"{__name__}:{name}", "metric_every": 1, **defaults, **fields})
        assert run(job, "checkpoints.keep_last=0", f"artifacts_dir={place}") == 0
        return place

    return train


@pytest.fixture(scope="module")
def usual(train):
    return train()


def assert_found(usual, other, scratch, plant, at):
    result = bisect([usual, other], scratch)

    assert (result.step, result.kind, result.is_exact) == (at, KIND_OF[plant], True), result
    assert result.replays <= 4
    assert len(result.values) == 2
    assert result.values[0] != result.values[1] or result.distance
    shutil.rmtree(scratch, ignore_errors=True)
    return result


@pytest.mark.parametrize(
    ("plant", "at"),
    [("weight", 8), ("rate", 3), ("rows", 12), ("dropout in evaluation", 6), ("constant", 5), ("average", 11)],
)
def test_a_planted_difference_is_found_by_step_and_kind(train, usual, tmp_path, plant, at):
    result = assert_found(usual, train(plant=plant, at=at), tmp_path / "scratch", plant, at)

    names = [change.name for change in result.facts]
    assert names == (["mock_batches"] if plant == "rows" else ["hyperparams.plant", "hyperparams.at"])
    if newest := (at - 1) // EVERY * EVERY:
        assert f"the checkpoints of step {newest} are equal" in result.notes


@pytest.mark.slow
@pytest.mark.parametrize("plant", KIND_OF)
def test_differences_of_each_kind_are_found_in_any_step(train, usual, tmp_path, plant):
    at = random.Random(plant).randint(1, STEPS)
    assert_found(usual, train(plant=plant, at=at), tmp_path / "scratch", plant, at)


def test_equal_runs_are_equal_and_nothing_is_trained(train, usual, tmp_path, capfd):
    other = train()

    assert main(["bisect", str(usual), str(other), "--json"]) == 0

    result = json.loads(capfd.readouterr().out)
    assert (result["equal"], result["step"], result["replays"], result["facts"]) == (True, None, 0, [])
    assert main(["bisect", str(usual), str(other)]) == 0
    assert "no difference" in capfd.readouterr().out


def test_the_command_names_the_value_and_what_differs_before(train, usual, capfd):
    other = train(plant="weight", at=8)
    before = sorted((path, path.stat().st_mtime_ns) for path in other.rglob("*"))

    assert main(["bisect", str(usual), str(other)]) == 1

    output = capfd.readouterr().out
    assert 'the first difference is in step 8, rank 0: weight, state["model"].2.weight (' in output
    assert "hyperparams.plant" in output
    assert before == sorted((path, path.stat().st_mtime_ns) for path in other.rglob("*"))


def test_another_seed_differs_in_the_first_step(train, usual, tmp_path):
    result = bisect([usual, train(seed=2)], tmp_path)

    assert (result.step, result.kind) == (1, "random numbers")
    assert [change.name for change in result.facts] == ["seed"]


def test_another_class_with_the_same_steps_is_equal(train, usual, tmp_path):
    result = bisect([usual, train("Timed")], tmp_path)

    assert result.step is None, result  # the time is in no checkpoint and changes no step
    assert [change.name for change in result.facts] == ["trainer"]


def test_a_run_that_ended_earlier_is_compared_up_to_its_end(train, usual, tmp_path):
    result = bisect([usual, train(max_steps=7)], tmp_path)

    assert result.step is None, result
    assert "RUN_A 12 and RUN_B 7 steps: those up to 7 are compared" in result.notes


def test_other_weights_differ_before_the_first_step(train, usual, tmp_path):
    result = bisect([usual, train("Wider")], tmp_path)

    assert (result.step, result.kind) == (0, "weight"), result
    assert "configure" in result.cause


@pytest.mark.parametrize("at", [8, 9])
def test_many_steps_are_narrowed_in_rounds(at, train, usual, tmp_path, monkeypatch):
    monkeypatch.setattr(bisect_module, "MOST_DIGESTS", 2)

    result = bisect([usual, train(plant="momentum", at=at)], tmp_path)

    assert (result.step, result.kind) == (at, "optimizer state")
    # Two replays for each round, two for the step that is found, and two that show that it repeats.
    assert result.replays <= 2 * math.ceil(math.log2(EVERY)) + 4


def test_a_value_that_no_replay_repeats_is_no_difference(train, tmp_path):
    result = bisect([train("Timed"), train("Timed", plant="weight", at=9)], tmp_path)

    assert (result.step, result.kind, result.name) == (9, "weight", 'state["model"].2.weight')
    assert any('state["began"]' in note for note in result.notes)


def test_code_that_does_not_repeat_is_named(train, tmp_path):
    result = bisect([train("Draws"), train("Draws")], tmp_path)

    assert (result.after, result.step, result.kind) == (0, 1, "loss")
    assert "Two replays of RUN_A differ as well" in result.cause


@pytest.mark.parametrize(("at", "step", "kind"), [(7, 8, "loss"), (10, 10, "checkpoint")])
def test_a_step_that_no_replay_repeats_points_at_the_machine(train, tmp_path, monkeypatch, at, step, kind):
    usual = train("Struck")
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.STRUCK_AT", at)
        other = train("Struck")

    result = bisect([usual, other], tmp_path)

    assert (result.after, result.step, result.kind) == (5, step, kind), result
    assert f"Step {step} of RUN_B, replayed twice, has the same bits both times" in result.cause
    assert "RUN_A" not in result.cause
    if kind == "checkpoint":
        assert "2.weight" in result.name


def test_a_class_that_was_changed_since_is_named(train, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    runs = []
    for factor in (1, 20):  # of another size, since Python keeps the bytecode of a file that is as old and as long
        (tmp_path / "edited.py").write_text(EDITED.replace("FACTOR", str(factor)))
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        runs.append(train(trainer="edited:Edited"))

    result = bisect(runs, tmp_path / "scratch")

    assert (result.after, result.step, result.kind) == (0, 1, "loss")
    assert "The file of the class has changed since RUN_A trained" in result.cause
    assert "RUN_B" not in result.cause
    assert [change.name for change in result.facts] == ["source of the class"]


EDITED = """
import torch
from support.trainer_class import Trains

class Edited(Trains):
    def prepare_batch(self, raw, state, ctx):
        return torch.tensor([row["x"] for row in raw])

    def loss(self, batch, state):
        return super().loss(batch, state) * FACTOR
"""


def remove_witness(folder):
    shutil.rmtree(folder / "checkpoints" / ".witness")


def tear_witness(folder):
    path = file_of_rank(folder / "checkpoints", 0)
    path.write_bytes(path.read_bytes()[:-400])


def damage_witness(folder):
    file_of_rank(folder / "checkpoints", 0).write_bytes(b"nothing\n")


def remove_job(folder):
    (folder / "job.json").unlink()


def break_checkpoint(folder):
    data = next((folder / "checkpoints" / "step-00000005").rglob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("damage", "words", "interval"),
    [
        (remove_witness, "RUN_B kept no witness", (7, 8)),
        (damage_witness, "it is of another version, or no witness", (7, 8)),
        (tear_witness, "its end is torn", (7, 8)),
        (lambda folder: change_witness(folder, ranks=2), "1 and 2 ranks", (7, 8)),
        (lambda folder: change_witness(folder, device="cuda"), "losses and learning rates are not compared", (7, 8)),
        (remove_job, "no step is trained again", (5, 9)),
        (break_checkpoint, "the checkpoints of step 5 are not compared", (7, 8)),
    ],
    ids=["no witness", "damaged", "torn", "ranks", "device", "no job", "broken checkpoint"],
)
def test_what_cannot_be_compared_is_said(train, usual, tmp_path, damage, words, interval):
    other = train(plant="weight", at=8)
    damage(other)

    result = bisect([usual, other], tmp_path)

    assert any(words in note for note in result.notes), result.notes
    assert (result.after, result.step) == interval


@pytest.mark.parametrize(
    ("plant", "device", "step"), [("constant", "cuda", None), ("rows", "cuda", 8), ("constant", "cpu", 8)]
)
def test_losses_of_other_devices_are_not_compared_but_their_rows_are(train, usual, tmp_path, plant, device, step):
    other = train(plant=plant, at=8)
    change_witness(other, device=device)
    for record in (other / "checkpoints").glob("*.json"):
        record.unlink()

    assert bisect([usual, other], tmp_path).step == step


def test_runs_with_nothing_in_common_are_refused(train, usual, tmp_path):
    other = train(plant="weight", at=8)
    remove_witness(other)
    for record in (other / "checkpoints").glob("*.json"):
        record.unlink()

    with refusal(UsageError):
        bisect([usual, other], tmp_path)
    assert main(["bisect", str(usual), str(other)]) == 2
