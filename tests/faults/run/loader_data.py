"""Data modules with a `DataLoader` of torch and worker processes."""

import signal
from pathlib import Path

import lightning.pytorch as pl
from fault_trainer import Faulty
from torch.utils.data import DataLoader


class OwnLoader(pl.LightningDataModule):
    """A loader of 4,000 items; with `gives_up`, its workers restore the default handler of SIGTERM and end on it."""

    def __init__(self, method: str = "fork", persistent: bool = False, gives_up: bool = False):
        super().__init__()
        # A spawned worker imports for seconds, so there is only one.
        self.options = {
            "num_workers": 2 if method == "fork" else 1,
            "multiprocessing_context": method,
            "persistent_workers": persistent,
        }
        self.options["worker_init_fn"] = give_up if gives_up else None

    def train_dataloader(self):
        return DataLoader(range(4000), batch_size=None, **self.options)


def give_up(worker):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Prepared(OwnLoader):
    """Waits while data is prepared."""

    def prepare_data(self):
        trainer = Faulty()
        trainer.rank = 0
        trainer.hold(60.0)


class MarksStart(OwnLoader):
    """Makes the file ``reached-0`` in its constructor, before the ranks meet."""

    def __init__(self):
        super().__init__()
        Path("reached-0").touch()
