"""Replay the steps of a run up to one of them, from the newest checkpoint before it, and show that step: ``replay``.

The job is trained in this process, in a scratch folder: the run's own folder is only read, and nothing is uploaded.
"""

from __future__ import annotations

import bdb
import contextlib
import copy
import json
import math
import os
import pdb  # noqa: T100  # the command has an option for it
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from ...callbacks.checkpoint import list_checkpoints, newest_valid
from ...callbacks.checkpoint.format.record import CheckpointRecord
from ...callbacks.checkpoint.policy import savers_of
from ...callbacks.checkpoint.selection import folder_of_checkpoints
from ...callbacks.finite import are_finite
from ...callbacks.hook.events import callbacks_of, run_state_of
from ...callbacks.witness.entry import (
    Difference,
    Entry,
    Key,
    Recorded,
    compare,
    describe_steps,
    file_of_rank,
    read_witness,
)
from ...callbacks.witness.recording import Sources, read_batch
from ...callbacks.witness.witness import facts_of_attempt
from ..check.batches import count_rows, describe_batch, take_rows
from ..check.isolation import quiet, where_raised
from ..check.snapshot import live_weights
from ..contract.exceptions import TrainingCanceled, UsageError
from ..helpers import seed_everything
from ..inputs.materialize import materialize_inputs
from ..job.config import JOB_NAME, RunConfig, read_job, resolve_run_config
from ..module.module import ContractModule
from ..module.plugin_loading import make_trainer, on_sys_path
from ..plumbing.redaction import safe_str
from ..run.report import working_directory
from ..run.training import import_seeded, prepare_training
from ..view.summary import summary_of
from .rehearsal import WITHOUT_EFFECTS, environment_of_rehearsal
from .step_view import RowSearch, SavedState, StepView, find_rows

_ALONE = (
    *WITHOUT_EFFECTS,
    "resume_checkpoint_path=null",
    "inputs.resume_checkpoint_ref=null",
    *(f"callbacks.{name}=false" for name in ("JobProgress", "SystemMonitor", "WatchHangs", "WatchNonfinite")),
)
"""Overrides of the job. These callbacks change no numbers, and would report, end or disturb the replay."""


@dataclass
class Replay:
    """The result of a replay."""

    step: int
    record: str
    """Name of the checkpoint that it started from."""
    is_same: bool | None = None
    """Whether the replayed steps have the same bits as those of the run; None if none could be compared."""
    witness: str = ""
    """The comparison in words."""
    error: str = ""
    """The exception that ended the replay, and its place."""
    rows: str = ""
    """Type and shape of the raw batch of the step."""
    digest: str = ""
    """Digest of that batch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    modules: Sequence[Mapping[str, Any]] = ()
    """Of each module its ``name`` and the norms of its ``output`` and ``gradient``, in the order of execution."""
    first_nonfinite: str = ""
    """The first value of the step that is not finite."""
    search: RowSearch | None = None
    """The search for the rows that make the step fail; None if the loss and all gradients are finite."""
    ids: Sequence[Any] = ()
    """The values of these rows in the column ``id``, if there is one."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object; a number that is not finite is a text."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str), parse_constant=str)
        return plain


class _Done(BaseException):
    """Ends the training after the replayed step."""


class _Observer(pl.Callback):
    """Compares steps with the witness of the run, and reads the last one.

    Args:
        result: Receives the results.
        recorded: The witness of the run.
        limits: Why steps cannot be compared, if that is known.
        with_debugger: Whether to open the debugger in ``train_step`` of the last step.
    """

    def __init__(self, result: Replay, recorded: Recorded | None, limits: str, *, with_debugger: bool) -> None:
        self.result, self.with_debugger = result, with_debugger
        self.running_step: int | None = None
        self._recorded, self._limits = recorded, limits
        self._expected: dict[Key, Entry] = {}
        self._facts: dict[int, Mapping[str, Any]] = {}
        self._equal: list[int] = []
        self._difference: Difference | None = None
        self._sources: Sources | None = None
        self._broken_by = 0
        """The first step after which a weight was not finite."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Callbacks are in their final order now. A later one may draw random numbers after the witness was taken.
        callbacks = callbacks_of(trainer)
        callbacks.remove(self)
        callbacks.insert(callbacks.index(savers_of(trainer)[0]) + 1, self)
        if self._recorded is None:
            return
        entries, facts, now = self._recorded.entries, self._recorded.header.attempts, facts_of_attempt(trainer)
        due = {key: entry for key, entry in entries.items() if trainer.global_step < key[0] <= self.result.step}
        before = facts.get(next(reversed(due.values())).attempt, {}) if due else now
        if before.get("ranks") != now["ranks"]:
            self._limits = f"the run had {before.get('ranks')} ranks, the replay has {now['ranks']}"
            return
        if before.get("device") != now["device"]:
            self._limits = f"losses are not compared, because {before.get('device')} and {now['device']} differ"
        self._expected, self._facts = due, {**facts, 0: now}

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.running_step = pl_module.completed_steps + 1
        if not self._broken_by and not are_finite(list(live_weights(pl_module.discovered).values())):
            self._broken_by = self.running_step - 1
        if self.running_step != self.result.step:
            return
        # A class may change a raw batch in place.
        self._raw = batch if isinstance(batch, pa.RecordBatch | pa.Table) else copy.deepcopy(batch)
        self.result.rows = describe_batch(batch)
        self._before: SavedState | None = None
        with contextlib.suppress(Exception):  # objects of users may raise anything, and only the search needs it
            self._before = SavedState(pl_module.discovered)
        self._view = StepView(pl_module.discovered)
        self._watching = self._view.watching()
        self._watching.__enter__()
        if self.with_debugger:
            _open_debugger_in(pl_module.plugin)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        key = (pl_module.completed_steps, trainer.current_epoch, batch_idx)
        earlier = self._expected.get(key)
        if earlier is None and key[0] != self.result.step:
            return
        self._sources = self._sources or Sources.of(trainer, pl_module)
        entry = read_batch(trainer, outputs, batch, key, 0, self._sources).entry()
        self.result.digest = f"{entry.rows:016x}"
        if earlier is not None and self._difference is None:
            with_values = not self._limits
            self._difference = compare(earlier, entry, rank=0, facts=self._facts, with_values=with_values)
            self._equal += [] if self._difference else [entry.step]

    def on_mb_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Read the last step, after all callbacks have seen it, and end the training."""
        if pl_module.completed_steps != self.result.step:
            return
        self._read_view()
        self.result.metrics = pl_module.metrics()
        if _is_broken(self._view, self.result.metrics) and not self._view.has_nonfinite("weight before"):
            search = self.result.search = self._search(pl_module)
            rows = [row for first, last in search.groups for row in range(first, last + 1)]
            self.result.ids = _ids_of(self._raw, rows)
        raise _Done

    def _read_view(self) -> None:
        self._watching.__exit__(None, None, None)
        self.result.modules = [{"name": name, **norms} for name, norms in self._view.by_module().items()]
        if (first := self._view.first_nonfinite) is not None:
            since = f"; weights are not finite since step {self._broken_by}" if first.kind == "weight before" else ""
            self.result.first_nonfinite = f"{first.kind} of {first.name}{since}"

    def _search(self, module: Any) -> RowSearch:
        before, count = self._before, count_rows(self._raw)
        if before is None or not count:
            reason = "the rows of this batch cannot be counted" if before else "the state of the class cannot be copied"
            return RowSearch(problem=reason)

        def fails(rows: Sequence[int]) -> bool:
            before.restore()
            view = StepView(module.discovered)
            with view.watching():
                module.hosted_trainer.train_raw_batch(take_rows(copy.deepcopy(self._raw), rows))
            return _is_broken(view, module.metrics())

        try:
            return find_rows(count, fails)
        except Exception as error:  # noqa: BLE001  # a class may refuse a batch of another size
            return RowSearch(problem=f"the step cannot be repeated with some of its rows: {error!r}")

    def conclude(self, error: BaseException | None) -> None:
        """Complete the result after the training has ended, by an exception of a step or as planned."""
        if error is not None:
            text = f"{type(error).__name__}: {safe_str(error)}{where_raised(error)}"
            self.result.error = f"step {self.running_step}: {text}"
            if self.running_step == self.result.step:
                self._read_view()
        same = ""
        if self._equal:
            named, has, compared = describe_steps(self._equal)
            same = f"{named}{compared} {has} the same bits as in the run"
        if (found := self._difference) is not None:
            text = f"step {found.step} is not the same as in the run: {found.text}{same and f'. Before it, {same}'}"
        elif same:
            text = f"{same}{self._limits and f'; {self._limits}'}"
        else:
            text = f"not compared: {self._limits or 'the witness of the run has no entry for these steps'}"
        self.result.witness, self.result.is_same = text, found is None if same or found else None


def replay(run: Path, step: int, folder: Path, *, overrides: Sequence[str] = (), with_debugger: bool = False) -> Replay:
    """Replay the steps of a run from the newest checkpoint before `step` to it.

    Args:
        run: The folder of a run.
        step: The step to show, from 1.
        folder: An empty folder for everything that the training writes.
        overrides: Changes of the job, as of ``--set``.
        with_debugger: Whether to open the debugger in ``train_step`` of the step, and after an exception.

    Raises:
        UsageError: The run cannot be replayed: it has no job, no checkpoint before the step, several ranks or FSDP 2,
            or it has not trained the step.
        StartupContractError: Its job cannot be used.
    """
    if read_job(run) is None:
        text = f"{run} has no {JOB_NAME} of genlight. Only a run of `genlight run` can be replayed: a fit keeps no job."
        raise UsageError(text)
    config = resolve_run_config(
        spec_path=run / JOB_NAME,
        overrides=[*overrides, *_ALONE, f"artifacts_dir={folder}"],
        environ=environment_of_rehearsal(os.environ),
    )
    directory, recorded, limits = folder_of_checkpoints(run) or run, None, ""
    try:
        recorded = read_witness(path := file_of_rank(directory, 0))
    except ValueError as error:
        limits = f"{path}: {error}"
    saved = [listed.record.step for listed in list_checkpoints(directory) if listed.record is not None]
    witnessed = [] if recorded is None else [key[0] for key in recorded.entries]
    if step > (last := max([summary_of(run, sizes=False).step, *saved, *witnessed])):
        raise UsageError(f"{run} is not known to have trained step {step}; its last known step is {last}.")
    here = [path for path in (config.spec_dir, working_directory()) if path is not None]
    with quiet(), on_sys_path(here):
        target = import_seeded(config, here)
        record = _start_of(config, directory, step)
        observer = _Observer(Replay(step, record.name), recorded, limits, with_debugger=with_debugger)
        if config.seed is not None:
            seed_everything(config.seed)  # as `genlight run` does before it makes the class
        observer.conclude(_train(config, make_trainer(target), record, observer))
    return observer.result


def _start_of(config: RunConfig, directory: Path, step: int) -> CheckpointRecord:
    def is_earlier(record: CheckpointRecord) -> bool:
        return record.step < step and record.run_id in ("", config.run_id) and not record.is_old

    record, warnings = newest_valid(directory, accept=is_earlier, knows_types=True)
    if record is None:
        text = "; ".join([f"there is no checkpoint before step {step} to replay from", *warnings])
        raise UsageError(f"{text}. With `checkpoints.keep_last: 0` a run keeps all.")
    return record


def _train(config: RunConfig, plugin: Any, record: CheckpointRecord, observer: _Observer) -> Exception | None:
    """Train until the observer ends it; return the exception of a step."""
    inputs = materialize_inputs(config)
    trainer, data = prepare_training(config, plugin, parquet_paths=[str(path) for path in inputs.parquet_paths])
    if trainer.world_size > 1 or isinstance(trainer.strategy, ModelParallelStrategy):
        ranks = f"{trainer.world_size} ranks" if trainer.world_size > 1 else "a strategy that shards"
        raise UsageError(
            f"the job has {ranks}, and a replay runs in one process. `--set lightning.devices=1 --set "
            "lightning.strategy=auto` replays it on one device, but not with the same bits."
        )
    handles, keep = inputs.model_handles(), config.resume.keep
    module = ContractModule(plugin, config.job, model_handles=handles, keep_on_resume=keep)
    run_state_of(trainer).run_id = config.run_id
    callbacks, savers = callbacks_of(trainer), savers_of(trainer)
    # Those of users may write into, or remove files from, the folder of the run.
    callbacks[:] = [each for each in callbacks if each in savers or not isinstance(each, LightningCheckpoint)]
    callbacks.append(observer)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=str(record.path))
    except _Done:
        return None
    except (bdb.BdbQuit, TrainingCanceled):
        raise KeyboardInterrupt from None
    except Exception as error:
        if observer.running_step is None:
            raise
        if observer.with_debugger:
            pdb.post_mortem(error.__traceback__)
        return error
    step = observer.result.step
    raise UsageError(f"the replay ended after step {module.completed_steps}, before step {step}")


def _open_debugger_in(plugin: Any) -> None:
    """Have the next call of ``train_step`` stop in the debugger at its first line."""
    train_step = plugin.train_step

    def debugged(batch: Any, state: Any, ctx: Any) -> Any:
        del plugin.train_step
        return pdb.runcall(train_step, batch, state, ctx)

    plugin.train_step = debugged


def _is_broken(view: StepView, metrics: Mapping[str, float]) -> bool:
    losses = [value for name, value in metrics.items() if "loss" in name.lower()]
    return view.has_nonfinite("gradient", "weight after") or not all(map(math.isfinite, losses))


def _ids_of(batch: Any, rows: Sequence[int]) -> list[Any]:
    """Return the values of rows in the column ``id``; empty if there is none."""
    chosen = take_rows(batch, rows)
    try:
        ids = [row["id"] for row in chosen] if isinstance(chosen, list) else chosen["id"]
    except (LookupError, TypeError, ValueError):
        return []
    as_list = getattr(ids, "to_pylist", None) or getattr(ids, "tolist", None)
    return list(ids) if as_list is None else as_list()
