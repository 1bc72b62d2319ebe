"""Trainer hooks: classes whose methods take a `TrainerState`, run through one adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ..adapter.contract.run_state import RunState
from ..adapter.plumbing.text import nearest
from .hook.cadence import NEVER
from .hook.events import is_own_loop, run_state_of
from .hook.hook import Hook
from .hook.listeners import skippable

__all__ = ["TRAINER_HOOK_EVENTS", "TrainerHook", "TrainerHookAdapter", "TrainerState", "trainer_state_of"]

TRAINER_HOOK_EVENTS = (
    "on_new_training_run",
    "on_rollout_start",
    "on_rollout_end",
    "on_mb_end",
    "on_train_phase_end",
    "on_epoch_end",
    "on_training_end",
)
_ATTRIBUTE = "_genlight_trainer_state"
_FACTS = {
    "agent_step": "agent_step",
    "epoch": "epoch",
    "update_epoch": "update_epoch",
    "mb_idx": "minibatch_index",
    "rollout_stats": "rollout_stats",
    "loss_stats": "loss_stats",
    "eval_scores": "eval_scores",
    "latest_checkpoint_uri": "latest_checkpoint_uri",
    "stop_rollout": "stop_rollout",
    "stop_update_epoch": "stop_update_epoch",
}
"""Fields that are facts of the run state, with their names there."""
_EXTRA: Mapping[str, Any] = {"latest_wandb_uri": None}
"""Fields that are facts without a field of their own in the run state, with what they are at first."""
_LIVE = ("optimizer", "policy", "experience", "stats_tracker", "timer", "training_env_id")
"""Fields that are live objects, which no checkpoint holds."""
_ALWAYS_THERE = frozenset(_LIVE)


class TrainerState:
    """The state that trainer hooks share: a view of the run state, and the live objects of the training.

    Facts are those of the `RunState`, read and written there, so that no fact stands twice and all of them are in
    checkpoints: ``agent_step, epoch, update_epoch, mb_idx`` (its ``minibatch_index``), ``stop_rollout,
    stop_update_epoch, rollout_stats, loss_stats, eval_scores, latest_checkpoint_uri``; ``latest_wandb_uri`` is in its
    ``extra``, where a trainer class finds it, too.

    Live objects are ``policy`` (the trainer's ``policy`` or ``model``, else its only module, else the LightningModule),
    ``optimizer`` (the first), and ``experience``, ``timer``, ``stats_tracker`` and ``training_env_id``, as the state of
    the trainer has them. One that a hook sets is what all hooks get.

    Args:
        trainer: The Lightning trainer; None for a loop of one's own, which sets the fields itself and has a run state
            of its own.
        pl_module: What it trains.
        fields: Fields by name, such as ``agent_step=1``.

    Raises:
        AttributeError: A field that there is not; offers the nearest.
    """

    __slots__ = ("_module", "_own", "_run_state", "_trainer")

    def __init__(
        self, trainer: pl.Trainer | None = None, pl_module: pl.LightningModule | None = None, **fields: Any
    ) -> None:
        object.__setattr__(self, "_trainer", trainer)
        object.__setattr__(self, "_module", pl_module)
        object.__setattr__(self, "_own", {})
        object.__setattr__(self, "_run_state", RunState() if trainer is None else None)
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def run_state(self) -> RunState:
        """The facts as all callbacks have them; those without a field belong to its ``extra``."""
        return run_state_of(self._trainer) if self._run_state is None else self._run_state

    @property
    def trainer(self) -> pl.Trainer | None:
        """The Lightning trainer; None in a loop of one's own."""
        trainer: pl.Trainer | None = self._trainer
        return trainer

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return getattr(self.run_state, _FACTS[name])
        if name in _EXTRA:
            return self.run_state.extra.get(name, _EXTRA[name])
        if name in _LIVE:
            return self._own[name] if name in self._own else _live(name, self._trainer, self._module)
        raise _unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FACTS:
            setattr(self.run_state, _FACTS[name], value)
        elif name in _EXTRA:
            self.run_state.extra[name] = value
        elif name in _LIVE:
            self._own[name] = value
        else:
            raise _unknown(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_FACTS, *_EXTRA, *_LIVE})


class TrainerHook:
    """Base of trainer hooks; a subclass overrides the events it wants.

    Args:
        trainer_cfg: The configuration of the hook's own kind, if it has one.
        device: What trains, if the hook wants to know it.
    """

    critical: bool = False
    """Whether an exception of this hook ends the run; else it is logged once for each event and counted."""
    run_on_all_ranks: bool = False
    """Whether events are delivered on all ranks, and not on rank zero alone."""
    reads: Sequence[str] = ()
    """Fields of the state that must be written before this hook runs."""
    optional_reads: Sequence[str] = ()
    """Fields that must be written before, if any hook writes them."""
    writes: Sequence[str] = ()
    """Fields that this hook writes."""

    def __init__(self, trainer_cfg: Any = None, device: torch.device | None = None) -> None:
        self.trainer_cfg = trainer_cfg
        self.device = device

    def on_new_training_run(self, trainer_state: TrainerState) -> None:
        """Training is about to take its first step, of a new run or of a resumed one."""

    def on_rollout_start(self, trainer_state: TrainerState) -> None:
        """The trainer is about to collect experience."""

    def on_rollout_end(self, trainer_state: TrainerState) -> None:
        """Experience was collected; ``rollout_stats`` is set."""

    def on_mb_end(self, trainer_state: TrainerState) -> None:
        """A minibatch was trained."""

    def on_train_phase_end(self, trainer_state: TrainerState) -> None:
        """All minibatches of the current experience were trained."""

    def on_epoch_end(self, trainer_state: TrainerState) -> None:
        """A pass over the data, or a rollout with its training phase, has ended."""

    def on_training_end(self, trainer_state: TrainerState) -> None:
        """Training ended as planned."""


class TrainerHookAdapter(Hook):
    """Runs a trainer hook as a callback: ``Trainer(callbacks=[TrainerHookAdapter(hook) for hook in hooks])``.

    The hook's `critical`, `run_on_all_ranks`, `reads` and `writes` become the policy of the callback. An evaluation
    therefore runs before the hook that reports its scores, whatever the order of registration. Under Lightning's own
    loop the events map to Lightning's: a minibatch is a batch, a training phase is an epoch, and there are no rollouts.

    Args:
        hook: A `TrainerHook`, or any object that has one of its events.

    Raises:
        TypeError: `hook` has none of the events, or is a class.
    """

    def __init__(self, hook: TrainerHook) -> None:
        given: Any = hook
        if isinstance(given, type):
            raise TypeError(f"Invalid `hook`. Expected an instance, but received the class {given.__name__}.")
        self._events = [name for name in TRAINER_HOOK_EVENTS if _has_event(hook, name)]
        if not self._events:
            events = ", ".join(TRAINER_HOOK_EVENTS)
            raise TypeError(f"Invalid `hook`. {type(hook).__name__} has none of the events {events}.")
        self.hook = hook
        self.critical = bool(getattr(hook, "critical", False))
        self.ranks: Literal["zero", "all"] = "all" if getattr(hook, "run_on_all_ranks", False) else "zero"
        reads = _fields_of(hook, "reads")
        # What is always there needs no hook that writes it.
        self.reads = [field for field in reads if field not in _ALWAYS_THERE]
        self.optional_reads = [*_fields_of(hook, "optional_reads"), *_ALWAYS_THERE.intersection(reads)]
        self.writes = _fields_of(hook, "writes")

    @property
    @override
    def label(self) -> str:
        return type(self.hook).__name__

    @override
    def on_new_training_run(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._deliver("on_new_training_run", trainer, pl_module)

    @override
    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._deliver("on_rollout_start", trainer, pl_module)

    @override
    def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._deliver("on_rollout_end", trainer, pl_module)

    @override
    def on_mb_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._deliver("on_mb_end", trainer, pl_module)

    @override
    def on_train_phase_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._deliver("on_train_phase_end", trainer, pl_module)

    @override
    def on_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._deliver("on_epoch_end", trainer, pl_module)

    @override
    def on_training_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._deliver("on_training_end", trainer, pl_module)

    # Lightning's own loop

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_own_loop(trainer):
            self._deliver("on_new_training_run", trainer, pl_module)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_own_loop(trainer):
            self.next_due_step = NEVER
        else:
            run_state_of(trainer).minibatch_index = batch_idx
            self._deliver("on_mb_end", trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_own_loop(trainer):
            run_state_of(trainer).epoch = trainer.current_epoch + 1
            self._deliver("on_train_phase_end", trainer, pl_module)
            self._deliver("on_epoch_end", trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_own_loop(trainer):
            self._deliver("on_training_end", trainer, pl_module)

    def _deliver(self, event: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if event in self._events:
            getattr(self.hook, event)(trainer_state_of(trainer, pl_module))


def trainer_state_of(trainer: pl.Trainer, pl_module: pl.LightningModule) -> TrainerState:
    """The state that all trainer hooks of `trainer` share; made at the first call."""
    state: TrainerState | None = getattr(trainer, _ATTRIBUTE, None)
    if state is None or state._module is not pl_module:
        state = TrainerState(trainer, pl_module)
        setattr(trainer, _ATTRIBUTE, state)
    return state


def _has_event(hook: Any, name: str) -> bool:
    method = getattr(type(hook), name, None)
    return callable(getattr(hook, name, None)) and method is not getattr(TrainerHook, name)


def _fields_of(hook: Any, name: str) -> tuple[str, ...]:
    """Fields that a hook reads or writes, as the run state names them; live objects are always there.

    Raises:
        TypeError: It is one string instead of several.
    """
    fields = getattr(hook, name, ())
    if isinstance(fields, str):
        raise TypeError(
            f"Invalid `{name}` of {type(hook).__name__}. Expected a tuple of fields, but received {fields!r}."
        )
    return tuple(_FACTS.get(field, field) for field in fields)


def _live(name: str, trainer: pl.Trainer | None, pl_module: pl.LightningModule | None) -> Any:
    if trainer is None:
        return None
    state = getattr(pl_module, "contract_state", None)
    if name == "optimizer":
        return next(iter(trainer.optimizers), None)
    found = _entry(state, name)
    if name != "policy" or found is not None:
        return found
    model = _entry(state, "model")
    if model is not None:
        return model
    modules = list(getattr(getattr(pl_module, "discovered", None), "modules", ()))
    return modules[0].value if len(modules) == 1 else pl_module


def _entry(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def _unknown(name: str) -> AttributeError:
    known = (*_FACTS, *_EXTRA, *_LIVE)
    return AttributeError(
        f"TrainerState has no field {name!r}.{nearest(name, known)} Facts of your own belong to `run_state.extra`"
    )
