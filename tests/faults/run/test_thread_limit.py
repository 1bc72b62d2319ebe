"""A limit on the number of threads, as for users and containers: failures are reported, optional threads omitted."""

import pytest

from genlight.callbacks.checkpoint.selection import newest_valid
from support import SUPPORT
from support.thread_limit import NO_ROOM_BYTES

pytestmark = pytest.mark.promise(name="stop")

WITHOUT_THREADS = str(SUPPORT / "thread_limit.py")


@pytest.mark.parametrize("place", ["the start", "setup"])
def test_a_run_that_cannot_start_a_thread_reports_it(job, place):
    """The terminal message is sent, and the event log gets its last line."""
    plan = {} if place == "the start" else {"at": place, "stack_bytes": NO_ROOM_BYTES}
    job.write(plan=plan, uploads={f"{kind}_url": f"SERVER/{kind}" for kind in ("terminal", "metrics")})
    process = job.fork("run", job.spec, program=WITHOUT_THREADS if place == "the start" else "genlight.adapter.cli")
    assert process.wait(120) == 1, job.output()

    failed = job.terminal_event()
    assert "ulimit -u" in failed["error"]
    assert [posted["error"] for posted in job.server.posted("/terminal")] == [failed["error"]]
    assert "Traceback" not in job.output()


def test_a_run_saves_checkpoints_and_completes_if_no_more_threads_can_start(job):
    """The limit applies from the first step; threads that started before it suffice."""
    job.write(plan={"at": "train_step:1", "stack_bytes": NO_ROOM_BYTES, "accumulates": 1}, resume_from_latest=True)
    process = job.fork("run", job.spec)
    assert process.wait(120) == 0, job.output()

    assert job.terminal_event()["event"] == "completed"
    assert [posted["status"] for posted in job.server.posted("/terminal")] == ["completed"]
    checkpoints = job.out / "checkpoints"
    assert {path.stem for path in checkpoints.glob("*.json")} == {"step-00000002", "step-00000004", "final"}
    record, warnings = newest_valid(checkpoints)
    assert (record.step, warnings) == (5, [])
