"""Policy gradient in plain PyTorch, on one process."""

import argparse
import time

import gymnasium
import torch


def sample(env: gymnasium.Env, policy: torch.nn.Module, steps: int) -> dict[str, torch.Tensor]:
    """Whole episodes, until there are `steps` steps: observations, actions and discounted returns to go."""
    observations, actions, to_go, returns = [], [], [], []
    while len(actions) < steps:
        observation, _ = env.reset()
        rewards, ended = [], False
        while not ended:
            observations.append(torch.as_tensor(observation))
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=policy(observations[-1])).sample()
            observation, reward, terminated, truncated, _ = env.step(action.item())
            actions.append(action)
            rewards.append(float(reward))
            ended = terminated or truncated
        returns.append(sum(rewards))
        total, later = 0.0, []
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            later.append(total)
        to_go += reversed(later)
    return {
        "observations": torch.stack(observations),
        "actions": torch.stack(actions),
        "to_go": torch.tensor(to_go),
        "returns": torch.tensor(returns),
    }


def loss_of(policy: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The policy gradient's loss, with normalised returns as advantages."""
    advantages = (batch["to_go"] - batch["to_go"].mean()) / (batch["to_go"].std() + 1e-8)
    chosen = torch.distributions.Categorical(logits=policy(batch["observations"])).log_prob(batch["actions"])
    return -(chosen * advantages).mean()


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
    samples, begun = 0, time.perf_counter()
    for iteration in range(args.iterations):
        batch = sample(env, policy, args.steps)
        optimizer.zero_grad()
        loss_of(policy, batch).backward()
        optimizer.step()
        samples += len(batch["actions"])
        print(f"iteration {iteration}: mean return {batch['returns'].mean():.2f} of {len(batch['returns'])} episodes")
    print(f"{samples / (time.perf_counter() - begun):.0f} samples/s")


if __name__ == "__main__":
    main()
