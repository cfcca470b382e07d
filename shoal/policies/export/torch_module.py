"""A policy as a PyTorch module. Needs PyTorch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shoal.errors import UsageError
from shoal.policies.export.layers import Computation, tensors
from shoal.policies.policy import Policy, SavedPolicy

_OPERATORS = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Tanh": torch.tanh,
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Softsign": torch.nn.functional.softsign,
}


class TorchPolicy(torch.nn.Module):  # type: ignore[misc]
    """A policy over batches of raw observations; `state_dict` has the names of an exported safetensors file.

    module(observations)          distribution parameters (batch, n): logits, means or Q-values
    module.act(observations)      greedy actions, as `env.step` takes them, batch axis first

    If the policy is recurrent, both take a memory (batch, remembered) as second argument, which defaults to zeros, the
    start of an episode, and return a pair with the new memory.
    """

    def __init__(self, saved: SavedPolicy) -> None:
        super().__init__()
        self._computation = Computation(saved.policy)
        arrays = tensors(saved.policy, saved.weights)
        for name, array in arrays.items():
            self._place(name, torch.tensor(array), learned=True)
        for name, array in self._computation.constants.items():
            self._place(name, torch.tensor(array), learned=False)

    def forward(self, observations: Any, memory: Any = None) -> Any:
        """Compute distribution parameters."""
        output, new_memory = self._output(observations, memory)
        return output if new_memory is None else (output, new_memory)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def act(self, observations: Any, memory: Any = None) -> Any:
        """Choose the most likely actions."""
        output, new_memory = self._output(observations, memory)
        action = self._computation.action(_Tensors(self), output)
        return action if new_memory is None else (action, new_memory)

    def _output(self, observations: Any, memory: Any) -> tuple[Any, Any]:
        policy: Policy = self._computation.policy
        if tuple(observations.shape[1:]) != policy.observation_shape or observations.ndim == 0:
            expected = ", ".join(map(str, ("batch", *policy.observation_shape)))
            raise UsageError(f"observations have shape {tuple(observations.shape)}; this policy takes ({expected})")
        if memory is None and policy.remembered:
            memory = torch.zeros(len(observations), policy.remembered, device=observations.device)
        return self._computation.output(_Tensors(self), observations, memory)

    def _place(self, name: str, value: Any, learned: bool) -> None:
        """Put a tensor where its name says: `layers.0.weight` into a `Linear` that is `layers[0]`."""
        *path, leaf = name.split(".")
        place: Any = self
        for depth, part in enumerate(path):
            if part not in place._modules:
                deepest = depth == len(path) - 1
                place.add_module(part, _linear(value) if leaf == "weight" and deepest else torch.nn.ModuleList())
            place = place.get_submodule(part)
        if learned and path != ["observation"]:
            place.register_parameter(leaf, torch.nn.Parameter(value))
        else:
            place.register_buffer(leaf, value, persistent=learned)


def _linear(weight: Any) -> Any:
    """Make a `Linear` without drawing weights, which would change PyTorch's random state."""
    return torch.nn.utils.skip_init(torch.nn.Linear, *reversed(weight.shape))


class _Tensors:
    """`Operations` that compute."""

    def __init__(self, module: TorchPolicy) -> None:
        self._module = module

    def tensor(self, name: str) -> Any:
        return operator.attrgetter(name)(self._module)

    def number(self, value: float) -> Any:
        return torch.tensor(value)

    def apply(self, name: str, *inputs: Any) -> Any:
        return _OPERATORS[name](*inputs)

    def features(self, observations: Any) -> Any:
        return observations.flatten(1).float() if observations.ndim > 1 else observations[:, None].float()

    def linear(self, x: Any, weight: str, bias: str) -> Any:
        return torch.nn.functional.linear(x, self.tensor(weight), self.tensor(bias))

    def part(self, x: Any, start: int, end: int) -> Any:
        return x[:, start:end]

    def join(self, parts: Sequence[Any]) -> Any:
        return torch.cat(list(parts), dim=1)

    def mean(self, x: Any) -> Any:
        return x.mean(dim=1, keepdim=True)

    def argmax(self, x: Any) -> Any:
        return x.argmax(dim=1, keepdim=True)

    def take(self, table: Any, indices: Any) -> Any:
        return table[indices]

    def shaped(self, x: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        return x.reshape(len(x), *shape).to(_torch_dtype(dtype))


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> Any:
    return torch.from_numpy(np.zeros(0, dtype.newbyteorder("="))).dtype
