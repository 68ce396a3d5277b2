"""A graph that Dynamo captured, as a module with the user's parameters and buffers that can be exported."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.traceback
from torch import Tensor

from onnxtrain._export import messages
from onnxtrain._export.autograd_calls import refused
from onnxtrain._export.errors import Untraceable
from onnxtrain._export.functionalization import traced_value
from onnxtrain._torch import OpOverload, OpOverloadPacket, pytree

Kinds = tuple[tuple[torch.dtype, int], ...]  # the dtype and rank of each tensor
Layout = tuple[int, ...] | tuple[str, str]  # see layout_of()
TRANSLATED = ("transformers.grouped_mm_fallback",)  # operators of libraries that an export knows by their names
_ROOT = re.compile(r"(\w*\['[^']*'\]|[^.]*).*")  # in Dynamo's expression of a module: the one whose forward it follows
_KEEPS_INFERENCE_MODE = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)  # a trace that has entered it
_LOOP = 16  # entries from which on a graph is taken for an unrolled loop
_OF_STRIDES = frozenset(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "is_contiguous",
                         "stride", "storage_offset", "untyped_storage", "data_ptr",
                         "randn_like", "rand_like", "randint_like", "empty_like"))  # eager fills memory in its order


class Place(NamedTuple):
    """Where a module holds a tensor."""

    store: dict[str, Tensor | None]  # the _parameters or _buffers of one of its modules
    name: str
    path: str  # of that module
    kind: str  # "_parameters" or "_buffers"

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


class _Notes(NamedTuple):
    """What Dynamo has noted at a graph's nodes."""

    open_axes: list[set[int] | None]  # of each argument, whose sizes Dynamo has left open; None: no tensor
    reads_strides: bool
    layouts: tuple[Layout | None, ...]  # of each argument, as layout_of() gives it
    kinds: dict[str, Kinds]  # by a node's name the dtype and rank of each tensor of its result
    orders: dict[tuple[str, int], tuple[int, ...]]  # by a name and rank, the order of axes in memory
    lasting: tuple[bool, ...]  # of each argument, whether the next call may read it again
    unrolled: bool  # whether a loop of Python's takes single entries of tensors, as of a sequence


class Operations:
    """What Dynamo captured, and where the parameters and buffers are that it takes.

    Args:
        root: the module that holds them, in submodules.
        module: the user's.
        graph: the operations, which take parameters and buffers as arguments.
        places: for each argument every place in `module` that holds it; empty for those that are arguments of `root`.
        user: gives the user's module, or the clone of it, that runs; None: `module`.

    Attributes:
        argument_names: of the arguments of `root`.
        held: for each argument where `root` has it: a dict and a name; None for its own arguments.
        dynamic: of each tensor among its own arguments the axes whose sizes Dynamo has left open.
        unrolled: whether it is a loop of Python's over the entries of tensors.
        reads_strides: whether it computes something else for the same contents with other strides.
        lasting: of each of its own arguments whether it is an attribute of something, which the next call reads again.
        layouts: how the elements of each argument lie in memory, where that is not row by row: it decides which
            results are views.
        places: as given.
    """

    def __init__(self, root: torch.nn.Module, module: torch.nn.Module, graph: torch.fx.GraphModule,
                 places: Sequence[Sequence[Place]],
                 user: Callable[[], torch.nn.Module] | None = None) -> None:
        noted = _notes(graph)
        self._root: Callable[[], Any] = weakref.ref(root)
        self.user, self.graph = user or (lambda: module), graph
        self.dynamic = _dynamic(noted, places)
        self.reads_strides, self.layouts, self.unrolled = noted.reads_strides, noted.layouts, noted.unrolled
        self.held = [None if not held else (getattr(_owner(root, held[0].path), held[0].kind), held[0].name)
                     for held in places]
        self.lasting = [lasts for lasts, held in zip(noted.lasting, places, strict=True) if not held]
        self._kinds = {name: {kinds} for name, kinds in noted.kinds.items()}
        self._orders = dict(noted.orders)
        self.argument_names = _names(module, graph, places)
        self.places = places
        self.hold([held[0].store[held[0].name] if held else None for held in places])

    def take(self, graph: torch.fx.GraphModule) -> None:
        """Dynamo captured the same operations again, perhaps of another layer: takes what it has noted."""
        noted = _notes(graph)
        for name, kinds in noted.kinds.items():
            self._kinds.setdefault(name, set()).add(kinds)
        self._orders.update(noted.orders)
        found = _dynamic(noted, self.places)
        self.dynamic = [one | other for one, other in zip(self.dynamic, found, strict=True)]

    def hold(self, inputs: Sequence[Any]) -> None:
        """Has `root` hold the weights among these arguments of the graph, in the place of others."""
        for held, tensor in zip(self.places, inputs, strict=True):
            for place in held:
                getattr(_owner(self._root(), place.path), place.kind)[place.name] = tensor

    def names(self) -> list[list[str]]:
        """For each argument the names of the parameter or buffer that it is."""
        return [[place.full_name for place in held] for held in self.places]

    def positions(self) -> dict[int | str, int]:
        """Which argument of the graph each argument of `root` is, by its number, and each weight, by its names."""
        own = [i for i, held in enumerate(self.places) if not held]
        return {**dict(enumerate(own)), **{name: i for i, names in enumerate(self.names()) for name in names}}

    @property
    def text(self) -> str | None:
        """All that is computed; None where there are tensors, modules or functions that no text stands for."""
        for node in self.graph.graph.nodes:
            function = node.target if isinstance(node.target, types.FunctionType) else None
            if node.op in ("get_attr", "call_module") or function is not None and not _has_text(function):
                return None
            if isinstance(node.target, OpOverload | OpOverloadPacket) and not str(
                    node.target).startswith(("aten.", "prims.", *TRANSLATED)):
                return None  # a library's, which may be another one in another process
        return f"{self.graph.code}{self.layouts if any(self.layouts) else ''}"

    def inputs(self, args: Sequence[object]) -> list[object]:
        """The arguments of the graph, for the arguments of `root`."""
        given = iter(args)
        return [next(given) if held is None else held[0][held[1]] for held in self.held]

    def run(self, args: Sequence[object]) -> Any:
        """Calls them with the arguments of `root`."""
        return self.graph.forward(*self.inputs(args))

    def trace(self, inputs: Sequence[object], wrap: Callable[[object], object]) -> Any:
        """Calls them while they are traced: names of the user's modules go along.

        Args:
            inputs: of the graph.
            wrap: called for each constant of the graph.
        """
        with torch.fx.traceback.preserve_node_meta():
            return _Comparing(self.graph, self._kinds, self._orders, wrap).run(*inputs)


class _Comparing(torch.fx.Interpreter):
    """Refuses a result of a type that Dynamo, which has called the functions of torch themselves, has not had.

    Args:
        kinds: by the name of a node the results that its captures had, as _kinds() has them.
        orders: by the name of a node and its rank the order of its result's axes in memory, which it gets here too.
        wrap: called for each constant.
    """

    def __init__(self, graph: torch.fx.GraphModule, kinds: Mapping[str, set[Kinds]],
                 orders: Mapping[tuple[str, int], tuple[int, ...]], wrap: Callable[[object], object]) -> None:
        super().__init__(graph)
        self._results, self._orders, self._wrap = kinds, orders, wrap
        self.extra_traceback = False  # the operator and its arguments in each exception

    def run_node(self, node: torch.fx.Node) -> Any:
        with messages.raised_by(node):
            with refused() if _is_whole(node) else contextlib.nullcontext():
                result = super().run_node(node)
            if node.op == "get_attr":
                return self._wrap(result)
            want = self._results.get(node.name)
            if want is not None and (got := _kinds(result)) not in want:
                raise Untraceable(f"The module uses {node.target} in a way that gives {want} in PyTorch, and would "
                                  f"give {got} in the engine.")
        order = self._orders.get((node.name, result.dim())) if isinstance(result, Tensor) else None
        return _laid_out(result, order, self.map_nodes_to_values(node.all_input_nodes, node))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _KEEPS_INFERENCE_MODE and getattr(target, "__name__", "") == "_enter_inference_mode":
            raise Untraceable("The module enters torch.inference_mode(), which a trace of torch 2.10 does not leave.")
        if target in _TYPED:
            return _of_type(_TYPED[target] or torch.get_default_dtype(), args, kwargs)
        return super().call_function(_UNSEEN.get(target, target), args, kwargs)


def _variable(data: Tensor, requires_grad: bool = False, volatile: bool = False) -> Tensor:
    """torch.autograd.Variable()."""
    if requires_grad or volatile:
        raise Untraceable("The module calls torch.autograd.Variable(requires_grad=True) inside forward; a graph would "
                          "lose it.")
    return data.detach()


def _range(start: float, end: float | None = None, step: float = 1, **kwargs: Any) -> Tensor:
    """torch.range(): the end is one of its numbers."""
    start, end = (0, start) if end is None else (start, end)
    kwargs["dtype"] = kwargs.get("dtype") or torch.get_default_dtype()
    return torch.arange(math.floor((end - start) / step) + 1, **kwargs) * step + start


# What torch had before torch.tensor(), Tensor.detach() and torch.arange(), which no trace sees: functions in their
# place, and of constructors the dtype, where None is torch's default.
_UNSEEN: dict[object, Callable[..., Tensor]] = {torch.autograd.Variable: _variable, torch.range: _range}
_TYPED: dict[object, torch.dtype | None] = {
    torch.Tensor: None, torch.FloatTensor: torch.float32, torch.DoubleTensor: torch.float64,
    torch.HalfTensor: torch.float16, torch.BFloat16Tensor: torch.bfloat16, torch.LongTensor: torch.int64,
    torch.IntTensor: torch.int32, torch.ShortTensor: torch.int16, torch.CharTensor: torch.int8,
    torch.ByteTensor: torch.uint8, torch.BoolTensor: torch.bool}


def _of_type(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch.FloatTensor(2, 3), of a size, or torch.FloatTensor([1., 2.]), of entries."""
    if not kwargs and all(isinstance(size, int | torch.SymInt) for size in args):
        return torch.empty(args or (0,), dtype=dtype)
    if kwargs or len(args) != 1 or isinstance(args[0], Tensor):
        raise Untraceable("The module calls a constructor such as torch.FloatTensor() with something other than sizes "
                          "or entries; torch.tensor() takes it.")
    return torch.empty(args[0], dtype=dtype) if isinstance(args[0], torch.Size) else torch.tensor(args[0], dtype=dtype)


def _has_text(function: types.FunctionType) -> bool:
    """Whether its name says all: one of torch's or ours, and where it has variables of its own (max_pool2d's are two
    functions), the one that its module has under that name."""
    if function.__module__.split(".")[0] not in ("torch", "onnxtrain"):
        return False
    return not function.__closure__ or getattr(sys.modules[function.__module__], function.__name__, None) is function


def _laid_out(result: object, order: tuple[int, ...] | None, given: object) -> object:
    """A new tensor with the axes in memory in the order that Dynamo had: whether view() takes it, and what as_strided()
    reads of it, is then as in eager. simplify.py removes the two transpositions, which have no effect on values.
    """
    if not isinstance(result, Tensor) or order is None or order_of(traced_value(result)) == order:
        return result
    memory = result.untyped_storage()._cdata
    if any(isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata == memory for leaf in pytree.tree_leaves(given)):
        return result
    copy = result.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute([order.index(axis) for axis in range(result.dim())])


def _is_whole(node: torch.fx.Node) -> bool:
    """Whether this is a Python function of others, which Dynamo has not followed."""
    return isinstance(node.target, types.FunctionType) and node.target.__module__.split(".")[0] not in (
        "torch", "onnxtrain")


def _kinds(value: object) -> Kinds:
    """The dtype and rank of each tensor of a result."""
    return tuple([(leaf.dtype, leaf.dim()) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)])


class Graph(torch.nn.Module):
    """Operations that Dynamo captured, as a module with parameters and buffers of the user's, under their names.

    The containers are its own, so that no export touches the user's module. All that it knows is in `_captured`: any
    other name may be one of the user's modules.
    """

    _captured: Operations

    @property
    def training(self) -> bool:
        """The user's module's: a graph that depends on it is guarded."""
        return self._captured.user().training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_captured" in self.__dict__:
            self._captured.user().training = mode

    def forward(self, *args: object) -> Any:
        return self._captured.run(args)


def graph_of(module: torch.nn.Module, operations: torch.fx.GraphModule, places: Sequence[Sequence[Place]],
             user: Callable[[], torch.nn.Module] | None = None) -> Graph:
    """A Graph whose class has the name of the user's module, for what is said of it; arguments as Operations has them.
    """
    graph = type(type(module).__name__, (Graph,), {})()
    graph.__dict__["_captured"] = Operations(graph, module, operations, places, user)
    return graph


def _owner(root: torch.nn.Module, path: str) -> torch.nn.Module:
    """The module of this path, made if there is none."""
    for name in path.split(".") if path else ():
        root = root._modules.setdefault(name, torch.nn.Module())  # type: ignore[assignment]
    return root


def _notes(operations: torch.fx.GraphModule) -> _Notes:
    """What Dynamo has noted at the operations, which have the names of the user's modules from then on.

    Read once: the same operations may serve several layers, each as a Graph.
    """
    noted = operations.meta.get("notes")
    if noted is None:
        arguments = [node for node in operations.graph.nodes if node.op == "placeholder"]
        examples, lasting = [node.meta.get("example_value") for node in arguments], tuple(map(_lasts, arguments))
        reads_strides, unrolled = False, _entries(operations) > _LOOP
        kinds = {node.name: _kinds(node.meta["example_value"]) for node in operations.graph.nodes
                 if node.op in ("call_function", "call_method") and node.meta.get("example_value") is not None}
        orders = {(node.name, len(order)): order for node in operations.graph.nodes
                  if node.name in kinds and isinstance(node.meta["example_value"], Tensor)
                  and (order := order_of(node.meta["example_value"])) is not None}
        for part in operations.modules():
            for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                _name_modules(node)
                name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
                reads_strides = reads_strides or name in _OF_STRIDES
        noted = operations.meta["notes"] = _Notes([_open_axes(example) for example in examples], reads_strides,
                                                  tuple([layout_of(e, reads_strides) for e in examples]), kinds, orders,
                                                  lasting, unrolled)
    return noted


def _entries(operations: torch.fx.GraphModule) -> int:
    """How many single entries along an axis, as x[:, 3], a graph takes of tensors."""
    return sum(node.target is operator.getitem and isinstance(node.args[0].meta.get("example_value"), Tensor)
               and any(type(part) is int for part in pytree.tree_leaves(node.args[1]))
               for node in operations.graph.nodes)


def _lasts(argument: torch.fx.Node) -> bool:
    """Whether Dynamo found it at an attribute, or in a global variable."""
    source = getattr(argument.meta.get("grapharg"), "source", None)
    while source is not None and not (hasattr(source, "member") or hasattr(source, "global_name")):
        source = getattr(source, "base", None)
    return source is not None


def layouts_of(operations: torch.fx.GraphModule) -> tuple[Layout | None, ...]:
    """Of each argument of a graph of Dynamo's what layout_of() gives."""
    return _notes(operations).layouts


def order_of(tensor: object) -> tuple[int, ...] | None:
    """The axes of a tensor in memory, from the one with the largest stride on; None where that is not known."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    strides = [stride.node.hint if isinstance(stride, torch.SymInt) else stride for stride in tensor.stride()]
    if any([not isinstance(stride, int) for stride in strides]):
        return None
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def layout_of(tensor: Any, whole: bool = False) -> tuple[Any, ...] | None:
    """order_of(), or None where the elements lie row by row; with `whole`, strides and offset instead."""
    order = order_of(tensor)
    if order is None or order == tuple(range(len(order))) and not (whole and tensor._is_view()):
        return None
    return (str(tensor.stride()), str(tensor.storage_offset())) if whole else order


def is_dense(tensor: Tensor, order: Sequence[int] | None = None) -> bool:
    """Whether a tensor's elements, with the axes in this order, fill its memory one behind another."""
    step: int | torch.SymInt = 1
    for axis in reversed(order if order is not None else range(tensor.dim())):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if str(size) != "1" and str(stride) != str(step):
            return False
        step = step * size
    return True


def _open_axes(example: object) -> set[int] | None:
    if not isinstance(example, Tensor):
        return None
    return {axis for axis, size in enumerate(example.shape)
            if isinstance(size, torch.SymInt) and size.node.expr.free_symbols}


def _dynamic(noted: _Notes, places: Sequence[Sequence[Place]]) -> list[set[int]]:
    """Of each tensor argument that is in no place the axes whose sizes Dynamo has left open."""
    return [axes for axes, held in zip(noted.open_axes, places, strict=True) if not held and axes is not None]


def _name_modules(node: torch.fx.Node) -> None:
    """Notes the user's modules that an operation is in as torch.export does, by name; Dynamo has the Python expression
    of each.
    """
    found = list((node.meta.get("nn_module_stack") or {}).items())
    root = _ROOT.sub(r"\1", found[0][1][0], count=1) if found else ""
    node.meta = {"stack_trace": node.meta.get("stack_trace"), "nn_module_stack": {
        str(key): ("module" + str(name).removeprefix(root), str(kind))
        for key, (name, kind) in found if str(name).startswith(root)}}


def _names(module: torch.nn.Module, operations: torch.fx.GraphModule,
           places: Sequence[Sequence[Place]]) -> list[str]:
    """For each argument of a graph the name of the user's argument that it is, or is a part of."""
    try:
        positional = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        positional = []
    names: list[str] = []
    for node, held in zip((node for node in operations.graph.nodes if node.op == "placeholder"), places):
        if held:
            continue
        name = str(node.target).removeprefix("L_").removesuffix("_")
        if (found := re.match(r"args_(\d+)(?!\d)", name)) and int(found[1]) < len(positional):
            name = positional[int(found[1])] + name[found.end():]
        name = name.removeprefix("kwargs_")
        names.append(name if name.isidentifier() and name not in names else f"input_{len(names)}")
    return names


def places_of(module: torch.nn.Module, inputs: Sequence[object]) -> list[list[Place]]:
    """For each input of a graph the places where the module holds it; none for what is no parameter or buffer."""
    held: dict[int, list[Place]] = {}
    for path, child in module.named_modules():
        for kind in ("_parameters", "_buffers"):
            store = getattr(child, kind)
            for name, tensor in store.items():
                # Others among the parameters, as clones have, are arguments, whose gradients go on to what made them.
                if tensor is not None and (kind == "_buffers" or isinstance(tensor, torch.nn.Parameter)):
                    held.setdefault(id(tensor), []).append(Place(store, name, path, kind))
    return [held.get(id(value), []) if isinstance(value, Tensor) else [] for value in inputs]


def names_of_weights(module: torch.nn.Module) -> dict[int, str]:
    """By its id, what each parameter and buffer of a module is called in messages: "parameter fc.weight"."""
    named = [("buffer", *each) for each in module.named_buffers()] + [
        ("parameter", *each) for each in module.named_parameters()]
    return {id(tensor): f"{kind} {name}" for kind, name, tensor in named}


def kinds_of(inputs: Sequence[Any], places: Sequence[Sequence[Place]]) -> tuple[object, ...]:
    """What an export depends on of the weights among the inputs of a graph: others of these kinds may stand there."""
    return tuple([(len(held), held[0].kind, tensor.dtype, tensor.shape, tensor.stride())
                  if held else None for tensor, held in zip(inputs, places, strict=True)])
