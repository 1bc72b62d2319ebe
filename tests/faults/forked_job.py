"""Stands for a job that ``support/fork_server.py`` runs: ends as it ends; when this is killed, so is the job.

    python forked_job.py SOCKET LOG JOB_SPEC FOLDER

The job notes its processes in the folder, by files whose names are ``<rank>-<pid>``. The server's process runs this
program too, so that Lightning starts the other ranks with this command line.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

IS_THE_JOB = "FORKED_JOB"
RANK_ZERO_PROCESS = "GENLIGHT_RANK_ZERO_PID"


def run():
    """In the server's process, which has all of this loaded."""
    from genlight.adapter.run.run import RunOptions, run_job

    (Path(sys.argv[4]) / f"{os.environ.get('LOCAL_RANK', '0')}-{os.getpid()}").touch()
    code = 1
    try:
        code = run_job(RunOptions(spec_path=sys.argv[3]))
    finally:
        sys.stderr.flush()
        os._exit(code)


def stand_in():
    environ = {**os.environ, IS_THE_JOB: "1"}
    environ.pop(RANK_ZERO_PROCESS, None)  # a further rank would look for its parent, which is the server
    wanted = {"program": os.path.abspath(__file__), "arguments": sys.argv[1:], "environ": environ}
    wanted |= {"folder": os.getcwd(), "log": sys.argv[2], "output": sys.argv[2]}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        server.sendall(json.dumps(wanted).encode() + b"\n")
        answers = server.makefile()
        job = int(answers.readline())
        signal.signal(signal.SIGTERM, lambda *_: tell_to_stop(job))
        threading.Thread(target=watch_launcher, args=(job, os.getppid()), daemon=True).start()
        status = int(answers.readline())
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def watch_launcher(job, launcher):
    """The job would see for itself that it has another parent, were it not a child of the server."""
    while os.getppid() == launcher:
        time.sleep(0.05)
    tell_to_stop(job)


def tell_to_stop(job):
    with contextlib.suppress(ProcessLookupError):
        os.kill(job, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run() if os.environ.pop(IS_THE_JOB, None) else stand_in())
