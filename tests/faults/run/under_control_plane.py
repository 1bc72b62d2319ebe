"""A program that runs a job under a control plane, as one does whose orchestrator hands out leases."""

import os
import sys

from genlight.adapter import HttpLifecycleClient
from genlight.adapter.run.run import RunOptions, run_job

if __name__ == "__main__":
    client = HttpLifecycleClient(os.environ["CONTROL_PLANE"], timeout_s=60.0)
    sys.exit(run_job(RunOptions(lifecycle=client, heartbeat_s=0.1)))
