"""Job files of tests, and runs of them in this process."""

import json
from pathlib import Path
from typing import Any

from genlight.adapter.run.run import RunOptions, run_job
from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events


def write_job(folder: Path, **fields: Any) -> Path:
    """Write ``job.json``, three steps on the CPU unless `fields` say otherwise; a field of `...` is absent."""
    job = {
        "run_id": "r",
        "trainer": "support.trainer_class:Counts",
        "max_steps": 3,
        "mock_batches": [1, 2, 3],
        "lightning": {"accelerator": "cpu"},
        **fields,
    }
    path = folder / "job.json"
    path.write_text(json.dumps({name: value for name, value in job.items() if value is not ...}))
    return path


def run(job: Path, *overrides: str, **options: Any) -> int:
    """Run a job in this process, with its artifacts in ``out`` next to it; return the exit code."""
    return run_job(RunOptions(spec_path=job, overrides=(f"artifacts_dir={job.parent}/out", *overrides), **options))


def events_of(job: Path) -> list[dict[str, Any]]:
    """Return the events of a job that `run` ran, after validating the log."""
    path = job.parent / "out" / "metrics" / "events.jsonl"
    assert validate_events(path) == []
    return list(read_events(path))
