"""A policy as an ONNX graph, from raw observations to greedy actions. Needs the package onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, checker, helper, numpy_helper

import shoal
from shoal.policies.export.description import description
from shoal.policies.export.layers import Computation, tensors
from shoal.policies.policy import SavedPolicy

OPSET = 17
IR_VERSION = 8  # the version that goes with this opset; the newest one needs a new runtime
BATCH = "batch"


def onnx_model(saved: SavedPolicy) -> ModelProto:
    """Build the graph: `observation` (and `memory`) in; `action` and `output` (and `new_memory`) out."""
    policy, computation = saved.policy, Computation(saved.policy)
    graph = _Graph(tensors(policy, saved.weights) | computation.constants)
    memory = "memory" if policy.remembered else None
    output, new_memory = computation.output(graph, "observation", memory)
    action = computation.action(graph, output)
    action_shape, action_dtype = computation.action_type
    inputs = [_value("observation", np.dtype(policy.observation_dtype), policy.observation_shape)]
    outputs = [
        _value("action", action_dtype, action_shape),
        _value("output", np.dtype(np.float32), (computation.outputs,)),
    ]
    results = {"action": action, "output": output}
    if memory is not None:
        inputs.append(_value("memory", np.dtype(np.float32), (policy.remembered,)))
        outputs.append(_value("new_memory", np.dtype(np.float32), (policy.remembered,)))
        results["new_memory"] = new_memory
    for name, node in results.items():
        graph.node("Identity", node, output=name)
    content = helper.make_graph(graph.nodes, "policy", inputs, outputs, graph.used)
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(
        content, opset_imports=[opset], ir_version=IR_VERSION, producer_name="shoal", producer_version=shoal.__version__
    )
    helper.set_model_props(model, description(saved))
    checker.check_model(model, full_check=True)
    return model


def _value(name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, _element(dtype), [BATCH, *shape])


def _element(dtype: np.dtype[Any]) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype.newbyteorder("=")))


class _Graph:
    """`Operations` that append nodes. A tensor is the name of a node's output."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.nodes: list[NodeProto] = []
        self.used: list[TensorProto] = []
        self._arrays = dict(arrays)
        self._known: set[str] = set()

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node, and return the name of its output."""
        output = output or f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], output, **attributes))
        return output

    def tensor(self, name: str) -> str:
        if name not in self._known:
            self._known.add(name)
            self.used.append(numpy_helper.from_array(self._arrays[name], name))
        return name

    def number(self, value: float) -> str:
        return self._constant(f"number_{value:g}", np.float32(value))

    def apply(self, operator: str, *inputs: str) -> str:
        return self.node(operator, *inputs)

    def features(self, observations: str) -> str:
        return self.node("Flatten", self.node("Cast", observations, to=TensorProto.FLOAT), axis=1)

    def linear(self, x: str, weight: str, bias: str) -> str:
        return self.node("Gemm", x, self.tensor(weight), self.tensor(bias), transB=1)

    def part(self, x: str, start: int, end: int) -> str:
        edges = [self._constant(f"column_{at}", np.array([at])) for at in (start, end, 1)]
        return self.node("Slice", x, *edges)

    def join(self, parts: Sequence[str]) -> str:
        return self.node("Concat", *parts, axis=1)

    def mean(self, x: str) -> str:
        return self.node("ReduceMean", x, axes=[1], keepdims=1)

    def argmax(self, x: str) -> str:
        return self.node("ArgMax", x, axis=1, keepdims=1)

    def take(self, table: str, indices: str) -> str:
        return self.node("Gather", table, indices, axis=0)

    def shaped(self, x: str, shape: Sequence[int], dtype: np.dtype[Any]) -> str:
        target = self._constant("action.shape", np.array([0, *shape]))  # 0 keeps the batch
        return self.node("Cast", self.node("Reshape", x, target), to=_element(dtype))

    def _constant(self, name: str, value: Any) -> str:
        self._arrays[name] = np.asarray(value)
        return self.tensor(name)
