"""A data module whose loader is torch's own, with worker processes."""

import signal

import lightning.pytorch as pl
from torch.utils.data import DataLoader


class OwnLoader(pl.LightningDataModule):
    """`gives_up`: its workers end on SIGTERM, whatever was set up for them before."""

    def __init__(self, method: str = "fork", persistent: bool = False, gives_up: bool = False):
        super().__init__()
        self.options = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": persistent}
        self.options["worker_init_fn"] = give_up if gives_up else None

    def train_dataloader(self):
        return DataLoader(range(4000), batch_size=None, **self.options)


def give_up(worker):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
