"""The base class of genlight's callbacks: a Lightning callback with a policy for failures, ranks and order.

A subclass states its policy as class (or instance) attributes and overrides the events it wants. The policy holds
under genlight's loop and under a plain ``lightning.pytorch.Trainer`` alike, because `Hook.__init_subclass__` wraps the
event methods themselves:

- **failure**: if a hook that is not `critical` raises an exception, training continues. The first exception of each
  event is logged with its traceback; later ones are counted, and the end of the fit logs the counts. A critical hook's
  exception ends the run.
- **rank**: with ``ranks = "zero"`` a hook receives events only on rank zero.
- **order**: a hook with a field of the run state in `reads` runs after the hooks with this field in `writes`, whatever
  the order of registration. Callbacks that are not a `Hook` keep their places, but run before a hook that saves
  checkpoints.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from typing_extensions import override

from ...adapter.contract.exceptions import GenlightError, HookOrderError, TrainingCanceled
from ...adapter.contract.types import RunState
from ..checkpoint.format.record import CheckpointRecord
from ..health.rules import Fault
from .events import callbacks_of, facts_to_store, run_state_of

if TYPE_CHECKING:
    from ...reporters.uploads import Uploader
    from ..checkpoint.format.record import RecordMeta
    from ..stop.sources import StopSources
    from ..witness.entry import Proof


log = logging.getLogger(__name__)

RUN_STATE_KEY = "genlight_run_state"
"""Key of the run state in a checkpoint."""

FIELDS_OF_HOOKS = frozenset({"eval_scores", "latest_checkpoint_uri", "latest_sample_uris", "latest_wandb_uri"})
FIELDS_OF_THE_LOOP = frozenset(RunState.__dataclass_fields__) - FIELDS_OF_HOOKS
"""Fields of the run state that the loop itself writes, so that a hook may read them although no hook writes them."""

FIELDS_OF_THE_ATTEMPT = frozenset({"attempt", "stop_reason", "rolls_back"})
"""Fields that a resumed run does not take from its checkpoint: the stop of the last attempt must not end this one."""


_ENDS_RUN_ATTRIBUTE = "_genlight_ends_run"
_ORDERED_ATTRIBUTE = "_genlight_callbacks_ordered"
_SKIPPABLE_ATTRIBUTE = "_genlight_is_skippable"

_Method = TypeVar("_Method", bound=Callable[..., Any])


class RunContext(Protocol):
    """The session of ``genlight run`` or ``genlight fit``, as callbacks see it. Any other fit has none."""

    stop: StopSources
    """Everything that can ask the run to stop."""
    record: RecordMeta | None
    """Metadata of the run for every checkpoint record; None if it is not known before the fit."""
    uploader: Uploader | None
    """Sends the run's artifacts, on rank zero. ``genlight run`` opens it; in ``genlight fit``, `UploadArtifacts` does.
    In both cases the session waits for the uploads and closes it."""
    requires_uploads: bool
    """Whether a completed run fails if an upload did not arrive."""
    deadline_s: float
    """How long the end of the run waits for uploads, in seconds."""
    is_supervised: bool
    """Whether a supervisor on this machine starts the run again after a rank was killed."""

    def end_now(self, error: BaseException) -> NoReturn:
        """Report a failure from a thread that watches the training, and end the process."""
        ...


class Hook(pl.Callback):
    """A Lightning callback that keeps a failure, rank and order policy.

    Besides Lightning's own hooks it receives `HOOK_EVENTS`, each as ``(trainer, pl_module, …)``.
    """

    critical: bool = False
    """Whether an exception of this hook ends the run."""
    ranks: Literal["zero", "all"] = "zero"
    """Ranks that receive events."""
    reads: Sequence[str] = ()
    """Fields of the run state that must be written before this hook runs."""
    optional_reads: Sequence[str] = ()
    """Fields that must be written before this hook runs if any hook writes them."""
    writes: Sequence[str] = ()
    """Fields of the run state that this hook writes."""
    next_due_step: int = 0
    """The step after which a `skippable` ``on_train_batch_end`` has to run next."""

    _inside_event: bool = False
    _failures: Counter[str] | None = None

    _of_this_process: ClassVar[frozenset[str]] = frozenset()
    """Attributes that are not copied or pickled; a copy has the class's defaults."""
    _not_events: ClassVar[frozenset[str]] = frozenset({"on_save_checkpoint", "on_load_checkpoint"})
    """Events without a policy: they run on every rank, and a failure must reach the code that saves or loads."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in list(vars(cls).items()):
            is_event = name.startswith("on_") or name in ("setup", "teardown")
            if is_event and name not in cls._not_events and inspect.isfunction(method):
                setattr(cls, name, _apply_policy(name, method))

    def __getstate__(self) -> dict[str, Any]:
        # An event that runs in this object does not run in the copy, and the copy may be at another step.
        left = {"_inside_event", "next_due_step", *self._of_this_process}
        return {name: value for name, value in vars(self).items() if name not in left}

    @property
    def label(self) -> str:
        """Name of this hook in messages."""
        return type(self).__name__

    @property
    def failures(self) -> dict[str, int]:
        """Failures of this hook, by event; empty for a critical hook, whose first failure ends the run."""
        return dict(self._failures or {})

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        order_callbacks(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        report_failures(self)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint.setdefault(RUN_STATE_KEY, facts_to_store(trainer))

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = run_state_of(trainer)
        kept = FIELDS_OF_THE_ATTEMPT | ({"run_id"} if state.run_id else set())
        saved = checkpoint.get(RUN_STATE_KEY, {})
        state.load_state_dict({name: value for name, value in saved.items() if name not in kept})

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_training_failed(trainer, pl_module, exception)
        report_failures(self)  # Lightning calls no `teardown` after an exception

    def join_run(self, run: RunContext) -> None:
        """Receive the session of the run; called on each rank before the fit."""

    def on_new_training_run(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training is about to take its first step, in a new run or a resumed one."""

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The trainer is about to collect experience."""

    def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Experience was collected; ``rollout_stats`` is set."""

    def on_module_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The module's own ``on_train_batch_end`` has run; fired only if the module has one.

        Lightning's own loop fires it only in a step in which a hook has called `awaits_module_hook`.
        """

    def on_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Mapping[str, float], step: int
    ) -> None:
        """The metrics of `step` were read from the device; fired on the rank that reads them, at their cadence."""

    def on_scores(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Mapping[str, float], step: int
    ) -> None:
        """An evaluation after `step` gave `scores`."""

    def on_mb_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A minibatch was trained."""

    def on_train_phase_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All minibatches of the current experience were trained."""

    def on_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A pass over the data, or a rollout with its training phase, has ended."""

    def on_training_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training ended as planned."""

    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Training ended by an exception or a stop."""

    def on_checkpoint_timed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, seconds: float) -> None:
        """A checkpoint took `seconds` to become durable, including the wait for the previous one."""

    def on_checkpoint_durable(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: CheckpointRecord
    ) -> None:
        """The checkpoint of `record` can no longer be lost; may be fired some steps after ``record.step``."""

    def on_checkpoint_budget(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, level: Literal["ok", "warn"], text: str
    ) -> None:
        """`Checkpoint` has changed the time between checkpoints, to keep its budget; fired on rank zero.

        `text` describes the change; `level` is ``warn`` if the budget cannot be kept.
        """

    def on_resume_proof(self, trainer: pl.Trainer, pl_module: pl.LightningModule, proof: Proof) -> None:
        """Steps that the run repeated after a restart were compared with the earlier attempt; fired on rank zero."""

    def on_samples_written(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        samples: Mapping[Path, Sequence[Path]],
        step: int,
    ) -> None:
        """Samples of `step` are on disk: the record of each, with the files that belong to it."""

    def on_roll_back_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The run is to be rolled back after this step; genlight's loop fires it if ``rolls_back`` is set."""

    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """`Recover` has rolled the run back to ``trainer.global_step``; counters of steps continue from there."""

    def on_fault(self, trainer: pl.Trainer, pl_module: pl.LightningModule, fault: Fault) -> None:
        """`Diagnosis` has found a fault, the same on all ranks; ``fault.is_over`` is true when it has ended."""

    def on_hold_up(self, trainer: pl.Trainer, pl_module: pl.LightningModule, what: str | None) -> None:
        """`what` delays training from now on: ``pause``, or a name of ``on_time_spent``. None: training continues."""

    def on_time_spent(self, trainer: pl.Trainer, pl_module: pl.LightningModule, what: str, seconds: float) -> None:
        """`what` delayed training for `seconds`: ``checkpoint``, ``samples``, ``evaluation`` or ``rollout``.

        ``lost`` is the time of the steps that a roll-back has undone.
        """


HOOK_EVENTS = tuple(name for name in vars(Hook) if name.startswith("on_") and not hasattr(pl.Callback, name))
"""Events that Lightning's callbacks do not have."""


def _apply_policy(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `method` in the failure and rank policy of its hook."""
    is_setup = name == "setup"

    @functools.wraps(method)
    def event(self: Hook, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        if self._inside_event:  # a call of super(); the policy applies to the outer call
            return method(self, trainer, *args, **kwargs)
        if is_setup:
            order_callbacks(trainer)
        if self.ranks == "zero" and not trainer.is_global_zero:
            return None
        self._inside_event = True
        try:
            return method(self, trainer, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the policy raises it again
            judge(self, name, error)
            return None
        finally:
            self._inside_event = False

    return event


def ending_the_run(error: Exception) -> Exception:
    """Mark `error` to end the run even if the hook that raises it is not critical; return it."""
    setattr(error, _ENDS_RUN_ATTRIBUTE, True)
    return error


def judge(hook: Hook, event: str, error: Exception) -> None:
    """Raise `error` again if it ends the run, and note it otherwise."""
    # `error` may be marked: this hook may have fired an event, and a critical hook that received it has failed.
    if hook.critical or isinstance(error, TrainingCanceled) or hasattr(error, _ENDS_RUN_ATTRIBUTE):
        raise ending_the_run(error)
    hook._failures = hook._failures or Counter()
    hook._failures[event] += 1
    if hook._failures[event] == 1:
        is_ours = isinstance(error, GenlightError)  # its message is complete; a traceback adds nothing
        log.error(
            "%s failed in %s; training continues, and further failures of this event are only counted%s",
            hook.label,
            event,
            f": {error}" if is_ours else "",
            exc_info=None if is_ours else error,
        )


def report_failures(hook: Hook) -> None:
    """Log the failures that were only counted during training."""
    if hook._failures:
        counts = ", ".join(f"{event} {count} times" for event, count in sorted(hook._failures.items()))
        log.warning("%s failed: %s", hook.label, counts)


def order_callbacks(trainer: pl.Trainer) -> None:
    """Sort the hooks of `trainer` by their reads and writes; once per trainer.

    Raises:
        HookOrderError: Hooks wait for each other in a circle, or one reads a field that no hook writes.
    """
    registered = callbacks_of(trainer)
    if getattr(trainer, _ORDERED_ATTRIBUTE, None) is registered:
        return
    ordered = iter(in_order([callback for callback in registered if isinstance(callback, Hook)]))
    # A new list, because Lightning is iterating over the old one while it calls `setup`.
    callbacks = [next(ordered) if isinstance(callback, Hook) else callback for callback in registered]
    # A checkpoint must contain the changes that other callbacks make after its step. Lightning puts checkpoint
    # callbacks last. Only hooks that read a field that a checkpoint callback writes may come after it.
    is_saver = [isinstance(callback, Hook) and isinstance(callback, LightningCheckpoint) for callback in callbacks]
    first = is_saver.index(True) if any(is_saver) else len(callbacks)
    before, behind = callbacks[:first], callbacks[first:]
    before += [callback for callback in behind if not isinstance(callback, Hook | LightningCheckpoint)]
    callbacks = [*before, *(callback for callback in behind if isinstance(callback, Hook | LightningCheckpoint))]
    trainer.callbacks = callbacks  # type: ignore[attr-defined]
    setattr(trainer, _ORDERED_ATTRIBUTE, callbacks)


def in_order(hooks: Sequence[Hook]) -> list[Hook]:
    """Return the hooks with writers first, otherwise in the order of registration.

    Raises:
        HookOrderError: Hooks wait for each other in a circle, or one reads a field that no hook writes.
    """
    # The nodes are positions, not hooks: a hook that is a dataclass may have no hash, and may be equal to another hook.
    graph = TopologicalSorter({position: _predecessors(position, hooks) for position in range(len(hooks))})
    try:
        graph.prepare()
    except CycleError as error:
        labels = ", ".join(hooks[position].label for position in reversed(error.args[1]))
        raise HookOrderError(
            f"hooks wait for each other: {labels}; each reads what the next one writes. Drop a read or a write"
        ) from None
    ordered: list[Hook] = []
    ready: list[int] = []
    while graph.is_active():
        ready = sorted([*ready, *graph.get_ready()])
        first = ready.pop(0)
        ordered.append(hooks[first])
        graph.done(first)
    return ordered


def _predecessors(position: int, hooks: Sequence[Hook]) -> set[int]:
    """Return the positions of the hooks that must run before the one at `position`.

    Among hooks that both read and write a field, such as a counter, the order of registration decides.
    """
    hook = hooks[position]
    before: set[int] = set()
    for field in (*hook.reads, *hook.optional_reads):
        writers = [other for other, writer in enumerate(hooks) if field in writer.writes]
        if not writers and field in hook.reads and field not in FIELDS_OF_THE_LOOP:
            raise HookOrderError(f"{hook.label} reads {field!r}, which no hook writes; add the callback that writes it")
        for writer in writers:
            both_update = field in hook.writes and field in hooks[writer].reads
            if writer != position and (not both_update or writer < position):
                before.add(writer)
    return before


def listeners(trainer: pl.Trainer, event: str) -> list[Callable[..., Any]]:
    """Return the method `event` of every callback that overrides it; faster than `fire` in each step.

    Hooks that do not receive events on this rank are skipped.
    """
    return [
        getattr(callback, event)
        for callback in callbacks_of(trainer)
        if _overrides(callback, event)
        and (not isinstance(callback, Hook) or callback.ranks == "all" or trainer.is_global_zero)
    ]


def skippable(method: _Method) -> _Method:
    """Mark an ``on_train_batch_end`` that has nothing to do before ``self.next_due_step``, which it sets at each call.

    genlight's loop does not call it before that step, except at the first step of an epoch and after a stop request. A
    call without work still costs some 2 µs, because its code has left the processor's caches. Without this decorator,
    the callbacks of a job would take 28 µs a step instead of 12. A hook that gets work from another event sets
    ``next_due_step`` to 0. Lightning's own loop calls the method after every step. A method of a subclass that
    overrides a marked one must be marked too.
    """
    setattr(method, _SKIPPABLE_ATTRIBUTE, True)
    return method


def skipping_hook(listener: Callable[..., Any]) -> Hook | None:
    """Return the hook whose ``next_due_step`` decides when to call `listener`; None if every step calls it."""
    hook = getattr(listener, "__self__", None)
    return hook if isinstance(hook, Hook) and hasattr(listener, _SKIPPABLE_ATTRIBUTE) else None


def _overrides(callback: pl.Callback, event: str) -> bool:
    plain = {getattr(pl.Callback, event, None), getattr(Hook, event), None}
    return event in vars(callback) or getattr(type(callback), event, None) not in plain


def join_run(trainer: pl.Trainer, run: RunContext) -> None:
    """Hand `run` to each callback and logger of `trainer` that has a method ``join_run``."""
    for part in [*callbacks_of(trainer), *trainer.loggers]:
        join = getattr(part, "join_run", None)
        if join is not None:
            join(run)
