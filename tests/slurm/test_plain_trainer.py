"""A plain Lightning trainer under srun, with another number of tasks on each node."""

import json
import sys

import pytest

pytestmark = [pytest.mark.promise(name="old names"), pytest.mark.slurm, pytest.mark.slow]

PROGRAM = """
import json, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl
import torch
from genlight.adapter import SlurmEnvironment

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, batch_idx):
        return (self.layer(torch.ones(1, 1)) * (self.global_rank + 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

environment = SlurmEnvironment()
net = Net()
trainer = pl.Trainer(
    accelerator="cpu", strategy="ddp", plugins=[environment], devices=environment.context.local_world_size,
    num_nodes=2, max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, [0])
place = [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size]
print(json.dumps([*place, net.layer.weight.item()]))
"""


def test_three_tasks_on_two_nodes_train_together(slurm, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    said = slurm.call("srun", "--nodes=2", "--ntasks=3", sys.executable, "train.py", cwd=tmp_path)

    lines = sorted(json.loads(line) for line in said.splitlines() if line.startswith("[") and line.endswith("]"))
    assert lines == [[0, 0, 0, 3, -2.0], [1, 1, 0, 3, -2.0], [2, 0, 1, 3, -2.0]]
