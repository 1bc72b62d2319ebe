"""A real process that saves all the time and is killed at random times ends with the same weights."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genlight.callbacks.checkpoint import list_checkpoints


@pytest.fixture
def fork_server():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("training_process.py")
    server = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    yield server
    server.stdin.close()
    server.stdout.close()
    server.wait()


def run(server, directory, kill_after_s=None):
    """Start a run; kill it after a while, if asked. Returns its exit status, negative for a signal."""
    print(directory, file=server.stdin, flush=True)
    pid = int(server.stdout.readline())
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        with contextlib.suppress(ProcessLookupError):  # It may have finished by itself.
            os.kill(pid, signal.SIGKILL)
    return int(server.stdout.readline())


@pytest.mark.slow
@pytest.mark.timeout(7200)  # The long run kills 1,000 times.
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(tmp_path, fork_server, is_long):
    reference = tmp_path / "reference"
    reference.mkdir()
    started = time.monotonic()
    assert run(fork_server, reference) == 0
    duration = time.monotonic() - started
    expected = (reference / "digest").read_text()

    kills, target, soak = 0, 1000 if is_long else 15, 0
    while kills < target:
        soak += 1
        directory = tmp_path / f"soak{soak}"
        directory.mkdir()
        status = None
        while status != 0:
            chance, started = random.Random(kills * 1000 + soak), time.monotonic()
            status = run(fork_server, directory, chance.uniform(0, duration / 2) if kills < target else None)
            assert status in (0, -signal.SIGKILL)
            kills += status != 0
            if status == 0:  # The first run is the slowest; kills later than a run takes would hit nobody.
                duration = min(duration, time.monotonic() - started)
        assert (directory / "digest").read_text() == expected
        left = sorted(path.name for path in directory.iterdir() if path.name != "digest")
        kept = [listed.path.name.removesuffix(".json") for listed in list_checkpoints(directory)]
        assert left == sorted([*kept, *(f"{name}.json" for name in kept)])
        assert kept == ["step-00000019", "step-00000020"]
