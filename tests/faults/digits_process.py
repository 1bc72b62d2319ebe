"""A fork server for the kill soak of whole jobs: libraries are imported once, every line on stdin forks a job.

A line is the path of a job spec and the artifacts directory; the answers are the job's pid and then its exit status.
"""

import faulthandler
import os
import sys
from pathlib import Path

import torch
import torch._dynamo

# Imported before the fork, so that each job starts at once: torch's first optimizer would load `_dynamo`, for seconds.
import genlight.adapter.assembly
import genlight.adapter.feed
import genlight.adapter.module  # noqa: F401
from genlight.adapter.run import RunOptions, run_job


def serve():
    torch.set_num_threads(1)
    for line in sys.stdin:
        spec, artifacts = line.split()
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(120, exit=True)  # A job that hangs says where, and fails the test.
            environ = {"PATH": os.environ["PATH"], "TRAINER_ARTIFACTS_DIR": artifacts}
            code = run_job(RunOptions(spec_path=Path(spec), environ=environ))
            os._exit(code)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
