"""The benchmark of the diagnosis as it lies in the repository, with few steps; no figure is judged."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.promise(name="speed")

SCRIPT = Path(__file__).parents[2] / "examples" / "benchmarks" / "diagnosis.py"


def test_it_measures_every_model_and_leaves_the_methods_as_they_were(capsys):
    spec = importlib.util.spec_from_file_location("diagnosis_benchmark", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    methods = [getattr(owner, name) for owner, name in benchmark.TIMED]
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "genlight")
    threads, levels = torch.get_num_threads(), [logging.getLogger(name).level for name in names]
    try:
        found = benchmark.main(["--checks", "1", "--interval", "5"])
    finally:
        torch.set_num_threads(threads)
        for name, level in zip(names, levels, strict=True):
            logging.getLogger(name).setLevel(level)

    assert set(found) == set(benchmark.MODELS)
    assert all(cost > 0 for cost in found.values())
    assert [getattr(owner, name) for owner, name in benchmark.TIMED] == methods
    printed = capsys.readouterr().out
    assert all(name in printed for name in found)
