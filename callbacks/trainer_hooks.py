"""Trainer hooks: classes whose methods take a `TrainerState`, run through one adapter; three that most runs need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ..adapter.contract.exceptions import CheckpointError
from ..adapter.contract.run_state import RunState
from ..adapter.plumbing.text import nearest
from .checkpoint.format.record import read_record
from .checkpoint.policy import savers_of
from .hook.events import entry_of, is_own_loop, log_to_loggers, model_of, run_state_of, step_metrics
from .hook.hook import Hook, judge, telling
from .log_metrics import rollout_means

__all__ = [
    "TRAINER_HOOK_EVENTS",
    "CheckpointHook",
    "EvaluationHook",
    "MetricsHook",
    "TrainerHook",
    "TrainerHookAdapter",
    "TrainerState",
    "log_model_parameters",
    "should_run",
    "trainer_state_of",
]

log = logging.getLogger(__name__)

_ATTRIBUTE = "_genlight_trainer_state"
_FACTS = {each.name: each.name for each in fields(RunState)} | {"mb_idx": "minibatch_index"}
"""Fields that are facts of the run state, with their names there."""
_LIVE = ("optimizer", "policy", "experience", "stats_tracker", "timer", "training_env_id")
"""Fields that are live objects, which no checkpoint holds."""


class TrainerState:
    """The state that trainer hooks share: a view of the run state, and the live objects of the training.

    Facts are read from and written to the `RunState`, which checkpoints hold: all of its fields, and ``mb_idx`` (its
    ``minibatch_index``). ``loss_stats`` are the metrics of the step that has just ended, read from the device when a
    hook asks for them.

    Live objects are ``policy`` (the trainer's ``policy`` or ``model``, else its only module, else the LightningModule),
    ``optimizer`` (the first), and ``experience``, ``timer``, ``stats_tracker`` and ``training_env_id``, as the state of
    the trainer has them. One that a hook sets is what all hooks get.

    Args:
        trainer: The Lightning trainer; None for a loop of one's own, which sets the fields itself.
        pl_module: Its module.
        fields: Fields by name, such as ``agent_step=1``.

    Raises:
        AttributeError: A field that there is not; offers the nearest.
    """

    trainer: pl.Trainer | None
    """The Lightning trainer; None in a loop of one's own."""
    run_state: RunState
    """The facts as all callbacks have them; those without a field belong to its ``extra``."""

    def __init__(
        self, trainer: pl.Trainer | None = None, pl_module: pl.LightningModule | None = None, **fields: Any
    ) -> None:
        run_state = RunState() if trainer is None else run_state_of(trainer)
        vars(self).update(trainer=trainer, module=pl_module, run_state=run_state, _live={})
        for name, value in fields.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "loss_stats" and self.trainer is not None:
            return step_metrics(self.trainer, self.module) or self.run_state.loss_stats
        if name in _FACTS:
            return getattr(self.run_state, _FACTS[name])
        if name in _LIVE:
            return self._live[name] if name in self._live else _live(name, self.trainer, self.module)
        raise _unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FACTS:
            setattr(self.run_state, _FACTS[name], value)
        elif name in _LIVE:
            self._live[name] = value
        else:
            raise _unknown(name)


class TrainerHook:
    """Base of trainer hooks; a subclass overrides the events it wants.

    Args:
        trainer_cfg: The hook's own configuration, if it has one.
        device: The training device, if the hook needs it.
        instance_name: Name of this hook in messages; None means its class.
        critical: Overrides the attribute of the class.
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

    def __init__(
        self,
        trainer_cfg: Any = None,
        device: torch.device | None = None,
        instance_name: str | None = None,
        *,
        critical: bool | None = None,
    ) -> None:
        self.trainer_cfg = trainer_cfg
        self.device = device
        self.instance_name = instance_name or type(self).__name__
        if critical is not None:
            self.critical = critical

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


TRAINER_HOOK_EVENTS = tuple(name for name in vars(TrainerHook) if name.startswith("on_"))


class TrainerHookAdapter(Hook):
    """Runs a trainer hook as a callback: ``Trainer(callbacks=[TrainerHookAdapter(hook) for hook in hooks])``.

    The hook's `critical`, `run_on_all_ranks`, `reads` and `writes` become the policy of the callback. Under Lightning's
    own loop a minibatch is a batch, a training phase is an epoch, and there are no rollouts.

    Args:
        hook: A `TrainerHook`, or any object that has one of its events.

    Raises:
        TypeError: `hook` has none of the events, or is a class.
    """

    def __init__(self, hook: TrainerHook) -> None:
        if isinstance(hook, type) or not any(_has_event(hook, event) for event in TRAINER_HOOK_EVENTS):
            events = ", ".join(TRAINER_HOOK_EVENTS)
            raise TypeError(f"Invalid `hook` {hook!r}. Expected an object with one of the events {events}.")
        self.callback = hook
        self.critical = bool(getattr(hook, "critical", False))
        self.ranks: Literal["zero", "all"] = "all" if getattr(hook, "run_on_all_ranks", False) else "zero"
        reads = _fields_of(hook, "reads")
        # What is always there needs no hook that writes it.
        self.reads = [field for field in reads if field not in _LIVE]
        self.optional_reads = [*_fields_of(hook, "optional_reads"), *reads]
        self.writes = _fields_of(hook, "writes")

    @property
    @override
    def label(self) -> str:
        return str(getattr(self.callback, "instance_name", type(self.callback).__name__))

    def tell(self, event: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call the method `event` of the trainer hook, where it has one; a failure is that of this event alone."""
        method = getattr(self.callback, event, None)
        if method is not None:
            try:
                method(trainer_state_of(trainer, pl_module))
            except Exception as error:  # noqa: BLE001  # the policy raises it again
                judge(self, event, error)

    on_new_training_run = telling("on_new_training_run")
    on_rollout_start = telling("on_rollout_start")
    on_rollout_end = telling("on_rollout_end")
    on_mb_end = telling("on_mb_end")
    on_train_phase_end = telling("on_train_phase_end")
    on_epoch_end = telling("on_epoch_end")
    on_training_end = telling("on_training_end")

    # Lightning's own loop

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_own_loop(trainer):
            self.on_new_training_run(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_own_loop(trainer):
            run_state_of(trainer).minibatch_index = batch_idx
            self.on_mb_end(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_own_loop(trainer):
            run_state_of(trainer).epoch = trainer.current_epoch + 1
            self.on_train_phase_end(trainer, pl_module)
            self.on_epoch_end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_own_loop(trainer):
            self.on_training_end(trainer, pl_module)


def trainer_state_of(trainer: pl.Trainer, pl_module: pl.LightningModule) -> TrainerState:
    """The state that all trainer hooks of `trainer` share; made at the first call."""
    state: TrainerState | None = getattr(trainer, _ATTRIBUTE, None)
    if state is None or state.module is not pl_module or state.run_state is not run_state_of(trainer):
        state = TrainerState(trainer, pl_module)
        setattr(trainer, _ATTRIBUTE, state)
    return state


def _has_event(hook: Any, name: str) -> bool:
    inherits = getattr(type(hook), name, None) is getattr(TrainerHook, name)
    return callable(getattr(hook, name, None)) and not inherits


def _fields_of(hook: Any, name: str) -> list[str]:
    """Fields that a hook reads or writes, as the run state names them."""
    fields = getattr(hook, name, ())
    return [_FACTS.get(field, field) for field in ([fields] if isinstance(fields, str) else fields)]


def _live(name: str, trainer: pl.Trainer | None, pl_module: pl.LightningModule | None) -> Any:
    if trainer is None:
        return None
    if name == "optimizer":
        return next(iter(trainer.optimizers), None)
    found = entry_of(getattr(pl_module, "contract_state", None), name)
    return model_of(pl_module) if name == "policy" and found is None else found


def _unknown(name: str) -> AttributeError:
    hint = nearest(name, (*_FACTS, *_LIVE))
    return AttributeError(f"TrainerState has no field {name!r}.{hint} Facts of your own belong to `run_state.extra`")


def should_run(epoch: int, interval: int) -> bool:
    """Whether something that is due every `interval` epochs is due after `epoch`; an interval of 0 turns it off."""
    return interval > 0 and epoch % interval == 0


def log_model_parameters(policy: torch.nn.Module, wandb_run: Any = None) -> dict[str, int]:
    """Log how many parameters a module has and how many of them train, and put both into a run of W&B.

    Returns:
        ``model/parameters`` and ``model/trainable_parameters``.
    """
    counts = {
        "model/parameters": sum(each.numel() for each in policy.parameters()),
        "model/trainable_parameters": sum(each.numel() for each in policy.parameters() if each.requires_grad),
    }
    log.info("%s has %d parameters, of which %d train", type(policy).__name__, *counts.values())
    if wandb_run is not None:
        wandb_run.summary.update(counts)
    return counts


class _AtEpochs(TrainerHook):
    """Acts at the end of every so many epochs."""

    def __init__(
        self, trainer_cfg: Any = None, device: torch.device | None = None, *, interval: int = 1, wandb_run: Any = None
    ) -> None:
        super().__init__(trainer_cfg, device)
        self.interval = interval
        self.wandb_run = wandb_run

    @override
    def on_epoch_end(self, trainer_state: TrainerState) -> None:
        if should_run(trainer_state.epoch, self.interval):
            self.act(trainer_state)

    def act(self, trainer_state: TrainerState) -> None:
        """An epoch has ended at which this is due."""
        raise NotImplementedError


class CheckpointHook(_AtEpochs):
    """Has the run's `Checkpoint` save at the end of epochs, and waits until the files are durable.

    So ``latest_checkpoint_uri`` names the checkpoint of this epoch for all hooks that come later. With `wandb_run` the
    files also become an artifact of W&B, whose address is ``latest_wandb_uri``.

    Args:
        trainer_cfg: See `TrainerHook`.
        device: See `TrainerHook`.
        interval: Cadence in epochs; 0 turns it off.
        wandb_run: What ``wandb.init`` returned, on rank zero.

    Raises:
        CheckpointError: At the end of an epoch: the trainer has no `Checkpoint`, or a file cannot be written.
    """

    critical = True
    run_on_all_ranks = True  # a save is collective
    writes = ("latest_checkpoint_uri", "latest_wandb_uri")

    @override
    def act(self, trainer_state: TrainerState) -> None:
        trainer = trainer_state.trainer
        savers = [] if trainer is None else savers_of(trainer)
        if trainer is None or not savers:
            raise CheckpointError("CheckpointHook has nothing to save with: give the trainer a Checkpoint callback")
        record = savers[0].save(trainer, trainer.lightning_module)
        # Not reported yet: an event log takes no metric of this step after its checkpoint.
        savers[0].wait_until_durable()
        trainer_state.latest_checkpoint_uri = str(record)
        if self.wandb_run is not None and trainer.is_global_zero:
            trainer_state.latest_wandb_uri = self._upload(record, trainer_state)

    def _upload(self, record: Path, trainer_state: TrainerState) -> str:
        import wandb

        run = self.wandb_run
        artifact = wandb.Artifact(f"{run.id}-checkpoint", "model", metadata={"epoch": trainer_state.epoch})
        artifact.add_file(str(record))
        data = read_record(record).data_path
        if data is not None:
            artifact.add_dir(str(data), name=data.name)
        run.log_artifact(artifact, aliases=[f"epoch-{trainer_state.epoch}", "latest"])
        return f"wandb://{run.entity}/{run.project}/{artifact.name}:epoch-{trainer_state.epoch}"


class EvaluationHook(_AtEpochs):
    """Calls a function of yours with the newest checkpoint's address at the end of epochs, and shares its scores.

    Args:
        evaluate: Takes ``latest_wandb_uri``, else ``latest_checkpoint_uri``, and the `TrainerState`; returns scores by
            name.
        trainer_cfg: See `TrainerHook`.
        device: See `TrainerHook`.
        interval: Cadence in epochs; 0 turns it off. It is skipped while there is no checkpoint.
    """

    optional_reads = ("latest_wandb_uri",)  # so a `CheckpointHook` comes first
    writes = ("eval_scores",)

    def __init__(
        self,
        evaluate: Callable[[str, TrainerState], Mapping[str, float]],
        trainer_cfg: Any = None,
        device: torch.device | None = None,
        *,
        interval: int = 1,
    ) -> None:
        super().__init__(trainer_cfg, device, interval=interval)
        self.evaluate = evaluate

    @override
    def act(self, trainer_state: TrainerState) -> None:
        uri = trainer_state.latest_wandb_uri or trainer_state.latest_checkpoint_uri
        if uri is not None:
            scores = self.evaluate(uri, trainer_state)
            trainer_state.eval_scores = {name: float(value) for name, value in scores.items()}


class MetricsHook(_AtEpochs):
    """Sends losses, means of the rollout's statistics and scores to all loggers at the end of epochs, and logs a line.

    Args:
        trainer_cfg: See `TrainerHook`.
        device: See `TrainerHook`.
        interval: Cadence in epochs; 0 turns it off.
        wandb_run: What ``wandb.init`` returned, where no logger of the trainer is W&B's.
    """

    optional_reads = ("eval_scores", "loss_stats", "rollout_stats")

    @override
    def on_new_training_run(self, trainer_state: TrainerState) -> None:
        if isinstance(trainer_state.policy, torch.nn.Module):
            log_model_parameters(trainer_state.policy, self.wandb_run)

    @override
    def act(self, trainer_state: TrainerState) -> None:
        own = {f"eval/{name}": value for name, value in (trainer_state.eval_scores or {}).items()}
        own |= {"epoch": float(trainer_state.epoch), "agent_step": float(trainer_state.agent_step)}
        metrics = {**(trainer_state.loss_stats or {}), **rollout_means(trainer_state.rollout_stats or {}), **own}
        trainer = trainer_state.trainer
        if trainer is not None:
            sent = own if is_own_loop(trainer) else metrics  # in genlight's loop `LogMetrics` has sent the others
            log_to_loggers(trainer, sent, trainer.global_step)
        if self.wandb_run is not None:
            self.wandb_run.log(metrics)
        log.info("epoch %d  %s", trainer_state.epoch, "  ".join(f"{name} {each:.4g}" for name, each in metrics.items()))
