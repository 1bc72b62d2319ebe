"""The feed benchmark runs, and its report has the figures that its table shows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise(name="speed")

BENCHMARK = Path(__file__).parents[2] / "examples" / "benchmarks" / "feed.py"


def test_the_feed_benchmark_reports_every_contender_with_the_same_number_of_batches(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("feed_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--rows", "6400", "--repeats", "1", "--json", str(tmp_path / "feed.json")])
    report = json.loads((tmp_path / "feed.json").read_text())
    for name, rows in (("narrow", 6400), ("wide", 640)):
        lines = {line["contender"]: line for line in report[name]["throughput"]}
        assert {"feed", "limit", "scanner", "iter_batches"} <= set(lines)
        assert lines["feed"]["batches"] == lines["limit"]["batches"] == rows // 32
        assert report[name]["resume_ms"]["feed at 75%"] > 0
    assert "x scanner" in capsys.readouterr().out
