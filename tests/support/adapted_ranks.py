"""One rank of a run that trains a part of its model; started twice by ``test_shared_by_ranks.py``.

Arguments: rank, world size, folder of the store, directory of checkpoints, ``ddp`` or ``sharded``, which weights
checkpoints hold. Trains four steps, or two more than the newest checkpoint, whose weights it is given then; the whole
weights at the end go into ``rank<r>.pt``.
"""

import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from adapted_model import Adapted
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from rank_environment import Ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from genlight.callbacks.checkpoint import Checkpoint, newest_valid


class OnRanks(Adapted):
    """Under `ModelParallelStrategy` its trained part is sharded, and one frozen layer."""

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.up.weight, DTensor):
            for part in (self.up, self.down, self.base[3]):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


def strategy_of(rank, world_size, what):
    environment = Ranks(rank, world_size)
    if what == "ddp":
        return DDPStrategy(cluster_environment=environment, process_group_backend="gloo")
    strategy = ModelParallelStrategy(world_size, 1, process_group_backend="gloo")
    strategy.cluster_environment = environment
    return strategy


def main(rank, world_size, folder, directory, what, weights):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    record, _ = newest_valid(directory)
    trainer = pl.Trainer(
        strategy=strategy_of(rank, world_size, what),
        accelerator="cpu",
        devices=world_size,
        max_steps=4 if record is None else record.step + 2,
        callbacks=[Checkpoint(directory, every_n_steps=2, keep_last=None, weights=weights)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = OnRanks()
    loader = torch.utils.data.DataLoader(torch.ones(80, 64), batch_size=4)
    trainer.fit(module, loader, ckpt_path=None if record is None else record.path)
    whole = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in module.state_dict().items()}
    torch.save(whole, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7])
