"""The training loop, as a Lightning loop.

Lightning has no public loop class since 2.0, so two protected ones are subclassed. Their protected names come from
`genlight.callbacks.lightning_internals`; if a release of Lightning lacks one, the import of that module fails.

One epoch, with the hooks in Lightning's order::

    on_train_start; on_new_training_run
    a stop was requested?  raise TrainingCanceled
    for every epoch:
        on_train_epoch_start
        while global_step < max_steps:
            raw = next(batches)                              # never after the last step
            callbacks, module, strategy: on_train_batch_start(raw)       # -1 from the module ends the epoch
            batch = prepare_batch(raw); result = train_step(batch)
            global_step += 1
            callbacks, module: on_train_batch_end            # cadences: metrics, checkpoint, samples
            on_module_batch_end                              # if the module has an on_train_batch_end
            on_mb_end
            `Recover` requested it?  on_roll_back_due, which resets global_step to a checkpoint's
            a stop was requested?  raise TrainingCanceled (a validation that was due runs after the resume)
            validation, if it is due and a validation loader and a `validation_step` exist
            pause for `backoff_seconds`
        on_train_epoch_end; on_train_phase_end; on_epoch_end
    on_train_end; on_training_end

A hook that is not overridden is not called. ``trainer.global_step`` is the number of completed steps, whatever
optimizers do.

Where this differs from Lightning's own loop:

- Raw batches go to ``prepare_batch`` as the loader made them: hooks that transfer batches are not called.
- Listeners of the hooks of a step are looked up when an epoch begins: a callback that is added, removed or changed
  within an epoch counts from the next epoch on.
- No batch is fetched ahead. So the last batch of a loader without length has ``is_last_batch`` False, and its epoch is
  validated when the loader has ended, unless the step limit ends the run first.
- A list of batches is refused: Lightning treats each batch in it as a loader.
- A run without steps left to do starts and ends, with `on_train_start` and `on_train_end`.
- A resumed run continues after any step with the next batches, epochs and validations of the original run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from typing_extensions import override

from ...callbacks.checkpoint.loader_position import set_up_data, skip_to_next_epoch
from ...callbacks.checkpoint.policy import savers_of
from ...callbacks.checkpoint.positioned_loader import with_position
from ...callbacks.hook.events import fire, run_state_of
from ...callbacks.lightning_internals import (
    DataFetcher,
    FitLoop,
    PrefetchDataFetcher,
    load_loader_states,
    share_data_source,
)
from ..contract.exceptions import InputError
from .epoch_loop import ContractEpochLoop, LoggedInSteps, counts_of, start_after
from .hosted_trainer import HostedTrainer

log = logging.getLogger(__name__)


def install_loop(trainer: pl.Trainer, hosted: HostedTrainer, *, start_step: int = 0) -> ContractFitLoop:
    """Replace the fit loop of `trainer` by ours, with the limits and data sources of the old one.

    The module's ``setup("fit")`` calls this. By then Lightning has parsed the trainer's limits and attached the data,
    and it has not restored the state of its loops yet.
    """
    old = trainer.fit_loop
    if isinstance(old, ContractFitLoop):
        old.hosted = old.epoch_loop.hosted = hosted
        old.epoch_loop.step_in_progress = None
        old.data_exhausted = old.has_ended = False
        run_state_of(trainer).stop_reason = None  # a reason that is still set belongs to the previous fit
        old.epoch_loop._results = LoggedInSteps(hosted)
        return old
    if old._combined_loader is not None:  # the caller has read the number of batches; end the workers of the loaders
        old._combined_loader.reset()
    loop = ContractFitLoop(trainer, hosted, min_epochs=old.min_epochs, max_epochs=old.max_epochs)
    loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = old.min_steps, old.max_steps
    loop.epoch_loop.val_loop = old.epoch_loop.val_loop
    share_data_source(loop, old)
    trainer.fit_loop = loop
    start_after(trainer, start_step)
    return loop


class ContractFitLoop(FitLoop):
    """Runs epochs until the contract's steps are done."""

    epoch_loop: ContractEpochLoop
    restarted_mid_epoch: bool = False
    """Whether an earlier attempt began this epoch and called its ``on_train_epoch_start``."""
    raises_stops = True
    """This loop raises `TrainingCanceled` itself, once every callback has seen the step after which the run stops.

    `is_own_loop` recognizes genlight's loop by this attribute."""

    def __init__(
        self, trainer: pl.Trainer, hosted: HostedTrainer, *, min_epochs: int | None, max_epochs: int | None
    ) -> None:
        self._fetcher: DataFetcher | None = None
        super().__init__(trainer, min_epochs, max_epochs)
        self.hosted = hosted
        self.epoch_loop = ContractEpochLoop(trainer, hosted)
        self.data_exhausted = False
        self.has_ended = False
        """Whether the run has ended as planned."""

    @property
    def _data_fetcher(self) -> DataFetcher | None:
        return self._fetcher

    @_data_fetcher.setter
    def _data_fetcher(self, fetcher: DataFetcher | None) -> None:
        # Lightning fetches one batch ahead from a loader without length, to know which batch is the last. The position
        # of such a loader would then be ahead of the last trained batch, and a resume would lose one.
        if isinstance(fetcher, PrefetchDataFetcher):
            fetcher.prefetch_batches = 0
        self._fetcher = fetcher

    @override
    def setup_data(self) -> None:
        set_up_data(self, super().setup_data)
        if self._combined_loader is not None:
            _refuse_batches(self._combined_loader.iterables, self._combined_loader.flattened)

    @override
    def _load_combined_loader_states(self) -> None:
        if self._combined_loader is not None:  # replace loaders now: Lightning makes their iterators next
            loaders = self._combined_loader.flattened
            positioned = [with_position(loader) for loader in loaders]
            if any(new is not old for new, old in zip(positioned, loaders, strict=True)):
                self._combined_loader.flattened = positioned
        # Lightning loads states only within an epoch, but a loader that counts epochs needs its state between them too.
        if self._combined_loader_states_to_load and self._combined_loader is not None:
            load_loader_states(self._combined_loader, self._combined_loader_states_to_load)
            self._combined_loader_states_to_load = []
            if self.epoch_loop.batch_progress.is_last_batch and not self.epoch_loop.loader_ended:
                # The epoch ended before the loader raised StopIteration, for example because its length is known. So
                # advance loaders that count their epochs themselves.
                skip_to_next_epoch(
                    loader
                    for loader in self._combined_loader.flattened
                    if hasattr(loader, "load_state_dict") and not hasattr(loader, "begin_epoch")
                )

    @override
    def reset(self) -> None:
        """Continue at the place of the restored counters: within an epoch, or after one."""
        torch.set_grad_enabled(True)
        if not self._loaded_from_state_dict:
            return
        counts = counts_of(self.epoch_progress)
        is_over = self.epoch_loop.exhausted and counts[0].processed == counts[0].started
        self.restarted_mid_epoch = counts[0].started > 0 and not is_over
        self.epoch_loop.restarting = self.restarted_mid_epoch
        for counters in counts:
            if self.restarted_mid_epoch:
                # If the step limit ended the run, Lightning has counted this epoch as completed, though data was left.
                counters.processed = counters.completed = counters.started - 1
            else:
                counters.ready = counters.started = counters.completed = counters.processed

    @property
    def done(self) -> bool:
        """Whether to leave the loop."""
        return self.data_exhausted or bool(super().done)

    @property
    def skip(self) -> bool:
        """Whether to skip the run completely; a run without steps left to do still starts and ends."""
        return self.trainer.limit_train_batches == 0

    @override
    def reset_restart_stage(self) -> None:
        self.restarted_mid_epoch = False

    @property
    def stopped(self) -> str | None:
        """Why training ended before its step limit: ``should_stop``, ``data_exhausted``, or None."""
        if not self.has_ended or self.epoch_loop.global_step >= self.hosted.ctx.job.max_steps:
            return None
        return "should_stop" if self.trainer.should_stop else "data_exhausted"

    @override
    def on_run_start(self) -> None:
        if self.max_batches == 0 and self.epoch_loop.global_step == 0:
            raise _empty_source()
        self.hosted.restore()
        super().on_run_start()
        fire(self.trainer, "on_new_training_run")
        if any(saver.saves_anything for saver in savers_of(self.trainer)):
            self.hosted.state.check_storable()
        self.epoch_loop.raise_if_stopped()

    @override
    def _warn_if_modules_in_eval_mode(self) -> None:
        """Do nothing: frozen teachers and EMA copies are in eval mode on purpose."""

    @override
    def on_advance_start(self) -> None:
        super().on_advance_start()
        self._skip_to_current_epoch()
        # A feed resumed within an epoch on another number of ranks has another length in that epoch.
        length = None if self._combined_loader is None else sized_len(self._combined_loader)
        if length is not None:
            self.max_batches = length

    def _skip_to_current_epoch(self) -> None:
        """Tell feeds which epoch begins.

        After a resume, a feed cannot know whether the rest of its epoch is still to be trained or was cut off by
        ``limit_train_batches``.
        """
        if self.restarted_mid_epoch or self._combined_loader is None:
            return
        for loader in self._combined_loader.flattened:
            if hasattr(loader, "begin_epoch"):
                loader.begin_epoch(counts_of(self.epoch_progress)[0].processed)

    @override
    def advance(self) -> None:
        try:
            super().advance()
        except StopIteration as error:
            # Lightning's loop would end the run as if it were complete.
            raise RuntimeError("a hook raised StopIteration within an epoch") from error

    @override
    def on_advance_end(self) -> None:
        super().on_advance_end()
        fire(self.trainer, "on_train_phase_end")
        run_state_of(self.trainer).epoch = self.epoch_progress.current.completed
        fire(self.trainer, "on_epoch_end")
        batches = self.epoch_loop.batch_progress
        # `ready` also counts batches that the module's `on_train_batch_start` refused: such a source is not empty.
        if not self.epoch_loop.global_step and not batches.total.ready:
            raise _empty_source()
        # A source that allows only one pass stays empty, so endless epochs without a step would follow.
        self.data_exhausted = batches.current.ready == 0

    @override
    def teardown(self) -> None:
        super().teardown()
        self.hosted.close_router()

    @override
    def on_run_end(self) -> None:
        self.has_ended = True
        if self.stopped == "data_exhausted" and self.trainer.max_epochs != 0:
            log.warning(
                "the source of batches ended at step %d of %d; the run completes there",
                self.epoch_loop.global_step,
                self.hosted.ctx.job.max_steps,
            )
        self.hosted.feed_callback_metrics()
        super().on_run_end()
        fire(self.trainer, "on_training_end")


def _empty_source() -> InputError:
    return InputError("the source of batches is empty: not one step could be trained; check `dataset`")


def _refuse_batches(source: Any, loaders: Sequence[Any]) -> None:
    """Refuse a list of batches: Lightning treats each batch in it as a loader.

    Raises:
        InputError: Each of the `loaders` that Lightning finds in `source` is a batch.
    """
    kinds: tuple[type, ...] = (torch.Tensor, np.ndarray, dict)
    arrow = sys.modules.get("pyarrow")  # without an import of pyarrow there can be no batch of its types
    if arrow is not None:
        kinds += (arrow.RecordBatch, arrow.Table)
    if isinstance(source, list | tuple) and loaders and all(isinstance(loader, kinds) for loader in loaders):
        raise InputError(
            f"The data is a list of batches ({len(loaders)}, of type {type(loaders[0]).__name__}). Lightning treats "
            "each of them as a loader and iterates over all of them in parallel. Pass "
            "`torch.utils.data.DataLoader(batches, batch_size=None)` instead."
        )
