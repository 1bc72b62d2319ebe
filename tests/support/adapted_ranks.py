"""One rank of a run that trains a part of its model; started twice by ``test_shared_by_ranks.py``.

Arguments: rank, world size, folder of the store, directory of checkpoints, ``ddp`` or ``sharded``, and the
weights that checkpoints hold. Trains four steps, or two more than the newest checkpoint, starting with its weights. The
full final weights go into ``rank<r>.pt``.
"""

import sys

import torch
from adapted_model import Adapted
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from genlight.callbacks.checkpoint import Checkpoint, newest_valid
from support.rank import Rank


class OnRanks(Adapted):
    """Under `ModelParallelStrategy` its trained part is sharded, and one frozen layer."""

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.up.weight, DTensor):
            for part in (self.up, self.down, self.base[3]):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


def main(rank, directory, what, weights):
    record, _ = newest_valid(directory)
    saver = Checkpoint(directory, every_n_steps=2, keep_last=None, weights=weights)
    trainer = rank.trainer(saver, strategy=what, max_steps=4 if record is None else record.step + 2)
    module = OnRanks()
    loader = torch.utils.data.DataLoader(torch.ones(80, 64), batch_size=4)
    trainer.fit(module, loader, ckpt_path=None if record is None else record.path)
    whole = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in module.state_dict().items()}
    torch.save(whole, rank.folder / f"rank{rank.number}.pt")


if __name__ == "__main__":
    me = Rank.of_command_line()
    with me.group():
        main(me, *sys.argv[4:7])
