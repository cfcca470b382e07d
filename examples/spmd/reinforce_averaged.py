"""REINFORCE in plain PyTorch and shoal.spmd: every process samples and learns, with averaged gradients."""

import argparse
import time

import gymnasium
import torch

from shoal import spmd


def sample(env: gymnasium.Env, policy: torch.nn.Module, steps: int) -> dict[str, torch.Tensor]:
    """Play whole episodes until there are at least `steps` steps."""
    observations, actions, rewards_to_go, returns = [], [], [], []
    while len(actions) < steps:
        observation, _ = env.reset()
        rewards, done = [], False
        while not done:
            observations.append(torch.as_tensor(observation))
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=policy(observations[-1])).sample()
            observation, reward, terminated, truncated, _ = env.step(action.item())
            actions.append(action)
            rewards.append(float(reward))
            done = terminated or truncated
        returns.append(sum(rewards))
        total, discounted = 0.0, []
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            discounted.append(total)
        rewards_to_go += reversed(discounted)
    return {
        "observations": torch.stack(observations),
        "actions": torch.stack(actions),
        "rewards_to_go": torch.tensor(rewards_to_go),
        "returns": torch.tensor(returns),
    }


def loss_of(policy: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Policy gradient loss, with normalised rewards-to-go as advantages."""
    rewards_to_go = batch["rewards_to_go"]
    advantages = (rewards_to_go - rewards_to_go.mean()) / (rewards_to_go.std() + 1e-8)
    log_probs = torch.distributions.Categorical(logits=policy(batch["observations"])).log_prob(batch["actions"])
    return -(log_probs * advantages).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    spmd.launch(args.processes)
    spmd.seed_everything(args.seed)
    env = gymnasium.make(args.env)
    env.reset(seed=spmd.own_seed(args.seed))
    size, actions = env.observation_space.shape[0], int(env.action_space.n)
    policy = torch.nn.Sequential(torch.nn.Linear(size, 64), torch.nn.Tanh(), torch.nn.Linear(64, actions))
    spmd.broadcast(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    samples, start = 0, time.perf_counter()
    for iteration in range(args.iterations):
        batch = sample(env, policy, args.steps // spmd.size())
        optimizer.zero_grad()
        loss_of(policy, batch).backward()
        spmd.average_gradients(policy)
        optimizer.step()
        samples += spmd.sum(len(batch["actions"]))
        returns = spmd.allgather(batch["returns"])
        spmd.print0(f"iteration {iteration}: mean return {returns.mean():.2f} of {len(returns)} episodes")
    spmd.print0(f"{samples / (time.perf_counter() - start):.0f} samples/s")


if __name__ == "__main__":
    main()
