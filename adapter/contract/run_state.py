"""The facts of a run that hooks share.

The run state is plain data and travels inside checkpoints. Live objects (model, optimizers, loggers) are not here:
hooks reach them through the Lightning trainer and module.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class RunState:
    """Facts that hooks read and write; one object per run, saved in every checkpoint.

    A hook names the fields it ``reads`` and ``writes``, and the order of hooks follows from that. Other facts go to
    `extra`, under a name that the hook declares the same way.
    """

    run_id: str = ""
    attempt: int = 1
    agent_step: int = 0
    """Environment steps of all ranks: the sum of ``agent_steps`` in the statistics of rollouts, or of the steps that
    the ``rollout`` of each rank adds here."""
    epoch: int = 0
    """Completed passes over the data, or rollout and training phases; counted after ``on_train_phase_end``."""
    update_epoch: int = 0
    """Pass over the current rollout, from 0."""
    minibatch_index: int = 0
    """Minibatch within the current update epoch, from 0; without a ``rollout``, batch within the epoch."""
    stop_rollout: bool = False
    """Set by a trainer or a hook: take no further batches from the current rollout."""
    stop_update_epoch: bool = False
    """Set by a trainer or a hook, on any rank: train no further minibatch of the current rollout."""
    rollout_stats: dict[str, Any] | None = None
    loss_stats: dict[str, float] | None = None
    """The last metrics that a cadence read from the device."""
    eval_scores: Any = None
    """The latest scores: a mapping of names to numbers, or any object; checkpoints store its numbers only."""
    latest_checkpoint_uri: str | None = None
    """The newest durable checkpoint, or the one that the run resumed from: the path of its record, and its address
    after an upload has arrived."""
    latest_wandb_uri: str | None = None
    """The newest checkpoint that is an artifact of Weights & Biases."""
    latest_sample_uris: list[str] | None = None
    stop_reason: str | None = None
    """Why the run ends early, after that is decided."""
    rolls_back: bool = False
    """Whether the run returns to an earlier checkpoint after all callbacks have seen this step."""
    extra: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the facts as a plain dictionary."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved facts.

        Unknown fields, of an older or newer version, are kept in `extra`.
        """
        known = {f.name for f in fields(self)}
        for name, value in state.items():
            if name in known:
                setattr(self, name, value)
            else:
                self.extra[name] = value
