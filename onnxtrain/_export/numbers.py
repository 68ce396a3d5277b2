"""Numbers among the arguments and results of a graph of Dynamo's: sizes, counters, floats that change.

dynamo.py makes a graph one of tensors with these. A size is read off a tensor that has it; another number is a tensor
without dims, which the graph reads; and a number among the results is computed from the arguments, beside the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onnxtrain._torch import PythonPrinter

if TYPE_CHECKING:
    import sympy

KINDS = ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))
SYMBOLIC = tuple(symbolic for symbolic, _ in KINDS)
_ARITHMETIC = frozenset((operator.add, operator.sub, operator.mul, operator.truediv,
                         torch.add, torch.sub, torch.mul, torch.div))
_NAMES = {"math": math, "torch": torch, "max": max, "min": min, "abs": abs, "round": round}  # in formulas


def copied(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same operations and attributes; Dynamo goes on reading the arguments of its own graph."""
    own = torch.fx.Graph()
    own.output(own.graph_copy(graph.graph, {}))
    copy = torch.fx.GraphModule(graph, own)
    copy.meta.update(graph.meta)
    return copy


def placeholders(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def output_of(graph: torch.fx.GraphModule) -> Any:
    """The node whose first argument has the results."""
    return next(node for node in reversed(graph.graph.nodes) if node.op == "output")


def example(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def drop_arithmetic(graph: torch.fx.GraphModule) -> None:
    """Takes out what computes numbers that nothing reads: a counter's, whose results Dynamo's formulas are."""
    for node in reversed(graph.graph.nodes):
        is_number = node.op == "call_function" and isinstance(example(node), SYMBOLIC)
        if not node.users and (is_number or node.target == "__index__"):  # a list's index, which Dynamo guards
            graph.graph.erase_node(node)


def floats_as_arguments(graph: torch.fx.GraphModule, constants: bool) -> frozenset[int]:
    """Undoes Dynamo's way with a float that changes: a tensor without dims, of which the graph asks item().

    In arithmetic with a tensor of floats the tensor itself gives the same result. Elsewhere (an eps, a momentum) the
    graph asks, or takes the number if that is to be a constant. Returns the arguments that are to be numbers.
    """
    floats = set()
    for index, placeholder in enumerate(placeholders(graph)):
        value, asked = example(placeholder), list(placeholder.users)
        if not (isinstance(value, Tensor) and value.dim() == 0 and value.dtype is torch.float64 and asked
                and not value.requires_grad
                and all(node.op == "call_method" and node.target == "item" for node in asked)):
            continue
        users = [user for node in asked for user in node.users]
        as_tensor = all(map(_is_arithmetic_with_floats, users))
        if not (as_tensor or constants):
            continue
        for node in asked:
            node.replace_all_uses_with(placeholder)
            graph.graph.erase_node(node)
        if not as_tensor:
            floats.add(index)
            placeholder.meta["example_value"] = None
    return frozenset(floats)


def _is_arithmetic_with_floats(node: torch.fx.Node) -> bool:
    """Whether a node adds, subtracts, multiplies or divides a number and a tensor of floats that has dims."""
    others = [value for value in map(example, node.all_input_nodes) if isinstance(value, Tensor)]
    return (node.op == "call_function" and node.target in _ARITHMETIC and not node.kwargs and len(others) == 1
            and others[0].dim() > 0 and others[0].is_floating_point())


def wholes_as_tensors(graph: torch.fx.GraphModule, kept: Sequence[int]) -> frozenset[int]:
    """Makes whole numbers that are arguments tensors without dims, which the graph reads. Returns their places."""
    found = set()
    for index, placeholder in zip(kept, placeholders(graph), strict=True):
        value = example(placeholder)
        if isinstance(value, torch.SymInt):
            with graph.graph.inserting_after(placeholder):
                number = graph.graph.call_method("item", (placeholder,))
            for user in [user for user in placeholder.users if user is not number]:
                user.replace_input_with(placeholder, number)
            number.meta = dict(placeholder.meta)
            placeholder.meta["example_value"] = torch.tensor(value.node.hint)
            found.add(index)
    return frozenset(found)


def sizes_from_tensors(graph: torch.fx.GraphModule) -> list[int]:
    """Reads every size that is an argument off a tensor that has it; returns the arguments that are left."""
    given = placeholders(graph)
    owners = {expression: (node, axis) for node in given if isinstance(example(node), Tensor)
              for axis, size in enumerate(example(node).shape) if (expression := _expression(size)) is not None}
    kept = []
    for index, placeholder in enumerate(given):
        owner = owners.get(_expression(example(placeholder)))
        if owner is None:
            kept.append(index)
            continue
        if placeholder.users:
            with graph.graph.inserting_after(given[-1]):
                size = graph.graph.call_method("size", owner)
            placeholder.replace_all_uses_with(size)
    for index in set(range(len(given))).difference(kept):
        graph.graph.erase_node(given[index])
    return kept


def without_unread(graph: torch.fx.GraphModule, kept: Sequence[int]) -> list[int]:
    """Takes out whole numbers that no operation reads, each of which would be a constant of an export: where arguments
    are views of one tensor Dynamo gives their offsets, which are others in each batch. Returns the arguments of
    `kept` that remain.
    """
    left = []
    for index, placeholder in zip(kept, placeholders(graph), strict=True):
        if isinstance(example(placeholder), torch.SymInt) and not placeholder.users:
            graph.graph.erase_node(placeholder)
        else:
            left.append(index)
    return left


def _expression(value: object) -> sympy.Expr | None:
    """The formula of a symbolic size."""
    return value.node.expr if isinstance(value, torch.SymInt) else None


def symbols_of(value: object) -> set[sympy.Symbol]:
    """Those in the formula of a symbolic number; a condition of a tensor's value is that its symbol is 1."""
    return value.node.expr.free_symbols if isinstance(value, SYMBOLIC) else set()


def _computed(formula: sympy.Expr) -> Callable[[Mapping[str, object]], object]:
    """What gives a formula's value for the numbers that its symbols stand for, by name: in Python where all of it can
    be said so. sympy would take a millisecond, at each call of a module that counts its calls.
    """
    symbols = {str(symbol): symbol for symbol in formula.free_symbols}
    try:
        code = compile(PythonPrinter().doprint(formula), "<a formula of numbers>", "eval")
    except (NotImplementedError, SyntaxError):
        code = None
    if code is None or not {*_NAMES, *symbols, "sym_float", "_sym_sqrt", *dir(math)}.issuperset(code.co_names):
        return lambda bound: formula.subs({symbol: bound[name] for name, symbol in symbols.items()})
    return lambda bound: eval(code, _NAMES, bound)


class NumericResults:
    """The sizes and other numbers among a graph's results, which are no business of the engine's.

    Raises LookupError where one of them does not follow from the graph's arguments.
    """

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self._output = output_of(graph)
        self._results = list(self._output.args[0])
        self._tensors = [i for i, node in enumerate(self._results)
                         if isinstance(node, torch.fx.Node) and isinstance(example(node), Tensor)]
        formulas: dict[int, tuple[type, sympy.Expr]] = {}
        for i, node in enumerate(self._results):
            if i not in self._tensors and isinstance(node, torch.fx.Node):
                value = example(node)
                kind = next((plain for symbolic, plain in KINDS if isinstance(value, symbolic)), None)
                if kind is None:
                    raise LookupError(f"the result {node} is {type(value).__name__}")
                formulas[i] = kind, value.node.expr
        symbols = {_expression(example(node)): i for i, node in enumerate(placeholders(graph))}
        wanted = set().union(*[formula.free_symbols for _, formula in formulas.values()])
        contents = {symbol: node.args[0] for node in graph.graph.nodes if node.op == "call_method"
                    and node.target == "item" for symbol in symbols_of(example(node))}
        unknown = wanted.difference(symbols, contents)
        # A size that depends on contents: of nonzero(), say, or of zeros(n) with a tensor n.
        self._sizes = {_expression(size): (node, axis) for node in graph.graph.nodes
                       if isinstance(value := example(node), Tensor) for axis, size in enumerate(value.shape)
                       if _expression(size) in unknown}
        if unknown := unknown.difference(self._sizes):
            raise LookupError(f"a result depends on {', '.join(map(str, unknown))}, which is not an argument")
        self._symbols = [(str(symbol), symbols[symbol]) for symbol in wanted.intersection(symbols)]
        self._contents = [(str(symbol), contents.get(symbol)) for symbol in wanted.difference(symbols, self._sizes)]
        self._numbers = {i: (kind, _computed(formula)) for i, (kind, formula) in formulas.items()}

    def take_out(self) -> None:
        """Leaves the graph with its tensors as results, and with those that a number among them is read from."""
        tensors = [self._results[i] for i in self._tensors]
        self._contents += [(str(symbol), self._size(*place)) for symbol, place in self._sizes.items()]
        self._output.args = (*tensors, *[tensor for _, tensor in self._contents]),

    def _size(self, node: torch.fx.Node, axis: int) -> torch.fx.Node:
        """A tensor without dims that holds a size."""
        graph, tensor = self._output.graph, example(node)
        with graph.inserting_before(self._output), tensor.fake_mode:
            size = graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
            number = graph.call_function(torch.scalar_tensor, (size,), {"dtype": torch.int64})
            size.meta["example_value"] = tensor.shape[axis]
            number.meta["example_value"] = torch.empty((), dtype=torch.int64)
        return number

    def put_back(self, left: Sequence[Tensor], given: Sequence[object]) -> tuple[object, ...]:
        """All results, from those that are left and the graph's arguments."""
        bound: dict[str, object] = {symbol: given[i] for symbol, i in self._symbols}
        for (symbol, _), tensor in zip(self._contents, left[len(self._tensors):]):
            read = tensor.item()
            bound[symbol] = int(read) if isinstance(read, bool) else read
        whole = [None if isinstance(result, torch.fx.Node) else result for result in self._results]
        for i, value in zip(self._tensors, left):
            whole[i] = value
        for i, (kind, computed) in self._numbers.items():
            whole[i] = kind(computed(bound))
        return tuple(whole)

    def __bool__(self) -> bool:
        return len(self._tensors) < len(self._results)
