"""What asks for a stop, on which rank, in which phase: every run ends, at one step, with its reason and a checkpoint.

Cells in which every two of a trigger, a rank and a phase meet run here; ``GENLIGHT_LONG_FAULTS=1``, as ``make
faults`` sets it, runs all of them.
"""

import itertools
import os
import signal

import pytest

pytestmark = pytest.mark.slow

TRIGGERS = {"SIGTERM": "preempted", "SIGUSR1": "preempted", "SIGINT": "canceled", "cancel file": "canceled"}
PHASES = {
    "setup": ({"at": "setup"}, {}),
    "first step": ({"at": "train_step:1"}, {}),
    "later step": ({"at": "train_step:5"}, {}),
    "batch": ({"at": "prepare_batch:3"}, {}),
    "sample": ({"at": "generate_sample:3", "samples": True}, {"sample_every": 3, "sample_prompts": ["a cat"]}),
    "save": ({"at": "save_checkpoint:2"}, {}),
    "state": ({"at": "state_dict:4"}, {}),
}
RANKS = [(1, 0), (2, 0), (2, 1)]
OF_RANK_ZERO_ALONE = ("sample", "save")
"""What no other rank does."""

CELLS = [
    (trigger, world, rank, phase)
    for trigger, (world, rank), phase in itertools.product(TRIGGERS, RANKS, PHASES)
    if rank == 0 or phase not in OF_RANK_ZERO_ALONE
]


def _pairwise():
    """For each trigger and phase one rank, in turn, so that each trigger and each phase meets every rank."""
    for (t, trigger), (p, phase) in itertools.product(enumerate(TRIGGERS), enumerate(PHASES)):
        turns = (RANKS[(t + p + turn) % len(RANKS)] for turn in range(len(RANKS)))
        yield next(cell for rank in turns if (cell := (trigger, *rank, phase)) in CELLS)


PAIRWISE = set(_pairwise())


@pytest.mark.parametrize(("trigger", "world", "rank", "phase"), CELLS)
def test_a_stop_ends_the_run(job, kill_after, is_long, trigger, world, rank, phase):
    if not is_long and (trigger, world, rank, phase) not in PAIRWISE:
        pytest.skip("runs with GENLIGHT_LONG_FAULTS=1")
    plan, fields = PHASES[phase]
    lightning = {"accelerator": "cpu", "devices": world, **({"strategy": "ddp"} if world > 1 else {})}
    job.write(
        plan={**plan, "holds": 1.0, "rank": rank, "step_s": 0.05},
        lightning=lightning,
        max_steps=400,
        mock_batches=list(range(400 * world)),
        cancel_file_path="cancel",
        **fields,
    )
    process = job.start()
    kill_after(process)
    reached = job.folder / "reached"
    job.wait_until(reached.exists, process)

    if trigger == "cancel file":
        (job.folder / "cancel").touch()
    else:
        os.kill(int(reached.read_text()), getattr(signal, trigger))

    assert process.wait(120) == 75
    failed = job.terminal_event()
    assert (failed["error"], failed["category"], failed["resumable"]) == (*[TRIGGERS[trigger]] * 2, True)
    assert job.server.posted("/terminal")[-1]["error"] == failed["error"]
    assert (job.out / "checkpoints" / f"step-{failed['step']:08d}.json").exists() == (failed["step"] > 0)
    assert failed["step"] < 400
