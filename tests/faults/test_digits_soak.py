"""The digits job, killed at random times and resumed until it is done, leaves the bytes of an undisturbed run."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genlight.callbacks.checkpoint import list_checkpoints, verify
from genlight.reporters.event_validation import validate_events

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The example's own job, smaller and with a short cadence."""
    spec = json.loads((DIGITS / "job.json").read_text())
    spec |= {"max_steps": 40, "checkpoint_every": 2, "metric_every": 5, "sample_every": 0, "resume_from_latest": True}
    spec["hyperparams"] |= {"width": 32, "depth": 2, "warmup_steps": 5}
    spec["dataset"]["parquet_paths"] = [str(DIGITS / "digits.parquet")]
    del spec["sample_prompts"]
    folder = tmp_path_factory.mktemp("job")
    (folder / "trainer.py").write_bytes((DIGITS / "trainer.py").read_bytes())
    (folder / "job.json").write_text(json.dumps(spec))
    return folder / "job.json"


@pytest.fixture
def fork_server(tmp_path):
    log = open(tmp_path / "log", "w")  # noqa: SIM115 - the server's, until the test ends
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("digits_process.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    yield server
    server.stdin.close()
    server.stdout.close()
    server.wait()
    log.close()


def run(server, job, artifacts, kill_after_s=None):
    """Start the job; kill it after a while, if asked. Returns its exit status, negative for a signal."""
    print(job, artifacts, file=server.stdin, flush=True)
    pid = int(server.stdout.readline())
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        with contextlib.suppress(ProcessLookupError):  # It may have finished by itself.
            os.kill(pid, signal.SIGKILL)
    return int(server.stdout.readline())


def digest(artifacts):
    """Of the model's and the trainer's own final files."""
    final = artifacts / "checkpoints" / "final"
    files = [final / "model.safetensors", final / "trainer" / "digits.safetensors"]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.slow
@pytest.mark.timeout(7200)  # The long run kills 1,000 times.
def test_the_digits_job_killed_again_and_again_ends_with_the_same_weights(job, tmp_path, fork_server, is_long):
    started = time.monotonic()
    assert run(fork_server, job, tmp_path / "reference") == 0, (tmp_path / "log").read_text()
    duration = time.monotonic() - started
    expected = digest(tmp_path / "reference")

    kills, target, soak = 0, 1000 if is_long else 15, 0
    while kills < target:
        soak += 1
        artifacts = tmp_path / f"soak{soak}"
        status = None
        while status != 0:
            chance, started = random.Random(kills * 1000 + soak), time.monotonic()
            status = run(fork_server, job, artifacts, chance.uniform(0.1, 0.9) * duration if kills < target else None)
            assert status in (0, -signal.SIGKILL), (tmp_path / "log").read_text()
            kills += status != 0
            if status == 0:  # The first run is the slowest; kills later than a run takes would hit nobody.
                duration = min(duration, time.monotonic() - started)
        assert digest(artifacts) == expected
        assert validate_events(artifacts / "metrics" / "events.jsonl") == []
        checkpoints = artifacts / "checkpoints"
        kept = [listed.path for listed in list_checkpoints(checkpoints)]
        assert [path.stem for path in kept] == ["step-00000038", "step-00000040", "final"]
        for path in kept:
            verify(path)
        assert sorted(os.listdir(checkpoints)) == sorted([*(p.stem for p in kept), *(p.name for p in kept)])
