"""Stand in for a job that ``support/fork_server.py`` runs: end as it ends, and end it if this process is killed.

    python forked_job.py SOCKET LOG JOB_SPEC FOLDER

The job makes a file ``<rank>-<pid>`` in the folder for each of its processes. The server's process runs this program
too, so that Lightning starts the other ranks with this command line.
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
    """Run the job in the server's process, which has loaded all modules."""
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
    environ.pop(
        RANK_ZERO_PROCESS, None
    )  # with it, another rank would check that its parent is rank 0, but the server is
    request = {"program": os.path.abspath(__file__), "arguments": sys.argv[1:], "environ": environ}
    request |= {"folder": os.getcwd(), "log": sys.argv[2], "output": sys.argv[2]}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        server.sendall(json.dumps(request).encode() + b"\n")
        answers = server.makefile()
        job = int(answers.readline())
        signal.signal(signal.SIGTERM, lambda *_: terminate(job))
        threading.Thread(target=watch_launcher, args=(job, os.getppid()), daemon=True).start()
        status = int(answers.readline())
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def watch_launcher(job, launcher):
    """Stop the job when the launcher ends; the job cannot notice it, because its parent is the server."""
    while os.getppid() == launcher:
        time.sleep(0.05)
    terminate(job)


def terminate(job):
    with contextlib.suppress(ProcessLookupError):
        os.kill(job, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run() if os.environ.pop(IS_THE_JOB, None) else stand_in())
