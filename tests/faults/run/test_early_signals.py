"""A stop signal while a command imports any of its modules is reported like any other stop."""

import signal
import subprocess
import sys

import pytest

from genlight.reporters import read_events

SIGNALLED = """
import os, sys

module, number, *words = sys.argv[1:]

class Signals:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Signals())
sys.argv = ["genlight", *words]
from genlight.adapter.cli import main
raise SystemExit(main())
"""


def run(job, module, number, *words):
    command = [sys.executable, "-c", SIGNALLED, module, str(int(number)), *words]
    return subprocess.run(
        command, cwd=job.folder, env=job.process_environ(), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("genlight.adapter.cli.command_line", signal.SIGTERM),
        ("genlight.adapter.run.run", signal.SIGINT),
        ("genlight.adapter.run.training", signal.SIGTERM),
    ],
)
def test_a_signal_during_imports_stops_a_run_before_it_trains(job, module, number):
    job.write(uploads={})
    done = run(job, module, number, "run", str(job.spec))

    assert done.returncode == 75, done.stderr
    assert f"{signal.Signals(number).name}: the run stops before it trains" in done.stderr
    assert "Traceback" not in done.stderr
    (failed,) = read_events(job.events_path)
    assert (failed["error"], failed["resumable"]) == ("canceled" if number == signal.SIGINT else "preempted", True)


@pytest.mark.slow
def test_a_signal_during_imports_stops_a_fit_before_it_trains(job):
    (job.folder / "fit.yaml").write_text("model: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}")
    done = run(job, "lightning", signal.SIGTERM, "fit", "--config", "fit.yaml", "--trainer.logger", "false")

    assert done.returncode == 75, done.stderr
    assert "SIGTERM: the fit stops before it trains" in done.stderr
