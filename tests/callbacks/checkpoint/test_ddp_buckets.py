"""A LightningModule resumed under torch's DDP on three ranks, whose sums depend on the order of addition."""

from pathlib import Path

import pytest
import torch

from genlight.callbacks import Checkpoint
from support.plain_module import Fits
from support.rank_processes import on_ranks

pytestmark = [pytest.mark.promise(name="resume"), pytest.mark.slow]


class Net(Fits):
    def training_step(self, batch, batch_idx):
        return super().training_step(torch.randn(7, 33), batch_idx)


def weights_after_nine_steps(rank, folder, path=None, **options):
    torch.manual_seed(0)
    net = Net(torch.nn.Sequential(*(torch.nn.Linear(33, 33) for _ in range(6))))
    torch.manual_seed(rank.number)
    saver = Checkpoint(folder, every_n_steps=4, keep_last=None)
    trainer = rank.trainer(saver, strategy=rank.strategy(**options), max_steps=9)
    trainer.fit(net, [torch.ones(1)] * 20, ckpt_path=path)
    return list(net.state_dict().values())


def whole_and_resumed(rank, folder, keeps_buckets):
    with rank.group("whole"):
        options = {"find_unused_parameters": keeps_buckets == "True"}
        whole = weights_after_nine_steps(rank, Path(folder, "a"), **options)
        path = str(Path(folder, "a", "step-00000004.json"))
        resumed = weights_after_nine_steps(rank, Path(folder, "b"), path, **options)
        return all(map(torch.equal, whole, resumed))


@pytest.mark.parametrize("keeps_buckets", [False, True])
def test_a_resume_is_bit_equal_or_says_that_it_is_not(tmp_path, keeps_buckets):
    are_equal, output = on_ranks(whole_and_resumed, tmp_path, tmp_path, keeps_buckets, world_size=3)

    assert are_equal == [keeps_buckets] * 3
    assert ("DDP sorts gradients" in output) != keeps_buckets
