"""The nodes of a training step on a device, with their kernels, types and sizes, from a program's plan: nothing runs.

A module is captured and exported as ORTModule does it, with weights that are never read, and its program is built for
the device. So a model may be larger than this machine's memory allows to train.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import onnx
import torch
from torch import nn

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule, _runner

# By the numbers of onnx.TensorProto and by the names in Session.text(): a name, and bytes.
TYPES = {1: ("float", 4), 2: ("uint8", 1), 3: ("int8", 1), 4: ("uint16", 2), 5: ("int16", 2), 6: ("int32", 4),
         7: ("int64", 8), 9: ("bool", 1), 10: ("float16", 2), 11: ("double", 8), 12: ("uint32", 4), 13: ("uint64", 8),
         16: ("bfloat16", 2)}
SIZES = dict(TYPES.values())
# An output in a node's line of Session.text(): type and dims, and a name, which may be in quotes; or nothing.
OUTPUT = re.compile(r'(?:(\w+)\[([\d,]*)\] (?:"(?:[^"\\]|\\.)*"|[^\s,"]+))?(, | = )')


class Value(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str = "node"  # "input" of the graph, "constant", or result of a node

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * SIZES[self.dtype]


class Node(NamedTuple):
    name: str
    op: str
    kernel: str
    backward: bool
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    attributes: dict[str, Any]
    constants: dict[str, list[int]]  # of inputs that hold a few integers, by name

    def input(self, index: int) -> Value | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def output(self, index: int) -> Value | None:
        return self.outputs[index] if index < len(self.outputs) else None

    def operands(self) -> list[Value]:
        """What it reads and writes, each value once."""
        return list({v.name: v for v in (*self.inputs, *self.outputs) if v is not None}.values())


# ---- the program of a module ----

class _Found(BaseException):
    """Ends a call before the program runs; no handler of exceptions may take it for a failure."""


def _stop(self: _runner.GraphRunner, program: Any, leaves: Any, grad_enabled: bool, inputs: Any) -> Any:
    """In place of a graph's run of a program."""
    tensors, mask = _C.gather(program.sources, inputs, grad_enabled)
    raise _Found(program, [tuple(tensor.shape) for tensor in tensors], mask)


def without_data(make: Any) -> Any:
    """What `make` returns, a module with a batch among others, with tensors in memory that is not touched."""
    with torch.device("meta"):
        made = make()
    names = defaultdict(list)
    for name, parameter in made.module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    made.module.to_empty(device="cpu")
    for first, *others in names.values():
        for name in others:  # tied, which to_empty() is not careful about
            path, _, leaf = name.rpartition(".")
            setattr(made.module.get_submodule(path), leaf, made.module.get_parameter(first))
    return made._replace(batch=tuple(torch.empty_like(tensor, device="cpu") for tensor in made.batch))


def built(made: Any, device: str) -> tuple[Any, dict[str, Any]]:
    """The session of a training step, and its plan. `made` has a module, a batch, a loss and `autocast`.

    CPU's autocast stands for CUDA's: for matrix products, attention and losses they choose the same types.

    Raises:
        RuntimeError: PyTorch runs a part of the step.
    """
    try:
        with mock.patch.object(_runner, "device_of", lambda tensors: device), \
                mock.patch.object(_runner.GraphRunner, "_run", _stop), \
                torch.autocast("cpu", torch.bfloat16, enabled=made.autocast):
            made.loss(ORTModule(made.module), *made.batch)
    except _Found as found:
        program, shapes, mask = found.args
    else:
        raise RuntimeError("PyTorch ran the step: nothing was planned")
    finally:
        torch._dynamo.reset()
    if program.chain is not None:
        raise RuntimeError("PyTorch runs operators between parts of the graph")
    return program.session, program.session.plan(shapes, mask)


# ---- its nodes ----

def outputs_of(line: str) -> list[tuple[str, tuple[int, ...]] | None]:
    """Types and dims of a node's outputs, from its line of Session.text()."""
    at, found = 2, []
    while True:
        match = OUTPUT.match(line, at)
        if not match:
            raise ValueError(f"no outputs of a node: {line[:200]}")
        dims = tuple(map(int, filter(None, (match[2] or "").split(","))))
        found.append((match[1], dims) if match[1] else None)
        at = match.end()
        if match[3] == " = ":
            return found


def _values(graph: onnx.GraphProto) -> Iterator[Value]:
    for each in graph.input:
        tensor = each.type.tensor_type
        yield Value(each.name, TYPES[tensor.elem_type][0], tuple(d.dim_value for d in tensor.shape.dim), "input")
    for each in graph.initializer:
        yield Value(each.name, TYPES[each.data_type][0], tuple(each.dims), "constant")


def nodes_of(session: Any) -> list[Node]:
    """The nodes of the latest program that has a kernel for each; views, which have none, are left out."""
    graph = onnx.load_model_from_string(session.save("execution_model")).graph
    lines = session.text("program").split("\n{\n", 1)[1].split("\n}\n", 1)[0].splitlines()
    lines = [line for line in lines if line != "  # backward"]
    values = {value.name: value for value in _values(graph)}
    constants = {each.name: onnx.numpy_helper.to_array(each).reshape(-1).tolist() for each in graph.initializer
                 if TYPES[each.data_type][0] in ("int32", "int64") and math.prod(each.dims) <= 16}
    kernels: dict[str, deque[tuple[str, bool]]] = defaultdict(deque)
    for name, kernel, backward in session.kernels():
        kernels[name].append((kernel, backward))
    found = []
    for proto, line in zip(graph.node, lines, strict=True):
        for name, kind in zip(proto.output, outputs_of(line), strict=False):  # a file leaves out absent ones at the end
            if kind:
                values[name] = Value(name, *kind)
        if not kernels[proto.name]:
            continue
        kernel, backward = kernels[proto.name].popleft()
        found.append(Node(proto.name, proto.op_type, kernel, backward,
                          *(tuple(values[name] if name else None for name in names)
                            for names in (proto.input, proto.output)),
                          {a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute},
                          {name: constants[name] for name in proto.input if name in constants}))
    left = [name for name, each in kernels.items() if each]
    if left:
        raise RuntimeError(f"steps without a node: {left[:5]}")
    return found


def planned(make: Any, device: str) -> tuple[list[Node], list[nn.Parameter]]:
    """The nodes of a training step of what `make` returns, and the parameters of its module."""
    made = without_data(make)
    session, _ = built(made, device)
    return nodes_of(session), list(made.module.parameters())
