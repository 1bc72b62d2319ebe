"""The benchmarks of a step, the diagnosis and the feed, with few steps; no figure is judged."""

from __future__ import annotations

import importlib
import json
import logging
import sys

import pytest
import torch

from genlight.adapter import StepResult

pytestmark = pytest.mark.promise(name="speed")

LOGGERS = ("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "genlight")


@pytest.fixture
def benchmark(examples, monkeypatch):
    """Imports a benchmark by its name; threads, levels of loggers and modules stay as they were."""
    monkeypatch.syspath_prepend(str(examples / "benchmarks"))
    threads, levels, before = (
        torch.get_num_threads(),
        [logging.getLogger(name).level for name in LOGGERS],
        {*sys.modules},
    )
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name, level in zip(LOGGERS, levels, strict=True):
        logging.getLogger(name).setLevel(level)
    for name in {*sys.modules} - before:
        if name.split(".")[0] in ("step_cost", "step_overhead", "diagnosis", "feed", "checkpoint"):
            del sys.modules[name]


def test_the_diagnosis_is_measured_for_every_model_and_leaves_the_methods_as_they_were(benchmark, capsys):
    diagnosis = benchmark("diagnosis")
    methods = [getattr(owner, name) for owner, name in diagnosis.TIMED]

    found = diagnosis.main(["--checks", "1", "--interval", "5"])

    assert set(found) == set(diagnosis.MODELS)
    assert all(cost > 0 for cost in found.values())
    assert [getattr(owner, name) for owner, name in diagnosis.TIMED] == methods
    printed = capsys.readouterr().out
    assert all(name in printed for name in found)


def test_the_feed_benchmark_reports_every_contender_with_the_same_number_of_batches(benchmark, tmp_path, capsys):
    benchmark("feed").main(["--rows", "6400", "--repeats", "1", "--json", str(tmp_path / "feed.json")])
    report = json.loads((tmp_path / "feed.json").read_text())
    for name, rows in (("narrow", 6400), ("wide", 640)):
        lines = {line["contender"]: line for line in report[name]["throughput"]}
        assert {"feed", "limit", "scanner", "iter_batches"} <= set(lines)
        assert lines["feed"]["batches"] == lines["limit"]["batches"] == rows // 32
        assert report[name]["resume_ms"]["feed at 75%"] > 0
    assert "x scanner" in capsys.readouterr().out


@pytest.mark.slow  # each save waits until the disk is idle
@pytest.mark.parametrize("settings", [("--mb", "1"), ("--synchronous",)])
def test_saves_of_any_number_of_tensors_take_turns_with_their_limit(benchmark, monkeypatch, tmp_path, capsys, settings):
    command = ["checkpoint.py", "--tensors", "8", "16", "--rounds", "1", "--directory", str(tmp_path), *settings]
    monkeypatch.setattr(sys, "argv", command)
    benchmark("checkpoint").main()

    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["8", "16"]
    assert all(row[4:7:2] == [row[3], row[3]] for row in rows), "the range of one round"
    assert not list(tmp_path.iterdir())


def test_every_host_takes_turns_with_its_floor_and_is_reported(benchmark, tmp_path, capsys):
    found = benchmark("step_overhead").main(
        ["--steps", "6", "--block", "3", "--rounds", "2", "--startup", "0", "--json", str(tmp_path / "found.json")]
    )

    written = json.loads((tmp_path / "found.json").read_text())
    assert written["hosts"] == found["hosts"]
    assert {"bare torch loop", "genlight, standard", "genlight, standard, progress bar", "Fabric"} <= set(
        found["hosts"]
    )
    for name, figures in found["hosts"].items():
        assert figures["pairs"] == 4, name
        assert figures["floor_us"]["median"] > 0
        assert figures["ratio"]["median"] > 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"  {name} ") == 2 for name in found["hosts"])


def test_many_steps_and_many_callbacks_are_measured(benchmark, capsys):
    found = benchmark("step_overhead").main(["--scale", "1000", "--rounds", "1"])

    assert [part["step"] for part in found["steps"]] == list(range(100, 1001, 100))
    assert all(part["memory_mb"] > 1 for part in found["steps"])
    assert set(found["callbacks"]["no-op"]) == {"0", "10", "50", "100", "200", "each_us"}
    assert "us each" in capsys.readouterr().out


def test_a_step_reads_no_value_of_the_device_outside_of_the_cadence(benchmark, tmp_path):
    found = benchmark("step_overhead").main(
        ["--device", "cpu", "--steps", "4", "--block", "2", "--trace", str(tmp_path / "trace.json")]
    )["device"]

    assert found["waits"]["elsewhere"] == {}
    assert sum(found["waits"]["at_cadence"].values()) == 10
    assert found["traced"] == {}
    assert found["times"]["device_ratio"]["median"] > 0
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert sum(str(name).startswith("step ") for name in names) >= 9


def test_a_trainer_that_reads_its_loss_in_every_step_is_found(benchmark):
    device = benchmark("step_cost.device")

    class Reads(device.Transformer):
        def train_step(self, batch, state, ctx):
            return StepResult(metrics={"loss": super().train_step(batch, state, ctx).metrics["loss"].item()})

    reading = Reads(**device.LITTLE)
    waits = device.waits(reading, "cpu", 20)["elsewhere"]
    traced = device.traced(reading, "cpu", None)

    ((place, count),) = waits.items()
    assert place.startswith("tests/examples/test_benchmarks.py:")
    assert count == 17
    assert 9 <= traced["aten::_local_scalar_dense"] <= 11
