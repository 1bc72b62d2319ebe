"""One rank of a data-parallel run of plain Lightning; started twice by ``test_two_ranks.py``.

Arguments: rank, world size, folder of the store, directory of checkpoints, what to do. Every rank draws its own dropout
and its own data, so that a resume is exact only if each gets its own random state back.
"""

import contextlib
import random
import sys

import lightning.pytorch as pl
import torch

from genlight.callbacks.checkpoint import Checkpoint, newest_valid
from support.rank import Rank

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


def main(rank, directory, what):
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(rank.number)
    random.seed(rank.number)
    checkpoint = Checkpoint(directory, save_final=False)
    others = [KillAfterSave(checkpoint)] if what == "kill" else []
    resume_from = newest_valid(directory)[0].path if what == "resume" else None
    with contextlib.suppress(Killed):
        rank.trainer(*others, checkpoint, max_steps=STEPS).fit(net, [0] * STEPS, ckpt_path=resume_from)
    torch.save(net.state_dict(), rank.folder / f"rank{rank.number}.pt")


if __name__ == "__main__":
    me = Rank.of_command_line()
    with me.group():
        main(me, *sys.argv[4:6])
