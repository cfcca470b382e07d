from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from shoal.base import seeding
from shoal.errors import CheckpointFault
from shoal.policies.actions import Categorical, Gaussian, Point
from shoal.policies.networks import MLP, Dueling, Recurrent
from shoal.policies.policy import Policy, SavedPolicy

BOX = Gaussian((2,), (-1.0, -1.0), (1.0, 1.0), "<f4")
ACTIVATIONS = ("tanh", "relu", "sigmoid", "softsign", "identity")
POLICY = Policy((3,), "<f4", BOX, (16, 16), normalise=True)


def weights(policy: Policy) -> dict[str, np.ndarray]:
    params = policy.init(seeding.rng(0, "weights"))
    return {
        "params": params,
        "mean": np.ones(policy.inputs, np.float32),
        "scale": np.full(policy.inputs, 2.0, np.float32),
    }


def test_network_is_the_same_function_on_both_sides() -> None:
    for activation in ACTIVATIONS:
        network = MLP((5, 32, 32, 4), activation, output=activation)
        params = network.init(seeding.rng(0, "weights"), out_scale=1.0)
        assert len(params) == network.count
        x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
        np.testing.assert_allclose(
            network(params, x), network(jnp.asarray(params), jnp.asarray(x)), rtol=2e-5, atol=2e-6
        )


@pytest.mark.parametrize("sizes", [(5, 32, 16, 4), (5, 16, 4)])
def test_dueling_network(sizes: tuple[int, ...]) -> None:
    network = Dueling(sizes, "relu")
    params = network.init(seeding.rng(0, "weights"), out_scale=1.0)
    assert len(params) == network.count
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    out = network(params, x)
    np.testing.assert_allclose(out, network(jnp.asarray(params), jnp.asarray(x)), rtol=2e-5, atol=2e-6)
    common, value, advantages = network.parts
    if common.count:
        x = np.maximum(common(params[: common.count], x), 0)
    worth = value(params[common.count : common.count + value.count], x)
    np.testing.assert_allclose(out.mean(axis=-1), worth[:, 0], rtol=1e-5, atol=1e-6)
    over = advantages(params[common.count + value.count :], x)
    np.testing.assert_allclose(out - out[:, :1], over - over[:, :1], rtol=1e-4, atol=1e-5)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("cell", ["elman", "lstm"])
def test_recurrent_network_as_computed_by_hand(cell: str) -> None:
    network = Recurrent((2, 4, 3, 2), "tanh", "softsign", cell)
    params = network.init(seeding.rng(0, "weights"), out_scale=1.0) + np.float32(0.1)
    assert len(params) == network.count
    inputs = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32)
    memory = np.zeros((5, network.remembered), np.float32)
    h, c = [np.zeros((5, 4)), np.zeros((5, 3))], [np.zeros((5, 4)), np.zeros((5, 3))]
    *layers, (weights, bias) = network.layers(params.astype(np.float64))
    for x in inputs:
        below = x
        for at, (matrix, shift) in enumerate(layers):
            size = h[at].shape[1]
            summed = np.concatenate([below, h[at]], axis=1) @ matrix + shift
            if cell == "elman":
                h[at] = np.tanh(summed)
            else:
                enter, forget, leave, new = np.split(summed, [size, 2 * size, 3 * size], axis=1)
                c[at] = sigmoid(forget + 1) * c[at] + sigmoid(enter) * np.tanh(new)
                h[at] = sigmoid(leave) * np.tanh(c[at])
            below = h[at]
        out = below @ weights + bias
        found = network.step(network.layers(params), x, memory)
        np.testing.assert_allclose(found, out / (1 + np.abs(out)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("memory", ["none", "elman", "lstm"])
def test_stacked_weights_act_as_each_alone(activation: str, memory: str) -> None:
    policy = Policy((3,), "<f4", Point((2,), (-1.0, -1.0), (1.0, 1.0), "<f4"), (5, 4), activation, memory=memory)
    rng = np.random.default_rng(0)
    stacked = rng.normal(size=(6, policy.count)).astype(np.float32)
    still = {"mean": np.zeros(3, np.float32), "scale": np.ones(3, np.float32)}
    together = policy.actor(still | {"params": stacked})
    alone = [policy.actor(still | {"params": row}) for row in stacked]
    remembered = np.zeros((6, policy.remembered), np.float32)
    rows = np.zeros((6, 1, policy.remembered), np.float32)
    for _ in range(3):
        x = rng.normal(size=(6, 3)).astype(np.float32)
        expected = [act(x[at : at + 1], None, rows[at])[0] for at, act in enumerate(alone)]
        actions = together(x, None, remembered)
        np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-6)
        stacked[0] *= np.float32(1.1)  # the actor sees what is written into the stack
        alone[0] = policy.actor(still | {"params": stacked[0]})
    np.testing.assert_allclose(remembered, rows[:, 0], rtol=1e-5, atol=1e-6)


def test_weights_are_orthogonal() -> None:
    for sizes in ((64, 64, 2), (3, 64, 2)):
        layers = MLP(sizes).layers(MLP(sizes).init(seeding.rng(0, "weights"), out_scale=0.01))
        matrix, bias = layers[0]
        small = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
        np.testing.assert_allclose(small, 2 * np.eye(len(small)), atol=1e-5)
        assert not bias.any()
        assert np.abs(layers[-1][0]).max() <= 0.01


def test_new_policy_is_near_uniform() -> None:
    policy = Policy((3,), "<f4", Categorical((4,), (0,), scalar=True))
    out = policy.out(policy.init(seeding.rng(0, "weights")), np.ones((1, 3), np.float32))
    assert np.abs(out).max() < 0.05


def test_features_are_normalised_and_cut() -> None:
    tree = weights(POLICY)
    features = POLICY.features(np.array([[1.0, 2.0, 1e9]], np.float32), tree["mean"], tree["scale"])
    assert features.tolist() == [[0.0, 2.0, 10.0]]


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    saved = SavedPolicy(POLICY, weights(POLICY), {"id": "Walk-v0"})
    path.write_bytes(saved.to_bytes())
    back = SavedPolicy.load(path)
    assert back.policy == POLICY
    assert back.env == {"id": "Walk-v0"}
    for name, array in saved.weights.items():
        np.testing.assert_array_equal(back.weights[name], array)


def test_unreadable_policies(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFault, match="there is no policy"):
        SavedPolicy.load(tmp_path / "none.safetensors")
    for content in (b"", b"\x80\x04K\x01.", bytes(100), safetensors.numpy.save({"a": np.ones(2)})):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(CheckpointFault, match="cannot be read"):
            SavedPolicy.load(tmp_path / "bad.safetensors")


def test_a_new_policy_is_as_wide_as_asked() -> None:
    policy = Policy((3,), "<f4", Gaussian((2,), (-1.0, -1.0), (1.0, 1.0), "<f4"), (4,))
    assert policy.init(np.random.default_rng(0), -0.5)[-2:].tolist() == [-0.5, -0.5]
