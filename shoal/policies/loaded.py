"""A policy to act with: for one observation or many, greedy or sampled, with its memory if it is recurrent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.base import disk
from shoal.errors import MissingExtra, UsageError
from shoal.policies.policy import SavedPolicy

if TYPE_CHECKING:
    from shoal.policies.export.torch_module import TorchPolicy


class LoadedPolicy:
    """A trained policy. Needs NumPy alone or, for observations that are no arrays, Gymnasium's spaces."""

    def __init__(self, saved: SavedPolicy, source: Path | None = None) -> None:
        self.saved = saved
        self.source = source
        """File that the policy was loaded from; None for one that was just learned."""
        self._policy, self._distribution = saved.policy, saved.policy.distribution
        weights = saved.weights.copy()
        if "epsilon" in weights:  # slots may explore at different rates; sampled actions use the lowest
            weights["epsilon"] = weights["epsilon"].min(keepdims=True)
        self._act = self._policy.actor(weights)
        self._flattener = None
        if self._policy.flattened is not None:
            from shoal.policies.observations import Flattener

            self._flattener = Flattener.from_record(self._policy.flattened)
        self._shape, self._dtype = self._policy.observation_shape, np.dtype(self._policy.observation_dtype)
        self._memory = np.zeros((1, self._policy.remembered), np.float32)
        self._began = False

    @staticmethod
    def load(path: Path) -> LoadedPolicy:
        """Read a policy file. Nothing that the file names is imported."""
        return LoadedPolicy(SavedPolicy.load(path), path)

    @property
    def env(self) -> Mapping[str, Any]:
        """The environment that the policy was trained in: its id, keyword arguments and limits."""
        return self.saved.env

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation; of its flattened form, if observations are no arrays."""
        return self._shape

    @property
    def recurrent(self) -> bool:
        """Whether the policy has a memory, which `reset` clears at the start of an episode."""
        return bool(self._policy.remembered)

    def reset(self) -> None:
        """Forget the episode so far. Only recurrent policies remember anything."""
        self._memory[:] = 0.0
        self._began = False

    def act(self, observation: Any, rng: np.random.Generator | None = None) -> Any:
        """Choose the most likely action or, with an `rng`, sample one.

        An observation of shape `observation_shape` gives one action, as `env.step` takes it; a batch (n, *shape) gives
        n actions, as one array. Dict, Tuple, Discrete and text observations are given as the environment returns them;
        a batch of them is a list, or has arrays of n rows.
        """
        if rng is not None and not isinstance(rng, np.random.Generator):
            raise UsageError(f"rng must be a generator such as np.random.default_rng(0), not {rng!r}")
        if self._flattener is not None:
            observations, single = self._flattener.rows(observation)
            return self._actions(observations.astype(self._dtype, copy=False), single, rng)
        try:
            observations = np.asarray(observation, self._dtype)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the observation is not an array of numbers ({error}); this policy takes {self._shape}. Where a reset "
                f"returns (observation, info), pass the observation alone"
            ) from None
        single = observations.shape == self._shape
        if single:
            observations = observations[None]
        elif observations.shape[1:] != self._shape or observations.ndim != len(self._shape) + 1:
            raise UsageError(
                f"an observation has shape {observations.shape}; this policy takes {self._shape}, or a batch "
                f"(n, {', '.join(map(str, self._shape))})"
            )
        return self._actions(observations, single, rng)

    def save(self, path: str | Path) -> None:
        """Write a policy file, which `shoal.load` and `--from` take: the policy of an iteration, say, without a run."""
        target = Path(path)
        if target.suffix != ".safetensors":
            raise UsageError(f"the name of a policy file ends in .safetensors, unlike {target}; see also export()")
        try:
            disk.write_file(target, self.saved.to_bytes())
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}") from None

    def export(self, path: str | Path) -> None:
        """Write the policy for other programs, in the format that the suffix names.

        `.safetensors` holds named layers as PyTorch has them (`layers.0.weight` (out, in), `log_std`) and metadata that
        describe how to compute with them; a run's own `policy.safetensors` holds one flat vector that only Shoal reads.

        `.onnx` holds a graph from raw `observation` (batch, *shape) to the greedy `action`, as `env.step` takes it, and
        to `output`: logits, means or Q-values. Recurrent policies also have `memory` (batch, remembered), all zeros at
        the start of an episode, and `new_memory`. Needs the extra `onnx`.

        Dict, Tuple, Discrete and text observations have to be flattened before, as `gymnasium.spaces.utils.flatten`
        does.
        """
        from shoal.policies.export.files import export

        export(self.saved, Path(path), self.source)

    def to_torch(self) -> TorchPolicy:
        """Convert to a PyTorch module: `module(observations)` for logits, means or Q-values, `module.act` for actions.

        Its `state_dict` has the names of an exported `.safetensors` file. Takes batches; other observations than arrays
        have to be flattened first, as for `export`.
        """
        try:
            from shoal.policies.export.torch_module import TorchPolicy
        except ImportError as error:
            if error.name is None or error.name.partition(".")[0] != "torch":
                raise
            raise MissingExtra("to_torch() needs PyTorch, which is not installed. Run: pip install torch") from None
        return TorchPolicy(self.saved)

    def _actions(self, observations: np.ndarray, single: bool, rng: np.random.Generator | None) -> Any:
        width = len(observations)
        if self._memory.shape[0] != width:
            self._resize(width)
        self._began = True
        noise = None if rng is None else self._distribution.noise(rng, 1, width)[0]
        actions = self._distribution.to_env(self._act(observations, noise, self._memory))
        return actions[0] if single else np.asarray(actions)

    def _resize(self, width: int) -> None:
        if self._began and self.recurrent:
            raise UsageError(
                f"this policy is recurrent and remembers {len(self._memory)} episodes, but was given {width} "
                f"observations: call reset() before the number changes"
            )
        self._memory = np.zeros((width, self._policy.remembered), np.float32)

    def __repr__(self) -> str:
        size = math.prod(self.saved.weights["params"].shape)
        return f"LoadedPolicy({self.env['id']!r}, observations {self._shape}, {size:,} parameters)"
