"""A fork server for the kill soak: torch is imported once, and every line on stdin forks a run that trains.

Each run resumes from the newest valid checkpoint of its directory, draws from every random source, saves
asynchronously after every step and exits 0 when all steps are done. Prints the pid of each run.
"""

import hashlib
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch

from genlight.callbacks.checkpoint import RecordMeta, capture_rng, load, newest_valid, restore_rng, sweep
from genlight.callbacks.checkpoint.checkpoint_io import DurableCheckpointIO, SaveRequest
from genlight.callbacks.checkpoint.commit import delete_checkpoint
from genlight.callbacks.checkpoint.retention import Retention, to_delete
from genlight.callbacks.checkpoint.selection import list_checkpoints

STEPS = 20


def train(directory):
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    plugin = DurableCheckpointIO(asynchronous=True)
    step = resume(directory, model, optimizer)
    while step < STEPS:
        scale = random.random() + np.random.random()
        loss = (model(torch.randn(4, 8)) * scale).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        save(plugin, directory, model, optimizer, step)
    plugin.teardown()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    (directory / "digest").write_text(digest)


def resume(directory, model, optimizer):
    sweep(directory)
    record, warnings = newest_valid(directory)
    assert not warnings, warnings
    if record is None:
        return 0
    loaded = load(record.path)
    model.load_state_dict(loaded["state_dict"])
    optimizer.load_state_dict(loaded["optimizer_states"][0])
    restore_rng(loaded["genlight"]["rng"])
    return record.step


def save(plugin, directory, model, optimizer, step):
    def keep_two(_):
        records = [listed.record for listed in list_checkpoints(directory) if listed.record is not None]
        for record in to_delete(records, Retention()):
            delete_checkpoint(record.path)

    path = directory / f"step-{step:08d}.json"
    plugin.expect(path, SaveRequest(RecordMeta(step=step, run_id="soak"), on_durable=keep_two))
    checkpoint = {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "genlight": {"rng": capture_rng()},
    }
    plugin.save_checkpoint(checkpoint, path)


def serve():
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            train(Path(line.strip()))
            os._exit(0)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
