"""A rank that is paused for a while, as a debugger or a suspended machine does it: the others wait for it."""

import contextlib
import os
import signal
import time

import pytest

pytestmark = pytest.mark.slow

PAUSE_S = 3.0
"""Longer than any of the run's own watches looks away."""


@pytest.fixture
def two_ranks(job, fork_server, kill_after, torchrun_environs):
    """Starts two ranks as torchrun does it; rank 0 is the first."""

    def started(steps, **plan):
        job.write(
            plan={"step_s": 0.02, **plan},
            lightning={"accelerator": "cpu", "devices": 2, "strategy": "ddp"},
            max_steps=steps,
            mock_batches=list(range(2 * steps)),
            checkpoint_every=5,
            resume_from_latest=True,
        )
        ranks = [fork_server.start(job, "run", str(job.spec), **environ) for environ in torchrun_environs(2)]
        for process in ranks:
            kill_after(process)
        return ranks

    return started


@contextlib.contextmanager
def paused(process):
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
        time.sleep(PAUSE_S)
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_a_run_whose_rank_was_paused_completes(job, two_ranks):
    ranks = two_ranks(30, at="train_step:10", rank=1, holds=60.0)
    job.wait_until(lambda: job.reached(1), ranks[1])
    with paused(ranks[1]):
        job.go()

    assert [process.wait(120) for process in ranks] == [0, 0], (job.folder / "stderr").read_text()
    assert (job.terminal_event()["event"], job.terminal_event()["step"]) == ("completed", 30)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_the_other_rank_is_paused_stops_both_at_one_step(job, two_ranks, rank):
    ranks = two_ranks(4000, at="train_step:10", rank=rank, holds=60.0)
    job.wait_until(lambda: job.reached(rank), ranks[rank])
    with paused(ranks[rank]):
        ranks[1 - rank].send_signal(signal.SIGTERM)
        job.go()

    assert [process.wait(120) for process in ranks] == [75, 0], (job.folder / "stderr").read_text()
    failed = job.terminal_event()
    assert (failed["error"], failed["resumable"]) == ("preempted", True)
    assert (job.out / "checkpoints" / f"step-{failed['step']:08d}.json").exists()
