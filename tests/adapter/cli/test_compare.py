"""``genlight compare``: the same class in a plain loop and under genlight."""

from __future__ import annotations

import json

import pytest
import torch

from genlight.adapter.cli import main
from support import compared
from support.jobs import write_job

ROLLOUTS = ["--set", "mock_batches=null"]
TWO_RANKS = ["--set", "lightning.devices=2", "--set", "lightning.strategy=ddp"]


@pytest.fixture
def compare(tmp_path, capsys, monkeypatch):
    """Compare a class of `support.compared`; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments, max_steps=20):
        fields = {"mock_batches": compared.batches(), "max_steps": max_steps, "checkpoint_every": 1}
        write_job(tmp_path, trainer=f"support.compared:{name}", **fields)
        code = main(["compare", "job.json", "--steps", "3", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def first(out):
    return json.loads(out)["first_difference"]


def test_a_class_without_a_seed_is_bit_equal_and_nothing_is_left_behind(compare, tmp_path):
    before = torch.get_rng_state()
    code, out, _ = compare("Plain", "--rtol", "0")

    assert code == 0, out
    assert "equal: no relative difference beyond 0" in out
    assert [line.split()[:5] for line in out.splitlines()[2:6]] == [
        ["0", "-", "equal", "-", "equal"],
        ["1", "equal", "equal", "equal", "equal"],
        ["2", "equal", "equal", "equal", "equal"],
        ["3", "equal", "equal", "equal", "equal"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
    assert torch.equal(torch.get_rng_state(), before)


def test_an_instance_is_copied(compare):
    assert compare("INSTANCE")[0] == 0


@pytest.mark.parametrize("name", ["Collects", "CollectsLazily"])
def test_rollouts_and_their_update_epochs_match_a_plain_loop(name, compare):
    code, out, _ = compare(name, *ROLLOUTS, "--steps", "12", "--rtol", "0")

    assert code == 0, out
    assert len([line for line in out.splitlines() if line.endswith("equal")]) == 13


def test_half_precision_may_differ_by_its_rounding_and_no_more(compare):
    assert compare("Plain", "--set", "lightning.precision=bf16-mixed")[0] == 0

    code, out, _ = compare("NeverUpdates", "--set", "lightning.precision=bf16-mixed", "--rtol", "0")
    assert code == 0, out

    code, out, _ = compare("Sums", "--set", "lightning.precision=bf16-mixed", "--rtol", "1e-9", "--json")
    assert code == 1
    assert first(out)["kind"] == "metric"


@pytest.mark.parametrize(
    ("name", "step", "kind", "value", "cause"),
    [
        ("Remembers", 1, "metric", "train/loss", "random numbers that a callback draws too"),
        ("BuildsAnother", 0, "weight", 'state["model"].', "builds something else"),
        ("AnotherOptimizer", 0, "weight", 'state["extra"].', "builds something else"),
    ],
)
def test_the_first_difference_is_reported_with_step_name_sizes_and_cause(name, step, kind, value, cause, compare):
    code, out, _ = compare(name, "--json")

    told = first(out)
    assert code == 1
    assert (told["step"], told["kind"]) == (step, kind)
    assert told["name"].startswith(value)
    assert cause in told["cause"]
    assert told["plain"] != told["hosted"]

    _, out, _ = compare(name)
    assert [line.endswith("differs") for line in out.splitlines()[2:6]] == [number >= step for number in range(4)]
    assert f"the first difference is after step {step}: {kind} " in out


def test_a_shorter_job_is_reported(compare):
    code, out, _ = compare("Plain", "--steps", "9", max_steps=2)
    assert (code, "the job has only 2 of the 9 requested steps" in out) == (0, True)
    code, out, _ = compare("Plain", "--steps", "9")
    assert (code, f"the job has only {compared.COUNT} of" in out) == (0, True)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("Nowhere", [], "has no 'Nowhere'"),
        ("Plain", TWO_RANKS, "has 2 ranks, but both loops must run in one process: --set lightning.devices=1"),
        ("CollectsNothing", ROLLOUTS, "the rollout after step 0 returned no batches"),
        ("LOCKED", [], "is an instance of HasALock and cannot be copied"),
        ("Plain", ["--set", "mock_batches=null"], "The job names no data"),
        ("Plain", ["--set", "lightning.precision=17"], "The `lightning` block of the job cannot be used"),
        ("Plain", ["--against", "support.compared:nowhere"], "has no attribute 'nowhere'"),
        ("Plain", ["--against", "train"], "Expected 'module:function', but received 'train'"),
        ("Plain", ["--against", "support.compared:wants_more"], "missing a required argument: 'config_file'"),
        ("Plain", ["--against", "support.compared:never_steps"], "returned without calling optimizer.step"),
        ("NeverUpdates", ["--against", "support.compared:old_loop"], "The class never calls optimizer.step"),
    ],
)
def test_an_impossible_comparison_is_refused_with_the_reason(name, arguments, said, compare):
    code, out, err = compare(name, *arguments)

    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_class_or_function_that_raises_is_named_without_a_traceback(compare):
    for arguments, said in (
        (["Raises"], "ArithmeticError: mine (compared.py:"),
        (["Plain", "--against", "support.compared:fails"], "LookupError: no such file of mine (compared.py:"),
    ):
        code, out, err = compare(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"genlight compare: training failed: {said}")


@pytest.mark.parametrize("function", ["old_loop", "with_a_closure"])
def test_an_old_function_is_compared_at_each_update(function, compare):
    code, out, _ = compare("Plain", "--against", f"support.compared:{function}", "--rtol", "0")

    assert code == 0, out
    assert "weight before" in out
    assert len([line for line in out.splitlines() if line.endswith("equal")]) == 3


@pytest.mark.parametrize(
    ("function", "kind", "value", "cause"),
    [
        ("another_rate", "setting", "optimizer 0.param_groups[0].lr", "a different setting"),
        ("four_times", "gradient", 'state["model"].', "a sum instead of a mean"),
        ("another_start", "weight before", 'state["model"].', "Seed both in the same way"),
        ("other_rows", "gradient", 'state["model"].', "different rows, order of rows"),
        ("other_model", "weight before", 'state["model"].0.weight', "build the same model"),
    ],
)
def test_differences_of_an_old_function_are_reported(function, kind, value, cause, compare):
    code, out, _ = compare("Plain", "--against", f"support.compared:{function}", "--json")

    told = first(out)
    assert code == 1
    assert (told["step"], told["kind"]) == (1, kind)
    assert told["name"].startswith(value)
    assert cause in told["cause"]


def test_a_function_that_ends_early_is_compared_up_to_its_end(compare):
    code, out, _ = compare("Plain", "--against", "support.compared:short")

    assert code == 0, out
    assert "ended after 1 of 3 updates" in out
