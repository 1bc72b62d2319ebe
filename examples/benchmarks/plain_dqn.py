"""`examples/rl/dqn.py` as one file without genlight, to compare with: ``python examples/benchmarks/plain_dqn.py``."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

POLES, STEPS, UPDATES, ROWS = 8, 32, 128, 64
CAPACITY, FIRST_UPDATE_AFTER = 50_000, 1_000
GAMMA, RATE, TARGET_EVERY = 0.99, 1e-3, 32
LEAST_RANDOM, RANDOM_UNTIL = 0.04, 8_000


def phases(seed: int, max_steps: int) -> Iterator[tuple[list[Tensor], float]]:
    """Yield the weights and the mean return of the last hundred episodes after each rollout and its updates."""
    torch.manual_seed(seed)
    envs = gymnasium.make_vec("CartPole-v1", POLES, vectorization_mode="vector_entry_point").unwrapped
    observation = torch.from_numpy(envs.reset(seed=seed)[0])
    net = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max_steps)

    draws = torch.Generator().manual_seed(seed)
    observations, followings = torch.zeros(CAPACITY, 4), torch.zeros(CAPACITY, 4)
    actions, rewards = torch.zeros(CAPACITY, dtype=torch.int64), torch.zeros(CAPACITY)
    terminated, real = torch.zeros(CAPACITY, dtype=torch.bool), torch.zeros(CAPACITY, dtype=torch.bool)
    written, updates, returns, finished = 0, 0, np.zeros(POLES), []

    def sample() -> tuple[Tensor, ...]:
        at = torch.randint(max(0, written - CAPACITY), written, (ROWS,), generator=draws) % CAPACITY
        return observations[at], actions[at], rewards[at], followings[at], terminated[at], real[at]

    while updates < max_steps:
        collected = 0
        while collected == 0 or written < FIRST_UPDATE_AFTER:
            for _ in range(STEPS):
                random = max(LEAST_RANDOM, 1 - written / RANDOM_UNTIL)
                with torch.no_grad():
                    best = net(observation).argmax(-1)
                action = torch.where(torch.rand(POLES) < random, torch.randint(2, (POLES,)), best)
                begin = written % CAPACITY
                rows = slice(begin, begin + POLES)
                observations[rows], real[rows] = observation, torch.from_numpy(~envs.prev_done)
                following, reward, is_terminated, is_truncated, _ = envs.step(action.numpy())
                observation = torch.from_numpy(following)
                actions[rows], rewards[rows], followings[rows] = action, torch.from_numpy(reward), observation
                terminated[rows] = torch.from_numpy(is_terminated)
                written += POLES
                collected += POLES
                returns += reward
                ended = is_terminated | is_truncated
                finished = [*finished, *returns[ended].tolist()][-100:]
                returns[ended] = 0.0
        for _ in range(UPDATES):
            x, action, reward, following, is_terminated, is_real = sample()
            with torch.no_grad():
                best = net(following).argmax(-1, keepdim=True)
                wanted = reward + GAMMA * target(following).gather(1, best).squeeze(1) * ~is_terminated
            values = net(x).gather(1, action[:, None]).squeeze(1)
            loss = (nn.functional.smooth_l1_loss(values, wanted, reduction="none") * is_real).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimizer.step()
            scheduler.step()
            updates += 1
            if updates % TARGET_EVERY == 0:
                target.load_state_dict(net.state_dict())
        yield list(net.parameters()), float(np.mean(finished)) if finished else 0.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, (_, mean_return) in enumerate(phases(0, 10_000)):
        if number % 5 == 0:
            print(f"{(number + 1) * UPDATES} updates: mean return {mean_return:.1f}")
