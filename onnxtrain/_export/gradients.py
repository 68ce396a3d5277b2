"""Gradients that a script registers for an ONNX operator: its nodes become calls between segments, as PythonOp nodes.

Called by ortmodule/_program.py for every graph; without a registration it changes nothing. Such a call runs the node in
one session, and backward runs the nodes of the registered definition in another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, helper, numpy_helper
from torch import Tensor

from onnxtrain import _C
from onnxtrain._export.autograd_functions import DOMAIN, Call
from onnxtrain._export.errors import DefinitionError
from onnxtrain._onnx_functions import bodies_of
from onnxtrain.utils.torch_io_helper import pytorch_type_to_onnx_dtype

_log = logging.getLogger("onnxtrain")
_TYPES = {"int": np.int64, "float": np.float32, "bool": np.bool_, "string": np.object_}

Definition = Callable[[], Sequence[Sequence[Any]]]  # steps, see _node()
REGISTERED: dict[tuple[str, str], Definition] = {}


def register(domain: str, name: str, attributes: Sequence[str], definition: Definition) -> None:
    """Keeps a definition for the nodes of programs that are made from now on."""
    if attributes or domain == "org.pytorch.aten":
        _log.warning("register_gradient(%s) has no effect in onnxtrain: an exported graph has no ATen nodes. PyTorch "
                     "runs the operators that the engine does not have, and computes their gradients.",
                     ", ".join(map(repr, (domain, name, *attributes))))
        return
    REGISTERED[(_plain_domain(domain), name)] = definition


def _plain_domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _attribute(name: str, given: Any) -> onnx.AttributeProto:
    """Of a value, or of {"value": ..., "dtype": ..., "is_tensor": ...}."""
    if not isinstance(given, dict):
        return helper.make_attribute(name, given)
    value = given["value"]
    if given.get("is_tensor", False):
        kind = given.get("dtype", "float")
        value = numpy_helper.from_array(np.array(value, _TYPES.get(kind) or np.dtype(kind)))
    return helper.make_attribute(name, value)


def _node(step: Sequence[Any]) -> NodeProto:
    """Of (operator or (operator, domain), inputs, outputs[, attributes])."""
    if not 3 <= len(step) <= 4:
        raise DefinitionError(f"a step of a registered gradient is {step!r}, expected (operator, inputs, outputs[, "
                              "attributes])")
    name, domain = (step[0], "") if isinstance(step[0], str) else step[0]
    made = helper.make_node(name, list(step[1]), list(step[2]), domain=domain)
    made.attribute.extend(_attribute(key, value) for key, value in (step[3] if len(step) > 3 else {}).items())
    return made


def _info(name: str, tensor: Tensor) -> onnx.ValueInfoProto:
    """Of a graph input with this dtype and rank, whatever its sizes."""
    dims = [f"{name}_{axis}" for axis in range(tensor.dim())]
    return helper.make_tensor_value_info(name, pytorch_type_to_onnx_dtype(tensor.dtype), dims)


class _Registered(torch.autograd.Function):
    """One node forward, a registered definition backward."""

    @staticmethod
    def forward(ctx: Any, call: RegisteredCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.run_forward(tensors)
        ctx.call, ctx.count = call, len(tensors)
        ctx.save_for_backward(*tensors, *outputs)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return None, *ctx.call.run_backward(saved[:ctx.count], saved[ctx.count:], gradients)


class RegisteredCall:
    """One node with a registered gradient, as a call between segments; a chain wants of it what autograd_functions.Call
    says.
    """

    function = _Registered

    def __init__(self, node: NodeProto, model: ModelProto, types: dict[str, onnx.ValueInfoProto],
                 constants: dict[str, Tensor], definition: Definition) -> None:
        self._model, self._types, self._constants = model, types, constants
        self._node = NodeProto()
        self._node.CopyFrom(node)
        self.inputs = [name for name in dict.fromkeys(node.input) if name and name not in constants]
        self._made = [name for name in node.output if name]
        self._steps = [_node(step) for step in definition()]
        self._sessions: dict[tuple[object, ...], _C.Session] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The node's outputs, under autograd."""
        return list(_Registered.apply(self, *tensors))

    def run_forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The node's outputs."""
        given = dict(zip(self.inputs, tensors)) | self._constants
        outputs = [self._types[name] for name in self._made]
        return list(self._run("forward", [self._node], given, outputs))

    def run_backward(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor],
                     gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """A gradient for each input, None where the definition has none."""
        values = dict(zip(self.inputs, tensors)) | self._constants
        named = dict(zip(self._made, zip(outputs, gradients)))
        given = {f"I({place})": values[name] for place, name in enumerate(self._node.input) if name}
        for place, name in enumerate(self._node.output):
            if name:
                given[f"O({place})"], given[f"GO({place})"] = named[name]
        made = [name for step in self._steps for name in step.output]
        wanted = [f"GI({place})" for place, name in enumerate(self._node.input) if name and f"GI({place})" in made]
        infos = [_info(name, given[name[1:]]) for name in wanted]
        for info in infos:
            info.type.tensor_type.ClearField("shape")
        results = dict(zip(wanted, self._run("backward", self._steps, given, infos)))
        summed: dict[str, Tensor] = {}  # an input that the node has twice gets both
        for place, name in enumerate(self._node.input):
            gradient = results.get(f"GI({place})")
            if gradient is not None:
                if gradient.shape != values[name].shape:
                    raise ValueError(f"the registered gradient of {self._node.op_type} gives GI({place}) the shape "
                                     f"{tuple(gradient.shape)}, expected {tuple(values[name].shape)}")
                summed[name] = summed[name] + gradient if name in summed else gradient
        return [summed.get(name) for name in self.inputs]

    def _run(self, way: str, nodes: Sequence[NodeProto], given: dict[str, Tensor],
             outputs: Sequence[onnx.ValueInfoProto]) -> Sequence[Tensor]:
        if not outputs:
            return ()
        used = {name for node in nodes for name in node.input}
        given = {name: tensor.detach() for name, tensor in given.items() if name in used}
        key = (way, *((tensor.dtype, tensor.dim()) for tensor in given.values()))
        if key not in self._sessions:
            graph = helper.make_graph(nodes, f"{self._node.op_type}_{way}", [_info(n, t) for n, t in given.items()],
                                      outputs)
            model = helper.make_model(graph, opset_imports=self._model.opset_import, ir_version=self._model.ir_version)
            self._sessions[key] = _C.Session(model.SerializeToString())
        session = self._sessions[key]
        return session.forward(list(given.values()), bytes(len(given)))[0]


def applied(data: bytes, calls: Sequence[Call]) -> tuple[bytes, tuple[Any, ...]]:
    """The model with PythonOp nodes in place of nodes that have a registered gradient, and the calls, these added.

    Raises:
        UnsupportedError: such a node is in the body of another operator, or its outputs have no type.
        DefinitionError: a definition is malformed.
    """
    if not REGISTERED:
        return data, tuple(calls)
    model = onnx.load_model_from_string(data)
    for body in (body for node in model.graph.node for body in bodies_of(node)):
        for node in body.node:
            if _key(node) in REGISTERED:
                raise _C.UnsupportedError(f"{node.op_type} '{node.name}': a registered gradient is not supported for a "
                                          "node in the body of another operator")
    if not any(_key(node) in REGISTERED for node in model.graph.node):
        return data, tuple(calls)
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v for v in (*inferred.value_info, *model.graph.value_info, *model.graph.output)}
    constants = {i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in model.graph.initializer}
    added: list[Call | RegisteredCall] = list(calls)
    nodes = []
    for node in model.graph.node:
        if _key(node) not in REGISTERED:
            nodes.append(node)
            continue
        if any(name and name not in types for name in node.output):
            raise _C.UnsupportedError(f"{node.op_type} '{node.name}': a registered gradient needs the types of the "
                                      "node's outputs, which ONNX cannot infer")
        own = {name: constants[name] for name in node.input if name in constants}
        call = RegisteredCall(node, model, types, own, REGISTERED[_key(node)])
        added.append(call)
        for place, name in enumerate(call._made):
            nodes.append(helper.make_node("PythonOp", call.inputs, [name], f"{node.name}_registered_{place}",
                                          domain=DOMAIN, key=len(added) - 1, output=place))
            nodes[-1].metadata_props.extend(node.metadata_props)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    if not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return model.SerializeToString(), tuple(added)


def _key(node: NodeProto) -> tuple[str, str]:
    return _plain_domain(node.domain), node.op_type
