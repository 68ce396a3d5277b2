"""torch.onnx.export() without the parts of two passes that would trace a program again and not change it.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export.exported import OPSETS
from onnxtrain._export.state import wrapped


def _survives(node: torch.fx.Node) -> bool:
    """Whether decompositions leave a translated operator whole. They take apart a composite one that may return a view,
    but for those that only reshape, and dropout, which mean the same whole; translations.py writes them.
    """
    op = node.target
    if not isinstance(op, _torch.OpOverload) or not _torch.is_cia_op(op) or _torch.is_preservable_cia_op(op):
        return True
    aten = torch.ops.aten
    return op in (aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default, aten.dropout.default)


def is_final(program: torch.export.ExportedProgram, registry: _torch.ONNXRegistry) -> bool:
    """Whether decompositions would leave the program, of which no operator writes in place, as it is: plain operators
    that have a translation.
    """
    if _torch.is_any_autocast_enabled():
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


def unpromoted(module: torch.fx.GraphModule, rule_of: Callable[[torch.fx.Node], Any],
               dtype_of_scalar: Callable[[type], torch.dtype]) -> list[torch.fx.Node]:
    """The nodes that torch.onnx's rules of promotion put casts around, going by the types that the trace has noted."""
    found = []

    def fits(value: object, dtype: torch.dtype) -> bool:
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
    with mode, _torch.enable_python_dispatcher(), torch.fx.traceback.preserve_node_meta():
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


def _keep_names_of_outputs(module: torch.fx.GraphModule, outputs: Iterable[torch.fx.Node]) -> None:
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


def _decomposed(program: torch.export.ExportedProgram, registry: _torch.ONNXRegistry) -> torch.export.ExportedProgram:
    """The program in operators that have a translation."""
    table = _torch.create_onnx_friendly_decomposition_table(set(_torch.get_onnx_implemented_overloads(registry)))
    if (nll_loss := torch.ops.aten.nll_loss.default) in table:
        table[nll_loss] = _nll_loss
    recurrent = _torch.patch_dynamic_shape_rnn_decompositions  # of a torch that unrolls them otherwise
    with contextlib.nullcontext() if recurrent is None else recurrent(program.range_constraints):
        return program.run_decompositions(table)


def _nll_loss(input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
              ignore_index: int = -100) -> Tensor:
    """PyTorch's own form in Python has other parameters than the operator: without reduction it gives one number."""
    return torch.ops.aten.nll_loss_forward.default(input, target, weight, reduction, ignore_index)[0]


@functools.cache
def _interpreter() -> type[Any]:
    """The class of torch.onnx that puts casts around nodes, for those that need them."""
    class Interpreter(_torch.TypePromotionInterpreter):  # type: ignore[misc]
        def run_node(self, node):
            if _promoting_rule(node, self.type_promotion_table) is None:
                return torch.fx.Interpreter.run_node(self, node)
            return super().run_node(node)

        def _rerun_node_after_type_promotion(self, node, expected_out_dtype):
            if _torch.OpTraceDispatchMode is None:
                return super()._rerun_node_after_type_promotion(node, expected_out_dtype)
            with wrapped("find_compatible_overload", lambda _: _overload_of):
                return super()._rerun_node_after_type_promotion(node, expected_out_dtype)

    return Interpreter


def _overload_of(packet, args, kwargs):
    """For torch 2.10, which takes the first operator that it sees: one that asks for a device may be before."""
    with _torch.OpTraceDispatchMode() as watched:
        packet(*args, **kwargs)
    return next(each for each in watched.traced_ops if each.overloadpacket == packet)


def _promoting_rule(node: torch.fx.Node, table: _torch.TypePromotionTable) -> Any:
    """torch.onnx's rule for the types of a node's operands, if the engine needs it."""
    rule = _torch.get_type_promotion_rule(node, table) if node.op == "call_function" else None
    return None if rule is not None and (_is_clamp(node) or _rounds_by_itself(node, rule)) else rule


def _promote_where_needed(module: torch.fx.GraphModule) -> None:
    table, parts = _torch.TypePromotionTable(), [*module.modules()]
    outputs: Any = module.graph.output_node().args[0]
    if len(parts) == 1:
        nodes = unpromoted(module, lambda node: _promoting_rule(node, table), _torch.from_scalar_type_to_torch_dtype)
        if nodes:
            _promote(nodes, _interpreter()(module, table))
    else:
        for part in parts:
            whole = _torch.InsertTypePromotion(part, table)
            whole.interpreter = _interpreter()(part, table)
            whole.run()
    _keep_names_of_outputs(module, outputs)


def translated(program: torch.export.ExportedProgram, opset: int, ours: Mapping[object, Callable[..., object]]) -> Any:
    """torch.onnx.export(program, opset_version=opset, optimize=False, custom_translation_table=ours), without what
    is_final() and unpromoted() say is for nothing.
    """
    registry = _registry_with(opset, ours)
    with _torch.fx_config.patch(backed_size_oblivious=True):
        if not is_final(program, registry):
            program = _decomposed(program, registry)
        _promote_where_needed(program.graph_module)
        program._graph_module = _torch.remove_assertion_nodes(program.graph_module)
    done = _torch.exported_program_to_onnx_program(program, registry=registry)
    done.model = _torch.convert_version(done.model, opset)
    return done


@functools.cache
def _registry(opset: int) -> _torch.ONNXRegistry:
    """torch.onnx's translations, of which each reads its function's signature when a node needs it.

    ONNXRegistry.from_torchlib() parses the source of 500 functions, which takes one second.
    """
    from onnxscript.function_libs.torch_lib import ops  # noqa: F401  fills its registry

    class Translation(_torch.OnnxDecompMeta):  # type: ignore[misc]
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

    registry = _torch.ONNXRegistry()
    registry._opset_version = opset
    for each in _torch.get_torchlib_ops():
        registry._register(each.fx_target, each)
    for name, found in _torch.default_registry.items():
        target = None if name.startswith("internal::") else _torch.get_overload(name)
        for is_complex, listed in ((False, found.overloads), (True, found.complex)) if target is not None else ():
            for function in listed:
                registry._register(target, Translation(onnx_function=function, fx_target=target, signature=None,
                                                       is_custom=False, is_complex=is_complex))
    registry._cleanup_registry_based_on_opset_version()
    return registry


def _registry_with(opset: int, ours: Mapping[object, Callable[..., object]]) -> _torch.ONNXRegistry:
    """torch.onnx's translations and ours. For our operators it has none of its own, but of complex numbers: between
    two, torch 2.10 cannot choose for a shape that is made of sizes.
    """
    registry = copy.copy(_registry(max(opset, OPSETS[0])))
    names = {each.name() if isinstance(each, _torch.OpOverload) else each for each in ours}
    registry.functions = {target: [each for each in found if each.is_complex or target not in names]
                          for target, found in registry.functions.items()}
    for target, function in ours.items():
        registry.register_op(target, function, is_complex=False)
    return registry
