"""Changes in place and casts of a traced program, written as plain operators where that is plainly the same.

Called by export.py between torch.export and torch.onnx. What is left here torch's decompositions would rewrite as well,
by executing every node once more with fake tensors and symbolic sizes: for a ResNet most of the time of an export.
retrace.py leaves them out for a program that needs none.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor

from onnxtrain._export import draws, views
from onnxtrain._export.errors import ExportError

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
_WRITES: dict[Any, Any] = {  # whatever the types are
    aten.fill_.Tensor: aten.fill.Tensor, aten.fill_.Scalar: aten.fill.Scalar,
    aten.index_put_.default: aten.index_put.default, aten.copy_.default: aten._to_copy.default}
_SCATTERED: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}

# Operators that multiply by a number, and where it is: by name, or among the arguments.
_WITH_NUMBER: dict[Any, str | None] = dict.fromkeys((
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.lerp.Scalar, aten.softplus.default)) | {
    aten.add.Tensor: "alpha", aten.sub.Tensor: "alpha", aten.addcmul.default: "value"}


def state_dtypes(program: torch.export.ExportedProgram) -> None:
    """Gives new tensors their dtype by name where torch's default is not float32, for which torch.onnx takes it.

    Raises:
        ExportError: an operator makes floats of whole numbers, which it cannot be told.
    """
    default = torch.get_default_dtype()
    if default is torch.float32:
        return
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            value = node.meta.get("val")
            if not (isinstance(node.target, torch._ops.OpOverload) and isinstance(value, Tensor)
                    and value.dtype is default):
                continue
            read = [made.meta["val"].dtype for made in node.all_input_nodes if isinstance(made.meta.get("val"), Tensor)]
            if any(map(_is_float, read)) or any(isinstance(given, torch.dtype)
                                                for given in (*node.args, *node.kwargs.values())):
                continue
            if read or not any(argument.name == "dtype" for argument in node.target._schema.arguments):
                raise ExportError(f"{node.target} returns {default}, torch's default dtype, for operands of other "
                                  "dtypes; torch.onnx would return float32.")
            node.kwargs = {**node.kwargs, "dtype": default}


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def simplify(program: torch.export.ExportedProgram) -> None:
    """Rewrites the nodes of the program's own graph, not those of branches and regions; names of results are kept."""
    graph = program.graph
    draws.lay_out(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in views.CASTS:
            _cast(graph, node)
        elif node.target in _RENAMED:
            node.target = _RENAMED[node.target]
        elif node.target in (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default):
            _pool(node)
        elif node.target is aten.numpy_T.default:
            node.target = aten.permute.default
            node.args = (node.args[0], list(range(node.meta["val"].dim()))[::-1])
        elif node.target is aten.chunk.default:
            _chunk(node)
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
    for node in list(graph.nodes):
        if node.target in _WITH_NUMBER and _rounds_number(node):
            _in_float32(graph, node)
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
    size = list(node.args[1])
    if size == [1] * len(size):
        node.target, node.args = aten.mean.dim, (node.args[0], [-1, -2][:len(size)], True)
    elif len(size) == 2:
        node.target = aten._adaptive_avg_pool2d.default


def _chunk(node: torch.fx.Node) -> None:
    """As torch does it: parts of one size, but for the last one."""
    parts = node.meta["val"]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    size = parts[0].shape[dim]
    if isinstance(size, int) and size > 0:
        node.target, node.args, node.kwargs = aten.split.Tensor, (node.args[0], size, dim), {}


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


def _rounds_number(node: torch.fx.Node) -> bool:
    """Whether an operator of 16-bit tensors has a number, or a tensor of rank 0, of more digits. torch computes such
    ones in float32, with all digits, and rounds the result alone.
    """
    dtype, name = node.meta["val"].dtype, _WITH_NUMBER[node.target]
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    given = (*node.args, *node.kwargs.values()) if name is None else (node.kwargs.get(name),)
    numbers = [value for value in given if isinstance(value, float)]
    wide = [value for value in given if isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), Tensor)
            and value.meta["val"].dtype in (torch.float32, torch.float64)]  # of rank 0, as the result has 16 bits
    return bool(wide) or any(torch.tensor(value, dtype=dtype).float() != torch.tensor(value, dtype=torch.float32)
                             for value in numbers)


def _in_float32(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """The operator between casts."""
    value = node.meta["val"]

    def cast(source: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        made = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
        made.meta = {**source.meta, "val": source.meta["val"].to(dtype)}
        return made

    with value.fake_mode:
        with graph.inserting_before(node):
            for source in node.all_input_nodes:
                operand = source.meta["val"]
                if isinstance(operand, Tensor) and operand.dtype != torch.float32:
                    node.replace_input_with(source, cast(source, torch.float32))
        node.meta = {**node.meta, "val": value.float()}
        with graph.inserting_after(node):
            node.replace_all_uses_with(made := cast(node, value.dtype), delete_user_cb=lambda user: user is not made)


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
    if _is_part_of_results(node):
        return _may_alias(node.args[0])
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True  # getitem, of a list of views perhaps; a region
    return any(result.alias_info is not None for result in schema.returns)


def _is_part_of_results(node: torch.fx.Node) -> bool:
    """Whether it is one of several tensors of an operator, each with memory of its own or an argument's."""
    source = node.args[0] if node.target is operator.getitem else None
    schema = getattr(getattr(source, "target", None), "_schema", None)
    return schema is not None and len(schema.returns) > 1


def _viewed(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The node and what it is a slice of, up to the whole; the node alone where it is none."""
    found = [node]
    while found[-1].op == "call_function" and found[-1].target in _SCATTERED:
        found.append(found[-1].args[0])
    return found


def _written(node: torch.fx.Node) -> Any:
    """Target and arguments of the value that an in-place operator writes; None where a graph has no simple one."""
    changed, value = node.args[0], node.meta.get("val")
    if any(not isinstance(step, int) for each in _viewed(changed)[:-1] if each.target is aten.select.int
           for step in each.args[1:]):
        return None
    if node.target is aten.copy_.default:
        source = node.args[1].meta["val"] if isinstance(node.args[1], torch.fx.Node) else None
        if source is None or [str(size) for size in source.shape] != [str(size) for size in value.shape]:
            return None  # it is broadcast
        return aten._to_copy.default, (node.args[1],), {"dtype": value.dtype}
    if node.target in _WRITES:
        return _WRITES[node.target], node.args, node.kwargs
    other = _FUNCTIONAL.get(node.target)
    return None if other is None or not _keeps_type(node) else (other, node.args, node.kwargs)


def _scatter(graph: torch.fx.Graph, node: torch.fx.Node, chain: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """New nodes behind the node: each of chain[1:], which chain[0] is a slice of, with the node's value in it, and then
    from the last of these the slices again, down to chain[0].
    """
    made = [node]

    def call(target: Any, source: torch.fx.Node, *args: Any) -> None:
        with graph.inserting_after(made[-1]):
            new = graph.call_function(target, args)
        new.meta = {**node.meta, "val": source.meta["val"]}
        made.append(new)

    for view, whole in zip(chain, chain[1:]):
        call(_SCATTERED[view.target], whole, whole, made[-1], *view.args[1:])
    for view in reversed(chain[:-1]):
        call(view.target, view, made[-1], *view.args[1:])
    return made[1:]


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
    roots: dict[torch.fx.Node, frozenset[Any]] = {}  # whose memory a node's result may be
    order = {node: i for i, node in enumerate(graph.nodes)}

    def is_read_later(changed: torch.fx.Node, whole: torch.fx.Node, at: int) -> bool:
        return any(order[user] >= at for other, found in roots.items()
                   if other is not changed and other is not whole and found & roots[changed] for user in other.users)

    def replace_later(old: torch.fx.Node, new: torch.fx.Node, at: int) -> None:
        if old is not new:
            old.replace_all_uses_with(new, delete_user_cb=lambda user: order[user] > at)

    for node in list(graph.nodes):
        written = _written(node) if node.op == "call_function" and node.target in (*_FUNCTIONAL, *_WRITES) else None
        if written is not None:
            changed, at = node.args[0], order[node]
            chain = _viewed(changed)
            whole = chain[-1]
            if not is_read_later(changed, whole, at) and (whole is changed or not _may_alias(whole)):
                node.target, node.args, node.kwargs = written
                roots[node] = frozenset((node,))
                made = [node, *_scatter(graph, node, chain)]
                new_whole, new_slice = made[len(chain) - 1], made[-1]
                for each in made[1:]:
                    order[each], roots[each] = at, frozenset((new_whole,))
                replace_later(whole, new_whole, at)
                replace_later(changed, new_slice, at)
                replace_later(node, new_slice, at)
                for each in reversed(made[1:]):
                    if not each.users:
                        del order[each], roots[each]
                        graph.erase_node(each)
                continue
        shared = [roots[each] for each in node.all_input_nodes] if _may_alias(node) else []
        own = (node.args[0], node.args[1]) if _is_part_of_results(node) else node
        roots[node] = frozenset().union(*shared) if shared else frozenset((own,))
