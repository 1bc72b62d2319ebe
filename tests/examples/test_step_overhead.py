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


def test_between_two_blocks_of_a_host_its_floor_makes_as_many_steps(benchmark):
    order = []
    batches = benchmark("step_cost.alternating").Alternation(lambda: order.append("floor"), blocks=2, block=3)
    for _, _ in zip(range(batches.steps), batches, strict=False):
        order.append("host")

    warm_and_counted = 4
    assert order == (["floor"] * 3 + ["host"] * 3) * warm_and_counted + ["host"]
    assert len(batches.pairs) == 2


def test_a_host_that_ends_early_is_not_reported(benchmark):
    batches = benchmark("step_cost.alternating").Alternation(lambda: None, blocks=2, block=3)
    next(iter(batches))

    with pytest.raises(AssertionError, match="the host ended early"):
        _ = batches.pairs


def test_work_of_other_threads_counts_for_the_host(benchmark):
    alternating = benchmark("step_cost.alternating")
    moment = alternating._Moment
    points = moment(0, 0, 0), moment(5, 3, 5), moment(5, 3, 5), moment(9, 6, 9)

    alone = alternating.Alternation(lambda: None, blocks=1, block=1)._pair(*points)
    shared = alternating.Alternation(lambda: None, blocks=1, block=1, shares_threads=True)._pair(*points)

    assert (alone.floor_cpu_s, alone.host_cpu_s) == (3, 6)
    assert (shared.floor_cpu_s, shared.host_cpu_s) == (5, 4)


def test_without_matplotlib_there_is_no_plot_and_it_says_so(benchmark, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    benchmark("step_cost.report").plot({}, tmp_path / "plot.png")

    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()


def test_a_host_that_is_not_installed_or_broken_does_not_take_part_and_it_says_so(
    benchmark, tmp_path, capsys, monkeypatch
):
    (tmp_path / "accelerate.py").write_text("import a_module_that_it_needs")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torchtnt", None)
    monkeypatch.setitem(sys.modules, "transformers", None)

    found = benchmark("step_cost.others").others()

    assert set(found) == {"Fabric"}
    told = capsys.readouterr().err
    assert "accelerate does not take part: No module named 'a_module_that_it_needs'" in told
    assert "TorchTNT does not take part" in told


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


def test_a_start_is_timed_as_a_whole_and_until_its_first_step(benchmark, tmp_path):
    start_up = benchmark("step_cost.start_up")
    base = start_up._start([sys.executable, "-c", start_up._NOTE], tmp_path)
    without = start_up._start([sys.executable, "-c", ""], tmp_path)

    assert 0 < base.first_step_s <= base.whole_s + 0.05
    assert without.first_step_s is None
    twice = start_up.Start(2 * base.whole_s, 2 * base.first_step_s)
    assert start_up._figures([twice], [base])["first_step_ratio"]["median"] == 2


def test_the_network_with_norms_trains_and_has_the_buffers_that_are_told(benchmark):
    norms = benchmark("step_cost.norms")
    trainer = norms.ResNet()
    state = trainer.configure(None)
    before = [buffer.clone() for buffer in state["model"].buffers()]
    trainer.train_step(trainer.prepare_batch(None, state, None), state, None)

    assert len(before) == 60
    assert not any(torch.equal(a, b) for a, b in zip(before, state["model"].buffers(), strict=True))
    assert set(norms.hosts_with_norms(0, 2)) >= {"genlight", "genlight, buffers never sent"}


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
