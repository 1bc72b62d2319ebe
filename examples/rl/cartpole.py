"""CartPole-v1 for several episodes at once, with its complete state, and the return of a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

OBSERVATION, ACTIONS = 4, 2


class CartPoles:
    """`count` poles; the step after the end of an episode only begins a new one."""

    def __init__(self, count: int, seed: int) -> None:
        self.env: Any = gymnasium.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point").unwrapped
        observation, _ = self.env.reset(seed=seed)
        self.observation = torch.from_numpy(observation)
        self.returns = np.zeros(count)
        self.finished: list[float] = []
        """Returns of the last hundred episodes."""

    def step(self, action: Tensor) -> dict[str, Tensor]:
        """Take one step with each pole; ``is_real`` is false if it only began an episode."""
        before, is_real = self.observation, torch.from_numpy(~self.env.prev_done)
        observation, reward, terminated, truncated, _ = self.env.step(action.numpy())
        self.observation = torch.from_numpy(observation)
        self.returns += reward
        ended = terminated | truncated
        self.finished = [*self.finished, *self.returns[ended].tolist()][-100:]
        self.returns[ended] = 0.0
        return {
            "observation": before,
            "action": action,
            "reward": torch.from_numpy(reward),
            "next_observation": self.observation,
            "terminated": torch.from_numpy(terminated),
            "truncated": torch.from_numpy(truncated),
            "is_real": is_real,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "observation": self.observation,
            "returns": self.returns.copy(),
            "finished": list(self.finished),
            "poles": self.env.state.copy(),
            "steps": self.env.steps.copy(),
            "prev_done": self.env.prev_done.copy(),
            "generator": self.env.np_random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of `state_dict`, also in the middle of an episode."""
        self.observation, self.returns, self.finished = state["observation"], state["returns"], state["finished"]
        self.env.state, self.env.steps, self.env.prev_done = state["poles"], state["steps"], state["prev_done"]
        self.env.np_random.bit_generator.state = state["generator"]

    def mean_return(self) -> float:
        """Mean return of the last hundred episodes; 0 before the first has ended."""
        return sum(self.finished) / max(1, len(self.finished))


@torch.no_grad()
def mean_return(act: Callable[[Tensor], Tensor], episodes: int = 100, seed: int = 10_000) -> float:
    """Return the mean return of the first episode of poles that the policy has not seen."""
    poles = CartPoles(episodes, seed)
    returns, lasts = torch.zeros(episodes), torch.ones(episodes)
    while lasts.any():
        row = poles.step(act(poles.observation))
        returns += row["reward"] * lasts
        lasts *= (~(row["terminated"] | row["truncated"])).float()
    return returns.mean().item()
