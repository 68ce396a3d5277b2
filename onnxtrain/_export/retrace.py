"""Shortens two passes of torch.onnx that would trace a program again without changing it, and keeps its registry.

Between the traced program and its translation torch.onnx runs two passes. Each executes every node again with fake
tensors and symbolic sizes: decompositions, which take most of its time, and type promotion. The first changes nothing
if all operators have a translation and change none of their arguments: programs that clearly meet this condition skip
it. The second changes only nodes whose numbers have several types: only those are executed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._export import utils

from onnxtrain._export.state import note_missing, replaced


def _survives(node: torch.fx.Node) -> bool:
    """Whether decompositions keep an operator that has a translation: not one that is composite and may return a view.

    Of those, the ones that only reshape have the same meaning without; translations.py writes them. So has dropout.
    """
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or not utils._is_cia_op(op) or utils._is_preservable_cia_op(op):
        return True
    aten = torch.ops.aten
    return op in (aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default, aten.dropout.default)


def is_final(program: torch.export.ExportedProgram, registry: Any) -> bool:
    """Whether decompositions would leave the program, of which no operator writes in place, as it is: plain operators
    that have a translation.
    """
    if torch._C._is_any_autocast_enabled():
        return False  # tracing for the second time puts the casts in
    if len(list(program.graph_module.modules())) > 1:
        return False  # branches and regions
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function" or node.meta.get("val") is None:
            return False
        if node.target is operator.getitem:
            continue
        if not registry.is_registered(node.target) or not _survives(node):
            return False
    return True


def _noted(node: torch.fx.Node) -> Any:
    return node.meta["val"]


def unpromoted(module: torch.fx.GraphModule, rule_of: Any, dtype_of_scalar: Any) -> list[torch.fx.Node]:
    """The nodes that torch.onnx's rules of promotion put casts around, going by the types that the trace has noted."""
    found = []

    def fits(value: Any, dtype: torch.dtype) -> bool:
        if isinstance(value, (tuple, list)):
            return all(fits(item, dtype) for item in value)
        return (value.dtype if isinstance(value, Tensor) else dtype_of_scalar(type(value))) == dtype

    for node in module.graph.nodes:
        rule = rule_of(node) if node.op == "call_function" else None
        if rule is None:
            continue
        args, kwargs = torch.fx.map_arg(node.args, _noted), torch.fx.map_arg(node.kwargs, _noted)
        wanted = rule.preview_type_promotion(args, kwargs)
        if not all(fits(args[i], dtype) for i, dtype in wanted.args_dtypes.items()) or not all(
                fits(kwargs[name], dtype) for name, dtype in wanted.kwargs_dtypes.items()):
            found.append(node)
    return found


def _promote(nodes: Sequence[torch.fx.Node], interpreter: Any) -> None:
    """Puts casts around these nodes as torch.onnx does, which executes all nodes for that: results keep their types."""
    graph = nodes[0].graph
    interpreter.env = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    mode = next(value.fake_mode for value in interpreter.env.values() if hasattr(value, "fake_mode"))
    with mode, torch._dispatch.python.enable_python_dispatcher(), torch.fx.traceback.preserve_node_meta():
        for node in nodes:
            interpreter.env[node] = interpreter.run_node(node)


def _rounds_by_itself(node: torch.fx.Node, rule: Any) -> bool:
    """Whether a rule would only widen: every operand that it casts is a tensor of the result's type, as is the result.

    Of such operators (sums, products, losses of 16-bit floats) PyTorch's kernels count in float32 and round once. So do
    the engine's, which then need no copy of the operand in float32.
    """
    if any(operand.meta.get("val") is None for operand in (node, *node.all_input_nodes)):
        return False
    args, kwargs = torch.fx.map_arg(node.args, _noted), torch.fx.map_arg(node.kwargs, _noted)
    wanted = rule.preview_type_promotion(args, kwargs)
    operands = [args[i] for i in wanted.args_dtypes] + [kwargs[name] for name in wanted.kwargs_dtypes]
    return all(getattr(value, "dtype", None) == wanted.out_dtype for value in (*operands, _noted(node)))


def _is_clamp(node: torch.fx.Node) -> bool:
    """A clamp by numbers keeps its tensor's type; made one by tensors, it would have other slopes at its bounds."""
    aten = torch.ops.aten
    return (node.target in (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
            and _noted(node).is_floating_point() and _noted(node).dtype == _noted(node.all_input_nodes[0]).dtype)


def _keep_names_of_outputs(module: torch.fx.GraphModule, outputs: tuple[Any, ...]) -> None:
    """Results that now come out of a cast have the names that they had: by them torch.onnx finds what a program
    returns.

    Its promotion of types casts a result that was computed in float32 back, and lets every reader have the cast; but
    the program's signature says the name of what was cast.
    """
    made: Any = module.graph.output_node().args[0]
    pairs = zip(outputs, made, strict=True)
    for old, new in dict.fromkeys(pairs):  # one that is returned twice has one name
        if old is not new:
            old.name, new.name = new.name, old.name


@contextlib.contextmanager
def spared() -> Iterator[None]:
    """Within, torch.onnx leaves out what is_final() and unpromoted() say is for nothing."""
    try:
        from torch.onnx._internal.exporter import _fx_passes
        from torch.onnx._internal.fx import type_utils
        from torch.onnx._internal.fx.passes import type_promotion

        decompose, promote = _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes
        table, find_rule = type_promotion.TypePromotionTable(), type_promotion.get_type_promotion_rule
        dtype_of_scalar = type_utils.from_scalar_type_to_torch_dtype
        interpreter = type_promotion._TypePromotionInterpreter
        _ = utils._is_cia_op, utils._is_preservable_cia_op
    except (ImportError, AttributeError) as error:
        note_missing(str(error))
        yield
        return

    def rule_of(node, *args, **kwargs):
        rule = find_rule(node, *args, **kwargs)
        return None if rule is not None and (_is_clamp(node) or _rounds_by_itself(node, rule)) else rule

    def overload_of(packet, args, kwargs):
        """For torch 2.10, which takes the first operator that it sees: one that asks for a device may be before."""
        with type_promotion._OpTraceDispatchMode() as watched:  # type: ignore[attr-defined]
            packet(*args, **kwargs)
        return next(each for each in watched.traced_ops if each.overloadpacket == packet)

    def decompose_where_needed(program, registry):
        if is_final(program, registry):
            return program
        # torch's Python form of nll_loss has other parameters than the operator: without reduction it gives one number.
        nll_loss = torch.ops.aten.nll_loss.default
        form = torch._decomp.decomposition_table.pop(nll_loss, None)
        try:
            return decompose(program, registry)
        finally:
            if form is not None:
                torch._decomp.decomposition_table[nll_loss] = form

    def promote_where_needed(module):
        outputs, whole = module.graph.output_node().args[0], len(list(module.modules())) == 1
        nodes = unpromoted(module, lambda node: rule_of(node, table), dtype_of_scalar) if whole else []
        if nodes:
            _promote(nodes, interpreter(module, table))
        elif not whole:
            promote(module)
        _keep_names_of_outputs(module, outputs)

    with replaced(_fx_passes, "decompose_with_registry", decompose_where_needed), \
            replaced(_fx_passes, "insert_type_promotion_nodes", promote_where_needed), \
            replaced(type_promotion, "get_type_promotion_rule", rule_of), \
            (replaced(type_promotion, "find_compatible_op_overload", overload_of)
             if hasattr(type_promotion, "_OpTraceDispatchMode") else contextlib.nullcontext()):
        yield


_registries: dict[Any, Any] = {}


@contextlib.contextmanager
def registry_reused(ours: Iterable[Any]) -> Iterator[None]:
    """Within, torch.onnx makes its registry once, and reads the signature of a translation when a node needs it. It has
    no translation of its own for the operators that are `ours`, but of complex numbers: between two, torch 2.10 cannot
    choose for a shape that is made of sizes.

    By itself it parses the source of 500 functions for every export, which takes one second. torch.export walks through
    all operators of the dispatcher once for each namespace: here once for each export.
    """
    try:
        from onnxscript.function_libs.torch_lib import registration
        from torch._export import utils
        from torch.onnx._internal.exporter import _registration

        original = _registration.ONNXRegistry.from_torchlib.__func__  # type: ignore[attr-defined]
        materialize = functools.cache(utils._materialize_cpp_cia_ops)
        _ = _registration.onnxscript_apis.get_torchlib_ops, registration.default_registry
    except (ImportError, AttributeError) as error:
        note_missing(str(error))
        yield
        return

    names = {each.name() if isinstance(each, torch._ops.OpOverload) else each for each in ours}

    class Translation(_registration.OnnxDecompMeta):
        """One whose signature is read from the function's source when it is asked for."""

        def __post_init__(self) -> None:
            if self.signature is None:
                del self.signature

        def __getattr__(self, name: str) -> Any:  # where there is no such attribute
            if name != "signature":
                raise AttributeError(name)
            self.signature = None
            super().__post_init__()
            return self.signature

    def torchlib_functions() -> list[types.SimpleNamespace]:
        from onnxscript.function_libs.torch_lib import ops  # noqa: F401  fills the registry

        return [types.SimpleNamespace(qualified_name=name, function=each, is_complex=is_complex)
                for name, found in registration.default_registry.items() if not name.startswith("internal::")
                for is_complex, listed in ((False, found.overloads), (True, found.complex)) for each in listed]

    def from_torchlib(cls: Any, *args: Any, **kwargs: Any) -> Any:
        key = (args, tuple(sorted(kwargs.items())))
        if key not in _registries:
            with replaced(_registration, "OnnxDecompMeta", Translation), \
                    replaced(_registration.onnxscript_apis, "get_torchlib_ops", torchlib_functions):
                _registries[key] = original(cls, *args, **kwargs)
        registry = copy.copy(_registries[key])
        registry.functions = {target: [each for each in found if each.is_complex or target not in names]
                              for target, found in registry.functions.items()}
        return registry

    with replaced(_registration.ONNXRegistry, "from_torchlib", classmethod(from_torchlib)), \
            replaced(utils, "_materialize_cpp_cia_ops", materialize):
        yield
