"""Data modules with a `DataLoader` of torch and worker processes."""

import lightning.pytorch as pl
from fault_trainer import Faulty
from torch.utils.data import DataLoader


class OwnLoader(pl.LightningDataModule):
    """A loader of 4,000 items."""

    def __init__(self, method: str = "fork", persistent: bool = False):
        super().__init__()
        # A spawned worker imports for seconds, so there is only one.
        self.options = {
            "num_workers": 2 if method == "fork" else 1,
            "multiprocessing_context": method,
            "persistent_workers": persistent,
        }

    def train_dataloader(self):
        return DataLoader(range(4000), batch_size=None, **self.options)


class Prepared(OwnLoader):
    """Waits while data is prepared."""

    def prepare_data(self):
        trainer = Faulty()
        trainer.rank = 0
        trainer.hold(60.0)
