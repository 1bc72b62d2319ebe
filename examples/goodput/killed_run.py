"""Train the digits, kill the run three times on the way, and show the use of its time.

python examples/goodput/killed_run.py          writes to runs/killed below the working directory
"""

import subprocess
import sys
import time
from pathlib import Path

from genlight.reporters import follow

DIGITS = Path(__file__).parents[1] / "digits"
RUN = Path("runs/killed")
EVENTS = RUN / "metrics" / "events.jsonl"
KILLS = (350, 650, 950)
"""Steps of the kills. A checkpoint is saved every 200 steps, so each kill costs up to that many."""
STEPS = 2000
"""So many steps that no attempt reaches the end before it is killed, however late the kill is."""
RESTART_S = 0.5
"""Seconds between a kill and the next start; a scheduler takes longer."""


def train():
    """Train to the end, from the newest checkpoint if there is one."""
    from lightning.pytorch import Trainer

    from genlight.adapter import ArrowDataModule, ContractModule, TrainingJobSpec
    from genlight.callbacks import Checkpoint, Goodput, LogMetrics
    from genlight.callbacks.checkpoint import newest_valid
    from genlight.reporters import EventLogger

    sys.path.insert(0, str(DIGITS))
    newest, _ = newest_valid(RUN / "checkpoints")
    job = TrainingJobSpec(run_id="killed", max_steps=STEPS, hyperparams={"width": 64, "depth": 2})
    trainer = Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[LogMetrics(10), Goodput(every_s=0.25), Checkpoint(RUN / "checkpoints", every_n_steps=200)],
        logger=EventLogger(EVENTS, run_id="killed"),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = ArrowDataModule(str(DIGITS / "digits.parquet"), batch_size=64, shuffle=True)
    trainer.fit(ContractModule("trainer:DigitsTrainer", job), data, ckpt_path=newest and str(newest.path))


def kill_at(process, step, attempt):
    """Kill `process` like a lost machine, once attempt number `attempt` has reached `step`."""
    attempts = 0
    for event in follow(EVENTS):
        attempts += event["event"] == "started"
        if attempts == attempt and event.get("step", 0) >= step:
            break
    else:
        raise SystemExit(f"attempt {attempt} ended by itself, with exit code {process.wait()}")
    process.kill()
    print(f"killed after step {event['step']}", flush=True)


def main():
    for attempt, step in enumerate((*KILLS, None), start=1):
        process = subprocess.Popen([sys.executable, __file__, "train"], stderr=subprocess.DEVNULL)
        if step is not None:
            kill_at(process, step, attempt)
            time.sleep(RESTART_S)
        elif process.wait():
            raise SystemExit(f"the last attempt ended with exit code {process.returncode}")
    subprocess.run([sys.executable, "-m", "genlight", "events", str(RUN), "--goodput"], check=True)


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
