"""`examples/rl/ppo.py` as one file without genlight, to compare with: ``python examples/benchmarks/plain_ppo.py``."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

POLES, STEPS, PASSES, ROWS = 8, 32, 20, 256
GAMMA, LAMBDA = 0.98, 0.8
RATE, CLIP, MOST_NORM = 1e-3, 0.2, 0.5


def network(outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, scale in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def phases(seed: int, max_steps: int) -> Iterator[tuple[list[Tensor], float]]:
    """Yield the weights and the mean return of the last hundred episodes after each rollout and its update."""
    torch.manual_seed(seed)
    envs = gymnasium.make_vec("CartPole-v1", POLES, vectorization_mode="vector_entry_point").unwrapped
    observation = torch.from_numpy(envs.reset(seed=seed * 1000)[0])
    policy, value = network(2, 0.01), network(1, 1.0)
    weights = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(weights, lr=RATE, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max_steps)

    observations, actions = torch.zeros(STEPS, POLES, 4), torch.zeros(STEPS, POLES, dtype=torch.int64)
    log_probs, rewards, advantages = (torch.zeros(STEPS, POLES) for _ in range(3))
    real, terminated, ended = (torch.zeros(STEPS, POLES, dtype=torch.bool) for _ in range(3))
    returns, finished, updates = np.zeros(POLES), [], 0

    while updates < max_steps:
        with torch.no_grad():
            for step in range(STEPS):
                observations[step], real[step] = observation, torch.from_numpy(~envs.prev_done)
                distribution = Categorical(logits=policy(observation))
                action = distribution.sample()
                actions[step], log_probs[step] = action, distribution.log_prob(action)
                following, reward, is_terminated, is_truncated, _ = envs.step(action.numpy())
                observation = torch.from_numpy(following)
                rewards[step], terminated[step] = torch.from_numpy(reward), torch.from_numpy(is_terminated)
                has_ended = is_terminated | is_truncated
                ended[step] = torch.from_numpy(has_ended)
                returns += reward
                finished = [*finished, *returns[has_ended].tolist()][-100:]
                returns[has_ended] = 0.0
            values = value(torch.cat([observations, observation[None]])).squeeze(-1)
            errors = rewards + GAMMA * values[1:] * (~terminated).float() - values[:-1]
            after, goes_on = torch.zeros(POLES), (~ended).float()
            for step in reversed(range(STEPS)):
                after = advantages[step] = errors[step] + GAMMA * LAMBDA * goes_on[step] * after
            rows = [t[real] for t in (observations, actions, log_probs, advantages, advantages + values[:-1])]
        count = len(rows[0])
        for _ in range(PASSES):
            order = torch.randperm(count)
            for begin in range(0, count, ROWS):
                x, action, log_prob, advantage, target = (row[order[begin : begin + ROWS]] for row in rows)
                clip = CLIP * scheduler.get_last_lr()[0] / RATE
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                ratio = (Categorical(logits=policy(x)).log_prob(action) - log_prob).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
                error = (value(x).squeeze(-1) - target).square().mean()
                loss = 0.5 * error - gain
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), MOST_NORM)
                nn.utils.clip_grad_norm_(value.parameters(), MOST_NORM)
                optimizer.step()
                scheduler.step()
                updates += 1
        yield weights, float(np.mean(finished)) if finished else 0.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, (_, mean_return) in enumerate(phases(0, 6000)):
        if number % 20 == 0:
            print(f"{(number + 1) * POLES * STEPS} environment steps: mean return {mean_return:.1f}")
