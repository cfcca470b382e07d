"""REINFORCE in plain PyTorch, in a single process."""

import argparse
import time

import gymnasium
import torch


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
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    env = gymnasium.make(args.env)
    env.reset(seed=args.seed)
    size, actions = env.observation_space.shape[0], int(env.action_space.n)
    policy = torch.nn.Sequential(torch.nn.Linear(size, 64), torch.nn.Tanh(), torch.nn.Linear(64, actions))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    samples, start = 0, time.perf_counter()
    for iteration in range(args.iterations):
        batch = sample(env, policy, args.steps)
        optimizer.zero_grad()
        loss_of(policy, batch).backward()
        optimizer.step()
        samples += len(batch["actions"])
        print(f"iteration {iteration}: mean return {batch['returns'].mean():.2f} of {len(batch['returns'])} episodes")
    print(f"{samples / (time.perf_counter() - start):.0f} samples/s")


if __name__ == "__main__":
    main()
