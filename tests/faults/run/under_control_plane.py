"""Run a job under a control plane, as an orchestrator with leases does."""

import json
import os
import sys
import urllib.error
import urllib.request

from genlight.adapter import LifecycleLease
from genlight.adapter.run import control_plane
from genlight.adapter.run.run import RunOptions, run_job


class Client:
    """Client of the control plane; an error status means that the lease was taken away."""

    def __init__(self, url):
        self.url = url

    def post(self, run_id, what, **body):
        request = urllib.request.Request(f"{self.url}/runs/{run_id}/{what}", json.dumps(body).encode(), method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError:
            return None

    def claim(self, *, run_id):
        return LifecycleLease(run_id, self.post(run_id, "claim")["lease_id"])

    def heartbeat(self, *, lease):
        return self.post(lease.run_id, "heartbeat", lease_id=lease.lease_id) is not None

    def request_cancel(self, *, lease):
        return (self.post(lease.run_id, "cancel", lease_id=lease.lease_id) or {}).get("cancel", False)

    def mark_completed(self, *, lease, step, final_checkpoint):
        self.post(lease.run_id, "completed", lease_id=lease.lease_id, step=step, final_checkpoint=final_checkpoint)

    def mark_failed(self, *, lease, step, error):
        self.post(lease.run_id, "failed", lease_id=lease.lease_id, step=step, error=error)


if __name__ == "__main__":
    control_plane.INTERVAL_S = 0.1
    sys.exit(run_job(RunOptions(lifecycle=Client(os.environ["CONTROL_PLANE"]))))
