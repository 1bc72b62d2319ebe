"""The time to open the page of a thousand runs, and the cost of a report on a log of millions of events.

    python examples/benchmarks/views.py --runs 1000 --events 5000000

The runs are folders with an event log of `--events-of-a-run` lines each and a lock, like runs without checkpoints. Only
the first request counts, when the server sees them for the first time. The report covers one run with a single attempt
and ten metrics. CPU time is measured for the process of the command, because a busy machine changes it less than the
clock; memory is its peak.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from genlight.reporters.events.run_metadata import run_metadata

COMMAND = [sys.executable, "-c", "import sys; from genlight.adapter.cli import main; sys.exit(main())"]
METRICS = 10
GB = 1e9


def main() -> None:
    """Measure both and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="how many runs the page lists; 0 leaves it out")
    parser.add_argument("--events-of-a-run", type=int, default=2000, help="lines in the log of each")
    parser.add_argument("--events", type=int, default=5_000_000, help="lines in the log to report; 0 leaves it out")
    parser.add_argument("--times", type=int, default=3, help="how often each is measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.runs:
            for number in range(args.runs):
                write_run(Path(folder, "many", f"run-{number:04}"), args.events_of_a_run)
            for _ in range(args.times):
                measure_page(Path(folder, "many"), args.runs)
        if args.events:
            write_run(Path(folder, "long"), args.events)
            for _ in range(args.times):
                measure_report(Path(folder, "long"), args.events)


def write_run(folder: Path, events: int) -> None:
    """Write the log of a run that completed, of `events` lines."""
    steps = max((events - 2) // METRICS, 1)
    common = f'"run_id":"{folder.name}","schema_version":"trainer_event.v1"'
    metadata = {**run_metadata(Path.cwd()), "job": {"max_steps": steps}, "ranks": 1, "last_step": steps}
    (folder / "metrics").mkdir(parents=True)
    (folder / ".lock").touch()
    with open(folder / "metrics" / "events.jsonl", "w", encoding="utf-8") as log:
        started = f'{{"event":"started",{common},"seq":1,"timestamp_ms":1000,"metadata":{json.dumps(metadata)}}}\n'
        log.write(started)
        for number in range(steps * METRICS):
            step, metric = divmod(number, METRICS)
            log.write(
                f'{{"event":"metric",{common},"seq":{number + 2},"timestamp_ms":{1000 + step * 20},'
                f'"name":"train/metric_{metric}","step":{step + 1},"value":{(number * 7919) % 1000 / 1000}}}\n'
            )
        log.write(
            f'{{"event":"completed",{common},"seq":{steps * METRICS + 2},"timestamp_ms":{1000 + steps * 20},'
            f'"step":{steps}}}\n'
        )


def measure_page(folder: Path, runs: int) -> None:
    """Start a server and ask for the page and for what it lists, as a browser does that opens it."""
    with served(folder) as (address, process):
        before_s, began = cpu_s(process), time.perf_counter()
        page = read(address)
        listed = json.loads(read(f"{address}runs.json"))["list"]
        wall_s, first_s = time.perf_counter() - began, cpu_s(process) - before_s
        before_s, began = cpu_s(process), time.perf_counter()
        read(f"{address}runs.json")
        again_s, second_s = time.perf_counter() - began, cpu_s(process) - before_s
    assert len(listed) == runs, f"{len(listed)} runs are listed"
    print(
        f"page of {runs:,} runs: {wall_s:.2f} s, {first_s:.2f} s of CPU; once more {again_s:.2f} s, "
        f"{second_s:.2f} s of CPU; {len(page):,} bytes of page",
        flush=True,
    )


def measure_report(folder: Path, events: int) -> None:
    """Write the report of one run."""
    began = time.perf_counter()
    process = subprocess.Popen([*COMMAND, "report", str(folder), "--to", str(folder / "report.html")])
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    assert status == 0, f"the report ended with status {status}"
    size = (folder / "report.html").stat().st_size
    log_size = (folder / "metrics" / "events.jsonl").stat().st_size
    print(
        f"report of {events:,} events ({log_size / GB:.2f} GB): {wall_s:.1f} s, "
        f"{used.ru_utime + used.ru_stime:.1f} s of CPU, {peak_bytes(used) / 1e6:.0f} MB at most; "
        f"{size:,} bytes of page",
        flush=True,
    )


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server of `folder`: its address and its process."""
    process = subprocess.Popen([*COMMAND, "serve", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def read(address: str) -> bytes:
    """The answer to a GET of `address`."""
    with urllib.request.urlopen(address) as answer:
        body: bytes = answer.read()
        return body


def cpu_s(process: psutil.Process) -> float:
    """Seconds of CPU that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def peak_bytes(used: resource.struct_rusage) -> int:
    """The most memory that a process held; Linux counts it in KiB."""
    return used.ru_maxrss * 1024


if __name__ == "__main__":
    main()
