"""Cuts a graph at its PythonOp nodes into graphs that the core can run, with the calls between them.

Used by ortmodule/_chain.py. A value that only depends on shapes and constants is computed again in each segment that
needs it, so that every segment can fold the shapes that its operators want.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator

import onnx
from onnx import GraphProto, ModelProto, NodeProto

from onnxtrain._export.autograd_functions import DOMAIN
from onnxtrain._onnx_functions import bodies_of, nodes_of

_SIZES = frozenset(("Shape", "Size"))
_CHEAP = frozenset((
    "Constant", "ConstantOfShape", "Range", "Gather", "Concat", "Unsqueeze", "Squeeze", "Slice", "Cast", "CastLike",
    "Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Min", "Max", "Equal", "Less", "LessOrEqual", "Greater",
    "GreaterOrEqual", "Not", "And", "Or", "Where", "Reshape", "Identity", "Expand", "ReduceProd", "ReduceMax",
    "ReduceMin", "Sqrt", "Floor", "Ceil",
))

_RANDOM = frozenset(("Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
                     "RandomUniformLike"))


@dataclasses.dataclass
class Boundary:
    """One PythonOp call: its key, the values that it takes and those that it makes, by output."""

    key: int
    inputs: list[str]
    outputs: dict[int, str]


@dataclasses.dataclass
class Segment:
    """A graph (None where nothing is left to compute), and the calls that follow it."""

    model: bytes | None
    inputs: list[str]
    outputs: list[str]
    calls: list[Boundary]


def is_python_op(node: NodeProto) -> bool:
    """Whether a node is a call of a torch.autograd.Function."""
    return node.op_type == "PythonOp" and node.domain == DOMAIN


def reads(node: NodeProto) -> Iterator[str]:
    """Inputs, those that bodies take from outside included."""
    yield from filter(None, node.input)
    for body in bodies_of(node):
        own = {v.name for v in (*body.input, *body.initializer)} | {name for n in body.node for name in n.output}
        for inner in body.node:
            yield from (name for name in reads(inner) if name not in own)
        yield from (v.name for v in body.output if v.name not in own)


def _draws(node: NodeProto) -> bool:
    """Whether the engine draws random numbers for a node, or for one in its bodies."""
    return any(inner.op_type in _RANDOM for inner in nodes_of([node]))


def _key_of(call: NodeProto) -> int:
    return next(attribute.i for attribute in call.attribute if attribute.name == "key")


class _Cutter:
    """Args:
        model: is changed.
        draws: keys of the calls that draw random numbers and do nothing else.
    """

    def __init__(self, model: ModelProto, draws: Container[int]) -> None:
        self.model, self.graph, self.draws = model, model.graph, draws
        self.producer = {name: node for node in self.graph.node for name in node.output if name}
        self.initializers = {i.name: i for i in self.graph.initializer}
        self.types = {v.name: v for v in (*self.graph.input, *self.graph.output, *self.graph.value_info)}
        self.level: dict[str, int] = {}
        self._repeatable: dict[str, bool] = {}
        self._name_types_of_casts()

    def _name_types_of_casts(self) -> None:
        """Makes a Cast of each CastLike whose type is known, so that it waits for no value.

        `x.new_empty(sizes).bernoulli_(p)` of stochastic depth is an example: the draw needs the type of x alone.
        """
        for node in self.graph.node:
            known = self.types.get(node.input[1]) if node.op_type == "CastLike" and node.domain == "" else None
            if known is not None and known.type.tensor_type.elem_type:
                node.op_type = "Cast"
                node.attribute.append(onnx.helper.make_attribute("to", known.type.tensor_type.elem_type))
                del node.input[1]

    def _levels(self) -> int:
        """How many calls lie, one after another, before each value.

        Calls, which may draw random numbers, keep their order, and nodes that draw in the engine follow the calls
        before them. A user's function also follows such nodes. An operator that draws in torch does not: behind a node
        whose numbers are not torch's, its own are not those of eager either.
        """
        before_call = before_draw = after_draw = 0  # least levels: of a call, of a drawing node, of a user's function
        of_call: dict[int, int] = {}
        for node in self.graph.node:
            level = max((self.level.get(name, 0) for name in reads(node)), default=0)
            if is_python_op(node):
                key = _key_of(node)
                least = max(level, before_call, 0 if key in self.draws else after_draw)
                level = before_call = of_call.setdefault(key, least)
                before_draw = max(before_draw, level + 1)
            elif _draws(node):
                level = max(level, before_draw)
                after_draw = max(after_draw, level)
            for name in node.output:
                self.level[name] = level + is_python_op(node)
        self._move_to_readers()
        return max(self.level.values(), default=0)

    def _move_to_readers(self) -> None:
        """Computes a value in the first segment that reads it: what the segments hand on, such as transposed weights,
        would be copied. Nodes that draw random numbers stay where they are if a user's function might draw some, too.
        """
        ordered = any(is_python_op(node) and _key_of(node) not in self.draws for node in self.graph.node)
        first: dict[str, int] = {}  # of the segments that read a value
        results = {v.name for v in self.graph.output}
        for node in reversed(self.graph.node):
            level = max((self.level[name] for name in node.output), default=0) - is_python_op(node)
            stays = is_python_op(node) or ordered and _draws(node)
            if not (stays or results.intersection(node.output)):
                level = max(level, min((first[name] for name in node.output if name in first), default=level))
                self.level.update(dict.fromkeys(node.output, level))
            for name in reads(node):
                first[name] = min(level, first.get(name, level))

    def repeatable(self, name: str) -> bool:
        """Whether a value is made of sizes and constants alone, by operators that cost nothing."""
        if name not in self._repeatable:
            node = self.producer.get(name)
            self._repeatable[name] = name in self.initializers or node is not None and node.domain == "" and (
                node.op_type in _SIZES or node.op_type in _CHEAP and all(self.repeatable(n) for n in reads(node)))
        return self._repeatable[name]

    def cut(self) -> list[Segment]:
        last = self._levels()
        segments = []
        needed_later: set[str] = {v.name for v in self.graph.output}
        for level in range(last, -1, -1):  # from the end, so that each segment knows what the later ones want of it
            calls = self._calls(level)
            needed = needed_later | {name for call in calls for name in call.inputs}
            own = {name for name in needed if name in self.producer and self.level[name] == level
                   and not is_python_op(self.producer[name])}
            nodes, inputs, used = self._collect(own, level)
            needed_later = (needed - own - {name for call in calls for name in call.outputs.values()}) | set(inputs)
            outputs = sorted(own)
            model = self._build(nodes, inputs, outputs, used) if outputs else None
            segments.append(Segment(model, inputs if outputs else [], outputs, calls))
        return segments[::-1]

    def _calls(self, level: int) -> list[Boundary]:
        """Those that need nothing beyond this level."""
        calls: dict[int, Boundary] = {}
        for node in self.graph.node:
            if is_python_op(node) and self.level[node.output[0]] == level + 1:
                attributes = {a.name: a.i for a in node.attribute}
                call = calls.setdefault(attributes["key"], Boundary(attributes["key"], list(node.input), {}))
                call.outputs[attributes["output"]] = node.output[0]
        return [calls[key] for key in sorted(calls)]

    def _collect(self, wanted: set[str], level: int) -> tuple[list[NodeProto], list[str], list[str]]:
        """(nodes in order, values from outside, initializers) that these values need within one level."""
        stack, seen, inputs, used = sorted(wanted), set(), set(), set()
        chosen: set[int] = set()
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.initializers:
                used.add(name)
                continue
            node = self.producer.get(name)
            inside = (node is not None and not is_python_op(node)
                      and (self.level[name] == level or self.repeatable(name)))
            if node is None or not inside:
                inputs.add(name)
                continue
            chosen.add(id(node))
            stack += reads(node)
        nodes = [node for node in self.graph.node if id(node) in chosen]
        return nodes, sorted(inputs), sorted(used)

    def _build(self, nodes: list[NodeProto], inputs: list[str], outputs: list[str], used: list[str]) -> bytes:
        graph = GraphProto(name=self.graph.name, node=nodes, initializer=[self.initializers[name] for name in used],
                           input=[self._typed(name) for name in inputs], output=[self._typed(name) for name in outputs])
        model = ModelProto(ir_version=self.model.ir_version, opset_import=self.model.opset_import,
                           functions=self.model.functions, graph=graph)
        return model.SerializeToString()

    def _typed(self, name: str) -> onnx.ValueInfoProto:
        if name not in self.types:
            inferred = onnx.shape_inference.infer_shapes(self.model).graph
            self.types = {v.name: v for v in inferred.value_info} | self.types
        if name not in self.types:
            raise ValueError(f"the type of {name!r} is not known, which a PythonOp node needs")
        return self.types[name]


def cut(model: bytes, draws: Container[int] = ()) -> list[Segment]:
    """Segments in the order in which they run; `draws` has the keys of calls that only draw random numbers.

    Raises:
        ValueError: a call inside the body of another operator, or a value without a type.
    """
    from onnxtrain._export import domain  # noqa: F401  whose schemas give types to a kept export's nodes, too

    proto = onnx.load_model_from_string(model)
    for node in proto.graph.node:
        if any(is_python_op(inner) for body in bodies_of(node) for inner in body.node):
            raise ValueError(f"a torch.autograd.Function inside the body of {node.op_type} {node.name!r}")
    return _Cutter(proto, draws).cut()
