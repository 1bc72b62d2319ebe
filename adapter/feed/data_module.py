"""The feed as Lightning data modules: from files, from a function, or from a list of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from lightning.pytorch import LightningDataModule

from ..contract.exceptions import InputError
from ..contract.types import StepContext, TrainingJobSpec
from .arrow_feed import ArrowFeed, import_function

_TRAINING_OPTIONS = ("shuffle", "seed", "drop_last", "shuffle_window")
"""Options of `ArrowFeed` that do not apply to validation data."""


class _FeedDataModule(LightningDataModule, ABC):
    """Keeps one feed of this rank for the run, because the feed holds the position."""

    def __init__(self) -> None:
        super().__init__()
        self._train: Any = None
        self._val: ArrowFeed | None = None

    @abstractmethod
    def _make_feed(self) -> Any:
        """Return a feed of this rank that starts at the first row."""

    def train_dataloader(self) -> Any:
        """Return the feed of this rank; the same one until the next `setup`."""
        if self._train is None:
            self._train = self._make_feed()
        return self._train

    @property
    def feed(self) -> Any:
        """The feed of the run."""
        return self.train_dataloader()

    def _share(self) -> dict[str, Any]:
        """Return the share of this rank as arguments of `ArrowFeed`."""
        trainer = self.trainer
        return {"rank": trainer.global_rank, "world_size": trainer.world_size} if trainer else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training feed, if it is an `ArrowFeed`.

        Lightning also saves the position with the loader, but restores it only within an epoch, and only after it has
        read ``len(feed)``, the number of steps.
        """
        return {"train": self._train.state_dict()} if isinstance(self._train, ArrowFeed) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the position, if there is a training feed."""
        if isinstance(self._train, ArrowFeed) and "train" in state_dict:
            self._train.load_state_dict(state_dict["train"])

    def teardown(self, stage: str) -> None:
        """Stop reading and close files."""
        for feed in (self._train, self._val):
            if isinstance(feed, ArrowFeed):
                feed.close()

    def on_exception(self, exception: BaseException) -> None:
        """Stop reading after a failure, too."""
        self.teardown("fit")


class ArrowDataModule(_FeedDataModule):
    """Parquet files as training batches of this rank.

    An epoch of the Trainer is one pass over the data, so ``max_epochs`` and ``max_steps`` decide how long it trains;
    every Lightning checkpoint contains the position and restores it in the middle of an epoch.

    Args:
        parquet_paths: Paths, folders, patterns or URLs of Parquet files.
        val_paths: Files of the validation data, read in order; None means no validation.
        options: Options of `ArrowFeed`; order and `drop_last` apply only to the training data.

    Raises:
        ValueError: An argument is out of range, or `collate` cannot be imported.
        TypeError: An argument has the wrong type, or the option does not exist.
    """

    def __init__(
        self, parquet_paths: str | Sequence[str], *, val_paths: str | Sequence[str] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._paths, self._val_paths = parquet_paths, val_paths
        # Check the options now, not only in `setup`. LightningCLI reads the options from this call.
        ArrowFeed(parquet_paths, rank=0, world_size=1, epochs=None, filesystem=None, **options)
        self._training = {name: options.pop(name) for name in _TRAINING_OPTIONS if name in options}
        self._options = options
        if val_paths is None:
            # Lightning expects data from an overridden method, and warns if it returns none.
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    def setup(self, stage: str) -> None:
        """Make the feeds again and read the metadata of all files.

        Raises:
            InputError: Lists every error that the metadata shows.
        """
        if stage == "fit":
            self._train = self._make_feed()
            self._train.check()
        if self._val_paths is not None:
            self._val = self._feed_of(self._val_paths)
            self._val.check()

    def _make_feed(self) -> ArrowFeed:
        return self._feed_of(self._paths, **self._training)

    def val_dataloader(self) -> ArrowFeed:
        """Return one pass over the validation data; without `val_paths`, Lightning's own method replaces this one."""
        if self._val is None:
            self.setup("validate")
        assert self._val is not None
        return self._val

    def _feed_of(self, paths: str | Sequence[str], **options: Any) -> ArrowFeed:
        return ArrowFeed(paths, **self._share(), **self._options, **options)


class FunctionDataModule(_FeedDataModule):
    """The data that a function returns, as training batches of this rank; `feed_of` says what it may return.

    Args:
        function: A function of `ctx`, or of nothing, or its name as ``module:function``.
        options: Options of `ArrowFeed`, for rows that are not yet in batches: `batch_size`, `shuffle`, `seed`,
            `drop_last`, `workers`, `collate`, `pin_memory`, ….

    Raises:
        ValueError: An option is out of range, or a name cannot be imported.
        TypeError: `function` is not a function, or the option does not exist.
    """

    def __init__(self, function: str | Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self._function = import_function(function, "data")
        ArrowFeed((), rank=0, world_size=1, **options)  # check the options now
        self._options = options
        self._context: StepContext | None = None

    def use_context(self, ctx: StepContext) -> None:
        """Pass `ctx`, the context of this rank, to the function; without this call, it gets a context without a job."""
        self._context = ctx

    def _make_feed(self) -> Any:
        from .user_data import feed_of  # loads torch's data loaders

        return feed_of(self._function, self._context or self._context_without_job(), self._options)

    def _context_without_job(self) -> StepContext:
        job = TrainingJobSpec(run_id="local", max_steps=0)
        device = {"device": str(self.trainer.strategy.root_device)} if self.trainer else {}
        return StepContext(job, **device, **self._share())  # type: ignore[arg-type]


class MockDataModule(_FeedDataModule):
    """A list of batches, shared among the ranks: step k takes the next `world_size` of them; for tests and dry runs.

    Args:
        batches: Raw batches as the trainer's ``prepare_batch`` takes them.

    Raises:
        InputError: There are fewer batches than ranks; raised when the data is first requested.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__()
        self._batches = list(batches)

    def _make_feed(self) -> ArrowFeed:
        world_size = self.trainer.world_size if self.trainer else 1
        if len(self._batches) < world_size:
            raise InputError(f"{len(self._batches)} mock batches for {world_size} ranks. Give at least one for each.")
        return _MockFeed(self._batches, **self._share())


class _MockFeed(ArrowFeed):
    """A feed whose batches can also be indexed, as in the older runtime."""

    def __init__(self, batches: list[Any], **share: Any) -> None:
        from .user_data import DatasetSource  # loads torch's data loaders

        super().__init__(DatasetSource(batches), batch_size=1, collate=itemgetter(0), **share)
        self._listed = batches

    def __getitem__(self, step: int) -> Any:
        """Return the batch of this rank in a step."""
        return self._listed[self.rank :: self.world_size][: len(self)][step]
