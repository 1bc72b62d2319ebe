"""Trainer hooks: classes whose methods take a `TrainerState`; the adapter that runs them; three common hooks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ..adapter.contract.exceptions import CheckpointError
from ..adapter.contract.types import RunState
from ..adapter.plumbing.text import nearest
from .checkpoint.format.record import read_record
from .checkpoint.policy import savers_of
from .hook.cadence import crossed, step_cadence
from .hook.events import get_entry, is_own_loop, log_to_loggers, model_of, numbers_of, run_state_of, step_metrics
from .log_metrics import rollout_means
from .other_styles import OtherStyle, StyleAdapter, forwarding_hook, require_events

log = logging.getLogger(__name__)

_ATTRIBUTE = "_genlight_trainer_state"
_FACTS = {each.name: each.name for each in fields(RunState)} | {"mb_idx": "minibatch_index"}
"""Fields of a `TrainerState` that the run state holds, by name; the value is the name in the run state."""
_LIVE = ("optimizer", "policy", "experience", "stats_tracker", "timer", "training_env_id")
"""Fields that are live objects; no checkpoint holds them."""


class TrainerState:
    """The state that trainer hooks share: a view of the run state, and the live objects of the training.

    Facts are read from and written to the `RunState`, and checkpoints hold them: all of its fields, and ``mb_idx`` (its
    ``minibatch_index``). ``loss_stats`` are the metrics of the step that has just ended; reading them waits for the
    device.

    Live objects are ``policy`` (the trainer's ``policy`` or ``model``, otherwise its only module, otherwise the
    LightningModule), ``optimizer`` (the first), and ``experience``, ``timer``, ``stats_tracker`` and
    ``training_env_id`` from the state of the trainer. If a hook sets one, all hooks get that object.

    Args:
        trainer: The Lightning trainer; None for your own loop, which sets the fields itself.
        pl_module: Its module.
        fields: Fields by name, such as ``agent_step=1``.

    Raises:
        AttributeError: No such field; the message suggests the closest name.
    """

    trainer: pl.Trainer | None
    """The Lightning trainer; None in your own loop."""
    run_state: RunState
    """The facts that all callbacks share; put other facts into its ``extra``."""

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
            return self._live[name] if name in self._live else _find_live_object(name, self.trainer, self.module)
        raise _unknown_field(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FACTS:
            setattr(self.run_state, _FACTS[name], value)
        elif name in _LIVE:
            self._live[name] = value
        else:
            raise _unknown_field(name)


class TrainerHook(OtherStyle):
    """Base of trainer hooks; a subclass overrides the events it wants. A `TrainerHookAdapter` runs it.

    Args:
        trainer_cfg: The hook's own configuration, if it has one.
        device: The training device, if the hook needs it.
        instance_name: Name of this hook in messages; None means its class.
        critical: Overrides the attribute of the class.
    """

    _style, _place = "a trainer hook", "TrainerHookAdapter({})"
    critical: bool = False
    """Whether an exception of this hook ends the run; otherwise it is logged once for each event and counted."""
    run_on_all_ranks: bool = False
    """Whether events are delivered on all ranks, not only on rank zero."""
    reads: Sequence[str] = ()
    """Fields of the state that must be written before this hook runs."""
    optional_reads: Sequence[str] = ()
    """Fields that must be written before this hook runs, if any hook writes them."""
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
        """Called before the first step of a new or resumed run."""

    def on_rollout_start(self, trainer_state: TrainerState) -> None:
        """Called before the trainer collects experience."""

    def on_rollout_end(self, trainer_state: TrainerState) -> None:
        """Called after experience was collected; ``rollout_stats`` is set."""

    def on_mb_end(self, trainer_state: TrainerState) -> None:
        """Called after each minibatch."""

    def on_train_phase_end(self, trainer_state: TrainerState) -> None:
        """Called after all minibatches of the current experience; ``epoch`` is the one that ends, from 0."""

    def on_epoch_end(self, trainer_state: TrainerState) -> None:
        """Called after a pass over the data, or a rollout with its training phase; ``epoch`` counts it already."""

    def on_training_end(self, trainer_state: TrainerState) -> None:
        """Called when training ends as planned."""


TRAINER_HOOK_EVENTS = tuple(name for name in vars(TrainerHook) if name.startswith("on_"))


class TrainerHookAdapter(StyleAdapter):
    """Runs a trainer hook as a callback: ``Trainer(callbacks=[TrainerHookAdapter(hook) for hook in hooks])``.

    The hook's `critical`, `run_on_all_ranks`, `reads` and `writes` become the policy of the callback. Under Lightning's
    own loop a minibatch is a batch, a training phase is an epoch, and there are no rollouts.

    Args:
        hook: A `TrainerHook`, or any object that has one of its events.

    Raises:
        TypeError: `hook` has none of the events, or is a class.
    """

    def __init__(self, hook: Any) -> None:
        require_events("hook", hook, TRAINER_HOOK_EVENTS, TrainerHook)
        everywhere = getattr(hook, "run_on_all_ranks", False)
        super().__init__(hook, critical=bool(getattr(hook, "critical", False)), ranks="all" if everywhere else "zero")
        reads = _fields_of(hook, "reads")
        # Live objects always exist; no hook has to write them.
        self.reads = [field for field in reads if field not in _LIVE]
        self.optional_reads = [*_fields_of(hook, "optional_reads"), *reads]
        self.writes = _fields_of(hook, "writes")

    @override
    def argument(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> TrainerState:
        return trainer_state_of(trainer, pl_module)

    on_new_training_run = forwarding_hook("on_new_training_run")
    on_rollout_start = forwarding_hook("on_rollout_start")
    on_rollout_end = forwarding_hook("on_rollout_end")
    on_mb_end = forwarding_hook("on_mb_end")
    on_train_phase_end = forwarding_hook("on_train_phase_end")
    on_epoch_end = forwarding_hook("on_epoch_end")
    on_training_end = forwarding_hook("on_training_end")

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
            state = run_state_of(trainer)
            state.epoch = trainer.current_epoch
            self.on_train_phase_end(trainer, pl_module)
            state.epoch += 1
            self.on_epoch_end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_own_loop(trainer):
            self.on_training_end(trainer, pl_module)


def trainer_state_of(trainer: pl.Trainer, pl_module: pl.LightningModule) -> TrainerState:
    """Return the state that all trainer hooks of `trainer` share, created at the first call."""
    state: TrainerState | None = getattr(trainer, _ATTRIBUTE, None)
    if state is None or state.module is not pl_module or state.run_state is not run_state_of(trainer):
        state = TrainerState(trainer, pl_module)
        setattr(trainer, _ATTRIBUTE, state)
    return state


def _fields_of(hook: Any, name: str) -> list[str]:
    """Return the fields that a hook reads or writes, under their names in the run state."""
    fields = getattr(hook, name, ())
    return [_FACTS.get(field, field) for field in ([fields] if isinstance(fields, str) else fields)]


def _find_live_object(name: str, trainer: pl.Trainer | None, pl_module: pl.LightningModule | None) -> Any:
    if trainer is None:
        return None
    if name == "optimizer":
        return next(iter(trainer.optimizers), None)
    found = get_entry(getattr(pl_module, "contract_state", None), name)
    return model_of(pl_module) if name == "policy" and found is None else found


def _unknown_field(name: str) -> AttributeError:
    hint = nearest(name, (*_FACTS, *_LIVE))
    return AttributeError(f"TrainerState has no field {name!r}.{hint} Store your own facts in `run_state.extra`")


def should_run(epoch: int, interval: int) -> bool:
    """Whether a cadence of `interval` epochs is due after `epoch`; an interval of 0 turns it off."""
    return interval > 0 and epoch % interval == 0


def log_model_parameters(policy: torch.nn.Module, wandb_run: Any = None) -> dict[str, int]:
    """Log the number of parameters and of trainable parameters of a module, and store both in a run of W&B.

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


def setup_wandb_metrics(wandb_run: Any) -> None:
    """Have W&B draw all metrics over ``epoch``; `MetricsHook` sends the epoch with the metrics."""
    for name in ("epoch", "agent_step"):
        wandb_run.define_metric(name)
    wandb_run.define_metric("*", step_metric="epoch")


def _interval(name: str, argument: int | None, holder: Any, path: str, default: int | None = None) -> int:
    """Return a cadence in epochs: `argument`, otherwise the entry at `path` of a configuration, otherwise `default`.

    The cadence is 1 if there is neither an argument nor a configuration nor a default.

    Raises:
        ValueError: The cadence is not an integer >= 0, or there is no default and the configuration lacks the entry.
    """
    value = functools.reduce(get_entry, path.split("."), holder) if argument is None else argument
    if value is None and default is None and holder is not None:
        raise ValueError(f"Invalid configuration. It has no {path}; add it, or set `{name}`.")
    if value is None:
        value = 1 if default is None else default
    return step_cadence(name, value)


class CheckpointHook(TrainerHook):
    """Saves with the run's `Checkpoint` at the end of epochs, and waits until the files are durable.

    ``latest_checkpoint_uri`` then names the checkpoint of this epoch for all later hooks. With `wandb_run` the
    files also become an artifact of W&B, whose address is ``latest_wandb_uri``; it is None after an epoch whose
    checkpoint was not uploaded.

    Args:
        trainer_cfg: A configuration, as mappings or objects: ``checkpoint.checkpoint_interval`` is the default of
            `interval`, and ``checkpoint.wandb_checkpoint_interval`` the default of `wandb_interval`.
        device: See `TrainerHook`.
        checkpoint_manager: Your own manager. On rank zero, its ``save_agent(policy, epoch, metadata, wandb_run=…)``
            also saves, and returns the address for ``latest_wandb_uri``. A run that starts at step 0 takes
            ``agent_step`` from its ``load_trainer_state()``. With a manager the trainer needs no `Checkpoint`.
        wandb_run: The run that ``wandb.init`` returned, on rank zero.
        interval: Cadence in epochs; 0 turns it off.
        wandb_interval: Upload the first checkpoint after each multiple of this number of epochs; None uploads all.

    Raises:
        ValueError: An interval is not an integer >= 0; or there is no `interval`, and `trainer_cfg` has none either.
        CheckpointError: At the end of an epoch: the trainer has no `Checkpoint`, or a file cannot be written.
    """

    critical = True
    run_on_all_ranks = True  # a save is collective
    writes = ("latest_checkpoint_uri", "latest_wandb_uri")

    def __init__(
        self,
        trainer_cfg: Any = None,
        device: torch.device | None = None,
        checkpoint_manager: Any = None,
        wandb_run: Any = None,
        *,
        interval: int | None = None,
        wandb_interval: int | None = None,
    ) -> None:
        super().__init__(trainer_cfg, device)
        self.interval = _interval("interval", interval, trainer_cfg, "checkpoint.checkpoint_interval")
        path = "checkpoint.wandb_checkpoint_interval"
        self.wandb_interval = _interval("wandb_interval", wandb_interval, trainer_cfg, path, self.interval)
        self.checkpoint_manager = checkpoint_manager
        self.wandb_run = wandb_run
        self._uploaded_epoch = 0

    @override
    def on_new_training_run(self, trainer_state: TrainerState) -> None:
        self._uploaded_epoch = trainer_state.epoch
        trainer, manager = trainer_state.trainer, self.checkpoint_manager
        if manager is not None and trainer is not None and trainer.global_step == 0:
            loaded = manager.load_trainer_state()
            if loaded:
                trainer_state.agent_step = int(get_entry(loaded, "agent_step"))

    @override
    def on_epoch_end(self, trainer_state: TrainerState) -> None:
        epoch, trainer = trainer_state.epoch, trainer_state.trainer
        if not should_run(epoch, self.interval):
            return
        savers = [] if trainer is None else savers_of(trainer)
        if trainer is None or not (savers or self.checkpoint_manager):
            raise CheckpointError("CheckpointHook cannot save: give the trainer a Checkpoint callback")
        record = savers[0].save(trainer, trainer.lightning_module) if savers else None
        if record is not None:
            # Do not report the checkpoint yet: afterwards an event log accepts no further metric of this step.
            savers[0].wait_until_durable()
            trainer_state.latest_checkpoint_uri = str(record)
        if not trainer.is_global_zero:
            return
        is_due = crossed(self._uploaded_epoch, epoch, self.wandb_interval)
        self._uploaded_epoch = epoch if is_due else self._uploaded_epoch
        run, uri = self.wandb_run if is_due else None, None
        if self.checkpoint_manager is not None:
            facts = {"epoch": epoch, "agent_step": trainer_state.agent_step, "eval_scores": trainer_state.eval_scores}
            uri = self.checkpoint_manager.save_agent(trainer_state.policy, epoch, facts, wandb_run=run)
        elif run is not None and record is not None:
            uri = self._upload(record, trainer_state)
        trainer_state.latest_wandb_uri = uri

    def _upload(self, record: Path, trainer_state: TrainerState) -> str:
        """Upload a checkpoint as an artifact of W&B, and return its address."""
        import wandb

        run = self.wandb_run
        artifact = wandb.Artifact(f"{run.id}-checkpoint", "model", metadata={"epoch": trainer_state.epoch})
        artifact.add_file(str(record))
        data = read_record(record).data_path
        if data is not None:
            artifact.add_dir(str(data), name=data.name)
        run.log_artifact(artifact, aliases=[f"epoch-{trainer_state.epoch}", "latest"])
        return f"wandb://{run.entity}/{run.project}/{artifact.name}:epoch-{trainer_state.epoch}"


class EvaluationHook(TrainerHook):
    """Evaluates the newest checkpoint at the end of epochs, and shares the scores as ``eval_scores``.

    A subclass may define ``evaluate(uri, trainer_state)`` instead of giving a function.

    Args:
        trainer_cfg: A configuration, as mappings or objects: ``evaluation.evaluate_interval`` is the default of
            `interval`. A function in this place is taken as `evaluate`.
        device: See `TrainerHook`.
        eval_config: The part of the configuration for evaluations, with ``evaluate_interval``, if it is separate.
        curriculum: Stored as an attribute of the hook, for `evaluate`.
        evaluate: Takes ``latest_wandb_uri``, otherwise ``latest_checkpoint_uri``, and the `TrainerState`. Returns
            scores: a mapping, an object with fields, or a result that has them as ``scores``.
        interval: Cadence in epochs; 0 turns it off. Nothing is evaluated while there is no checkpoint.

    Raises:
        TypeError: There is no `evaluate`.
        ValueError: `interval` is not an integer >= 0, or the configuration has none.
    """

    optional_reads = ("latest_wandb_uri",)  # so a `CheckpointHook` comes first
    writes = ("eval_scores",)

    def __init__(
        self,
        trainer_cfg: Any = None,
        device: torch.device | None = None,
        eval_config: Any = None,
        curriculum: Any = None,
        *,
        evaluate: Callable[[str, TrainerState], Any] | None = None,
        interval: int | None = None,
    ) -> None:
        if evaluate is None and callable(trainer_cfg):
            evaluate, trainer_cfg = trainer_cfg, None
        super().__init__(trainer_cfg, device)
        if evaluate is not None:
            vars(self)["evaluate"] = evaluate
        elif type(self).evaluate is EvaluationHook.evaluate:
            raise TypeError("EvaluationHook cannot evaluate. Set `evaluate`, a function of (uri, state).")
        if eval_config is None:
            self.interval = _interval("interval", interval, trainer_cfg, "evaluation.evaluate_interval")
        else:
            self.interval = _interval("interval", interval, eval_config, "evaluate_interval")
        self.eval_config = eval_config
        self.curriculum = curriculum

    def evaluate(self, uri: str, trainer_state: TrainerState) -> Any:
        """Return the scores of the checkpoint at `uri`."""
        raise NotImplementedError

    @override
    def on_epoch_end(self, trainer_state: TrainerState) -> None:
        uri = trainer_state.latest_wandb_uri or trainer_state.latest_checkpoint_uri
        if should_run(trainer_state.epoch, self.interval) and uri is not None:
            result = self.evaluate(uri, trainer_state)
            trainer_state.eval_scores = result if isinstance(result, Mapping) else getattr(result, "scores", result)


class MetricsHook(TrainerHook):
    """Sends losses, means of the rollout's statistics and scores to all loggers at the end of epochs, and logs a line.

    Scores may be any object: the numbers in its entries or fields are sent.

    Args:
        trainer_cfg: See `TrainerHook`.
        device: See `TrainerHook`.
        wandb_run: The run that ``wandb.init`` returned, if the trainer has no logger of W&B.
        stats_client: Your own client; its ``log(metrics)`` gets the same metrics.
        timer: Your own stopwatch, shared as ``timer`` of the state; its ``get_elapsed()`` is a metric, in seconds.
        interval: Cadence in epochs; 0 turns it off.

    Raises:
        TypeError: `stats_client` has no ``log``, or `timer` no ``get_elapsed``.
        ValueError: `interval` is not an integer >= 0.
    """

    optional_reads = ("eval_scores", "loss_stats", "rollout_stats")

    def __init__(
        self,
        trainer_cfg: Any = None,
        device: torch.device | None = None,
        wandb_run: Any = None,
        stats_client: Any = None,
        timer: Any = None,
        *,
        interval: int = 1,
    ) -> None:
        super().__init__(trainer_cfg, device)
        for name, part, method in (("stats_client", stats_client, "log"), ("timer", timer, "get_elapsed")):
            if part is not None and not callable(getattr(part, method, None)):
                raise TypeError(f"Invalid `{name}` {part!r}. Expected an object with `{method}`.")
        self.interval = step_cadence("interval", interval)
        self.wandb_run = wandb_run
        self.stats_client = stats_client
        self.timer = timer

    @override
    def on_new_training_run(self, trainer_state: TrainerState) -> None:
        if self.timer is not None:
            trainer_state.timer = self.timer
        if self.wandb_run is not None:
            setup_wandb_metrics(self.wandb_run)
        if isinstance(trainer_state.policy, torch.nn.Module):
            log_model_parameters(trainer_state.policy, self.wandb_run)

    @override
    def on_epoch_end(self, trainer_state: TrainerState) -> None:
        if not should_run(trainer_state.epoch, self.interval):
            return
        own = {f"eval/{name}": value for name, value in numbers_of(trainer_state.eval_scores).items()}
        own |= {"epoch": float(trainer_state.epoch), "agent_step": float(trainer_state.agent_step)}
        if self.timer is not None:
            own["timer/elapsed_s"] = float(self.timer.get_elapsed())
        metrics = {**(trainer_state.loss_stats or {}), **rollout_means(trainer_state.rollout_stats or {}), **own}
        trainer = trainer_state.trainer
        if trainer is not None:
            unsent = own if is_own_loop(trainer) else metrics  # in genlight's loop `LogMetrics` has sent the others
            log_to_loggers(trainer, unsent, trainer.global_step)
        for sink in (self.wandb_run, self.stats_client):
            if sink is not None:
                sink.log(metrics)
        log.info("epoch %d  %s", trainer_state.epoch, "  ".join(f"{name} {each:.4g}" for name, each in metrics.items()))
