"""One rank of a data-parallel run of plain Lightning; started twice by ``test_two_ranks.py``.

Arguments: rank, world size, folder of the store, directory of checkpoints, what to do. Every rank draws its own dropout
and its own data, so that a resume is exact only if each gets its own random state back.
"""

import contextlib
import random
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from rank_environment import Ranks

from genlight.callbacks.checkpoint import Checkpoint, newest_valid

STEPS = 7


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return (self.body(torch.randn(4, 4)) * random.random()).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Killed(Exception):
    pass


class KillAfterSave(pl.Callback):
    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == 3:
            self.checkpoint.save(trainer, pl_module, wait=True)
            raise Killed


def main(rank, world_size, folder, directory, what):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(rank)
    random.seed(rank)
    checkpoint = Checkpoint(directory, save_final=False)
    trainer = pl.Trainer(
        strategy=DDPStrategy(cluster_environment=Ranks(rank, world_size), process_group_backend="gloo"),
        accelerator="cpu",
        devices=world_size,
        max_steps=STEPS,
        callbacks=[KillAfterSave(checkpoint), checkpoint] if what == "kill" else [checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    resume_from = newest_valid(directory)[0].path if what == "resume" else None
    with contextlib.suppress(Killed):
        trainer.fit(net, [0] * STEPS, ckpt_path=resume_from)
    torch.save(net.state_dict(), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
