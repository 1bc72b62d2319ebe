"""A plain LightningModule with our plugin, callbacks and logger in processes that are spawned or forked.

Not a test module: started as ``launched_by_copy.py STRATEGY FOLDER [plugin]``, because a process that is spawned
imports the script that started it.
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from genlight.callbacks import Checkpoint, DurableCheckpointIO, JobProgress, StopRequests, WatchHangs
from genlight.callbacks.checkpoint import load_weights
from genlight.reporters import EventLogger, read_events


def main(strategy: str, folder: Path, plugins: list[DurableCheckpointIO]) -> dict[str, object]:
    trainer = pl.Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_steps=4,
        logger=EventLogger(folder / "events.jsonl", run_id="copies"),
        callbacks=[Checkpoint(folder / "made", every_n_steps=2), JobProgress(), StopRequests(), WatchHangs(folder)],
        plugins=plugins,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=folder,
    )
    module = BoringModel()
    trainer.fit(module)
    assert trainer.checkpoint_callback is not None
    best = trainer.checkpoint_callback.best_model_path  # type: ignore[attr-defined]
    weights = load_weights(best)
    return {
        "best": best,
        "events": [event["event"] for event in read_events(folder / "events.jsonl")],
        "is_trained": all(torch.equal(weights[name], value) for name, value in module.state_dict().items()),
    }


if __name__ == "__main__":
    given = [DurableCheckpointIO(asynchronous=True)] if sys.argv[3:] == ["plugin"] else []
    sys.stdout.write("\nresult " + json.dumps(main(sys.argv[1], Path(sys.argv[2]), given)) + "\n")
