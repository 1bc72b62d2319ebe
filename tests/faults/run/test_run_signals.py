"""Signals in any phase of a run, and ranks that die: no hang, one terminal event, the right exit code."""

import os
import signal
import threading
import time

import psutil
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("trigger", "returns", "ended", "code"),
    [(signal.SIGTERM, "result", "completed", 0), (signal.SIGINT, "none", "failed", 1)],
)
def test_a_signal_at_the_exit_of_the_process_changes_neither_event_nor_exit_code(job, trigger, returns, ended, code):
    job.write(plan={"at": "exit", "holds": 60.0, "returns": returns})
    process = job.fork_run()
    job.wait_until(job.reached, process)
    process.send_signal(trigger)
    time.sleep(0.3)
    job.go()

    assert process.wait(120) == code
    assert job.terminal_event()["event"] == ended
    assert [message["status"] for message in job.server.posted("/terminal")] == [ended]


def test_a_signal_while_the_last_message_is_sent_changes_nothing(job):
    """The message may have arrived, so no second one may follow."""
    job.server.gates["/terminal"] = threading.Event()
    job.write()
    process = job.fork_run()
    job.wait_until(lambda: job.server.at_gate, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    job.server.gates["/terminal"].set()

    assert process.wait(120) == 0
    assert job.terminal_event()["event"] == "completed"
    assert [body["status"] for body in job.server.posted("/terminal")] == ["completed"]


TWO = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
HANGS = [{"class_path": "genlight.callbacks.watch_hangs.WatchHangs", "init_args": {"floor_s": 5.0, "end_run": True}}]
"""Longer than a busy machine takes for the first step of two ranks."""


def test_ranks_of_one_machine_listen_on_loopback_only(job):
    """A process that reaches the store of the ranks can change what they agree on."""
    job.write_for_two_ranks({"at": "train_step:3", "holds": 60.0})
    process = job.fork_run()
    job.wait_until(lambda: job.reached(0) and job.reached(1), process)
    ranks = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    listening = {each.laddr.ip for rank in ranks for each in rank.net_connections("tcp") if each.status == "LISTEN"}
    assert listening == {"127.0.0.1"}


def test_a_complete_checkpoint_is_reported_before_the_loss_of_a_rank(job):
    """The training hangs in the next step, so that the step cannot report the checkpoint."""
    job.write(
        plan={"at": "train_step:11", "holds": 600.0},
        lightning=TWO,
        max_steps=200,
        mock_batches=list(range(400)),
        checkpoint_every=5,
        uploads={f"{kind}_url": f"SERVER/{kind}" for kind in ("terminal", "checkpoint")},
    )
    process = job.fork_run()
    job.wait_until(lambda: job.reached(1) and (job.out / "checkpoints/step-00000010.json").exists(), process)
    os.kill(int((job.folder / "reached-1").read_text()), signal.SIGKILL)

    assert process.wait(120) == 1
    assert [event["step"] for event in job.events() if event["event"] == "checkpoint"] == [5, 10]
    assert job.terminal_event()["category"] == "train-step"
    assert [posted["step"] for posted in job.server.posted("/checkpoint")] == [5, 10]


def test_a_hang_ends_the_run_if_asked_to(job):
    """The event names the files with the stacks, in which no secret is."""
    plan = {"at": "train_step:4", "rank": 1, "holds": 600.0, "api_key": "canary-of-a-hyperparameter"}
    job.environ = {"TRAINER_CAPABILITY_TOKEN": "canary-token", "MY_API_KEY": "canary-of-a-variable"}
    job.write(plan=plan, lightning={**TWO, "callbacks": HANGS}, max_steps=20, mock_batches=list(range(40)))
    process = job.fork_run()

    assert process.wait(120) == 1
    failed = job.terminal_event()
    assert failed["category"] == "train-step"
    assert "no step was finished on rank" in failed["error"]
    assert failed["error"] == job.server.posted("/terminal")[-1]["error"]
    assert "in train_step" in (job.out / "hangs" / "rank-1-1.txt").read_text()
    for rank in range(2):
        assert f"/hangs/rank-{rank}-1.txt" in failed["error"]
        assert "Thread" in (job.out / "hangs" / f"rank-{rank}-1.txt").read_text()
    shown = [job.output(), *(path.read_text() for path in (job.out / "hangs").iterdir())]
    assert [text for text in shown if "canary" in text] == []
