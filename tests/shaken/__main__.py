"""Run the tests as on an overloaded machine: processes pause, disks are slow, threads start late.

    .venv/bin/python tests/shaken [arguments of pytest]

Each process of the tests is stopped now and then for up to a second, and ``sitecustomize.py`` next to this file does
the rest within it. A test that fails only here relies on an order of events that nothing guarantees. Usually the test
is wrong, sometimes genlight.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BETWEEN_PAUSES_S = 0.3
LONGEST_PAUSE_S = 1.0
PAUSES_ITSELF = "tests/faults/run/test_paused_ranks.py"
"""Its ranks would be continued too soon."""


def main(arguments):
    """Run pytest with the arguments; its exit code."""
    usual = ["-m", "not gpu", "-n", "3", "--dist", "loadfile", "--deselect", PAUSES_ITSELF]
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    tests = subprocess.Popen([sys.executable, "-m", "pytest", *usual, *arguments], env=environ, cwd=HERE.parents[1])
    with contextlib.suppress(KeyboardInterrupt):  # which pytest gets as well
        while tests.poll() is None:
            time.sleep(random.expovariate(1 / BETWEEN_PAUSES_S))
            pause_some(descendants(tests.pid))
    return tests.wait()


def pause_some(processes):
    """Stop one of the processes, sometimes several, and let them continue."""
    most = 4 if random.random() < 0.3 else 1
    chosen = random.sample(processes, min(len(processes), random.randint(1, most)))
    try:
        for process in chosen:
            send(process, signal.SIGSTOP)
        time.sleep(random.random() ** 3 * LONGEST_PAUSE_S)
    finally:
        for process in chosen:
            send(process, signal.SIGCONT)


def send(process, number):
    """Signal a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def descendants(root):
    """Processes that a process started, and those that they did."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, ahead = [], [root]
    while ahead:
        own = children.get(ahead.pop(), [])
        found += own
        ahead += own
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
