"""A trainer class whose objective is a set of loss objects with their own hooks."""

from __future__ import annotations

from typing import Any

import torch
from cartpole import ACTIONS, CartPoles, mean_return
from losses import BaseLoss, init_losses
from ppo import MOST_NORM, POLES, RATE, STEPS, advantages, network
from torch import Tensor, nn

from genlight.adapter import Minibatches, StepContext, StepResult, seed_everything
from genlight.callbacks import TrainerState


class Policy(nn.Module):
    """Return the logits of the actions and the value of an observation."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = network(ACTIONS, 0.01), network(1, 1.0)

    def logits(self, observation: Tensor) -> Tensor:
        return self.actor(observation)

    def value(self, observation: Tensor) -> Tensor:
        return self.critic(observation).squeeze(-1)


class Composed:
    """Trains by the losses that ``hyperparams.losses`` names; genlight calls their hooks, this class the rest."""

    update_epochs = 20

    def setup(self, ctx: StepContext) -> None:
        torch.set_num_threads(1)  # the networks are so small that threads would wait for each other
        seed = ctx.job.hyperparams["seed"]
        seed_everything(seed + ctx.rank)
        self.poles = CartPoles(POLES, seed * 1000 + ctx.rank)

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        policy = Policy()
        losses = init_losses(ctx.job.hyperparams, ctx.device, policy)
        parameters = [*policy.parameters(), *(p for loss in losses.values() for p in loss.parameters())]
        optimizer = torch.optim.Adam(parameters, lr=RATE, eps=1e-5)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, ctx.job.max_steps)
        return {"policy": policy, "losses": losses, "optimizer": optimizer, "scheduler": scheduler}

    def trainer_hooks(self, state: dict[str, Any], ctx: StepContext) -> list[Any]:
        return [*state["losses"].values(), self]

    def on_new_training_run(self, trainer_state: TrainerState) -> None:
        self.trainer_state = trainer_state  # losses get it in `rollout` and `train`

    @torch.no_grad()
    def rollout(self, state: dict[str, Any], ctx: StepContext) -> Any:
        steps = []
        for _ in range(STEPS):
            logits = state["policy"].logits(self.poles.observation)
            step = self.poles.step(torch.distributions.Categorical(logits=logits).sample())
            for loss in state["losses"].values():
                loss.rollout(step, self.trainer_state)
            steps.append(step)
        rows = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
        values = state["policy"].value(torch.cat([rows["observation"], rows["next_observation"][-1:]]))
        rows["advantage"] = advantages(rows, values)
        rows["target"] = rows["advantage"] + values[:-1]
        real = {name: column[rows["is_real"]] for name, column in rows.items()}
        return Minibatches(real, POLES * STEPS), {"agent_steps": POLES * STEPS}

    def prepare_batch(self, raw: dict[str, Tensor], state: dict[str, Any], ctx: StepContext) -> dict[str, Tensor]:
        return raw

    def train_step(self, batch: dict[str, Tensor], state: dict[str, Any], ctx: StepContext) -> StepResult:
        actions = torch.distributions.Categorical(logits=state["policy"].logits(batch["observation"]))
        shared = {"log_prob": actions.log_prob(batch["action"]), "entropy": actions.entropy()}
        losses: dict[str, BaseLoss] = state["losses"]
        total = torch.stack([loss.train(batch, shared, self.trainer_state) for loss in losses.values()]).sum()
        state["optimizer"].zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(state["policy"].parameters(), MOST_NORM)
        state["optimizer"].step()
        state["scheduler"].step()
        merged = {f"{name}/{key}": value for name, loss in losses.items() for key, value in loss.stats().items()}
        return StepResult({"loss": total.detach(), "episode_return": self.poles.mean_return(), **merged})

    def evaluate(self, state: dict[str, Any], ctx: StepContext) -> dict[str, float]:
        return {"eval/return": mean_return(lambda observation: state["policy"].logits(observation).argmax(-1))}

    def rollout_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return self.poles.state_dict()

    def load_rollout_state(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        self.poles.load_state_dict(payload)

    def state_dict(self, state: dict[str, Any]) -> dict[str, object]:
        return {name: loss.state_dict() for name, loss in state["losses"].items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, loss in state["losses"].items():
            loss.load_state_dict(payload[name])
