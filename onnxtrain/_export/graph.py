"""From torch.onnx's onnx_ir model to the bytes that the core loads: weights out, inputs and outputs bound.

Called by export.py. Knows nothing of torch.export; it is told what each initializer is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain._export import messages
from onnxtrain._export.domain import DOMAIN, DOMAIN_VERSION
from onnxtrain._export.exported import Origin
from onnxtrain._export.recompute_regions import REGION

_SCOPES = "pkg.torch.onnx.name_scopes"
_FX_NODE, _STACK = "pkg.torch.onnx.fx_node", "pkg.torch.onnx.stack_trace"
_TARGET = re.compile(r"target=torch\.ops\.(\w+\.\w+\.\w+)")


def inline_functions(model: ir.Model) -> None:
    """The core knows operators, not model-local functions."""
    if model.functions:
        from onnx_ir.passes.common import InlinePass

        InlinePass()(model)


def mark_regions(model: ir.Model, regions: Mapping[str, str]) -> None:
    """Notes at each node the recompute region that it comes from.

    Args:
        regions: name of a node of the traced program -> region.
    """
    for node in model.graph:
        origin = re.findall(r"'([^']*)'", node.metadata_props.get(_SCOPES) or "")
        if origin and origin[-1] in regions:
            node.metadata_props[REGION] = regions[origin[-1]]


def sized_splits(model: ir.Model) -> None:
    """A Split either has sizes or a number of outputs; torch.onnx wants the number in both cases."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Split" and node.domain == "" and len(node.inputs) > 1 and node.inputs[1] is not None:
            node.attributes.pop("num_outputs", None)


def weights_to_inputs(model: ir.Model, weights: Mapping[str, str]) -> None:
    """Turns initializers into graph inputs.

    Args:
        weights: initializer name -> name of the graph input, which several may share. An initializer that is not named
            stays one.
    """
    graph = model.graph
    inputs: dict[str, ir.Value] = {}
    for old, new in weights.items():
        value = graph.initializers.pop(old, None)
        if value is None:
            continue
        value.const_value = None
        if new in inputs:
            value.replace_all_uses_with(inputs[new], replace_graph_outputs=True)
            continue
        value.name = new
        inputs[new] = value
        graph.inputs.append(value)
    _rename_clashes(graph, set(inputs))


def complex_inputs(graph: ir.Graph, tensors: Mapping[str, Any]) -> None:
    """Gives the shapes of complex inputs their last axis, of 2, which torch.onnx of torch 2.10 leaves out."""
    for value in graph.inputs:
        tensor = tensors.get(value.name or "")
        if tensor is not None and tensor.is_complex() and value.shape is not None and len(value.shape) == tensor.dim():
            value.shape = ir.Shape([*value.shape, 2])


def _rename_clashes(graph: ir.Graph, names: set[str]) -> None:
    """A result within the graph that bears the name of a weight gets another: a module's `scale`,
    torch.onnx's `scale`.
    """
    made = [output for node in ir.traversal.RecursiveGraphIterator(graph) for output in node.outputs]
    taken = names | {output.name for output in made}
    for output in made:
        if output.name in names:
            count = 1
            while f"{output.name}__{count}" in taken:
                count += 1
            output.name = f"{output.name}__{count}"
            taken.add(output.name)


def rename_inputs(model: ir.Model, values: Sequence[ir.Value], names: Sequence[str]) -> None:
    """Gives the user's inputs names after the arguments of forward, made unique."""
    taken = {value.name for value in model.graph.inputs} | set(model.graph.initializers)
    for node in model.graph:
        taken.update(output.name for output in node.outputs)
    for value, name in zip(values, names):
        unique, count = name, 0
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        taken.add(unique)
        value.name = unique


def separate_outputs(model: ir.Model) -> None:
    """Adds an Identity for each output that is an input or a second copy of an output."""
    graph = model.graph
    seen: set[ir.Value] = set()
    for position, value in enumerate(list(graph.outputs)):
        if value.producer() is None or value in seen:
            node = ir.node("Identity", [value], name=f"output_{position}")
            output = node.outputs[0]
            output.name = f"output_{position}__{value.name}"
            output.shape, output.type = value.shape, value.type
            graph.append(node)
            graph.outputs[position] = output
            value = output
        seen.add(value)


def drop_unused(model: ir.Model) -> None:
    """Removes nodes, initializers and inputs that no output depends on."""
    graph = model.graph
    outputs = set(graph.outputs)
    for node in reversed(list(graph)):
        if not any(output in outputs or output.uses() for output in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in outputs:
            del graph.initializers[name]
    kept = [value for value in graph.inputs if value.uses() or value in outputs]
    graph.inputs.clear()
    graph.inputs.extend(kept)


def _scope(text: str | None) -> str:
    """The user's module that a node comes from: 'encoder.layers.0.linear1' out of torch.onnx's list of scopes."""
    scopes = re.findall(r"'([^']*)'", text or "")
    inner = scopes[-2] if len(scopes) > 1 else ""
    if inner.startswith("_empty_nn_module_stack"):  # torch.export's word for no module
        return ""
    return inner.removeprefix("module").removeprefix(".")


def serialise(model: ir.Model) -> tuple[bytes, dict[str, Origin]]:
    """The model as bytes, without torch.onnx's stack traces, which outweigh everything else once weights are out.

    Second: where the nodes come from, by their names.
    """
    origins: dict[str, Origin] = {}
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for index, node in enumerate(model.graph.all_nodes()):
        scope = _scope(node.metadata_props.get(_SCOPES))
        origin = _TARGET.search(node.metadata_props.get(_FX_NODE) or "")
        region, trace = node.metadata_props.get(REGION), node.metadata_props.get(_STACK)
        node.metadata_props.clear()
        node.doc_string = None
        if not node.name or scope:  # messages and profiles say where in the user's module a node comes from
            node.name = f"{scope + '/' if scope else ''}{node.op_type}_{index}"
        origins[node.name or ""] = Origin(origin[1] if origin else "", messages.line(trace))
        if scope:
            node.metadata_props["scope"] = scope
        if region:
            node.metadata_props[REGION] = region
        for output in node.outputs:
            output.metadata_props.clear()
        if node.domain == DOMAIN:
            model.graph.opset_imports[DOMAIN] = DOMAIN_VERSION
    return ir.serde.serialize_model(model).SerializeToString(), origins
