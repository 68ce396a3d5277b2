"""A traced program in operators that torch.onnx translates well, and refused where a graph would lose something.

Called by export.py between torch.export and torch.onnx. What is left here torch's decompositions would rewrite as well,
by executing every node once more with fake tensors and symbolic sizes: for a ResNet most of the time of an export.
retrace.py leaves them out for a program that needs none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain._export import draws, messages, views
from onnxtrain._export.captured import is_dense, layout_of
from onnxtrain._export.errors import Untraceable
from onnxtrain._torch import OpOverload, pytree

aten = torch.ops.aten
_RENAMED = {aten.min.other: aten.minimum.default, aten.max.other: aten.maximum.default,
            aten.item.default: aten._local_scalar_dense.default, aten._neg_view.default: aten.neg.default} | {
    getattr(written, name): getattr(named, name) for name in ("Tensor", "Scalar") for written, named in (
        (aten.__and__, aten.bitwise_and), (aten.__or__, aten.bitwise_or), (aten.__xor__, aten.bitwise_xor),
        (aten.multiply, aten.mul), (aten.subtract, aten.sub), (aten.divide, aten.div), (aten.true_divide, aten.div))}


# Operators that multiply by a number, and where it is: by name, or among the arguments.
_WITH_NUMBER: dict[OpOverload, str | None] = dict.fromkeys((
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.lerp.Scalar, aten.softplus.default)) | {
    aten.add.Tensor: "alpha", aten.sub.Tensor: "alpha", aten.addcmul.default: "value"}


def state_dtypes(program: torch.export.ExportedProgram) -> None:
    """Gives new tensors their dtype by name where torch's default is not float32, for which torch.onnx takes it.

    Raises:
        Untraceable: an operator makes floats of whole numbers, which it cannot be told.
    """
    default = torch.get_default_dtype()
    if default is torch.float32:
        return
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            value = node.meta.get("val")
            if not (isinstance(node.target, OpOverload) and isinstance(value, Tensor)
                    and value.dtype is default):
                continue
            read = [made.meta["val"].dtype for made in node.all_input_nodes if isinstance(made.meta.get("val"), Tensor)]
            if any(map(_is_float, read)) or any(isinstance(given, torch.dtype)
                                                for given in (*node.args, *node.kwargs.values())):
                continue
            if read or not any(argument.name == "dtype" for argument in node.target._schema.arguments):
                with messages.raised_by(node):
                    raise Untraceable(f"{node.target} returns {default}, torch's default dtype, for operands of other "
                                      "dtypes; torch.onnx would return float32.")
            node.kwargs = {**node.kwargs, "dtype": default}


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def refuse_complex(program: torch.export.ExportedProgram) -> None:
    """Raises Untraceable where a complex result is no view of two real numbers: a buffer's, or a file's."""
    for result in pytree.tree_leaves(program.graph.output_node().args):
        value = result.meta.get("val") if isinstance(result, torch.fx.Node) else None
        if isinstance(value, Tensor) and value.is_complex():
            with messages.raised_by(result):
                raise Untraceable(f"The module returns, or keeps, a tensor of {value.dtype}, which a graph cannot "
                                  "hold.")


def mark_no_grad(program: torch.export.ExportedProgram) -> None:
    """A detach after every result of a torch.no_grad() region, which the exporter is about to inline."""
    for module in program.graph_module.modules():
        for region in list(module.graph.nodes) if isinstance(module, torch.fx.GraphModule) else ():
            if region.target is torch.ops.higher_order.wrap_with_set_grad_enabled and region.args[0] is False:
                for result in [each for each in region.users if isinstance(each.meta["val"], Tensor)]:
                    with module.graph.inserting_after(result):
                        barrier = module.graph.call_function(aten.detach.default, (result,))
                    barrier.meta.update(result.meta)
                    result.replace_all_uses_with(
                        barrier, delete_user_cb=lambda user, barrier=barrier: user is not barrier)
    _name_results(program)


def simplify(program: torch.export.ExportedProgram) -> None:
    """Rewrites nodes, also those of branches and regions. Names of results are kept."""
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            _simplify(part.graph)
            part.recompile()
    _name_results(program)


def _simplify(graph: torch.fx.Graph) -> None:
    draws.lay_out(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten._assert_tensor_metadata.default, aten._assert_scalar.default):
            graph.erase_node(node)
        elif node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
            with messages.raised_by(node):
                _as_strided(graph, node)
        elif node.target is aten.view.default:  # whatever strides a later trace has
            node.target = aten.reshape.default
        elif node.target in _RENAMED:
            node.target = _RENAMED[node.target]
        elif node.target in (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default):
            _pool(node)
        elif node.target is aten.copy.default:
            _copy(graph, node)
        elif node.target is aten.permute.default:
            _permute(node)
        elif node.target is aten.rsub.Scalar:
            _subtract(graph, node)
        elif node.target is aten.diff.default:
            _difference(graph, node)
    for node in list(graph.nodes):
        if node.target in _WITH_NUMBER and _rounds_number(node):
            _in_float32(graph, node)
    for node in reversed(graph.nodes):
        if not node.users and views.makes_views(node.target):  # made again of something that was written
            graph.erase_node(node)


def _name_results(program: torch.export.ExportedProgram) -> None:
    """Has the program's signature say which nodes its results are."""
    for spec, node in zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True):
        if isinstance(node, torch.fx.Node):
            spec.arg.name = node.name
    program.graph_module.recompile()


def _copy(graph: torch.fx.Graph, node: Any) -> None:
    """What copy_() writes: the source, in the shape and dtype of what it is written into."""
    made, (target, source) = node.meta["val"], node.args[:2]
    value = source.meta["val"]
    with graph.inserting_before(node), value.fake_mode:
        if [str(size) for size in value.shape] != [str(size) for size in made.shape]:
            shape = [size if isinstance(size, int) else graph.call_function(aten.sym_size.int, (target, axis))
                     for axis, size in enumerate(made.shape)]
            for size in shape:
                if isinstance(size, torch.fx.Node):
                    size.meta["val"] = made.shape[size.args[1]]
            source = graph.call_function(aten.expand.default, (source, shape))
            source.meta = {**node.meta, "val": value.expand(made.shape)}
    node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": made.dtype}


def _permute(node: Any) -> None:
    """A transposition, a copy, and the transposition back are what was there before: captured.py asks for the copy."""
    copy = node.args[0]
    first = copy.args[0] if copy.target is aten.clone.default else copy
    if first.target is aten.permute.default:
        there, back = ([axis % len(node.args[1]) for axis in each.args[1]] for each in (first, node))
        if [there[axis] for axis in back] == list(range(len(there))):
            node.replace_all_uses_with(first.args[0])


def _as_strided(graph: torch.fx.Graph, node: Any) -> None:
    """Reads or writes memory: that of the tensor which its argument is a view of, whose elements a graph has row by
    row.
    """
    writes = node.target is aten.as_strided_scatter.default
    viewed = root = node.args[0]
    given = node.args[2 if writes else 1:]
    while root.op == "call_function" and views.makes_views(root.target):
        root = root.args[0]
    value = root.meta["val"]
    order = list(layout_of(value) or range(value.dim()))
    if value._is_view() or not is_dense(value, order):
        raise Untraceable("The module calls as_strided() on a part of an argument; a graph has no more of its memory.")
    if writes and (root is not viewed or order != list(range(value.dim()))):
        raise Untraceable("The module writes into as_strided() of a tensor whose memory is not row by row.")
    offset = given[2] if len(given) > 2 and given[2] is not None else viewed.meta["val"].storage_offset()
    hints = [size.node.hint if isinstance(size, torch.SymInt) else size
             for size in (offset, value.numel(), *_values(given[0]), *_values(given[1]))]
    if not isinstance(offset, int) or any(not isinstance(hint, int) for hint in hints):
        raise Untraceable("The module calls as_strided() on a view whose offset depends on sizes.")
    sizes, strides = hints[2:2 + len(given[0])], hints[2 + len(given[0]):]
    if all(sizes) and offset + sum((size - 1) * stride for size, stride in zip(sizes, strides)) >= hints[1]:
        raise Untraceable("The module calls as_strided() beyond the tensor that it is given; a graph has no more.")
    if root is not viewed and not _lies_within((sizes, strides, offset), viewed.meta["val"], hints[1]):
        raise Untraceable("The module calls as_strided() on a part of a tensor and reads beyond that part, where "
                          "PyTorch gives it no gradient; a graph would.")
    with graph.inserting_before(node), value.fake_mode:
        if order != list(range(value.dim())):
            root = graph.call_function(aten.permute.default, (root, order))
            root.meta = {**node.meta, "val": value.permute(order)}
    node.args = (root, *node.args[1:2 if writes else 1], *given[:2], offset)


def _lies_within(read: tuple[Sequence[int], Sequence[int], int], viewed: Tensor, elements: int) -> bool:
    """Whether (sizes, strides, offset) reads elements of a view alone, of a memory of so many."""
    shape = [size.node.hint if isinstance(size, torch.SymInt) else size
             for size in (*viewed.shape, *viewed.stride(), viewed.storage_offset())]
    held = torch.zeros(elements, dtype=torch.bool)
    held.as_strided(shape[:viewed.dim()], shape[viewed.dim():-1], shape[-1]).fill_(True)
    return bool(held.as_strided(*read).all())


def _values(numbers: Iterable[object]) -> list[Any]:
    return [number.meta["val"] if isinstance(number, torch.fx.Node) else number for number in numbers]


def _pool(node: Any) -> None:
    """As torch decomposes it: into a mean where one cell is left."""
    size = list(node.args[1])
    if size == [1] * len(size):
        node.target, node.args = aten.mean.dim, (node.args[0], [-1, -2][:len(size)], True)
    elif len(size) == 2:
        node.target = aten._adaptive_avg_pool2d.default


def _subtract(graph: torch.fx.Graph, node: Any) -> None:
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


def _difference(graph: torch.fx.Graph, node: Any) -> None:
    """The first difference of numbers, as torch decomposes it."""
    names = [argument.name for argument in node.target._schema.arguments]
    given = {"n": 1, "dim": -1, "prepend": None, "append": None} | dict(zip(names, node.args)) | node.kwargs
    source = given["self"]
    if given["n"] != 1 or node.meta["val"].dtype is torch.bool:
        return

    def call(target: OpOverload, *args: Any) -> torch.fx.Node:
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
