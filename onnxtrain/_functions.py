"""Operators that the standard defines by a function body, where the core has no descriptor: the body runs in their place.

`inline` is called where a model is made ready; `missing` names what is left. Needs `onnx`, which the exporter brings.
"""

from __future__ import annotations

import functools
from typing import Iterator

import onnx
import onnx.inliner

from onnxtrain import _C

__all__ = ["inline", "missing"]

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


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of subgraphs included."""
    yield from _nodes_of(graph.node)


def _nodes_of(nodes: Iterator[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _nodes(graph)


def missing(model: onnx.ModelProto) -> set[tuple[str, str]]:
    """(domain, operator) of every node, in subgraphs and functions too, that neither the core nor the model's own functions have.

    Args:
        model: any ModelProto; it is not changed.
    """
    versions = {_domain(o.domain): o.version for o in model.opset_import}
    own = {(_domain(f.domain), f.name) for f in model.functions}
    used = {(_domain(n.domain), n.op_type): versions.get(_domain(n.domain), 0) for n in _nodes(model.graph)}
    for function in model.functions:
        inner = {_domain(o.domain): o.version for o in function.opset_import}
        used |= {(_domain(n.domain), n.op_type): inner.get(_domain(n.domain), 0) for n in _nodes_of(function.node)}
    have = _registry()
    return {key for key, version in used.items()
            if key not in own and key != ("", "Constant") and not any(since <= version for since in have.get(key, ()))}


def _has_body(domain: str, name: str, version: int) -> bool:
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return False
    return schema.has_function or schema.has_context_dependent_function


def inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with operators that the core does not have replaced by the function body of their schema, where there is one.

    Args:
        model: a ModelProto; the types of its graph inputs decide about bodies that depend on dtypes or ranks.

    Returns:
        `model` itself where there is nothing to replace, else a new one. Operators without a body stay, for the core to name.
    """
    for _ in range(_ROUNDS):
        versions = {_domain(o.domain): o.version for o in model.opset_import}
        wanted = sorted((d, n) for d, n in missing(model) if _has_body(d, n, versions.get(d, 0)))
        if not wanted:
            return model
        inlined = onnx.inliner.inline_selected_functions(model, wanted, exclude=False, inline_schema_functions=True)
        if missing(inlined) == missing(model):
            return model
        model = inlined
    return model
