"""A rank is killed or stops answering, while the `wait` of a collective blocks a stream and not the host."""

import json
import signal

import pytest

from device.lost import LAST_STEP
from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events
from support.device import PROCESS_GROUP, Waiting, reason_to_skip
from support.ports import free_port
from support.rank_processes import run_ranks_to_their_ends

HANGS_AFTER_S = 6.0
STRATEGIES = {
    "ddp": {"class_path": "support.device.training.SimDDPStrategy", "init_args": {"bucket_cap_mb": 1e-6}},
    "ddp of one bucket": {"class_path": "support.device.training.SimDDPStrategy", "init_args": {}},
    "fsdp": {"class_path": "genlight.adapter.FSDP2Strategy", "init_args": {}},
}

ROWS = [
    pytest.param(name, sign, marks=[pytest.mark.slow] if "bucket" in name or sign == signal.SIGSTOP else [])
    for name in STRATEGIES
    for sign in (signal.SIGKILL, signal.SIGSTOP)
    if "bucket" not in name or sign == signal.SIGKILL
]


def run_with_lost_rank(folder, strategy, lost, sign):
    """Return the exit codes of both ranks, the events, and the ranks' output."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    settings = STRATEGIES[strategy]
    job = {
        "run_id": "lost",
        "trainer": "device.lost:Loses",
        "max_steps": 4000,
        "metric_every": 5,
        "checkpoint_every": 10,
        "mock_batches": list(range(8000)),
        "hyperparams": {"lost": lost, "signal": int(sign)},
        # The run itself notices a killed rank; only this callback notices a rank that lives but does nothing.
        "callbacks": {} if sign == signal.SIGKILL else {"WatchHangs": {"floor_s": HANGS_AFTER_S, "end_run": True}},
        "lightning": {
            "accelerator": "sim",
            "devices": 2,
            "strategy": {**settings, "init_args": {**settings["init_args"], "process_group_backend": PROCESS_GROUP}},
        },
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    codes, outputs = run_ranks_to_their_ends(
        "device.lost",
        free_port(),
        path,
        world_size=2,
        timeout_s=200,
        may_fail={0, 1} if sign == signal.SIGKILL else {lost},
        environ={"SIM_WAITING": Waiting.STREAM.value, "TRAINER_ARTIFACTS_DIR": str(folder / "out")},
    )
    log = folder / "out" / "metrics" / "events.jsonl"
    assert log.exists(), "\n".join(outputs)
    return codes, log, "\n".join(outputs)


@pytest.mark.parametrize(("strategy", "sign"), ROWS)
def test_a_rank_that_is_killed_or_stops_answering_is_named_in_a_valid_log(tmp_path, strategy, sign):
    codes, log, output = run_with_lost_rank(tmp_path, strategy, 1, sign)

    assert codes[0] == 1, output
    assert validate_events(log) == []
    *_, last = read_events(log)
    assert last["event"] == "failed"
    assert "rank 1" in last["error"], last
    if sign == signal.SIGKILL:
        assert codes[1] == -signal.SIGKILL
        assert last["step"] >= LAST_STEP - 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_rank_zero_ends_the_other(tmp_path, strategy):
    codes, _, output = run_with_lost_rank(tmp_path, strategy, 0, signal.SIGKILL)

    assert codes == [-signal.SIGKILL, 1], output
