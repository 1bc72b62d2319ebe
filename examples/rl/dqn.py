"""Double deep Q-learning (Mnih et al. 2015, van Hasselt et al. 2016) on CartPole-v1 from a replay buffer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from cartpole import ACTIONS, OBSERVATION, CartPoles, mean_return
from torch import Tensor, nn

from genlight.adapter import ReplayBuffer, StepContext, StepResult, seed_everything

POLES, STEPS = 8, 32
UPDATES, ROWS = 128, 64
"""Minibatches of a rollout, and rows of each."""
CAPACITY, FIRST_UPDATE_AFTER = 50_000, 1_000
GAMMA, RATE = 0.99, 1e-3
TARGET_EVERY = 32
"""Steps between copies of the network to the target network."""
LEAST_RANDOM, RANDOM_UNTIL = 0.04, 8_000
"""Final share of random actions, and the environment steps until then."""

ROW = {
    "observation": torch.zeros(OBSERVATION),
    "action": torch.tensor(0),
    "reward": torch.tensor(0.0),
    "next_observation": torch.zeros(OBSERVATION),
    "terminated": torch.tensor(False),
    "truncated": torch.tensor(False),
    "is_real": torch.tensor(False),
}


class DQN:
    """A rollout is 32 steps of 8 poles, followed by 128 minibatches from the buffer."""

    def setup(self, ctx: StepContext) -> None:
        torch.set_num_threads(1)  # the networks are so small that threads would wait for each other
        self.seed = ctx.job.hyperparams.get("seed", 0)
        seed_everything(self.seed)
        self.poles = CartPoles(POLES, self.seed)
        self.replay = ReplayBuffer(CAPACITY, ROW, seed=self.seed)

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        hidden = [nn.Linear(OBSERVATION, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        net = nn.Sequential(*hidden, nn.Linear(256, ACTIONS))
        target = copy.deepcopy(net).requires_grad_(False)
        optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, ctx.job.max_steps)
        return {"net": net, "target": target, "optimizer": optimizer, "scheduler": scheduler, "updates": 0}

    @torch.no_grad()
    def rollout(self, state: dict[str, Any], ctx: StepContext) -> Any:
        collected = 0
        while collected == 0 or self.replay.written < FIRST_UPDATE_AFTER:
            for _ in range(STEPS):
                random = max(LEAST_RANDOM, 1 - self.replay.written / RANDOM_UNTIL)
                best = state["net"](self.poles.observation).argmax(-1)
                action = torch.where(torch.rand(POLES) < random, torch.randint(ACTIONS, (POLES,)), best)
                self.replay.extend(self.poles.step(action))
                collected += POLES
        return [self.replay.sample(ROWS) for _ in range(UPDATES)], {"agent_steps": collected}

    def prepare_batch(self, raw: dict[str, Tensor], state: dict[str, Any], ctx: StepContext) -> dict[str, Tensor]:
        return raw

    def train_step(self, batch: dict[str, Tensor], state: dict[str, Any], ctx: StepContext) -> StepResult:
        with torch.no_grad():
            best = state["net"](batch["next_observation"]).argmax(-1, keepdim=True)
            following = state["target"](batch["next_observation"]).gather(1, best).squeeze(1)
            wanted = batch["reward"] + GAMMA * following * ~batch["terminated"]
        values = state["net"](batch["observation"]).gather(1, batch["action"][:, None]).squeeze(1)
        # A row that only began an episode has no action of the policy.
        loss = (nn.functional.smooth_l1_loss(values, wanted, reduction="none") * batch["is_real"]).mean()
        state["optimizer"].zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(state["net"].parameters(), 10.0)
        state["optimizer"].step()
        state["scheduler"].step()
        state["updates"] += 1
        if state["updates"] % TARGET_EVERY == 0:
            state["target"].load_state_dict(state["net"].state_dict())
        return StepResult({"loss": loss.detach(), "episode_return": self.poles.mean_return()})

    def evaluate(self, state: dict[str, Any], ctx: StepContext) -> dict[str, float]:
        return {"eval/return": mean_return(lambda observation: state["net"](observation).argmax(-1))}

    def rollout_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return self.poles.state_dict()

    def load_rollout_state(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        self.poles.load_state_dict(payload)

    def save_checkpoint(self, *, state: Any, step: int, output_dir: str, final: bool, ctx: StepContext) -> None:
        self.replay.save(output_dir)

    def load_checkpoint(self, *, state: Any, checkpoint_dir: str, payload: Any, ctx: StepContext) -> None:
        self.replay.load(checkpoint_dir)

    def state_dict(self, state: dict[str, Any]) -> dict[str, object]:
        return {"updates": state["updates"]}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state["updates"] = payload["updates"]
