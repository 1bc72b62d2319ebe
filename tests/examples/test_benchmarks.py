"""The benchmarks of the diagnosis and the feed, with few steps; no figure is judged."""

from __future__ import annotations

import importlib
import json
import logging

import pytest
import torch

pytestmark = pytest.mark.promise(name="speed")


@pytest.fixture
def benchmark(examples, monkeypatch):
    """Imports a benchmark by its name; threads and levels of loggers stay as they were."""
    monkeypatch.syspath_prepend(str(examples / "benchmarks"))
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "genlight")
    threads, levels = torch.get_num_threads(), [logging.getLogger(name).level for name in names]
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)


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
