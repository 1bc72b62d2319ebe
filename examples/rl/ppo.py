"""Proximal policy optimization (Schulman et al. 2017) on CartPole-v1 as a trainer class."""

from __future__ import annotations

from typing import Any

import torch
from cartpole import ACTIONS, OBSERVATION, CartPoles, mean_return
from torch import Tensor, nn

from genlight.adapter import Minibatches, StepContext, StepResult, seed_everything

POLES, STEPS = 8, 32
GAMMA, LAMBDA = 0.98, 0.8
RATE, CLIP, MOST_NORM = 1e-3, 0.2, 0.5


def network(outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(OBSERVATION, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, scale in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class PPO:
    """A rollout is 32 steps of 8 poles; an update is 20 passes over it."""

    update_epochs = 20

    def setup(self, ctx: StepContext) -> None:
        torch.set_num_threads(1)  # the networks are so small that threads would wait for each other
        self.seed = ctx.job.hyperparams.get("seed", 0)
        seed_everything(self.seed + ctx.rank)
        self.poles = CartPoles(POLES, self.seed * 1000 + ctx.rank)

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        policy, value = network(ACTIONS, 0.01), network(1, 1.0)
        optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=RATE, eps=1e-5)
        # Rate and clip range fall to zero with the run.
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, ctx.job.max_steps)
        return {"policy": policy, "value": value, "optimizer": optimizer, "scheduler": scheduler}

    @torch.no_grad()
    def rollout(self, state: dict[str, Any], ctx: StepContext) -> Any:
        steps = []
        for _ in range(STEPS):
            actions = torch.distributions.Categorical(logits=state["policy"](self.poles.observation))
            action = actions.sample()
            steps.append({**self.poles.step(action), "log_prob": actions.log_prob(action)})
        rows = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
        values = state["value"](torch.cat([rows["observation"], rows["next_observation"][-1:]])).squeeze(-1)
        rows["advantage"] = advantages(rows, values)
        rows["target"] = rows["advantage"] + values[:-1]
        wanted = ("observation", "action", "log_prob", "advantage", "target")
        real = {name: rows[name][rows["is_real"]] for name in wanted}
        return Minibatches(real, POLES * STEPS), {"agent_steps": POLES * STEPS}

    def prepare_batch(self, raw: dict[str, Tensor], state: dict[str, Any], ctx: StepContext) -> dict[str, Tensor]:
        return raw

    def train_step(self, batch: dict[str, Tensor], state: dict[str, Any], ctx: StepContext) -> StepResult:
        clip = CLIP * state["scheduler"].get_last_lr()[0] / RATE
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        actions = torch.distributions.Categorical(logits=state["policy"](batch["observation"]))
        ratio = (actions.log_prob(batch["action"]) - batch["log_prob"]).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        error = (state["value"](batch["observation"]).squeeze(-1) - batch["target"]).square().mean()
        loss = 0.5 * error - gain
        state["optimizer"].zero_grad()
        loss.backward()
        for name in ("policy", "value"):
            nn.utils.clip_grad_norm_(state[name].parameters(), MOST_NORM)
        state["optimizer"].step()
        state["scheduler"].step()
        return StepResult({"loss": loss.detach(), "episode_return": self.poles.mean_return()})

    def evaluate(self, state: dict[str, Any], ctx: StepContext) -> dict[str, float]:
        return {"eval/return": mean_return(lambda observation: state["policy"](observation).argmax(-1))}

    def rollout_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return self.poles.state_dict()

    def load_rollout_state(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        self.poles.load_state_dict(payload)

    def state_dict(self, state: dict[str, Any]) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, object], ctx: StepContext) -> None: ...


def advantages(rows: dict[str, Tensor], values: Tensor) -> Tensor:
    """Return generalized advantage estimates (Schulman et al. 2016) by step and pole."""
    goes_on = (~(rows["terminated"] | rows["truncated"])).float()
    errors = rows["reward"] + GAMMA * values[1:] * (~rows["terminated"]).float() - values[:-1]
    found, after = torch.zeros_like(errors), torch.zeros(errors.shape[1])
    for step in reversed(range(len(errors))):
        after = found[step] = errors[step] + GAMMA * LAMBDA * goes_on[step] * after
    return found
