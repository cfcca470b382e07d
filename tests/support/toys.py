"""Small environments with known answers, and some that misbehave: `tests.support.toys:Walk-v0`."""

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env[np.ndarray, Any]):
    """A random walk whose every number follows from the seed and the actions. Ends by chance; cut after 13 steps."""

    def __init__(self, observation: str = "float32", action: str = "discrete", size: int = 3) -> None:
        self.observation_space = {
            "float32": spaces.Box(-np.inf, np.inf, (size,), np.float32),
            "float64": spaces.Box(-np.inf, np.inf, (2, size), np.float64),
            "uint8": spaces.Box(0, 255, (4, size), np.uint8),
            "dict": spaces.Dict({"a": spaces.Box(-1, 1, (size,), np.float32), "b": spaces.Discrete(3)}),
            "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (size,), np.float32)]),
            "text": spaces.Dict({"words": spaces.Sequence(spaces.Discrete(3))}),
        }[observation]
        self.action_space = {
            "discrete": spaces.Discrete(3),
            "from one": spaces.Discrete(3, start=1),
            "multi": spaces.MultiDiscrete([2, 3]),
            "box": spaces.Box(-1, 1, (2,), np.float32),
            "binary": spaces.MultiBinary(3),
        }[action]
        self.steps = 0
        self.level = 0.0

    def _observe(self) -> Any:
        space = self.observation_space
        numbers = self.np_random.normal(self.level, 1.0, 64)
        if isinstance(space, spaces.Box):
            if space.dtype == np.uint8:
                return (np.abs(numbers[: np.prod(space.shape)]) * 40).astype(np.uint8).reshape(space.shape)
            return numbers[: np.prod(space.shape)].astype(space.dtype).reshape(space.shape)
        if isinstance(space, spaces.Dict):
            return {"a": np.tanh(numbers[:3]).astype(np.float32), "b": int(self.np_random.integers(3))}
        return (int(self.np_random.integers(2)), np.tanh(numbers[:3]).astype(np.float32))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.level = 0, 0.0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action) or isinstance(action, int), (action, type(action))
        self.steps += 1
        self.level += float(np.sum(action)) * 0.1
        reward = self.level + self.np_random.normal()
        return self._observe(), reward, bool(self.np_random.random() < 0.08), self.steps >= 13, {}


class Aim(gymnasium.Env[np.ndarray, np.ndarray]):
    """The action should be the number that is shown; the best return is 0."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-2, 2, (1,), np.float32)

    def _observe(self) -> np.ndarray:
        self.right = float(self.np_random.uniform(-1, 1))
        return np.array([self.right], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = -((float(action[0]) - self.right) ** 2)
        self.steps += 1
        return self._observe(), reward, False, self.steps == 8, {}


class Bowl(gymnasium.Env[np.ndarray, np.ndarray]):
    """One step. The nearer the action is to (0.5, -1), the better; 0 is the best return."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Box(-9, 9, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = -float(((action - np.array([0.5, -1.0])) ** 2).sum())
        return np.ones(1, np.float32), reward, True, False, {}


class Recall(gymnasium.Env[np.ndarray, int]):
    """A number is shown once, at first. Whoever remembers it gets 1 in each of four steps; who does not, 2 at best on
    average."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.right, self.steps = int(self.np_random.integers(2)), 0
        return np.array([2 * self.right - 1], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        reward = float(action == self.right and self.steps > 1)
        return np.zeros(1, np.float32), reward, self.steps == 5, False, {}


class Chain(gymnasium.Env[np.ndarray, int]):
    """Five places in a row: left (0) or right (1). Past the right end it is over, with 1; at the left end staying pays
    0.3. Cut off after 6 steps, which the values must not see."""

    observation_space = spaces.Box(0, 1, (5,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(5)), 0
        return np.eye(5, dtype=np.float32)[self.place], {}

    @staticmethod
    def outcome(place: int, action: int) -> tuple[int, float, bool]:
        """Next place, reward, and whether it is over."""
        if action == 1:
            return min(place + 1, 4), float(place == 4), place == 4
        return max(place - 1, 0), 0.3 * (place == 0), False

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place, reward, terminated = self.outcome(self.place, int(action))
        self.steps += 1
        return np.eye(5, dtype=np.float32)[self.place], reward, terminated, self.steps == 6, {}


class Trouble(Walk):
    """Misbehaves at a step of an episode, in the way that is asked for."""

    def __init__(self, how: str, at: int = 3) -> None:
        super().__init__()
        self.how, self.at = how, at

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.how == "never ends":
            return observation, reward, False, False, info
        if self.steps == self.at:
            if self.how == "raises":
                raise RuntimeError("the simulation diverged")
            if self.how == "old":
                return observation, reward, terminated, info  # type: ignore[return-value]
            if self.how == "no reward":
                reward = None  # type: ignore[assignment]
            if self.how == "nan reward":
                reward = float("nan")
            if self.how == "nan observation":
                observation = observation * np.nan
            if self.how == "odd observation":
                observation = observation[:-1]
            if self.how == "no info":
                info = None  # type: ignore[assignment]
            if self.how == "kills":
                os._exit(7)
            if self.how == "hangs":
                time.sleep(3600)
        return observation, reward, terminated, truncated, info


class Careless(Walk):
    """Rewards that no seed determines."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward + int.from_bytes(os.urandom(6), "big"), terminated, truncated, info


class Whim(Walk):
    """Draws from the random numbers of its own action space, which nobody seeds."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward + self.action_space.np_random.random(), terminated, truncated, info


class Unseeded(Walk):
    """As before Gymnasium: `reset` takes no seed."""

    def reset(self) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
        return super().reset(seed=1)


class Sticky(Walk):
    """Something survives `reset`."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episodes += 1
        observation, info = super().reset(seed=seed)
        return observation + np.float32(self.episodes), info


class Single(Walk):
    """Rewards in single precision, as C simulators give them."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, np.float32(reward), terminated, truncated, info


class Flaky(Walk):
    """Ends when it likes, whatever the seed."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, os.urandom(1)[0] < 40, truncated, info


class Leaky(Walk):
    """Keeps a little of every episode."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.kept.append(np.ones(5_000))
        return super().reset(seed=seed)


class Slow(Leaky):
    """Takes so long to reset that few resets fit into a check."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        time.sleep(0.01)
        return super().reset(seed=seed)


class Liar(Walk):
    """Its observations are not what its space says."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        return observation.astype(np.float64), info


class Local(Walk):
    """Depends on the process that it runs in."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=None if seed is None else seed + os.getpid())


class Homesick(Walk):
    """Raises in every process but the first that made one."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if os.getpid() != int(os.environ.setdefault("HOMESICK", str(os.getpid()))):
            raise RuntimeError("no display")
        return super().step(action)


class Crowded(Walk):
    """Misbehaves at its third step, in the way that is asked for, if many were made in this process before it."""

    made = 0

    def __init__(self, how: str, many: int) -> None:
        super().__init__()
        type(self).made += 1
        self.how = how if self.made > many else ""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.steps == 3:
            if self.how == "raises":
                raise RuntimeError("the simulation diverged")
            if self.how == "reward":
                reward += 0.5
            if self.how == "observation":
                observation[1] += 1
            if self.how == "ends":
                terminated = True
        if self.how == "goes on":
            terminated = truncated = False
        return observation, reward, terminated, truncated, info


misbehaving = {
    "Crowded": Crowded,
    "Single": Single,
    "Flaky": Flaky,
    "Careless": Careless,
    "Whim": Whim,
    "Unseeded": Unseeded,
    "Slow": Slow,
    "Sticky": Sticky,
    "Leaky": Leaky,
    "Liar": Liar,
    "Local": Local,
    "Homesick": Homesick,
    "Trouble": Trouble,
}

plain = {"Walk": Walk, "Aim": Aim, "Chain": Chain, "Bowl": Bowl, "Recall": Recall}

for name, entry in (plain | misbehaving).items():
    gymnasium.register(f"{name}-v0", entry_point=entry)
