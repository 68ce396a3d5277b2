"""Keeps a dimension dynamic although the example's is 1, where that can be shown to be right.

torch.export freezes a size of 1, since 1 broadcasts. Used by export.py: it traces with the dimension enlarged as well,
and both traces must be the same program, operator by operator and size by size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def enlarged(tensors: Sequence[Tensor]) -> Iterator[tuple[tuple[Tensor, ...], list[tuple[int, int]]]]:
    """Examples with every dimension of 1 enlarged, then with the first dimensions only; and which those are."""
    sizes = {size for tensor in tensors for size in tensor.shape}
    size = next(candidate for candidate in (3, 5, 7, 11, 13, 17, *range(19, 1000)) if candidate not in sizes)
    places = [(i, axis) for i, tensor in enumerate(tensors) for axis, s in enumerate(tensor.shape) if s == 1]
    first = [place for place in places if place[1] == 0]
    for chosen in [places, first] if first and first != places else [places]:
        yield tuple(
            tensor.detach()
            .expand([size if (i, axis) in chosen else s for axis, s in enumerate(tensor.shape)])
            .clone(memory_format=torch.contiguous_format)
            .requires_grad_(tensor.requires_grad)
            for i, tensor in enumerate(tensors)
        ), chosen


def symbols_at(program: torch.export.ExportedProgram, places: Sequence[tuple[int, int]]) -> set[sympy.Symbol]:
    """The symbols of these dimensions of the inputs, if they have one each."""
    shapes = _input_shapes(program)
    found = (_expression(shapes[i][axis]) for i, axis in places)
    return {expression for expression in found if isinstance(expression, sympy.Symbol)}


def _input_shapes(program: torch.export.ExportedProgram) -> list[torch.Size]:
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    return [values[name].shape for name in program.graph_signature.user_inputs]


def same_program(one: torch.export.ExportedProgram, many: torch.export.ExportedProgram) -> bool:
    """Whether `many` at the sizes of the inputs of `one` is `one`."""
    values = {
        symbol: _expression(size)
        for sizes, symbols in zip(_input_shapes(one), _input_shapes(many))
        for size, symbol in zip(sizes, map(_expression, symbols)) if isinstance(symbol, sympy.Symbol)
    }
    modules = [dict(p.graph_module.named_modules()) for p in (one, many)]
    if list(modules[0]) != list(modules[1]):
        return False
    return all(
        _same_graph(module.graph, modules[1][name].graph, values)
        for name, module in modules[0].items() if isinstance(module, torch.fx.GraphModule)
    )


def _expression(value: Any) -> Any:
    """A size, known or not, as sympy has it; anything else as it is."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    return sympy.sympify(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _is_size(node: torch.fx.Node) -> bool:
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    return node.op == "call_function" and isinstance(node.meta.get("val"), symbolic)


def _same_graph(one: torch.fx.Graph, many: torch.fx.Graph, values: dict[sympy.Symbol, Any]) -> bool:
    """Operators in the same order on the same results; nodes that only compute sizes are compared where used."""
    left, right = (
        [node for node in graph.nodes if not _is_size(node) and not _is_check(node)] for graph in (one, many)
    )
    if len(left) != len(right):
        return False
    position = {node: i for nodes in (left, right) for i, node in enumerate(nodes)}

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.fx.Node) and a in position:
            return isinstance(b, torch.fx.Node) and position.get(b) == position[a]
        a, b = _expression(a), _expression(b)
        if isinstance(b, sympy.Basic):
            return isinstance(a, sympy.Basic) and a == b.subs(values, simultaneous=True)
        return type(a) is type(b) and a == b

    for a, b in zip(left, right):
        if (a.op, a.target) != (b.op, b.target):
            return False
        flat_a, spec_a = pytree.tree_flatten((a.args, a.kwargs))
        flat_b, spec_b = pytree.tree_flatten((b.args, b.kwargs))
        if spec_a != spec_b or not all(map(same, flat_a, flat_b)):
            return False
        # squeeze() is the same operator at every size, and gives other ranks
        shapes = _result_shapes(a), _result_shapes(b)
        if len(shapes[0]) != len(shapes[1]) or not all(map(same, *shapes)):
            return False
    return True


def _result_shapes(node: torch.fx.Node) -> list[Any]:
    results = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return [entry for result in results for entry in (result.dim(), *result.shape)]


def _is_check(node: torch.fx.Node) -> bool:
    return node.target in (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_tensor_metadata.default)
