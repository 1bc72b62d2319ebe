"""Train steps of a run again, in a scratch folder, and compare them with the witness and the checkpoints of the run.

Rank 0 is this process; Lightning starts the others. The folder of the run is only read, and nothing is uploaded.
"""

from __future__ import annotations

import bdb
import itertools
import os
import pdb  # noqa: T100  # an option opens the debugger
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from ...callbacks.checkpoint import list_checkpoints, newest_valid
from ...callbacks.checkpoint.format.record import CheckpointRecord
from ...callbacks.checkpoint.policy import savers_of
from ...callbacks.checkpoint.selection import folder_of_checkpoints
from ...callbacks.hook.events import callbacks_of, run_state_of
from ...callbacks.lightning_internals import checkpoint_connector
from ...callbacks.rank_channel import Channel
from ...callbacks.witness.entry import (
    HINTS,
    Entry,
    Key,
    Recorded,
    StepDifference,
    compare,
    describe_steps,
    file_of_rank,
    limit_between,
    read_witness,
    summarize,
)
from ...callbacks.witness.recording import Sources, read_batch
from ...callbacks.witness.state import compare_with_checkpoint
from ...callbacks.witness.witness import facts_of_attempt
from ..check.isolation import quiet
from ..contract.exceptions import TrainingCanceled, UsageError
from ..helpers import seed_everything
from ..inputs.materialize import materialize_inputs
from ..job.config import JOB_NAME, RunConfig, read_job, resolve_run_config
from ..module.module import ContractModule
from ..module.plugin_loading import make_trainer, on_sys_path
from ..run.report import working_directory
from ..run.training import import_seeded, prepare_training
from .rehearsal import WITHOUT_EFFECTS, environment_of_rehearsal

_ALONE = (
    *WITHOUT_EFFECTS,
    "resume_checkpoint_path=null",
    "inputs.resume_checkpoint_ref=null",
    *(f"callbacks.{name}=false" for name in ("JobProgress", "SystemMonitor", "WatchHangs", "WatchNonfinite")),
)
"""Overrides of the job. The removed callbacks change no numbers, but would report, end or disturb the repetition."""


@dataclass(frozen=True)
class Traces:
    """The checkpoints and witnesses that a run has left in its folder."""

    folder: Path
    checkpoints: Path
    records: Mapping[int, CheckpointRecord]
    """Its checkpoints that can be read, by step."""
    witness: Mapping[int, Recorded]
    """The entries of each rank."""
    limits: str
    """Why steps cannot be compared, if that is known."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts about the newest attempt that affect exact numbers; empty without a witness."""
        newest = next(iter(self.witness.values()), None)
        return {} if newest is None else newest.header.attempts[max(newest.header.attempts)]


def read_traces(folder: Path) -> Traces:
    """Read the traces of the run in `folder`, which need not have a job file."""
    checkpoints = folder_of_checkpoints(folder) or folder
    listed = [each.record for each in reversed(list_checkpoints(checkpoints)) if each.record is not None]
    witness, limits = {}, []
    for rank in itertools.count():
        path = file_of_rank(checkpoints, rank)
        try:
            if (recorded := read_witness(path)) is None:
                break
            witness[rank] = recorded
            limits += [f"{path}: its end is torn"] if recorded.is_torn else []
        except ValueError as error:
            limits.append(f"{path}: {error}")
    newest = max(listed, key=lambda record: record.step).run_id if listed else ""
    records = {record.step: record for record in listed if record.run_id == newest and not record.is_old}
    return Traces(folder, checkpoints, records, witness, "; ".join(limits))


@dataclass(frozen=True)
class PastRun:
    """A run of ``genlight run``, to be trained again."""

    traces: Traces
    config: RunConfig
    """Its job, with all files of a repetition in a scratch folder."""
    own_start: str | None
    """The checkpoint or reference that its job names as the start; None if the run began at step 0."""
    here: Sequence[Path]
    """Folders with its modules."""
    target: Any
    """Its trainer class, imported."""


def open_run(traces: Traces, scratch: Path, overrides: Sequence[str] = ()) -> PastRun:
    """Return a run, to be trained again.

    Args:
        traces: The run.
        scratch: A folder for everything that the training writes.
        overrides: Changes of its job, each as for ``--set``.

    Raises:
        UsageError: It has no job of genlight.
        StartupContractError: Its job cannot be used.
    """
    run = traces.folder
    if (job := read_job(run)) is None:
        text = f"{run} has no {JOB_NAME} of genlight. Only a run of `genlight run` can be replayed: a fit keeps no job."
        raise UsageError(text)
    config = resolve_run_config(
        spec_path=run / JOB_NAME,
        overrides=[*overrides, *_ALONE, f"artifacts_dir={scratch}"],
        environ=environment_of_rehearsal(os.environ),
    )
    here = [path for path in (config.spec_dir, working_directory()) if path is not None]
    own_start = job.get("resume_checkpoint_path") or job.get("inputs", {}).get("resume_checkpoint_ref")
    return PastRun(traces, config, own_start, here, import_seeded(config, here))


def start_before(run: PastRun, step: int) -> CheckpointRecord | None:
    """Return the newest checkpoint of a run before `step`, or None for its beginning.

    Raises:
        UsageError: There is no such checkpoint, and the beginning cannot be repeated.
    """

    def is_earlier(record: CheckpointRecord) -> bool:
        return record.step < step and record.run_id in ("", run.config.run_id) and not record.is_old

    record, warnings = newest_valid(run.traces.checkpoints, accept=is_earlier, knows_types=True)
    if record is None and (run.own_start or run.config.seed is None):
        text = "; ".join([f"there is no checkpoint before step {step} to replay from", *warnings])
        reason = f"it began with {run.own_start}" if run.own_start else "its job has no seed"
        raise UsageError(
            f"{text}, and the beginning of {run.traces.folder} cannot be repeated: {reason}. With "
            "`checkpoints.keep_last: 0` a run keeps all checkpoints."
        )
    return record


class Done(BaseException):
    """Ends the training after the last step."""


class Repetition(pl.Callback):
    """Compares the steps that are trained again with the witness and the checkpoints of the run.

    Args:
        run: The run.
        last: The step after which the training ends.
        with_debugger: Whether to open the debugger after an exception.
    """

    hints: Mapping[str, str] = HINTS

    def __init__(self, run: PastRun, last: int, *, with_debugger: bool = False) -> None:
        self.run, self.last, self.with_debugger = run, last, with_debugger
        self.running_step: int | None = None
        self.entry: Entry | None = None
        """The digests of the newest batch that was read here, as an entry of a witness."""
        self.difference: StepDifference | None = None
        """The first difference from the run."""
        self._equal: Sequence[int] = ()
        """The steps that are the same as in the run."""
        self._limits = run.traces.limits if 0 not in run.traces.witness else ""
        """Why steps cannot be compared, if that is known."""
        self._compares_states = True
        """Whether the state must equal the run's checkpoints: with other ranks it sees other rows, and another device
        rounds differently."""
        self._expected: dict[Key, Entry] = {}
        """The entries of this rank in the witness of the run."""
        self._facts: dict[int, Mapping[str, Any]] = {}
        """Facts that affect exact numbers, by attempt of the run; 0 is this repetition."""
        self._sources: Sources | None = None

    def is_read(self, step: int) -> bool:
        """Whether to read the batch of a step even if the witness of the run has no entry for it."""
        return step == self.last

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # Only now are callbacks in their final order. This one must directly follow the saver, which records the
        # witness, because a callback in between may draw random numbers.
        callbacks = callbacks_of(trainer)
        callbacks.remove(self)
        callbacks.insert(callbacks.index(savers_of(trainer)[0]) + 1, self)
        self._channel, now = Channel(), facts_of_attempt(trainer)
        if not self.run.traces.witness:
            return
        can_compare, limit = limit_between(self.run.traces.facts, now)
        self._compares_states = can_compare and not limit
        self._limits = limit or self._limits
        recorded = self.run.traces.witness.get(self._channel.rank)
        if recorded is not None and can_compare:
            self._expected = {
                key: entry for key, entry in recorded.entries.items() if trainer.global_step < key[0] <= self.last
            }
            self._facts = {**recorded.header.attempts, 0: now}

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.running_step = pl_module.completed_steps + 1

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = pl_module.completed_steps
        key = (step, trainer.current_epoch, batch_idx)
        earlier = self._expected.get(key)
        if earlier is not None or self.is_read(step):
            self._sources = self._sources or Sources.find(trainer, pl_module)
            self.entry = read_batch(trainer, outputs, batch, key, 0, self._sources).entry()
            if earlier is not None and self.difference is None:
                rank, facts, hints = self._channel.rank, self._facts, self.hints
                self._note(step, compare(earlier, self.entry, rank=rank, facts=facts, hints=hints))
        record = self.run.traces.records.get(step)
        if record is None or record.final or not self._compares_states:
            return
        state = checkpoint_connector(trainer).dump_checkpoint(weights_only=False)
        proof = compare_with_checkpoint(state, record, self._channel)
        if proof is not None and self.difference is None:
            self._note(step, proof.difference)

    def _note(self, step: int, difference: StepDifference | None) -> None:
        self.difference = difference
        if difference is None and step not in self._equal:
            self._equal = (*self._equal, step)

    def on_mb_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """End the training once all callbacks have seen the last step. Collective."""
        if pl_module.completed_steps == self.last:
            if (proof := summarize(self._channel.gather_everywhere((self._equal, self.difference)))) is not None:
                self._equal, self.difference = proof.steps, proof.difference
            self.conclude(pl_module)
            raise Done

    def conclude(self, module: Any) -> None:
        """Called after the last step, to read the state; does nothing by default."""

    @property
    def is_same(self) -> bool | None:
        """Whether the steps have the same bits as in the run; None if none could be compared."""
        return self.difference is None if self._equal or self.difference else None

    @property
    def text(self) -> str:
        """The comparison with the run in words."""
        same = ""
        if self._equal:
            named, has, compared = describe_steps(self._equal)
            same = f"{named}{compared} {has} the same bits as in the run"
        if (found := self.difference) is not None:
            place = f"step {found.step}{f' of rank {found.rank}' if found.rank else ''}"
            return f"{place} is not the same as in the run: {found.text}{same and f'. Before it, {same}'}"
        if same:
            return f"{same}{self._limits and f'; {self._limits}'}"
        return f"not compared: {self._limits or 'the witness of the run has no entry for these steps'}"


def repeat(run: PastRun, record: CheckpointRecord | None, repetition: Repetition) -> Exception | None:
    """Train from a checkpoint of a run, or from its beginning, until `repetition` ends it.

    Returns:
        The exception of a step, if one raised it.

    Raises:
        UsageError: The job needs FSDP 2, or the training ended before the last step.
        StartupContractError: The job cannot be used.
        KeyboardInterrupt: The user left the debugger.
    """
    with quiet(), on_sys_path(run.here):
        if run.config.seed is not None:
            seed_everything(run.config.seed)  # as `genlight run` does before it makes the class
        return _train(run.config, make_trainer(run.target), record, repetition)


def _train(config: RunConfig, plugin: Any, record: CheckpointRecord | None, repetition: Repetition) -> Exception | None:
    """Make the Lightning objects of the job, and train until `repetition` ends the training."""
    inputs = materialize_inputs(config)
    trainer, data = prepare_training(config, plugin, parquet_paths=[str(path) for path in inputs.parquet_paths])
    if isinstance(trainer.strategy, ModelParallelStrategy):
        raise UsageError(
            "the job shards its weights, and a replay does not. `--set lightning.strategy=ddp`, or `--set "
            "lightning.devices=1 --set lightning.strategy=auto`, replays it with complete weights, but not with the "
            "same bits."
        )
    handles, keep = inputs.model_handles(), config.resume.keep
    module = ContractModule(plugin, config.job, model_handles=handles, keep_on_resume=keep)
    run_state_of(trainer).run_id = config.run_id
    callbacks, savers = callbacks_of(trainer), savers_of(trainer)
    # A user's own checkpoint callback may write into the folder of the run, or remove files from it.
    callbacks[:] = [each for each in callbacks if each in savers or not isinstance(each, LightningCheckpoint)]
    callbacks.append(repetition)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=None if record is None else str(record.path))
    except Done:
        return None
    except (bdb.BdbQuit, TrainingCanceled):
        raise KeyboardInterrupt from None
    except Exception as error:
        if repetition.running_step is None:
            raise
        if repetition.with_debugger:
            pdb.post_mortem(error.__traceback__)
        return error
    raise UsageError(f"the replay ended after step {module.completed_steps}, before step {repetition.last}")
