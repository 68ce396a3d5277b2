"""Changes in place and casts of a traced program, written as plain operators where that is plainly the same.

Called by export.py between torch.export and torch.onnx. What is left here torch's decompositions would rewrite as well,
by executing every node once more with fake tensors and symbolic sizes: for a ResNet most of the time of an export.
retrace.py leaves them out for a program that needs none.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from onnxtrain._export import views

aten = torch.ops.aten
_RENAMED = {aten.min.other: aten.minimum.default, aten.max.other: aten.maximum.default} | {
    getattr(written, name): getattr(named, name) for name in ("Tensor", "Scalar") for written, named in (
        (aten.__and__, aten.bitwise_and), (aten.__or__, aten.bitwise_or), (aten.__xor__, aten.bitwise_xor))}
_FUNCTIONAL = {  # of operators that change their first argument
    getattr(packet, name): getattr(getattr(aten, packet.__name__.removesuffix("_")), name)
    for packet in (aten.abs_, aten.add_, aten.addcdiv_, aten.addcmul_, aten.clamp_, aten.clamp_max_, aten.clamp_min_,
                   aten.div_, aten.dropout_, aten.elu_, aten.exp_, aten.gelu_, aten.hardswish_, aten.hardtanh_,
                   aten.leaky_relu_, aten.masked_fill_, aten.mul_, aten.neg_, aten.pow_, aten.reciprocal_, aten.relu_,
                   aten.rsqrt_, aten.sigmoid_, aten.silu_, aten.sqrt_, aten.square_, aten.sub_, aten.tanh_)
    for name in packet.overloads() if name in getattr(aten, packet.__name__.removesuffix("_")).overloads()}


def simplify(program: torch.export.ExportedProgram) -> None:
    """Rewrites the nodes of the program's own graph, not those of branches and regions; names of results are kept."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in views.CASTS:
            _cast(graph, node)
        elif node.target in _RENAMED:
            node.target = _RENAMED[node.target]
        elif node.target is aten.adaptive_avg_pool2d.default:
            _pool(node)
        elif node.target is aten.detach_.default and node.args[0].target is aten.lift_fresh_copy.default:
            node.replace_all_uses_with(node.args[0])  # a constant
            graph.erase_node(node)
        elif node.target is aten.rsub.Scalar:
            _subtract(graph, node)
        elif node.target is aten.diff.default:
            _difference(graph, node)
        elif node.target is aten.dropout.default and (not node.args[2] or node.args[1] == 0):  # its very argument
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _functionalise(graph)
    outputs = graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, outputs, strict=True):
        if isinstance(node, torch.fx.Node):
            spec.arg.name = node.name
    program.graph_module.recompile()


def _cast(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """A cast to what the tensor is already is the tensor."""
    source, value = node.args[0], node.meta["val"]
    if not views.copies(node):
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    elif (value.device, value.layout) == (source.meta["val"].device, source.meta["val"].layout):
        node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": value.dtype}


def _pool(node: torch.fx.Node) -> None:
    """As torch decomposes it: into a mean where one cell is left."""
    size = node.args[1]
    if list(size) == [1, 1]:
        node.target, node.args = aten.mean.dim, (node.args[0], [-1, -2], True)
    else:
        node.target = aten._adaptive_avg_pool2d.default


def _subtract(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """A float minus whole numbers: torch.onnx finds no operator for the operand that it has cast."""
    source, dtype = node.args[0], node.meta["val"].dtype
    if source.meta["val"].dtype in (dtype, torch.bool):  # of booleans eager's operator says that it has none
        return
    with graph.inserting_before(node):
        made = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    with source.meta["val"].fake_mode:
        made.meta = {**node.meta, "val": aten._to_copy.default(source.meta["val"], dtype=dtype)}
    node.replace_input_with(source, made)


def _difference(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """The first difference of numbers, as torch decomposes it."""
    names = [argument.name for argument in node.target._schema.arguments]
    given = {"n": 1, "dim": -1, "prepend": None, "append": None} | dict(zip(names, node.args)) | node.kwargs
    source = given["self"]
    if given["n"] != 1 or node.meta["val"].dtype is torch.bool:
        return

    def call(target: Any, *args: Any) -> torch.fx.Node:
        made = graph.call_function(target, args)
        with source.meta["val"].fake_mode:
            made.meta = {**node.meta, "val": target(*torch.fx.map_arg(args, lambda arg: arg.meta["val"]))}
        return made

    with graph.inserting_before(node):
        parts = [part for part in (given["prepend"], source, given["append"]) if part is not None]
        whole = call(aten.cat.default, parts, given["dim"]) if len(parts) > 1 else source
        later = call(aten.slice.Tensor, whole, given["dim"], 1, sys.maxsize)
        earlier = call(aten.slice.Tensor, whole, given["dim"], 0, -1)
        node.replace_all_uses_with(call(aten.sub.Tensor, later, earlier))
    graph.erase_node(node)


def _may_alias(node: torch.fx.Node) -> bool:
    """Whether a node's result may share memory with an argument."""
    if node.op != "call_function" or node.target in views.CASTS and views.copies(node):
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True  # getitem, of a list of views perhaps; a region
    return any(result.alias_info is not None for result in schema.returns)


def _keeps_type(node: torch.fx.Node) -> bool:
    """Whether the functional operator's result has the dtype of what it would be written into."""
    own = node.args[0].meta["val"].dtype
    operands = [operand.meta.get("val") for operand in node.all_input_nodes if operand is not node.args[0]]
    dtypes = {value.dtype for value in operands if isinstance(value, Tensor)}
    if node.target in (aten.masked_fill_.Scalar, aten.masked_fill_.Tensor):
        dtypes.discard(torch.bool)
    numbers = [value for value in (*node.args, *node.kwargs.values(), *operands)
               if isinstance(value, (float, complex, torch.SymFloat))]
    return dtypes <= {own} and (own.is_floating_point or not numbers and not node.target._schema.name.endswith("div_"))


def _functionalise(graph: torch.fx.Graph) -> None:
    """Makes in-place changes functional if no other name reads the memory later."""
    roots: dict[torch.fx.Node, frozenset[torch.fx.Node]] = {}  # whose memory a node's result may be
    order = {node: i for i, node in enumerate(graph.nodes)}

    def is_read_later(changed: torch.fx.Node, at: int) -> bool:
        return any(order[user] >= at for other, found in roots.items()
                   if other is not changed and found & roots[changed] for user in other.users)

    for node in list(graph.nodes):
        other = _FUNCTIONAL.get(node.target) if node.op == "call_function" else None
        if other is not None:
            changed = node.args[0]
            if _keeps_type(node) and not is_read_later(changed, order[node]):
                node.target = other
                changed.replace_all_uses_with(node, delete_user_cb=lambda user, at=order[node]: order[user] > at)
                roots[node] = frozenset((node,))
                continue
        shared = [roots[each] for each in node.all_input_nodes] if _may_alias(node) else []
        roots[node] = frozenset().union(*shared) if shared else frozenset((node,))
