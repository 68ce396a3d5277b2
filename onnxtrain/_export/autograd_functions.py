"""torch.autograd.Function in an export: each call becomes a PythonOp node, which runs the class itself at every step.

autograd_calls.py brings calls of Function.apply here while the user's forward is traced. A trace would otherwise go
through the function's forward and differentiate that, and its own backward would be lost without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export.elementary import Operators, Table, Value
from onnxtrain._export.errors import CustomFunctionError, NotKept
from onnxtrain._torch import OpOverload, pytree
from onnxtrain.utils.torch_io_helper import onnx_dtype_to_pytorch_dtype

DOMAIN = "ai.onnxtrain"


@dataclasses.dataclass
class Call:
    """One call of Function.apply in a forward.

    function is the class; leaves are its flattened arguments, None where a tensor stands; results is, per item that
    forward returns, the index of the node's output, or a value that is no tensor.
    """

    function: type[torch.autograd.Function]
    leaves: list[object]
    tensors: tuple[int, ...]
    spec: pytree.TreeSpec
    single: bool = True
    results: tuple[tuple[int | None, object], ...] = ()

    @property
    def convention(self) -> str:
        """As onnxruntime's nodes have it: three times c for the fixed arguments of its kernel, then a letter for each
        argument, d for a tensor and c for a constant.
        """
        return "ccc" + "".join("d" if place in self.tensors else "c" for place in range(len(self.leaves)))

    @property
    def outputs(self) -> int:
        """How many tensors forward returns."""
        return sum(index is not None for index, _ in self.results)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of one call, with these tensors."""
        leaves = list(self.leaves)
        for leaf, tensor in zip(self.tensors, tensors):
            leaves[leaf] = tensor
        return pytree.tree_unflatten(leaves, self.spec)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs it under autograd's own rules; the tensors that it returns."""
        result = self.function.apply(*self.arguments(tensors))
        items = (result,) if self.single else result
        return [items[place] for place, (index, _) in enumerate(self.results) if index is not None]

    def dry_run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs forward alone, on fake tensors, for what it returns; fills in `results`."""
        global _inside
        context = torch.autograd.function.FunctionCtx()
        versions = [tensor._version for tensor in tensors]
        env = next((dim.node.shape_env for tensor in tensors for dim in tensor.shape  # type: ignore[attr-defined]
                    if isinstance(dim, torch.SymInt)), None)
        _inside += 1
        try:  # a number that forward reads from a tensor stays in it
            with torch.no_grad(), env.ignore_fresh_unbacked_symbols() if env else contextlib.nullcontext():
                result = self.function.forward(context, *self.arguments(tensors))
        finally:
            _inside -= 1
        if getattr(context, "dirty_tensors", None) or [t._version for t in tensors] != versions:
            raise CustomFunctionError(f"torch.autograd.Function {name_of(self.function)} changes its input in place; a "
                                      "graph would lose that.")
        self._describe(result)
        items = (result,) if self.single else result
        return [torch.empty_like(item) for item in items if isinstance(item, Tensor)]

    def _describe(self, result: Any) -> None:
        self.single = not isinstance(result, tuple)
        found, results = 0, []
        for item in (result,) if self.single else result:
            results.append((found, None) if isinstance(item, Tensor) else (None, item))
            found += isinstance(item, Tensor)
        self.results = tuple(results)
        if not found:
            raise CustomFunctionError(f"torch.autograd.Function {name_of(self.function)} returns no tensor.")


class OperatorCall(Call):
    """One use of a torch operator that the engine does not have; `spec` is that of (args, kwargs)."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs it under autograd's own rules."""
        overload: Any = self.function
        # Of sizes alone; and autograd has no formula for some.
        if overload._schema.name.endswith("_like") or overload is torch.ops.aten.normal_functional.default:
            tensors = [tensor.detach() for tensor in tensors]
        args, kwargs = self.arguments(tensors)
        places = overload._schema.arguments
        args = [_plain(value, places[i]) for i, value in enumerate(args)]
        named = {argument.name: argument for argument in places}
        result = overload(*args, **{key: _plain(value, named[key]) for key, value in kwargs.items()})
        return [result] if self.single else list(result)


def _plain(value: object, argument: torch.Argument) -> Any:
    """Sizes reach a node as tensors, and an operator wants numbers."""
    if "Tensor" in str(argument.type):
        return value
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.item(), value)


def run_by_torch(names: Sequence[str]) -> Table:
    """Translations of operators such as "aten.cross.default" to PythonOp nodes, for a custom_translation_table.

    Those that change an argument or return lists are left out: there is no such node.
    """
    import onnxscript

    own = onnxscript.values.Opset(DOMAIN, 1)
    table = {}
    for name in names:
        overload: Any = torch.ops
        for part in name.split("."):
            overload = getattr(overload, part)
        schema = overload._schema
        if not schema.is_mutable and all(str(result.type) == "Tensor" for result in schema.returns):
            table[overload] = _translation_of(own, overload, len(schema.returns))
    return table


def drawn_by_torch() -> Table:
    """Translations of operators that draw random numbers on the CPU: torch draws, so that a seed gives what it gives in
    PyTorch.

    One that only wants another tensor's sizes gets those, where they are known: no segment has to end before it.
    """
    import onnxscript

    own = onnxscript.values.Opset(DOMAIN, 1)
    drawn: Table = {overload: _drawn(own, overload) for overload in _draws().values()}
    return drawn | run_by_torch(("aten.multinomial.default",))


@functools.cache
def _draws() -> dict[str, OpOverload]:
    """The operators that draw random numbers and change no argument, by name."""
    ours = torch.ops.onnxtrain.drawn_like.default
    found: dict[str, OpOverload] = {str(ours): ours}
    aten = torch.ops.aten
    for packet in (aten.rand, aten.randn, aten.rand_like, aten.randn_like, aten.randint, aten.randint_like,
                   aten.randperm, aten.bernoulli, aten.normal, aten.normal_functional, aten.uniform, aten.exponential,
                   aten.log_normal, aten.cauchy, aten.geometric):
        for name in packet.overloads():
            overload = getattr(packet, name)
            arguments = [argument.name for argument in overload._schema.arguments]
            if not (name.endswith("out") or overload._schema.is_mutable or "names" in arguments):
                found[str(overload)] = overload
    return found


def only_draws(call: Call) -> bool:
    """Whether a call is an operator of torch that draws random numbers and changes nothing."""
    return isinstance(call, OperatorCall) and str(call.function) in _draws()


def as_data(call: Call) -> dict[str, object]:
    """A use of an operator that draws, for JSON.

    Raises:
        NotKept: it is a user's function, or has an argument of another kind than numbers, texts, dtypes and tensors.
    """
    name = str(call.function)
    if not (isinstance(call, OperatorCall) and name in _draws()):
        raise NotKept("the module calls a torch.autograd.Function, or an operator that PyTorch runs")
    leaves = [str(leaf) if isinstance(leaf, torch.dtype) else leaf for leaf in call.leaves]
    if any(type(leaf) not in (type(None), bool, int, float, str) for leaf in leaves):
        raise NotKept(f"an argument of {name} is not a number")
    dtypes = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.dtype)]
    return {"operator": name, "leaves": leaves, "dtypes": dtypes, "tensors": call.tensors, "single": call.single,
            "tree": pytree.tree_unflatten(list(range(len(leaves))), call.spec)}


def from_data(data: dict[str, Any]) -> OperatorCall:
    """What as_data() wrote.

    Raises:
        ValueError, KeyError, TypeError: it wrote something else.
    """
    args, kwargs = data["tree"]
    places, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    leaves = list(data["leaves"])
    if places != list(range(len(leaves))):
        raise ValueError("the arguments of an operator are not in order")
    for i in data["dtypes"]:
        leaves[i] = _DTYPES[leaves[i]]
    return OperatorCall(_draws()[data["operator"]], leaves, tuple(map(int, data["tensors"])), spec,
                        bool(data["single"]))


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _drawn(own: Operators, overload: OpOverload) -> Callable[..., Value]:
    sized = {torch.ops.aten.rand_like: torch.ops.aten.rand.default,
             torch.ops.aten.randn_like: torch.ops.aten.randn.default}.get(overload.overloadpacket)
    as_given: Any
    by_size: Any
    as_given, by_size = (_translation_of(own, one, 1) if one is not None else None for one in (overload, sized))

    def translate(*args, **kwargs):
        kwargs = {key: _torch_value(key, value) for key, value in kwargs.items()}
        if by_size is not None and all(isinstance(size, int) for size in args[0].shape):
            dtype = kwargs.get("dtype") or _torch_value("dtype", args[0].dtype)
            return by_size([int(size) for size in args[0].shape], dtype=dtype)
        return as_given(*args, **kwargs)

    return translate


def _torch_value(key: str, value: Any) -> object:
    """An option of a node as torch has it; torch.onnx has made its own kinds of dtypes and devices."""
    if key in ("layout", "device", "pin_memory", "memory_format") or key == "dtype" and value in (None, -1):
        return None
    return onnx_dtype_to_pytorch_dtype(int(value)) if key == "dtype" else value


def _translation_of(own: Operators, overload: OpOverload, outputs: int) -> Callable[..., Value]:
    import onnxscript

    def translate(*args, **kwargs):
        leaves, spec = pytree.tree_flatten((args, kwargs))
        where = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, _torch.SymbolicTensor))
        tensors = [leaves[i] for i in where]
        _calls.append(OperatorCall(overload, [None if i in where else leaf for i, leaf in enumerate(leaves)], where,
                                   spec, outputs == 1))
        given = tensors or [onnxscript.opset18.Constant(value_int=0)]  # a node has an input; this one is not looked at
        made = tuple(own.PythonOp(*given, key=len(_calls) - 1, output=index) for index in range(outputs))
        return made[0] if outputs == 1 else made

    return translate


def name_of(function: type) -> str:
    """The full name of a class, as ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS has it."""
    return f"{function.__module__}.{function.__qualname__}"


_calls: list[Call] = []  # of the export that is under way
_inside = 0  # forward of a function is being run for its shapes


def begin(calls: list[Call]) -> None:
    """The calls of a trace: an empty list before it, the filled one before it is translated."""
    global _calls
    _calls = calls


def inside() -> bool:
    """Whether a function's forward is running: functions that it calls are part of it."""
    return _inside > 0


def record(function: type[torch.autograd.Function], args: tuple[object, ...]) -> object:
    """What Function.apply gives while a forward is traced.

    Raises:
        CustomFunctionError: the call cannot be a node.
    """
    leaves, spec = pytree.tree_flatten(args)
    where = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    if not where:
        raise CustomFunctionError(f"torch.autograd.Function {name_of(function)} takes no tensor.")
    tensors = [leaves[i] for i in where]
    for i, leaf in enumerate(leaves):
        if i in where:
            leaves[i] = None
        elif isinstance(leaf, torch.SymInt):
            leaves[i] = int(leaf)
        elif isinstance(leaf, torch.SymFloat):
            leaves[i] = float(leaf)
    call = Call(function, leaves, where, spec)
    _calls.append(call)
    made = torch.ops.onnxtrain.python_op(tensors, len(_calls) - 1)
    items = [value if index is None else made[index] for index, value in call.results]
    return items[0] if call.single else tuple(items)


def _run(tensors: Sequence[Tensor], key: int) -> list[Tensor]:
    return _calls[key].dry_run(tensors)


@functools.cache
def register() -> torch.library.Library:
    """Makes the operator of such a node, and its schema, known to torch and to onnx: for an export."""
    library = torch.library.Library("onnxtrain", "FRAGMENT")
    library.define("python_op(Tensor[] tensors, int key) -> Tensor[]")
    library.impl("python_op", _run, "CompositeExplicitAutograd")
    torch.library.register_fake("onnxtrain::python_op", _run, lib=library)
    _register_schema()
    return library


def translation() -> Callable[..., tuple[Value, ...]]:
    """One node for each output; segments.py takes those of one key together."""
    import onnxscript

    own = onnxscript.values.Opset(DOMAIN, 1)

    def python_op(tensors, key=0):
        call = _calls[key]
        # For who reads the graph.
        described = {"func_name": name_of(call.function), "input_convention": call.convention}
        return tuple(own.PythonOp(*tensors, key=key, output=index, **described) for index in range(call.outputs))

    return python_op


def _register_schema() -> None:
    import onnx

    if onnx.defs.has("PythonOp", DOMAIN):
        return
    schema = onnx.defs.OpSchema
    types = sorted(onnx.defs.get_schema("Identity", 14).type_constraints[0].allowed_type_strs)
    variadic = schema.FormalParameterOption.Variadic
    onnx.defs.register_schema(
        schema(
            "PythonOp", DOMAIN, 1, doc="Output `output` of call `key` of a torch.autograd.Function.",
            inputs=[schema.FormalParameter("x", "T", param_option=variadic, is_homogeneous=False)],
            outputs=[schema.FormalParameter("y", "U")],
            type_constraints=[("T", types, "any tensor"), ("U", types, "any tensor")],
            attributes=[schema.Attribute("key", schema.AttrType.INT, "which call", required=True),
                        schema.Attribute("output", schema.AttrType.INT, "which of its outputs", required=True),
                        schema.Attribute("func_name", schema.AttrType.STRING, "the class", required=False),
                        schema.Attribute("input_convention", schema.AttrType.STRING, "c or d for each argument",
                                         required=False)],
        )
    )
