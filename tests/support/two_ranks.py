"""One rank of a data-parallel run of plain Lightning; started twice by ``test_two_ranks.py``.

Arguments: rank, world size, folder of the store, directory of checkpoints, what to do. Every rank draws its own dropout
and its own data, also in its data workers, so that a resume is exact only if each gets its own random states back. An
update takes two batches; rank 1 uses one of the layers only in the second, and the run is left between the two.
"""

import contextlib
import random
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from genlight.callbacks.checkpoint import Checkpoint, newest_valid
from support.rank import Rank

STEPS = 7
BATCHES_A_STEP = 2


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.late = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        rows = torch.randn(4, 4) + batch
        loss = (self.body(rows) * random.random()).pow(2).mean()
        is_unused = self.global_rank == 1 and batch_idx % BATCHES_A_STEP == 0
        return loss if is_unused else loss + self.late(rows).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Noise(Dataset):
    def __len__(self):
        return 64  # eight batches an epoch, so that no window is cut

    def __getitem__(self, index):
        return torch.rand(4) + random.random() + index / 64


class HalfInOwnOrder(Sampler):
    """The rows of a rank, in an order that it draws by itself."""

    def __init__(self, rank):
        self.rows = list(range(rank, 64, 2))

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        random.shuffle(self.rows)
        return iter(self.rows)


class Killed(Exception):
    pass


class KillAfterSave(pl.Callback):
    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 3 * BATCHES_A_STEP + 1:
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
    sampler = HalfInOwnOrder(rank.number)  # one rank alone takes its half
    loader = DataLoader(Noise(), 4, sampler=sampler, num_workers=2, persistent_workers=True)
    with contextlib.suppress(Killed):
        strategy = rank.strategy(find_unused_parameters=True)
        settings = {"max_steps": STEPS, "accumulate_grad_batches": BATCHES_A_STEP, "strategy": strategy}
        trainer = rank.trainer(*others, checkpoint, **settings)
        trainer.fit(net, loader, ckpt_path=resume_from)
    torch.save(net.state_dict(), rank.folder / f"rank{rank.number}.pt")


if __name__ == "__main__":
    me = Rank.of_command_line()
    with me.group():
        main(me, *sys.argv[4:6])
