"""The feed as a Lightning data module, for LightningCLI and the stock Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from lightning.pytorch import LightningDataModule

from .arrow_feed import ArrowFeed
from .row_plan import Shard

__all__ = ["ArrowDataModule"]


class ArrowDataModule(LightningDataModule):
    """Parquet files as training batches of this rank.

    An epoch of the Trainer is one pass over the data, so ``max_epochs`` and ``max_steps`` decide how long it trains;
    the position goes into every Lightning checkpoint and is restored from it in the middle of an epoch.

    Args:
        parquet_paths: Paths, folders, patterns or URLs of Parquet files.
        batch_size: Rows a step and rank.
        readahead: Decoded chunks kept ready; 0 decodes in the training thread.
        columns: Columns to read; None means all.
        filters: Rows to keep, as `[[column, operator, value], …]`.
        shuffle: Another order in each epoch.
        seed: The order depends on this and the number of the epoch alone.
        drop_last: Leave out the rows of an epoch that do not fill a step of all ranks.
        shard: ``rows`` (all ranks decode everything and share each step) or ``row_groups`` (each decodes its own part).
        shuffle_window: Rows that are permuted among each other.
        val_paths: Files of the validation data, read in order; None means no validation.
        collate: What makes of a record batch what the module gets: None hands out the record batch, ``torch`` a
            dictionary of tensors, a callable or ``module:function`` its own result.
        workers: Processes that decode and collate; 0 does it in this process.
        pin_memory: Tensors lie in pinned memory; None means where there is an accelerator.
        copy_ahead: Tensors lie on the accelerator, copied while the step before trains; see `ArrowFeed`.

    Raises:
        ValueError: An argument is out of range, `filters` has another form, or `collate` cannot be imported.
        TypeError: An argument is of another type.
    """

    def __init__(
        self,
        parquet_paths: str | Sequence[str],
        *,
        batch_size: int = 32,
        readahead: int = 2,
        columns: Sequence[str] | None = None,
        filters: Sequence[Any] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        shard: Shard = "rows",
        shuffle_window: int = 65_536,
        val_paths: str | Sequence[str] | None = None,
        # The text first: jsonargparse would save it as an instance that cannot be serialized.
        collate: str | Callable[[pa.RecordBatch], Any] | None = None,
        workers: int = 0,
        pin_memory: bool | None = None,
        copy_ahead: bool = False,
    ) -> None:
        super().__init__()
        self._paths, self._val_paths = parquet_paths, val_paths
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "readahead": readahead,
            "columns": columns,
            "filters": filters,
            "shard": shard,
            "collate": collate,
            "workers": workers,
            "pin_memory": pin_memory,
            "copy_ahead": copy_ahead,
        }
        self._training: dict[str, Any] = {
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
            "shuffle_window": shuffle_window,
        }
        ArrowFeed(parquet_paths, **self._options, **self._training)  # refuses here what it would refuse in `setup`
        self._train: ArrowFeed | None = None
        self._val: ArrowFeed | None = None
        if val_paths is None:
            # Lightning takes any overridden method for a promise of data, and warns when it gives none. Not a bound
            # method: a data module that refers to itself, and the thread of its feed, would wait for the collector.
            self.val_dataloader = partial(LightningDataModule.val_dataloader, None)  # type: ignore[arg-type, method-assign]

    def setup(self, stage: str) -> None:
        """Make the feeds again and read the metadata of all files.

        Raises:
            InputError: Lists every error that metadata can tell.
        """
        if stage == "fit":
            self._train = self._feed(self._paths, per_epoch=True, **self._training)
            self._train.check()
        if self._val_paths is not None:
            self._val = self._feed(self._val_paths, epochs=1)
            self._val.check()

    @property
    def batch_size(self) -> int:
        """Rows a step and rank; a new value counts from the next batch on, also in the middle of an epoch."""
        size: int = self._options["batch_size"]
        return size

    @batch_size.setter
    def batch_size(self, rows: int) -> None:
        if rows == self.batch_size:
            return
        self._options["batch_size"] = rows
        train, self._train = self._train, None
        self._val = None
        if train is not None:
            position = train.state_dict()
            train.close()
            self._train = self._feed(self._paths, per_epoch=True, **self._training)
            self._train.load_state_dict(position)

    def train_dataloader(self) -> ArrowFeed:
        """The feed of this rank, the same object until the next `setup`: it carries the position."""
        if self._train is None:
            self.setup("fit")
        assert self._train is not None
        return self._train

    @property
    def feed(self) -> ArrowFeed:
        """The feed of the run."""
        return self.train_dataloader()

    def val_dataloader(self) -> ArrowFeed:
        """One pass over the validation data each time; does not exist without `val_paths`."""
        if self._val is None:
            self.setup("validate")
        assert self._val is not None
        return self._val

    def _feed(self, paths: str | Sequence[str], **options: Any) -> ArrowFeed:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return ArrowFeed(paths, rank=rank, world_size=world_size, **self._options, **options)

    def state_dict(self) -> dict[str, Any]:
        """The position of the training feed.

        Lightning also saves it with the loader, but restores that only after it has asked for the number of steps, and
        only within an epoch.
        """
        return {} if self._train is None else {"train": self._train.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the position, where there is training to be done."""
        if self._train is not None and "train" in state_dict:
            self._train.load_state_dict(state_dict["train"])

    def teardown(self, stage: str) -> None:
        """Stop reading and close files."""
        for feed in (self._train, self._val):
            if feed is not None:
                feed.close()
