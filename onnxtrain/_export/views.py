"""Results that are an argument or weight, or share memory with one or with another result: found in a traced program,
made again at each step.

In eager PyTorch `x.view(-1)` that forward returns is a view: a change in place reaches x, and autograd knows. A graph's
output is a separate tensor, so such results are not outputs of the graph. What torch called to make them is kept as
steps instead, and called again on the tensors themselves. export.py calls find() between torch.export and torch.onnx,
_program.py replays, cache.py writes the steps down as the JSON that they are.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from onnxtrain._export.captured import is_dense, layout_of
from onnxtrain._export.errors import ExportError
from onnxtrain._torch import OpOverload

if TYPE_CHECKING:
    from onnxtrain.export import _Traced

Source = tuple[str, int | str]  # "input" and its place, "parameter" and its name, and so on

_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}  # which argument is the body
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem")
_NAMED = (torch.dtype, torch.memory_format, torch.layout)


class _Lost(Exception):
    """A view that cannot be made again; the message says why."""


def makes_views(target: object) -> bool:
    """Whether an operator of torch's returns views of its first argument, and writes nothing."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    schema = target._schema
    return (bool(schema.arguments) and schema.arguments[0].alias_info is not None
            and all(result.alias_info is not None for result in schema.returns[:1]))


class Scope:
    """A module of a graph, what its inputs are outside of it, and the grad mode that it sets."""

    def __init__(self, module: torch.nn.Module, outside: Scope | None = None,
                 inputs: Mapping[fx.Node, Any] | None = None,
                 grad: bool | None = None) -> None:
        self.module, self.outside, self.inputs = module, outside, inputs or {}
        self.grad: bool | None = grad if grad is not None or outside is None else outside.grad


class _Path:
    """From a result back to the tensor whose memory it is in: steps to take, first to last."""

    def __init__(self, node: Any, owner: torch.nn.Module, held: Mapping[fx.Node, Source]) -> None:
        self.steps: list[tuple[fx.Node, Scope]] = []
        scope = Scope(owner)
        while node not in held:
            if node in scope.inputs and scope.outside is not None:
                node, scope = scope.inputs[node], scope.outside
            elif node.op != "call_function":
                break
            elif node.target is operator.getitem and (found := region(node.args[0], scope)) is not None:
                results, within = found
                if not isinstance(inner := results[node.args[1]], fx.Node):
                    break
                node, scope = inner, within
            elif node.target is operator.getitem and makes_views(getattr(node.args[0], "target", None)):
                self.steps += [(node, scope), (node.args[0], scope)]
                node = node.args[0].args[0]
            elif not makes_views(node.target) or not isinstance(node.args[0], fx.Node):
                break
            else:
                self.steps.append((node, scope))
                node = node.args[0]
        self.steps.reverse()
        self.root, self.outermost = node, scope.outside is None or node in held


def region(node: object, scope: Scope) -> tuple[Any, Scope] | None:
    """Results of the body, and its scope, where a node runs one under another mode."""
    name = getattr(getattr(node, "target", None), "__name__", "")
    if not isinstance(node, fx.Node) or node.op != "call_function" or name not in _REGIONS:
        return None
    place, args = _REGIONS[name], list[Any](node.args)
    body: Any = scope.module.get_submodule(args[place].target)
    inputs = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    within = Scope(body, scope, dict(zip(inputs, args[place + 1:])), args[0] if place == 1 else None)
    return body.graph.output_node().args[0], within


class _Writer:
    """Paths as a list of calls: values are numbered, sources first seen first."""

    def __init__(self, sources: Callable[[fx.Node], Source | None]) -> None:
        self._sources = sources
        self.values: list[list[object]] = []

    def source(self, kind: str, target: int | str) -> int:
        entry = [kind, target]
        if entry not in self.values:
            self.values.append(entry)
        return self.values.index(entry)

    def result(self, leaf: int, remade: Mapping[int, Sequence[tuple[str, list[object]]]]) -> int:
        """An output of the graph, as the module has it."""
        at = self.source("result", leaf)
        for name, rest in remade.get(leaf, ()):
            at = self._call(name, [{"v": at}, *rest], {})
        return at

    def path(self, path: _Path, start: int) -> int:
        """The number of the value at the end of a path that begins at a value."""
        at = start
        for node, scope in path.steps:
            rest = [self._argument(argument, scope) for argument in node.args[1:]]
            keywords = {name: self._argument(value, scope) for name, value in node.kwargs.items()}
            at = self._call(_name(node.target), [{"v": at}, *rest], keywords, scope.grad)
        return at

    def _call(self, name: str | None, args: list[object], kwargs: dict[str, object], grad: bool | None = None) -> int:
        entry = ["call", name, args, kwargs, grad]
        if entry in self.values:
            return self.values.index(entry)
        self.values.append(entry)
        return len(self.values) - 1

    def _argument(self, value: object, scope: Scope) -> object:
        if isinstance(value, fx.Node):
            return {"v": self._size(value, scope)}
        if isinstance(value, (list, tuple)):
            return [self._argument(item, scope) for item in value]
        if isinstance(value, _NAMED):
            return {"torch": str(value).removeprefix("torch.")}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise _Lost(f"an argument is {value!r}")

    def _size(self, node: fx.Node, scope: Scope) -> int:
        """A number that is made of sizes of sources, or of views of these."""
        while node in scope.inputs and scope.outside is not None:
            node, scope = scope.inputs[node], scope.outside
        if isinstance(node, int):
            raise _Lost("a size is a constant of a region")
        if (source := self._sources(node)) is not None:
            return self.source(*source)
        if (node.op != "call_function" or node.target is not torch.ops.aten.sym_size.int
            and not makes_views(node.target) and _name(node.target, True) is None):
            raise _Lost(f"a size comes from {node.name}")
        return self._call(_name(node.target), [self._argument(argument, scope) for argument in node.args], {})


def _name(target: object, arithmetic: bool = False) -> str | None:
    if isinstance(target, OpOverload):
        # The trace has seen arguments in a row: of others, reshape() makes what eager makes.
        target = torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target
        return None if arithmetic else str(target)
    name = getattr(target, "__name__", "")
    if name in _ARITHMETIC and getattr(operator, name, None) is target:
        return f"operator.{name}"
    if arithmetic:
        return None
    raise _Lost(f"a step is {target}")


def find(program: torch.export.ExportedProgram, traced: _Traced, users: Sequence[int],
         owned: Callable[[str], tuple[str, str]], for_file: bool = False) -> list[Any] | None:
    """How to make the results that are views, as JSON: [values, [[leaf, value], ...]]; None where there is none.

    Args:
        traced: of its results, out_tensors are leaves of the user's output and `same` those that are an input or a
            parameter; buffers are the program's outputs after the results, and written its last ones: what these
            buffers and arguments hold after forward.
        users: leaves of the input that are tensors.
        owned: a weight's name in the program -> ("parameter" or "buffer", its name).
        for_file: no view is taken of a result that lies in another order in memory, or is complex.

    Raises:
        ExportError: a result shares memory with an argument or weight, and cannot be made again.
    """
    signature, results, same = program.graph_signature, traced.out_tensors, traced.same
    inputs = dict(zip(signature.user_inputs, users))
    weights = {name: owned(target) for targets in (signature.inputs_to_parameters, signature.inputs_to_buffers)
               for name, target in targets.items()}

    def source(node: fx.Node) -> Source | None:
        if node.op != "placeholder":
            return held.get(node)
        return ("input", inputs[node.name]) if node.name in inputs else weights.get(node.name)

    outputs = program.graph.output_node().args[0]
    nodes, owner = outputs[:len(results)], program.graph_module
    held = _held_afterwards(outputs, traced, owner)
    paths = {leaf: _Path(node, owner, held) for leaf, node in zip(results, nodes) if isinstance(node, fx.Node)}
    bases: dict[fx.Node, int] = {}
    for leaf, path in paths.items():
        if not path.steps and leaf not in same:
            bases.setdefault(path.root, leaf)
    writer, made = _Writer(source), []
    remade: dict[int, list[tuple[str, list[object]]]] = {}
    for leaf, path in paths.items():
        if not (for_file or leaf in same or path.outermost and source(path.root) is not None
                or bases.get(path.root, leaf) != leaf) and (calls := _remade(program.graph, results.index(leaf))):
            remade[leaf] = calls
            made.append([leaf, writer.result(leaf, remade)])
    for leaf, path in paths.items():
        known = source(path.root) if path.outermost else None
        if leaf in same:
            made.append([leaf, writer.source("input" if isinstance(same[leaf], int) else "parameter", same[leaf])])
            continue
        if known is None and bases.get(path.root, leaf) == leaf:
            continue
        try:
            start = writer.source(*known) if known is not None else writer.result(bases[path.root], remade)
            made.append([leaf, writer.path(path, start)])
        except _Lost as error:
            if known is not None:
                raise ExportError(f"A result shares memory with an argument or a weight, and {error}; a graph would "
                                  "return a copy.") from error
    return [writer.values, made] if made else None


def _order(node: object) -> list[int] | None:
    """The axes of a result in memory, where eager's lie in another order than row by row."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    order = layout_of(value)
    return list(order) if order is not None and is_dense(value, order) and not is_dense(value) else None


def _remade(graph: fx.Graph, place: int) -> list[tuple[str, list[object]]]:
    """Has the graph return a result as it lies in memory, and a complex one as real numbers.

    Returns the calls that make the result of it: operators, and their arguments behind the first.
    """
    output = graph.output_node()
    results: list[Any] = list(output.args[0])
    calls: list[tuple[str, list[object]]] = []
    node, order = results[place], _order(results[place])
    with graph.inserting_before(output), node.meta["val"].fake_mode:
        if order is not None:
            node = graph.call_function(torch.ops.aten.permute.default, (node, order))
            node.meta = {**results[place].meta, "val": results[place].meta["val"].permute(order)}
            calls.insert(0, ("aten.permute.default", [[order.index(axis) for axis in range(len(order))]]))
        if node.meta["val"].is_complex():
            for target in (torch.ops.aten.resolve_conj.default, torch.ops.aten.view_as_real.default):
                value = node.meta["val"]
                node = graph.call_function(target, (node,))
                node.meta = {**results[place].meta, "val": target(value)}
            calls.insert(0, ("aten.view_as_complex.default", []))
    results[place] = node
    output.args = (tuple(results),)
    return calls


def leaves(views: Sequence[Any] | None) -> frozenset[int]:
    """Leaves of the output that replaying makes, and that the graph does not return."""
    return frozenset() if views is None else frozenset(
        leaf for leaf, _ in views[1] if ["result", leaf] not in views[0])


def _held_afterwards(outputs: Sequence[Any], traced: _Traced, owner: torch.nn.Module) -> dict[fx.Node, Source]:
    """The nodes that make what buffers and arguments hold after forward, which changes them: a view of such a value is
    a view of the buffer or argument.
    """
    sources: tuple[list[Source], ...] = (
        [("buffer", name) for name in traced.buffers], [("input", leaf) for leaf in traced.written])
    first = len(traced.out_tensors)
    found: dict[fx.Node, Source] = {}
    for names, at in zip(sources, (first, len(outputs) - len(traced.written)), strict=True):
        for node, source in zip(outputs[at:], names):
            scope = Scope(owner)
            found[node] = source
            while node.target is operator.getitem and (within := region(node.args[0], scope)) is not None:
                results, scope = within
                node = results[node.args[1]]
                if not isinstance(node, fx.Node):
                    break
                found[node] = source
    return found


class Replay:
    """The steps of find(), as calls. Raises ValueError where a step is none that find() writes."""

    def __init__(self, views: Sequence[Any]) -> None:
        self._values = [tuple(value) if value[0] != "call" else ("call", _function(value[1]), *value[2:])
                        for value in views[0]]
        self._made = [(leaf, value) for leaf, value in views[1]]

    def __call__(self, flat: list[object], inputs: Sequence[object], weight: Callable[[str, str], Tensor]) -> None:
        """Fills in the leaves of the output that are views, of arguments, weights or leaves that are there already."""
        values: list[object] = []

        def given(argument: object) -> object:
            if isinstance(argument, list):
                return [given(item) for item in argument]
            if not isinstance(argument, dict):
                return argument
            if "v" in argument:
                return values[argument["v"]]
            return torch.device(argument["device"]) if "device" in argument else getattr(torch, argument["torch"])

        for kind, target, *rest in self._values:
            if kind == "call":
                args, kwargs, grad = rest
                with contextlib.nullcontext() if grad is None else torch.set_grad_enabled(grad):
                    values.append(target(*[given(argument) for argument in args],
                                         **{k: given(v) for k, v in kwargs.items()}))
            elif kind == "input":
                values.append(inputs[target])
            else:
                values.append(flat[target] if kind == "result" else weight(kind, target))
        for leaf, value in self._made:
            flat[leaf] = values[value]


def _function(name: str) -> Callable[..., Any]:
    family, _, rest = name.partition(".")
    if family == "operator" and rest in _ARITHMETIC:
        return getattr(operator, rest)
    packet, _, overload = rest.partition(".")
    found: Any = getattr(getattr(torch.ops.aten, packet, None), overload, None) if family == "aten" else None
    if found is not torch.ops.aten.sym_size.int and not makes_views(found):
        raise ValueError(f"{name} is not an operation of a view")
    return found
