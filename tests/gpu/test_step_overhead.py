"""The step benchmark on a CUDA device: a job adds no wait for the device to a step.

CI has no such device and skips it: ``pytest tests/gpu -m gpu``.
"""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, supported_activities

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"

pytestmark = [
    pytest.mark.promise(name="speed"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def device(monkeypatch):
    """The module of the benchmark that measures a device."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("step_cost.device")
    for name in [name for name in sys.modules if name.split(".")[0] == "step_cost"]:
        del sys.modules[name]


def test_no_step_waits_for_the_device_between_metric_cadences(device):
    waits = device.waits(device.Transformer(), "cuda", 100)

    assert waits["elsewhere"] == {}
    assert sum(waits["at_cadence"].values()) == 10, "one metric every 10 steps"


@pytest.mark.skipif(ProfilerActivity.CUDA not in supported_activities(), reason="torch cannot trace this device")
def test_a_trace_of_ten_steps_between_cadences_shows_no_call_that_waits(device, tmp_path):
    assert device.traced(device.Transformer(), "cuda", tmp_path / "trace.json") == {}

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert sum(str(event.get("name")).startswith("step ") for event in events) >= 9
