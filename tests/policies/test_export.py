"""Exported policies compute what `act` computes: in ONNX Runtime, and in NumPy from the description of the file."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
from safetensors import safe_open

import shoal
from shoal.errors import CheckpointFault, DiskFault, MissingExtra, UsageError
from shoal.policies.actions import Bins, Categorical
from shoal.policies.export.layers import Computation
from shoal.policies.loaded import LoadedPolicy
from tests.support.policies import KINDS, observations_for, outputs, random_policy, unflattened

SAVED = Path(__file__).parents[1] / "golden" / "saved"
ALGORITHMS = sorted(path.name for path in SAVED.iterdir())
every_kind = pytest.mark.parametrize("kind", KINDS)


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def assert_same_in_onnx(loaded: LoadedPolicy, path: Path) -> None:
    """Compare actions, outputs and memory over a few steps of a batch, and for a single row."""
    saved, policy = loaded.saved, loaded.saved.policy
    loaded.export(path)
    graph = session(path)
    acting = LoadedPolicy(unflattened(saved))
    differ = False
    for count in (7, 1):
        acting.reset()
        memory, expected_memory = (np.zeros((count, policy.remembered), np.float32) for _ in range(2))
        for step in range(3):
            observations = observations_for(policy, count, seed=step)
            inputs = {"observation": observations} | ({"memory": memory} if policy.remembered else {})
            action, output, *new = graph.run(None, inputs)
            expected = acting.act(observations)
            differ |= len(np.unique(expected)) > 1
            assert (action.shape, action.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(action, expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(
                output, outputs(saved, observations, expected_memory), rtol=1e-5, atol=1e-5, strict=True
            )
            if policy.remembered:
                memory = new[0]
                np.testing.assert_allclose(memory, expected_memory, rtol=0, atol=1e-5, strict=True)
            else:
                assert not new
    assert differ, "one action for every observation proves little"


@every_kind
def test_onnx_computes_the_same(kind: str, tmp_path: Path) -> None:
    saved = random_policy(KINDS[kind])
    assert_same_in_onnx(LoadedPolicy(saved), tmp_path / "p.onnx")


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_policies_of_every_algorithm(algo: str, tmp_path: Path) -> None:
    loaded = shoal.load(SAVED / algo)
    assert_same_in_onnx(loaded, tmp_path / "p.onnx")
    loaded.export(str(tmp_path / "p.safetensors"))
    tensors, _ = read(tmp_path / "p.safetensors")
    assert sum(map(np.size, tensors.values())) >= loaded.saved.policy.count


def test_algorithms_are_all_of_them() -> None:
    from shoal.algos import ALGORITHMS as BUILT_IN

    assert set(ALGORITHMS) == set(BUILT_IN)


def test_kinds_are_all_of_them() -> None:
    from shoal.policies import actions

    assert {policy.distribution.kind for policy in KINDS.values()} == set(actions._KINDS)
    assert {policy.memory for policy in KINDS.values()} == {"none", "elman", "lstm"}
    activations = {"tanh", "relu", "sigmoid", "softsign", "identity"}
    assert {policy.activation for policy in KINDS.values()} == activations


ACTIVATIONS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "identity": lambda x: x,
}


def follow_description(path: Path, observations: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute outputs and new memory from a safetensors export alone, as its metadata describe it."""
    tensors, metadata = read(path)
    observation, network = json.loads(metadata["observation"]), json.loads(metadata["network"])
    activate, last = ACTIVATIONS[network["activation"]], ACTIVATIONS[network["output_activation"]]

    def linear(x: np.ndarray, name: str, suffix: str = "") -> np.ndarray:
        return x @ tensors[f"{name}.weight{suffix}"].T + tensors[f"{name}.bias{suffix}"]

    x = observations.reshape(len(observations), -1).astype(np.float32) / observation["divide_by"]
    if observation["normalise"]:
        x = (x - tensors["observation.mean"]) * tensors["observation.scale"]
        x = np.clip(x, -observation["clip"], observation["clip"])
    depth = len(network["hidden"])
    if network["kind"] == "mlp":
        for at in range(depth):
            x = activate(linear(x, f"layers.{at}"))
        return last(linear(x, f"layers.{depth}")), memory
    if network["kind"] == "dueling":
        for at in range(depth - 1):
            x = activate(linear(x, f"layers.{at}"))
        value, advantage = (linear(activate(linear(x, f"{name}.0")), f"{name}.1") for name in ("value", "advantage"))
        return value + advantage - advantage.mean(axis=1, keepdims=True), memory
    states, left = [], memory
    for at, size in enumerate(network["hidden"]):
        h, left = left[:, :size], left[:, size:]
        summed = linear(x, f"cells.{at}", "_ih") + linear(h, f"cells.{at}", "_hh")
        if network["kind"] == "elman":
            x = activate(summed)
            states.append(x)
        else:
            c, left = left[:, :size], left[:, size:]
            i, f, g, o = np.split(summed, 4, axis=1)  # the order of torch.nn.LSTMCell
            sigmoid = ACTIVATIONS["sigmoid"]
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            x = sigmoid(o) * activate(c)
            states += [x, c]
    return last(linear(x, "output")), np.concatenate(states, axis=1)


@every_kind
def test_named_layers_compute_the_same(kind: str, tmp_path: Path) -> None:
    policy = KINDS[kind]
    saved = random_policy(policy)
    LoadedPolicy(saved).export(tmp_path / "p.safetensors")
    memory, expected_memory = (np.zeros((6, policy.remembered), np.float32) for _ in range(2))
    for step in range(3):
        observations = observations_for(policy, 6, seed=step)
        found, memory = follow_description(tmp_path / "p.safetensors", observations, memory)
        expected = outputs(saved, observations, expected_memory)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(memory, expected_memory, rtol=0, atol=1e-5)
    tensors, metadata = read(tmp_path / "p.safetensors")
    free = policy.distribution.free
    assert ("log_std" in tensors) == bool(free)
    if free:
        np.testing.assert_array_equal(tensors["log_std"], saved.weights["params"][-free:])
    for value in metadata.values():
        assert "Infinity" not in value


def test_metadata_describe_observations_and_actions(tmp_path: Path) -> None:
    LoadedPolicy(random_policy(KINDS["normal"])).export(tmp_path / "p.safetensors")
    tensors, metadata = read(tmp_path / "p.safetensors")
    assert set(tensors) == {
        *(f"layers.{at}.{part}" for at in range(3) for part in ("weight", "bias")),
        "observation.mean", "observation.scale", "log_std",
    }  # fmt: skip
    assert tensors["layers.0.weight"].shape == (16, 3)
    assert (metadata["format"], metadata["environment"], metadata["output"]) == ("shoal-export-1", "Walk-v0", "mean")
    assert json.loads(metadata["observation"]) == {
        "shape": [3], "dtype": "float32", "divide_by": 1, "normalise": True, "clip": 10.0, "flattened_from": None,
    }  # fmt: skip
    assert json.loads(metadata["action"]) == {
        "space": "Box", "kind": "gaussian", "shape": [2], "low": [-0.5, None], "high": [0.7, None], "dtype": "<f4",
    }  # fmt: skip
    graph_path = tmp_path / "p.onnx"
    LoadedPolicy(random_policy(KINDS["normal"])).export(graph_path)
    assert session(graph_path).get_modelmeta().custom_metadata_map == metadata


def test_types_of_the_graph_are_those_of_the_spaces(tmp_path: Path) -> None:
    path = tmp_path / "p.onnx"
    LoadedPolicy(random_policy(KINDS["matrix"])).export(path)
    graph = session(path)
    (observation,), (action, output) = graph.get_inputs(), graph.get_outputs()
    assert (observation.name, observation.type, observation.shape) == (
        "observation",
        "tensor(uint8)",
        ["batch", 2, 3, 4],
    )
    assert (action.name, action.type, action.shape) == ("action", "tensor(double)", ["batch", 2, 2])
    assert (output.name, output.type, output.shape) == ("output", "tensor(float)", ["batch", 4])
    assert graph.run(None, {"observation": np.zeros((0, 2, 3, 4), np.uint8)})[0].shape == (0, 2, 2)


def test_flattened_observations(tmp_path: Path) -> None:
    """The graph takes the vector; `act` takes what the environment returns."""
    space = gymnasium.spaces.Dict(
        {"a": gymnasium.spaces.Box(-1, 1, (2,), np.float32), "b": gymnasium.spaces.Discrete(3)}
    )
    loaded = LoadedPolicy(random_policy(KINDS["flattened"], seed=5))
    loaded.export(tmp_path / "p.onnx")
    graph = session(tmp_path / "p.onnx")
    space.seed(0)
    found = []
    for observation in [space.sample() for _ in range(20)]:
        vector = gymnasium.spaces.utils.flatten(space, observation)
        found.append(int(graph.run(["action"], {"observation": vector[None].astype(np.float32)})[0][0]))
        assert found[-1] == loaded.act(observation)
    assert len(set(found)) > 1
    described = json.loads(graph.get_modelmeta().custom_metadata_map["observation"])
    assert described["flattened_from"]["kind"] == "dict"
    assert described["shape"] == [5]


def test_constants_of_actions_stay_inside_the_bounds() -> None:
    for policy in KINDS.values():
        constants, distribution = Computation(policy).constants, policy.distribution
        if isinstance(distribution, Bins):
            low, high = np.array(distribution.low), np.array(distribution.high)
            values = constants["action.values"].reshape(len(low), -1)
            np.testing.assert_allclose([values[:, 0], values[:, -1]], [low, high], rtol=1e-6)
        elif isinstance(distribution, Categorical):
            assert constants["action.start"].tolist() == list(distribution.start)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder like that of a run, with one checkpoint."""
    folder, content = tmp_path / "run", random_policy(KINDS["logits"]).to_bytes()
    checkpoint = folder / "checkpoints" / "000002"
    checkpoint.mkdir(parents=True)
    (folder / "policy.safetensors").write_bytes(content)
    (checkpoint / "policy.safetensors").write_bytes(content)
    (checkpoint / "state.safetensors").write_bytes(safetensors.numpy.save({"adam": np.ones(2)}))
    (checkpoint / "manifest.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_files_of_runs_are_not_overwritten(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(random_policy(KINDS["point"]).to_bytes())
    loaded = LoadedPolicy.load(run / "policy.safetensors")
    (tmp_path / "hard.onnx").hardlink_to(run / "policy.safetensors")
    (tmp_path / "soft.safetensors").symlink_to(run / "policy.safetensors")
    before = contents(tmp_path)
    for path in (
        run / "policy.safetensors",
        run / "checkpoints/000002/policy.safetensors",
        run / "checkpoints/000002/state.safetensors",
        other,
        tmp_path / "hard.onnx",
        tmp_path / "soft.safetensors",
    ):
        with pytest.raises(UsageError, match="belongs to a run"):
            loaded.export(path)
    assert contents(tmp_path) == before

    unmarked = tmp_path / "unmarked.safetensors"  # without `format`, by which other policy files are recognised
    with safe_open(other, framework="numpy") as file:
        header = {name: value for name, value in file.metadata().items() if name != "format"}
    unmarked.write_bytes(safetensors.numpy.save(read(other)[0], header))
    with pytest.raises(UsageError, match="belongs to a run"):
        LoadedPolicy.load(unmarked).export(unmarked)

    loaded.export(run / "exported.safetensors")
    loaded.export(run / "exported.safetensors")  # exports are replaced


@pytest.mark.parametrize("name", ["p.pt", "p", ".onnx", "p.ONNX"])
def test_unknown_formats(name: str, tmp_path: Path) -> None:
    loaded = LoadedPolicy(random_policy(KINDS["logits"]))
    with pytest.raises(UsageError, match=r"\.safetensors or \.onnx, and policy\.to_torch\(\)"):
        loaded.export(tmp_path / name)
    with pytest.raises(UsageError) as caught:
        loaded.export(tmp_path / "none" / "p.pt")
    assert len(caught.value.problems) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "p.onnx").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        LoadedPolicy(random_policy(KINDS["logits"])).export(tmp_path / "p.onnx")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.safetensors"
    LoadedPolicy(random_policy(KINDS["logits"])).export(path)
    before = contents(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFault, match=r"p\.safetensors could not be written: No space left"):
        LoadedPolicy(random_policy(KINDS["start"])).export(path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("package", "command"), [("onnx", r"pip install 'shoal\[onnx\]'"), ("torch", "pip install torch")]
)
def test_missing_packages(package: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("onnx_graph", "torch_module"):
        monkeypatch.delitem(sys.modules, f"shoal.policies.export.{module}", raising=False)
    loaded = LoadedPolicy(random_policy(KINDS["logits"]))
    calls: dict[str, Any] = {"onnx": lambda: loaded.export(tmp_path / "p.onnx"), "torch": loaded.to_torch}
    with pytest.raises(MissingExtra, match=command):
        calls[package]()
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_no_policy_file(tmp_path: Path) -> None:
    LoadedPolicy(random_policy(KINDS["logits"])).export(tmp_path / "p.safetensors")
    with pytest.raises(CheckpointFault, match=r"it is an export for other programs\. Load the run"):
        shoal.load(tmp_path / "p.safetensors")
