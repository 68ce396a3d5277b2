"""A graph of ONNX's operators in an older opset, for save_as_onnx and for functions that change a graph.

The schemas of both opsets say what becomes of a node: it stays, an input becomes the attribute that it was before, or
the function body of its operator takes its place. onnx's own version converter has no way down for Add, Gather and
Reshape, and leaves the axis of a Softmax as it is. Used by _saved.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
from onnx import helper, numpy_helper

from onnxtrain import UnsupportedError, _onnx_functions
from onnxtrain._onnx_functions import BODIES, bodies_of, nodes_of

OPSET = 20  # of a file, unless another is asked for
_STANDARD = ("", "ai.onnx")


def version_of(model: onnx.ModelProto | onnx.FunctionProto) -> int:
    """The opset of ONNX's own operators."""
    return next((o.version for o in model.opset_import if o.domain in _STANDARD), 0)


def converted(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model in this opset, which is its own or an older one; other domains' operators stay.

    Raises:
        UnsupportedError: operators have no form in this opset; the message names them.
    """
    if version_of(model) == opset:
        return model
    model = _onnx_functions.inline(onnx.inliner.inline_local_functions(model), lambda each: _newer(each, opset))
    lacking: set[str] = set()
    given = {tensor.name: tensor for tensor in model.graph.initializer}
    graph, types = model.graph, _onnx_functions.types(model)
    _Conversion(version_of(model), opset, types, graph.node, given, lacking).convert(graph)
    for function in model.functions:
        _Conversion(version_of(function), opset, {}, function.node, {}, lacking).convert(function)
    if lacking:
        raise UnsupportedError(f"opset {opset} of ONNX has no form of {', '.join(sorted(lacking))}: a later opset is "
                               "needed")
    for owner in (model, *model.functions):
        kept = [helper.make_opsetid(o.domain, o.version) for o in owner.opset_import if o.domain not in _STANDARD]
        del owner.opset_import[:]
        owner.opset_import.extend([helper.make_opsetid("", opset), *kept])
    model = onnx.inliner.inline_local_functions(model)
    kept = [helper.make_opsetid(o.domain, o.version) for o in model.opset_import if o.domain != BODIES]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    _drop_unused_constants(model.graph)
    model.ir_version = helper.find_min_ir_version_for(kept, ignore_unknown=True)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UnsupportedError(f"the graph is not valid in opset {opset} of ONNX: {error}") from error
    return model


def _drop_unused_constants(graph: onnx.GraphProto) -> None:
    """Those that have become attributes."""
    used = {name for node in nodes_of(graph.node) for name in node.input} | {value.name for value in graph.output}
    kept = [node for node in graph.node if node.op_type != "Constant" or node.output[0] in used]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(kept)


def _schema(operator: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        schema = onnx.defs.get_schema(operator, opset)
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def _newer(model: onnx.ModelProto, opset: int) -> set[tuple[str, str]]:
    nodes = [node for owner in (model.graph, *model.functions) for node in nodes_of(owner.node)]
    return {("", node.op_type) for node in nodes
            if node.domain in _STANDARD and node.op_type not in _FORMS and _schema(node.op_type, opset) is None}


class _NoForm(Exception):
    """The older opset lacks a node; the text says what of it."""


class _Conversion:
    """Of the nodes of one graph, and of graphs in their attributes.

    Args:
        source, target: opsets.
        types: of values, where they are known.
        nodes, initializers: where constants are looked up.
        lacking: gets what has no form.
    """

    def __init__(self, source: int, target: int, types: Mapping[str, onnx.TypeProto], nodes: Iterable[onnx.NodeProto],
                 initializers: Mapping[str, onnx.TensorProto], lacking: set[str]) -> None:
        self.source, self.target, self._types, self._lacking = source, target, types, lacking
        self._constants: dict[str, object] = dict(initializers)
        self._names = {name for node in nodes_of(nodes) for name in (*node.input, *node.output)} | set(initializers)
        for node in nodes_of(nodes):
            if node.op_type == "Constant" and node.domain in _STANDARD and not node.attribute[0].ref_attr_name:
                self._constants[node.output[0]] = helper.get_attribute_value(node.attribute[0])

    def convert(self, owner: onnx.GraphProto | onnx.FunctionProto) -> None:
        """Puts the converted nodes in place of the nodes."""
        nodes = [new for node in owner.node for new in self._node(node)]
        del owner.node[:]
        owner.node.extend(nodes)

    def _node(self, node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
        for body in bodies_of(node):
            self.convert(body)
        schema, older = _schema(node.op_type, self.source), _schema(node.op_type, self.target)
        if node.domain not in _STANDARD or schema is None or older is not None and (
                older.since_version == schema.since_version):
            return [node]
        new = onnx.NodeProto()
        new.CopyFrom(node)
        try:
            nodes = _FORMS[node.op_type](self, new) if node.op_type in _FORMS else [new]
            if older is not None:
                for each in nodes:
                    if each.op_type == node.op_type:
                        _fit(each, schema, older, self.constant)
            elif any(each.op_type == node.op_type for each in nodes):
                raise _NoForm(f"which is of opset {schema.since_version}")
        except _NoForm as reason:
            self._lacking.add(f"{node.op_type} ({reason})")
            return [node]
        return nodes

    # ---- what the forms below ask for ----

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """The value, where the graph has it."""
        value = self._constants.get(name)
        if value is None:
            return None
        return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)

    def shape(self, name: str) -> list[int | None]:
        """Sizes, None for those that are not known.

        Raises:
            _NoForm: not even the rank is known.
        """
        tensor = self._types.get(name, onnx.TypeProto()).tensor_type
        if not tensor.HasField("shape"):
            raise _NoForm(f"of which the rank of {name} has to be known")
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]

    def dtype(self, name: str) -> int:
        """A TensorProto.DataType.

        Raises:
            _NoForm: it is not known.
        """
        dtype = self._types.get(name, onnx.TypeProto()).tensor_type.elem_type
        if not dtype:
            raise _NoForm(f"of which the dtype of {name} has to be known")
        return dtype

    def fresh(self, name: str) -> str:
        """A name that no value has."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def written(self, node: onnx.NodeProto, body: str) -> list[onnx.NodeProto]:
        """Nodes from ONNX's text form, of the node's inputs x, k, b and its outputs y, mean, inverse."""
        function = onnx.parser.parse_function(
            f'<domain: "x", opset_import: ["" : {self.target}]> f (x, k, b) => (y) {{ {body} }}')
        known = dict(zip("xkb", node.input))
        known |= {each: name for each, name in zip(("y", "mean", "inverse"), node.output) if name}
        for each in function.node:
            for field in (each.input, each.output):
                for place, name in enumerate(field):
                    if name not in known:
                        known[name] = self.fresh(f"{node.output[0]}_{name}")
                    field[place] = known[name]
            each.name = f"{node.name}/{each.output[0]}" if node.name else ""
        return list(function.node)


def _fit(node: onnx.NodeProto, schema: onnx.defs.OpSchema, older: onnx.defs.OpSchema,
         constant: Callable[[str], np.ndarray[Any, Any] | None]) -> None:
    """Gives the node the inputs and attributes that the older schema has.

    Raises:
        _NoForm: that one has nothing like it.
    """
    inputs: list[str] = []
    for place, name in enumerate(node.input):
        formal = schema.inputs[min(place, len(schema.inputs) - 1)].name
        if formal in older.attributes and name:
            value = constant(name)
            if value is None:
                raise _NoForm(f"of which {formal} has to be a constant")
            if value.size:
                single = older.attributes[formal].type in (onnx.defs.OpSchema.AttrType.INT,
                                                           onnx.defs.OpSchema.AttrType.FLOAT)
                node.attribute.append(helper.make_attribute(formal, value.item() if single else value.tolist()))
        elif place < older.max_input:
            inputs.append(name)
        elif name:
            raise _NoForm(f"with {formal}")
    node.input[:] = inputs
    kept = []
    for attribute in node.attribute:
        if attribute.name in older.attributes:
            kept.append(attribute)
        elif attribute.ref_attr_name or helper.get_attribute_value(attribute) != _default(schema, attribute.name):
            raise _NoForm(f"with {attribute.name}")
    for name in older.attributes:
        default = _default(schema, name) if name in schema.attributes else None
        if default is not None and default != _default(older, name) and all(each.name != name for each in kept):
            kept.append(helper.make_attribute(name, default))
    kept = [onnx.AttributeProto.FromString(attribute.SerializeToString()) for attribute in kept]
    del node.attribute[:]
    node.attribute.extend(kept)
    if len(node.output) > older.max_output:
        raise _NoForm(f"with {len(node.output)} outputs")


def _default(schema: onnx.defs.OpSchema, name: str) -> Any:
    value = schema.attributes[name].default_value
    return helper.get_attribute_value(value) if value.name else None


# ---- operators of which the schemas do not say all ----


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _without(node: onnx.NodeProto, *names: str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name not in names]
    del node.attribute[:]
    node.attribute.extend(kept)


def _shape(conversion: _Conversion, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """A part of a shape is a slice of the whole."""
    given = _attributes(node)
    start, end = given.get("start", 0), given.get("end")
    if not start and end is None:
        return [node]
    end = np.iinfo(np.int64).max if end is None else end
    return conversion.written(node, f"all = Shape(x) first = Constant<value = int64[1] {{{start}}}>() "
                              f"last = Constant<value = int64[1] {{{end}}}>() y = Slice(all, first, last)")


def _reshape(_: _Conversion, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """allowzero says what a size of 0 means, which only a tensor without elements has."""
    _without(node, "allowzero")
    return [node]


def _split(conversion: _Conversion, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Equal parts need no sizes; the last of num_outputs parts may be smaller."""
    given = _attributes(node)
    _without(node, "num_outputs")
    if "num_outputs" in given:
        size, parts = conversion.shape(node.input[0])[given.get("axis", 0)], given["num_outputs"]
        if size is None or size % parts:
            raise _NoForm("into parts of which one may be smaller")
    return [node]


def _softmax(conversion: _Conversion, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Before opset 13 the dims from the axis on were one, so it has to be the last."""
    if conversion.target >= 13:
        return [node]
    rank, axis = len(conversion.shape(node.input[0])), _attributes(node).get("axis", -1)
    _without(node, "axis")
    node.attribute.append(helper.make_attribute("axis", rank - 1))
    if axis in (-1, rank - 1):
        return [node]
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    first, last = (conversion.fresh(f"{node.output[0]}_{name}") for name in ("turned", "result"))
    before = helper.make_node("Transpose", [node.input[0]], [first], perm=order)
    after = helper.make_node("Transpose", [last], [node.output[0]], perm=order)
    node.input[0], node.output[0] = first, last
    return [before, node, after]


def _resize(conversion: _Conversion, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The region of interest, which only one mode reads, was not optional before opset 13."""
    if conversion.target >= 13:
        return [node]
    names = [*node.input, "", ""][:max(3, len(node.input))]
    made = []
    for place in (1, 2):
        if not names[place]:
            names[place] = conversion.fresh(f"{node.output[0]}_empty{place}")
            made.append(helper.make_node("Constant", [], [names[place]],
                                         value=numpy_helper.from_array(np.zeros(0, np.float32))))
    node.input[:] = names
    return [*made, node]


def _trilu(conversion: _Conversion, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """An entry stays or is 0 by its column less its row."""
    dtype, given = conversion.dtype(node.input[0]), len(node.input) > 1 and node.input[1]
    compare = "Less" if _attributes(node).get("upper", 1) else "Greater"
    return conversion.written(
        node, "all = Shape(x) second = Constant<value = int64[1] {-2}>() last = Constant<value = int64[1] {-1}>() "
        "end = Constant<value = int64[1] {9223372036854775807}>() high = Slice(all, second, last) "
        "wide = Slice(all, last, end) height = Squeeze(high) width = Squeeze(wide) "
        "zero = Constant<value = int64 {0}>() one = Constant<value = int64 {1}>() column = Range(zero, width, one) "
        "line = Range(zero, height, one) flat = Constant<value = int64[2] {-1, 1}>() row = Reshape(line, flat) "
        "distance = Sub(column, row) "
        f"out = {compare}(distance, {'k' if given else 'zero'}) "
        # Of bool, onnxruntime has no Where.
        + ("in = Not(out) y = And(x, in)" if dtype == onnx.TensorProto.BOOL else
           f"nothing = Cast<to = {dtype}>(zero) y = Where(out, nothing, x)"))


def _layer_normalization(conversion: _Conversion, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The schema's body has the variance as a difference of two means, which can be below 0 where rows are constant."""
    given, dtype = _attributes(node), conversion.dtype(node.input[0])
    rank, wide = len(conversion.shape(node.input[0])), given.get("stash_type", 1)
    mean = f"ReduceMean<axes = {list(range(given.get('axis', -1) % rank, rank))}>"
    biased = len(node.input) > 2 and node.input[2]
    return conversion.written(
        node, f"wide = Cast<to = {wide}>(x) mean = {mean}(wide) less = Sub(wide, mean) "
        f"square = Mul(less, less) variance = {mean}(square) "
        f"small = Constant<value = float {{{given.get('epsilon', 1e-5)!r}}}>() eps = Cast<to = {wide}>(small) "
        "positive = Add(variance, eps) deviation = Sqrt(positive) inverse = Reciprocal(deviation) "
        f"normal = Div(less, deviation) narrow = Cast<to = {dtype}>(normal) "
        + ("scaled = Mul(narrow, k) y = Add(scaled, b)" if biased else "y = Mul(narrow, k)"))


_FORMS: Mapping[str, Callable[[_Conversion, onnx.NodeProto], list[onnx.NodeProto]]] = {
    "Shape": _shape, "Reshape": _reshape, "Split": _split, "Softmax": _softmax, "LogSoftmax": _softmax,
    "Hardmax": _softmax, "Resize": _resize, "Trilu": _trilu,
    "LayerNormalization": _layer_normalization}
