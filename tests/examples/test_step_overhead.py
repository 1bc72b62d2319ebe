"""The benchmark of a step as it lies in the repository, with few steps; no figure is judged."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from genlight.adapter import StepResult

pytestmark = pytest.mark.promise(name="speed")

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
LOGGERS = ("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero")


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a part of the benchmark by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads, levels = torch.get_num_threads(), [logging.getLogger(name).level for name in LOGGERS]
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name, level in zip(LOGGERS, levels, strict=True):
        logging.getLogger(name).setLevel(level)
    for name in [name for name in sys.modules if name.split(".")[0] in ("step_cost", "step_overhead")]:
        del sys.modules[name]


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
    assert place.startswith("tests/examples/test_step_overhead.py:")
    assert count == 17
    assert 9 <= traced["aten::_local_scalar_dense"] <= 11


@pytest.mark.slow
def test_two_ranks_are_measured_beside_bare_ddp(tmp_path):
    arguments = ["--ranks", "2", "--steps", "8", "--block", "4", "--rounds", "1", "--only", "genlight"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "step_overhead.py", *arguments, "--json", tmp_path / "found.json"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ranks"] == 2
    assert {name: figures["pairs"] for name, figures in found["hosts"].items()} == {
        "genlight": 2,
        "genlight, standard": 2,
    }
