"""Operators that the standard defines by a function body, where the core has no descriptor: the body runs in their
place.

`inline` is called where a model is made ready; `missing` names what is left. Needs `onnx`, which the exporter brings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx
import onnx.inliner
import onnx.shape_inference
from onnx import helper

from onnxtrain import _C

__all__ = ["inline", "missing", "types"]

BODIES = "ai.onnxtrain.bodies"  # domain of the functions that `inline` adds
_ROUNDS = 8  # a body may use further operators that have bodies


@functools.cache
def _registry() -> dict[tuple[str, str], tuple[int, ...]]:
    """(domain, name) -> the opsets since which a descriptor is true."""
    found: dict[tuple[str, str], list[int]] = {}
    for op in _C.operators():
        found.setdefault((op["domain"], op["name"]), []).append(op["since"])
    return {key: tuple(sorted(since)) for key, since in found.items()}


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes, as a branch of an If."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def nodes_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes, and those in their bodies."""
    for node in nodes:
        yield node
        for body in bodies_of(node):
            yield from nodes_of(body.node)


def missing(model: onnx.ModelProto) -> set[tuple[str, str]]:
    """(domain, operator) of every node, in subgraphs and functions too, that neither the core nor the model's own
    functions have.

    Args:
        model: any ModelProto; it is not changed.
    """
    versions = {_domain(o.domain): o.version for o in model.opset_import}
    own = {(_domain(f.domain), f.name) for f in model.functions}
    used = {(_domain(n.domain), n.op_type): versions.get(_domain(n.domain), 0) for n in nodes_of(model.graph.node)}
    for function in model.functions:
        inner = {_domain(o.domain): o.version for o in function.opset_import}
        used |= {(_domain(n.domain), n.op_type): inner.get(_domain(n.domain), 0) for n in nodes_of(function.node)}
    have = _registry()
    return {key for key, version in used.items()
            if key not in own and key != ("", "Constant") and not any(since <= version for since in have.get(key, ()))}


def _schema(domain: str, name: str, version: int) -> Any:
    """The schema where it has a function body."""
    try:
        schema: Any = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def _body(schema: Any, node: onnx.NodeProto, version: int,
          types: dict[str, onnx.TypeProto]) -> onnx.FunctionProto:
    """The body for one call; of several, the one of the newest opset that is no later than the model's."""
    if schema.has_function:
        known = [v for v in schema.function_opset_versions if v <= version] or list(schema.function_opset_versions)
        text = schema.get_function_with_opset_version(max(known))
    else:
        known = [v for v in schema.context_dependent_function_opset_versions if v <= version]
        known = known or list(schema.context_dependent_function_opset_versions)
        given = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
        text = schema.get_context_dependent_function_with_opset_version(max(known), node.SerializeToString(), given)
    function = onnx.FunctionProto()
    function.ParseFromString(text)
    if not function.node:
        raise _C.UnsupportedError(f"{node.op_type} '{node.name}': ONNX has no function body of this operator for "
                                  "these types")
    return function


def _with_defaults(function: onnx.FunctionProto, schema: onnx.defs.OpSchema, node: onnx.NodeProto) -> None:
    """Declares every attribute of the schema, with its default where there is one: the call may give any of them."""
    del function.attribute[:], function.attribute_proto[:]
    for name, attribute in schema.attributes.items():
        if attribute.default_value.name:
            function.attribute_proto.append(attribute.default_value)
        else:
            function.attribute.append(name)
    unknown = [a.name for a in node.attribute if a.name not in schema.attributes]
    if unknown:
        raise _C.UnsupportedError(f"{node.op_type} '{node.name}': attribute '{unknown[0]}' is not supported")


def types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Name -> type of every value whose type can be told, those of subgraphs included."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    found: dict[str, onnx.TypeProto] = {}

    def visit(graph: onnx.GraphProto) -> None:
        for info in (*graph.input, *graph.value_info, *graph.output):
            found[info.name] = info.type
        for tensor in graph.initializer:
            found[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        for node in graph.node:
            for body in bodies_of(node):
                visit(body)

    visit(inferred.graph)
    return found


def inline(model: onnx.ModelProto,
           lacking: Callable[[onnx.ModelProto], set[tuple[str, str]]] = missing) -> onnx.ModelProto:
    """The model with operators that are lacking given the function body of their schema, where there is one.

    The bodies become functions of the model, under a separate domain; the core puts them in place of the calls.

    Args:
        model: a ModelProto; it is not changed. The types of its graph inputs decide about bodies that depend on dtypes
        or ranks.
        lacking: (domain, operator) of a model's nodes that are to be replaced; those that the core does not have.

    Returns:
        `model` itself where there is nothing to replace, else a new one. Operators without a body stay.

    Raises:
        UnsupportedError: a body depends on types that the model does not tell.
    """
    for round_ in range(_ROUNDS):
        versions = {_domain(o.domain): o.version for o in model.opset_import}
        wanted = {key: schema for key in lacking(model) if (schema := _schema(*key, versions.get(key[0], 0)))}
        if not wanted:
            return model
        if any((_domain(n.domain), n.op_type) in wanted for f in model.functions for n in nodes_of(f.node)):
            # A body is chosen by types, which a function does not tell.
            result = onnx.inliner.inline_local_functions(model)
        else:
            result = onnx.ModelProto()
            result.CopyFrom(model)
        known: dict[str, onnx.TypeProto] = {}
        if any(schema.has_context_dependent_function for schema in wanted.values()):
            known = types(result)
        for number, node in enumerate(nodes_of(result.graph.node)):
            key = _domain(node.domain), node.op_type
            if key not in wanted:
                continue
            function = _body(wanted[key], node, versions.get(key[0], 0), known)
            _with_defaults(function, wanted[key], node)
            function.domain, function.name = BODIES, f"{node.op_type}_{round_}_{number}"
            function.overload = ""
            node.name = node.name or node.op_type
            node.domain, node.op_type = function.domain, function.name
            result.functions.append(function)
        if not any(o.domain == BODIES for o in result.opset_import):
            result.opset_import.append(helper.make_opsetid(BODIES, 1))
        model = result
    return model
