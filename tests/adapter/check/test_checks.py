"""``genlight check`` reports the faults of a trainer class and their remedies."""

from __future__ import annotations

import importlib
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from genlight.adapter.check.batches import halves
from genlight.adapter.check.checks import CHECKS, run_checks
from genlight.adapter.check.snapshot import snapshot
from genlight.adapter.check.subject import Subject
from genlight.adapter.cli import main
from genlight.adapter.cli.command_line import command_parser
from support import SUPPORT

pytestmark = pytest.mark.promise(name="equal")

HERE = str(SUPPORT)


def batches(count: int = 4, rows: int = 4) -> tuple:
    rng = np.random.default_rng(0)
    return tuple(
        {name: rng.normal(size=(rows, size)).tolist() for name, size in (("x", 2), ("y", 1))} for _ in range(count)
    )


def check(name: str, rows: tuple = (), *, steps: int = 2, **more) -> dict:
    """Return the findings about a class of `check_zoo`, or of the zoo, by check."""
    subject = Subject(name if "." in name else f"check_zoo:{name}", rows, steps=steps, search_path=(HERE,), **more)
    return {finding.check: finding for finding in run_checks(subject)}


def zoo_class(name: str) -> tuple[str, tuple]:
    """Return the import path of a class of the zoo, and four of its batches."""
    theme, _, attribute = name.partition(":")
    cls = getattr(importlib.import_module(f"zoo.{theme}"), attribute)
    return f"zoo.{name}", tuple(cls.rows(step) for step in range(4))


def findings_of(name: str, monkeypatch, *, ranks: bool = False) -> dict:
    """Return the findings by check; without `ranks`, start no processes."""
    if not ranks:
        monkeypatch.setitem(CHECKS, "ranks", lambda _: iter(()))
    return check(name, batches())


def test_class_that_collects_its_own_batches_needs_no_data():
    """The rollouts after a resume must be equal; ranks and precisions collect different ones."""
    sound = check("Collects", steps=3)
    assert {name: finding.level for name, finding in sound.items()} == {
        **dict.fromkeys(
            ("hooks", "discovered", "devices", "metrics", "updates", "state", "state round trip", "reproducible"),
            "pass",
        ),
        "resume": "pass",
        "ranks": "skip",
    }
    assert "bit-equal, with 1 rollouts after the resume" in sound["resume"].detail
    within = check("Collects", steps=1)["resume"]
    assert within.level == "warn"
    assert "all steps train on one rollout" in within.detail
    forgetful = check("ForgetsItsEnvironment", steps=3)["resume"]
    assert forgetful.level == "fail"
    assert "trainer.position was not restored" in forgetful.detail
    assert "from rollout_state if it is an environment's" in forgetful.remedy


def test_a_sound_class_passes_every_check(monkeypatch):
    found = findings_of("Sound", monkeypatch)

    names = (
        "hooks",
        "discovered",
        "devices",
        "metrics",
        "updates",
        "state",
        "state round trip",
        "reproducible",
        "resume",
    )
    assert {name: f.level for name, f in found.items()} == dict.fromkeys((*names, "bf16-mixed"), "pass")
    assert 'state["model"] (17 parameters, trained)' in found["discovered"].detail
    assert 'state["ema"] (17 parameters, not trained)' in found["discovered"].detail
    assert "bit-equal" in found["resume"].detail


@pytest.mark.parametrize(
    "name",
    [
        "WithoutTorch",
        "Accumulates",
        "GroupsOfParameters",
        "SparseGraph",
        "OddTypes",
        "Lazy",
        "ReadsAClock",
        "WrappedOptimizer",
        "ClearsInPlace",
        "Evaluates",
        "ReadsItsLosses",
    ],
)
def test_a_class_passes_whatever_its_state_is_made_of(name, monkeypatch):
    found = findings_of(name, monkeypatch)

    assert [finding for finding in found.values() if finding.level != "pass"] == []


FAULTS = (
    ("WrongSignature", "hooks", "fail", "load_state_dict(state, payload) cannot be called as"),
    ("Nowhere", "hooks", "fail", "Nowhere"),
    ("Raising", "steps", "fail", "ArithmeticError: mine (check_zoo.py:"),
    ("HardCoded", "devices", "fail", "check_zoo.py:"),
    ("Unstorable", "state", "fail", 'state["items"][1]: generator cannot be stored'),
    ("ForgetsALongHistory", "state round trip", "fail", 'payload["history"][19999] differs'),
    ("Forgetful", "resume", "fail", 'state["count"] was not restored'),
    ("ForgetsAverage", "resume", "fail", 'bit-equal, but state["shadow"]["0.weight"] differs at the end'),
    ("ForgetsBest", "resume", "warn", "not restored (1 values) and is equal at the end because a later step wrote it"),
    ("HiddenState", "resume", "fail", "although everything in state and trainer was restored"),
    ("Unseeded", "reproducible", "warn", "two runs from the same seed end with a different"),
    ("Overflowing", "bf16-mixed", "fail", "is not finite"),
    ("ForgottenHead", "discovered", "warn", 'state["model"].2.weight, state["model"].2.bias collect gradients'),
    ("NanMetric", "metrics", "warn", "accuracy is nan after each of 4 steps"),
    ("NoZeroGrad", "gradients", "warn", 'are still part of the next one, of state["model"].0.weight'),
    ("ClipsEachCall", "changed gradients", "warn", "before " + str(SUPPORT / "check_zoo.py")),
    ("WritesBetweenCalls", "changed gradients", "warn", "between two backward calls of one update"),
    ("HoldsACopy", "updates", "fail", 'no weight changed in 4 steps: state["optimizer"] never had a gradient'),
    ("NeverUpdates", "updates", "warn", "no weight changed in 4 steps"),
    ("StaysInEvalMode", "evaluate", "fail", 'state["model"] is in eval mode after `evaluate`'),
    ("EvaluatesAnAverage", "evaluate", "fail", 'state["model"].0.weight differs after `evaluate`'),
    ("Late", "steps", "fail", 'state["late"] appeared after `configure`'),
    ("ReturnsNothing", "steps", "fail", "train_step returned a NoneType without `metrics`"),
    ("NanLoss", "metrics", "fail", "train/loss is nan after each of 4 steps"),
    ("RebuildsItsOptimizer", "resume", "fail", "Training replaced objects that `configure` built"),
)


@pytest.mark.parametrize(("name", "check", "level", "expected"), FAULTS)
def test_fault_is_reported_with_a_remedy(monkeypatch, name, check, level, expected):
    finding = findings_of(name, monkeypatch)[check]

    assert finding.level == level
    assert expected in finding.detail
    assert finding.remedy or check in ("steps", "discovered") or "in `load_state_dict`" in finding.detail


@pytest.mark.parametrize("name", ["Accumulates", "ClearsBetweenCalls"])
def test_changes_of_gradients_that_bound_no_rows_are_not_reported(monkeypatch, name):
    assert "changed gradients" not in findings_of(name, monkeypatch)


def test_without_data_only_the_hooks_are_checked():
    assert [(f.check, f.level) for f in check("Sound").values()] == [("hooks", "pass"), ("steps", "skip")]


ON_RANKS = (
    ("LbfgsOptimizer", {"ranks": "pass: bit-equal to each other", "sharded": 'warn: state["optimizer"]: LBFGS needs'}),
    ("SumLoss", {"ranks": "pass: bit-equal to each other", "batch size": "warn: away from the full"}),
    ("WrappedOptimizer", {"ranks": "pass: bit-equal to each other", "sharded": "pass: agrees with DDP"}),
    ("Drifting", {"ranks": 'fail: tensors differ between ranks, the first is state["model"].0.bias'}),
    ("FailingOnOneRank", {"ranks": "fail: rank 1: ValueError: no rows on this rank"}),
    ("Hidden", {"ranks": "fail: an optimizer (Adam) that is neither in the state nor on the trainer"}),
    ("DividesByRanks", {"ranks": 'fail: away from one process, at state["optimizer"][state["model"]'}),
    (
        "CountsOverRanks",
        {"ranks": "pass: agree with one process", "batch size": "pass: train like the full", "sharded": "pass: agrees"},
    ),
    (
        "ScalesByItsFirstLoss",
        {"ranks": "pass: with one process", "rank state": 'warn: state["first"], state["mean"] differs'},
    ),
    ("WithoutTorch", {"ranks": "pass: two processes finish; there are no weights"}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), ON_RANKS)
def test_two_processes_are_compared_with_one(monkeypatch, name, expected):
    found = findings_of(name, monkeypatch, ranks=True)

    for check, outcome in expected.items():
        level, _, detail = outcome.partition(": ")
        assert found[check].level == level
        assert detail in found[check].detail


GOOD = (
    "accumulation:OverTwoSteps",
    "ema:SwappedByData",
    "gan:WganGp",
    "language:LowRankAdapter",
    "optimizers:SamTwoSteps",
    "rl:DeepQ",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_good_classes_of_the_zoo_have_no_findings(name):
    """Not under FSDP 2 either, if it supports the class; the reference lists the classes that it refuses."""
    found = check(*zoo_class(name))

    assert found.keys() >= {"resume", "ranks"}
    assert [finding for finding in found.values() if finding.level in ("warn", "fail")] == []


@pytest.mark.slow
def test_unused_mean_loss_of_a_rank_is_no_finding(monkeypatch):
    assert "rank state" not in findings_of("KeepsAMeanLoss", monkeypatch, ranks=True)


@pytest.mark.parametrize(
    ("name", "unread"), [("ReadsItsRate", "the class did not read layers"), ("ReadsAll", "the class read all of them")]
)
def test_unread_hyperparameters_are_reported(monkeypatch, name, unread):
    monkeypatch.setitem(CHECKS, "ranks", lambda _: iter(()))

    found = check(name, batches(), hyperparams={"lr": 0.02, "layers": 3})

    assert found["hyperparams"].detail == unread
    assert found["resume"].level == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["self_supervised:MomentumContrast", "vision:SplatDensification"])
def test_own_queue_of_keys_and_equally_replaced_parameters_pass_on_ranks(name):
    found = check(*zoo_class(name))

    assert found["ranks"].level == "pass", found["ranks"].detail
    assert found["resume"].level == "pass", found["resume"].detail
    assert not [finding for finding in found.values() if finding.level == "fail"]


@pytest.mark.slow
def test_rounding_by_several_threads_is_no_difference_between_ranks():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert check("BiasBeforeBatchNorm", batches(4, rows=32))["ranks"].level == "pass"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_weights_moved_only_by_rounding_are_no_finding():
    found = check("Attends", batches(8, rows=8), steps=4)
    assert {"ranks", "sharded", "batch size", "bf16-mixed"} <= found.keys()
    assert [finding for finding in found.values() if finding.level in ("warn", "fail")] == []


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job whose class has a fault; its checks start no other process."""
    monkeypatch.setitem(CHECKS, "ranks", lambda _: iter(()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.syspath_prepend(HERE)
    job_dict = {"run_id": "j", "trainer": "check_zoo:Forgetful", "max_steps": 9, "mock_batches": list(batches(2))}
    (tmp_path / "job.json").write_text(json.dumps(job_dict))
    return str(tmp_path / "job.json")


def test_the_command_prints_json_and_fails_when_a_check_does(job, capsys):
    assert main(["check", job, "--json", "--steps", "2"]) == 1

    answer = json.loads(capsys.readouterr().out)
    assert answer["counts"] == {"pass": 9, "warn": 0, "fail": 1, "skip": 0}
    assert {"check", "level", "detail", "remedy"} == set(answer["findings"][0])


def test_the_command_prints_a_line_for_each_check_and_succeeds_when_all_pass(job, capsys):
    assert main(["check", job, "--set", "trainer=check_zoo:Sound"]) == 0

    assert "ok       resume             14 steps against 7 + resume + 7: bit-equal\n" in capsys.readouterr().out


def test_check_without_data_does_not_succeed(monkeypatch, capsys):
    """Otherwise a check in a pipeline would always pass."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.syspath_prepend(HERE)
    assert main(["check", "check_zoo:Misspells"]) == 2
    output = capsys.readouterr()
    assert "skipped  steps              training was not checked: there is no data\n" in output.out
    named = set(re.findall(r"--[a-z]+", output.out))
    assert "--data" in named
    assert named <= set(command_parser("check").format_help().split())
    assert (
        "warning  hooks              `save_checkpoints` is not a hook and is never called; did you mean `save_"
        in output.out
    )
    assert "training was not checked" in output.err


def test_command_reads_parquet_and_starts_again_at_its_end(job, tmp_path, capsys):
    pq.write_table(pa.table({"x": [[0.5, 1.0]] * 6, "y": [[1.0]] * 6}), tmp_path / "rows.parquet")

    words = ["check_zoo:ArrowRows", "--data", str(tmp_path / "rows.parquet"), "--set", "dataset.batch_size=4"]
    assert main(["check", *words]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.json"], "nowhere.json"),
        (["check_zoo:Sound", "--data", "nowhere.parquet"], "nowhere.parquet"),
    ],
)
def test_usage_errors_have_their_own_exit_code(arguments, expected, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert main(["check", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_a_batch_is_cut_into_halves_of_its_rows():
    assert halves([1, 2, 3]) == ([1], [2])
    assert halves({"a": [1, 2], "b": ["x", "y"]}) == ({"a": [1], "b": ["x"]}, {"a": [2], "b": ["y"]})
    table = pa.table({"a": [1, 2, 3, 4]})
    assert [half.column("a").to_pylist() for half in halves(table)] == [[1, 2], [3, 4]]
    assert [half.tolist() for half in halves(torch.arange(4))] == [[0, 1], [2, 3]]
    assert [half.tolist() for half in halves(np.arange(4))] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("batch", [None, 3, "text", [1], {"a": [1, 2], "b": [1]}, {"a": 1}, torch.tensor(1.0)])
def test_a_batch_without_rows_is_not_cut(batch):
    assert halves(batch) is None


def test_snapshots_differ_in_the_first_path_whose_bits_differ():
    of_a_column = torch.zeros(2, 2)[:1, 0]
    state = {"w": torch.tensor([1.0, float("nan")]), "one": of_a_column, "rng": torch.Generator(), "n": 1}
    state["a"] = np.zeros(2)
    before = snapshot(state, None)
    assert before.differences(snapshot(state, None)) == []

    state["n"] = 2
    state["w"][0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    state["one"][0] = 1.0
    state["rng"].manual_seed(3)
    state["new"] = 1

    changed = ['state["w"]', 'state["one"]', 'state["rng"]', 'state["n"]', 'state["new"]']
    assert before.differences(snapshot(state, None)) == changed


def test_the_data_of_a_job_is_collated_as_in_a_run(job, tmp_path, capsys):
    pq.write_table(pa.table({"x": [[0.5, 1.0]] * 6, "y": [[1.0]] * 6}), tmp_path / "rows.parquet")
    (tmp_path / "into_lists.py").write_text("def convert(rows):\n    return rows.to_pydict()\n")
    dataset = {"parquet_paths": ["rows.parquet"], "batch_size": 4, "collate": "into_lists:convert", "shuffle": True}
    job_dict = {"run_id": "j", "trainer": "check_zoo:Sound", "max_steps": 9, "dataset": dataset}
    (tmp_path / "job.json").write_text(json.dumps(job_dict))

    assert main(["check", job, "--steps", "2"]) == 0
    assert "fault" not in capsys.readouterr().out
