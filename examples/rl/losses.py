"""Losses as objects: each is a part of the objective, with its own hooks and state.

They have no code for genlight; a project with such losses uses them unchanged. Their hooks take a trainer state
with ``agent_step``, ``epoch``, ``update_epoch``, ``mb_idx``, ``stop_update_epoch``, ``policy``, ``optimizer`` and more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Rows = dict[str, Tensor]


class BaseLoss:
    """Base class: its hooks do nothing, and it adds nothing to the objective."""

    def __init__(self, trainer_cfg: Mapping[str, Any], device: str, policy: nn.Module) -> None:
        self.trainer_cfg, self.device, self.policy = trainer_cfg, device, policy
        self.tracked: dict[str, list[Tensor]] = {}

    def on_new_training_run(self, trainer_state: Any) -> None:
        """Training begins or resumes."""

    def on_rollout_start(self, trainer_state: Any) -> None:
        """A phase begins: clear the metrics of the previous one."""
        self.tracked = {}

    def on_mb_end(self, trainer_state: Any) -> None:
        """A minibatch was trained."""

    def on_train_phase_end(self, trainer_state: Any) -> None:
        """All minibatches of a rollout were trained."""

    def rollout(self, step: Rows, trainer_state: Any) -> None:
        """Add to one step of the environments what `train` will need."""

    def train(self, rows: Rows, shared: Rows, trainer_state: Any) -> Tensor:
        """Return the loss of a minibatch; `shared` has values for several losses, such as action distributions."""
        return torch.zeros((), device=self.device)

    def parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that only this loss has."""
        return ()

    def track(self, name: str, value: Tensor) -> None:
        self.tracked.setdefault(name, []).append(value.detach())

    def stats(self) -> dict[str, Tensor]:
        """Return the metrics of the loss, as means over the phase."""
        return {name: torch.stack(values).mean() for name, values in self.tracked.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"tracked": self.tracked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tracked = state["tracked"]


class ClippedPolicyLoss(BaseLoss):
    """The clipped objective of PPO (Schulman et al. 2017); it ends an update that has gone too far."""

    stopped_updates = 0

    def rollout(self, step: Rows, trainer_state: Any) -> None:
        logits = self.policy.logits(step["observation"])
        step["log_prob"] = torch.distributions.Categorical(logits=logits).log_prob(step["action"])

    def train(self, rows: Rows, shared: Rows, trainer_state: Any) -> Tensor:
        clip, advantage = self.trainer_cfg["clip"], rows["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        log_ratio = shared["log_prob"] - rows["log_prob"]
        ratio = log_ratio.exp()
        self.track("approx_kl", ((ratio - 1) - log_ratio).mean())
        self.track("clip_fraction", ((ratio - 1).abs() > clip).float().mean())
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()

    def on_mb_end(self, trainer_state: Any) -> None:
        if self.tracked["approx_kl"][-1] > self.trainer_cfg["kl_limit"]:
            trainer_state.stop_update_epoch = True
            self.stopped_updates += 1

    def stats(self) -> dict[str, Tensor]:
        return {**super().stats(), "stopped_updates": torch.tensor(float(self.stopped_updates))}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "stopped_updates": self.stopped_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.stopped_updates = state["stopped_updates"]


class ValueLoss(BaseLoss):
    """The squared error of the value of an observation."""

    def train(self, rows: Rows, shared: Rows, trainer_state: Any) -> Tensor:
        error = (self.policy.value(rows["observation"]) - rows["target"]).square().mean()
        self.track("error", error)
        return 0.5 * error


class EntropyLoss(BaseLoss):
    """Rewards the entropy of the policy, less with each phase."""

    def __init__(self, trainer_cfg: Mapping[str, Any], device: str, policy: nn.Module) -> None:
        super().__init__(trainer_cfg, device, policy)
        self.weight = float(trainer_cfg["entropy_weight"])

    def train(self, rows: Rows, shared: Rows, trainer_state: Any) -> Tensor:
        entropy = shared["entropy"].mean()
        self.track("entropy", entropy)
        return -self.weight * entropy

    def on_train_phase_end(self, trainer_state: Any) -> None:
        self.weight *= 0.98

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.weight = state["weight"]


class DynamicsLoss(BaseLoss):
    """Trains a separate network to predict the change of the observation."""

    def __init__(self, trainer_cfg: Mapping[str, Any], device: str, policy: nn.Module) -> None:
        super().__init__(trainer_cfg, device, policy)
        self.model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)

    def train(self, rows: Rows, shared: Rows, trainer_state: Any) -> Tensor:
        given = torch.cat([rows["observation"], rows["action"][:, None].float()], 1)
        change = rows["next_observation"] - rows["observation"]
        error = (self.model(given) - change).square().mean()
        self.track("error", error)
        return error

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.model.parameters()


def init_losses(trainer_cfg: Mapping[str, Any], device: str, policy: nn.Module) -> dict[str, BaseLoss]:
    """Return the losses of a job by name, in the order of their hooks."""
    kinds = {"ppo": ClippedPolicyLoss, "value": ValueLoss, "entropy": EntropyLoss, "dynamics": DynamicsLoss}
    return {name: kinds[name](trainer_cfg, device, policy) for name in trainer_cfg["losses"]}
