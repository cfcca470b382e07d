"""The PyTorch module computes what `act` computes, under the names of the safetensors export."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.policies.loaded import LoadedPolicy
from tests.support.packages import needs_torch
from tests.support.policies import KINDS, observations_for, outputs, random_policy, unflattened

pytestmark = needs_torch


def rows(observations: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(observations)


@pytest.mark.parametrize("kind", KINDS)
def test_module_computes_the_same(kind: str) -> None:
    saved = random_policy(KINDS[kind])
    policy = saved.policy
    acting, module = LoadedPolicy(unflattened(saved)), LoadedPolicy(saved).to_torch()
    expected_memory = np.zeros((7, policy.remembered), np.float32)
    memory: tuple[Any, ...] = ()
    for step in range(3):
        observations = observations_for(policy, 7, seed=step)
        found, action = module(rows(observations), *memory), module.act(rows(observations), *memory)
        if policy.remembered:
            (found, new_memory), (action, again) = found, action
            assert (new_memory == again).all()
            memory = (new_memory,)
        expected = acting.act(observations)
        assert (action.numpy().shape, action.numpy().dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(action.numpy(), expected, rtol=0, atol=1e-5)
        output = outputs(saved, observations, expected_memory)
        np.testing.assert_allclose(found.detach().numpy(), output, rtol=1e-5, atol=1e-5, strict=True)
        if policy.remembered:
            np.testing.assert_allclose(memory[0].detach().numpy(), expected_memory, rtol=0, atol=1e-5, strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_export_loads_into_a_module_with_other_weights(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    one, other = (LoadedPolicy(random_policy(KINDS[kind], seed)) for seed in (1, 2))
    one.export(tmp_path / "p.safetensors")
    expected, module = one.to_torch(), other.to_torch()
    observations = rows(observations_for(KINDS[kind], 5))
    assert not same(module(observations), expected(observations))
    module.load_state_dict(load_file(tmp_path / "p.safetensors"))
    assert same(module(observations), expected(observations))


def same(one: Any, other: Any) -> bool:
    pair = (one, other) if isinstance(one, tuple) else ((one,), (other,))
    return all(bool((a == b).all()) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("memory", ["elman", "lstm"])
def test_cells_are_those_of_pytorch(memory: str) -> None:
    import torch

    saved = random_policy(KINDS[memory])
    policy, module = saved.policy, LoadedPolicy(saved).to_torch()
    cell = (torch.nn.LSTMCell if memory == "lstm" else torch.nn.RNNCell)(3, policy.hidden[0])
    cell.load_state_dict(module.cells[0].state_dict())
    x, kept = observations_for(policy, 5), torch.randn(5, policy.remembered)
    features = rows(policy.features(x, saved.weights["mean"], saved.weights["scale"]))
    size = policy.hidden[0]
    state = (kept[:, :size], kept[:, size : 2 * size]) if memory == "lstm" else kept[:, :size]
    expected = torch.cat(cell(features, state), dim=1) if memory == "lstm" else cell(features, state)
    _, found = module(rows(x), kept)
    torch.testing.assert_close(found[:, : expected.shape[1]], expected, rtol=0, atol=1e-6)


def test_what_a_user_of_pytorch_expects() -> None:
    import torch

    torch.manual_seed(0)
    before = torch.get_rng_state()
    saved = random_policy(KINDS["normal"])
    module = LoadedPolicy(saved).to_torch()
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(module.layers[0], torch.nn.Linear)
    assert {name for name, _ in module.named_buffers()} >= {"observation.mean", "observation.scale"}
    assert {name for name, _ in module.named_parameters()} == set(module.state_dict()) - {
        "observation.mean",
        "observation.scale",
    }
    module(torch.ones(4, 3)).square().sum().backward()
    assert all(parameter.grad is not None for name, parameter in module.named_parameters() if name != "log_std")
    assert not module.act(torch.ones(4, 3)).requires_grad
    with torch.no_grad():
        module.layers[0].weight.zero_()
    assert LoadedPolicy(saved).to_torch().layers[0].weight.any(), "the policy keeps its own weights"


@pytest.mark.parametrize("shape", [(3,), (), (5, 4), (5, 3, 1)])
def test_wrong_shapes(shape: tuple[int, ...]) -> None:
    import torch

    module = LoadedPolicy(random_policy(KINDS["normal"])).to_torch()
    with pytest.raises(UsageError, match=r"this policy takes \(batch, 3\)"):
        module(torch.ones(shape))
