"""A graph that Dynamo captured and example arguments in, an ONNX graph fit for training out.

Called by ORTModule once per schema of arguments. Tracing is torch.export's and translation torch.onnx's; what they get
wrong for training is put right on the way (onnxtrain/_export/rewrite.py). The random state and torch's switches are
left exactly as they were, also after a failure. Nothing here knows the C core.
"""

from __future__ import annotations

import dataclasses
import io
import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor

from onnxtrain._export import (
    checkpoint,
    exclusive,
    formulas,
    functional,
    functions,
    messages,
    mutations,
    retrace,
    rewrite,
    sizes,
    state,
    views,
)
from onnxtrain._export import graph as onnx_graph
from onnxtrain._export import guards as shape_guards
from onnxtrain._export.captured import Graph
from onnxtrain._export.domain import register_symbolics
from onnxtrain._export.errors import ArgumentError, ExportError, NothingToCompute, is_final
from onnxtrain._export.exported import (
    DYNAMO_OPSETS,
    PLAIN_TENSORS,
    TORCHSCRIPT_OPSETS,
    Exported,
    GraphInput,
    GraphOutput,
    order,
)
from onnxtrain._export.function_apply import CustomFunctions
from onnxtrain._export.translations import translations, wide_numbers

_NUMBERS = (bool, int, float, complex)
SMALL_CONSTANT = 1024  # elements; larger constants become graph inputs

@dataclasses.dataclass
class _Traced:
    """What a trace says of the results. Apart from the module, whose attributes torch.export puts back."""

    out_tensors: list[int] = dataclasses.field(default_factory=list)
    buffers: list[str] = dataclasses.field(default_factory=list)
    same: dict[int, int | str] = dataclasses.field(default_factory=dict)
    checks: int = 0
    written: list[int] = dataclasses.field(default_factory=list)  # arguments that are changed in place
    views: list[Any] | None = None
    functions: list[functions.Call] = dataclasses.field(default_factory=list, compare=False)


class _Flat(torch.nn.Module):
    """The graph as a function of its tensors: those in; its results, then every buffer, out."""

    def __init__(self, module: Graph, args: Sequence[Any], barriers: bool) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._call = (list(args), barriers)
        self.traced = _Traced()
        self.by_torch: tuple[str, ...] = ()

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        example, barriers = self._call
        given = iter(leaves)
        args = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in example]
        traced, module = self.traced, self.module
        functions.begin(traced.functions)
        versions = [(leaf._version, leaf.shape) for leaf in leaves]
        checked: list[Tensor] = []
        patch = rewrite.Rewrite(barriers, [*leaves, *module.parameters(), *module.buffers()],
                                None if barriers else checked)
        with patch:
            results = module(*args)
        patch.refuse_visible(results)
        traced.out_tensors = list(range(len(results)))
        own: dict[int, int | str] = {id(leaf): i for i, leaf in enumerate(args)}
        own.update((id(parameter), name) for name, parameter in module.named_parameters())
        traced.same = {i: own[id(result)] for i, result in enumerate(results) if id(result) in own}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # what is asked here is no part of the graph
            traced.written = [own[id(leaf)] for leaf in mutations.written(leaves, versions)]  # type: ignore[misc]
            if barriers:
                views.refuse(results, traced, [*leaves, *module.parameters()])
        buffers = dict(module.named_buffers())
        traced.buffers, traced.checks = list(buffers), len(checked)
        # Cloned, so that torch.export sees no output that is an input. Those that are left alone are dropped later.
        return (*results, *(b.clone() for b in buffers.values()), *checked, *(args[i].clone() for i in traced.written))


def export(
    module: Graph, args: Sequence[Any], *, opset: int = 20, exporter: Literal["auto", "dynamo", "torchscript"] = "auto",
    custom: CustomFunctions | None = None, by_torch: tuple[str, ...] = (),
) -> Exported:
    """Exports `module` for arguments like these: tensors, and numbers, which become constants.

    Args:
        opset: wanted version of ai.onnx; the nearest one that the exporter has is used, with a note.
        exporter: "auto" tries the default exporter, then TorchScript's; below opset 18 TorchScript's first.
        custom: what becomes of torch.autograd.Functions; PythonOp nodes where None.
        by_torch: operators such as "aten.cross.default" that are PythonOp nodes as well, run by torch (default
            exporter).

    Raises:
        ExportError: neither can export it faithfully.
    """
    if exporter != "auto":
        return _run(module, args, opset, exporter, custom, by_torch)
    names = {"dynamo": "The default exporter", "torchscript": "TorchScript's exporter"}
    first, second = order(opset)
    try:
        return _run(module, args, opset, first, custom, by_torch)
    except ExportError as error:
        if is_final(first, error):
            raise  # the other would not trace it either
        reason = error
    try:
        exported = _run(module, args, opset, second, custom, by_torch)
    except ExportError as error:
        raise ExportError(f"{reason} {names[second]}: {error}") from reason
    exported.notes.append(f"{names[second]} was used, because of the other one: {reason}")
    return exported


def _run(
    module: Graph, args: Sequence[Any], opset: int, exporter: str, custom: CustomFunctions | None,
    by_torch: tuple[str, ...],
) -> Exported:
    """One exporter, inside everything that has to be undone after it."""
    run, opsets = (_dynamo, DYNAMO_OPSETS) if exporter == "dynamo" else (_torchscript, TORCHSCRIPT_OPSETS)
    functions.register()
    notes: list[str] = []
    custom = dataclasses.replace(custom or CustomFunctions(), nodes=exporter == "dynamo", inlined=[])
    used = min(max(opset, opsets[0]), opsets[1])
    if used != opset:
        notes.append(f"opset {opset} was requested; this exporter supports {opsets[0]} to {opsets[1]}, so it "
                     f"uses {used}.")
    names = module._captured.argument_names
    for leaf, name in zip(args, names, strict=True):
        if type(leaf) not in PLAIN_TENSORS and not isinstance(leaf, _NUMBERS):
            reason = ("a subclass of Tensor may return results of its own class" if isinstance(leaf, Tensor)
                      else "it is neither a tensor nor a number")
            raise ArgumentError(f"ORTModule does not support input type {type(leaf)} for input {name}: {reason}.")
    flat = _Flat(module, args, barriers=exporter == "torchscript")
    flat.by_torch = by_torch
    start = time.perf_counter()
    try:
        with (exclusive.exclusive(), state.unchanged(module), state.random_unchanged(),
              state.autocast_unchanged(), rewrite.patched(notes, custom), messages.quiet(), torch.enable_grad()):
            tensor_names = [name for name, leaf in zip(names, args) if isinstance(leaf, Tensor)]
            exported = run(flat, tensor_names, list(args), used, notes)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(messages.reason(error, exporter)) from messages.root(error)
    exported.seconds["total"] = time.perf_counter() - start
    exported.functions, exported.same = tuple(flat.traced.functions), tuple(flat.traced.same.items())
    if custom.inlined:
        notes.append("Traced through, as requested, and differentiated as plain operators: "
                     f"{', '.join(custom.inlined)}.")
        exported.needs_verification = True
    return exported


# --- the default exporter ---------------------------------------------------------------------------------------------


def _dynamo(flat: _Flat, names: list[str], leaves: list[Any], opset: int, notes: list[str]) -> Exported:
    module = flat.module
    tensors = _apart([_without_grad(leaf) for leaf in leaves if isinstance(leaf, Tensor)], module)
    if not module._captured.reads_strides:
        tensors = tuple([_in_a_row(tensor) for tensor in tensors])
    owned = _owned(module)
    start = time.perf_counter()
    program, relaxed = _trace(flat, tensors)
    functions.begin(flat.traced.functions)
    guards = shape_guards.from_program(program, relaxed)
    if (violated := guards(tensors)) is not None:
        raise ExportError(f"The exported graph does not accept the arguments that it was exported with: {violated}.")
    users = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    flat.traced.views = views.find(program, flat.traced, users, lambda target: owned[id(_lookup(module, target))])
    mutations.check(program)
    mutations.mark_no_grad(program)
    functional.state_dtypes(program)
    functional.simplify(program)
    traced = time.perf_counter()
    drawn = functions.drawn_by_torch() if all(t.is_cpu for t in (*tensors, *module.parameters())) else {}
    with retrace.registry_reused(), wide_numbers(), retrace.spared():
        translated: Any = torch.onnx.export(
            program, opset_version=opset, optimize=False, verbose=False,
            custom_translation_table=translations(opset) | drawn | functions.by_torch(flat.by_torch),
        )
    done = time.perf_counter()
    model, signature = translated.model, translated.exported_program.graph_signature
    onnx_graph.mark_regions(model, checkpoint.regions_of(translated.exported_program))
    constants = translated.exported_program.constants
    weights: dict[str, str] = {}
    bound: dict[str, tuple[Any, Any]] = {}
    for kind, targets in (("parameter", signature.inputs_to_parameters), ("buffer", signature.inputs_to_buffers)):
        for target in targets.values():
            tensor = _lookup(module, target)
            name = owned[id(tensor)][1]
            weights[target] = name
            bound[name] = (kind, name)
    for target in signature.inputs_to_lifted_tensor_constants.values():
        if constants[target].numel() > SMALL_CONSTANT:
            name = target.removeprefix("module.")
            weights[target] = name
            bound[name] = ("constant", constants[target])
    seconds = {"torch_export": traced - start, "torch_onnx": done - traced}
    return _finish(model, flat, names, leaves, weights, bound, guards, "dynamo", opset, seconds, notes)


def _without_grad(tensor: Tensor) -> Tensor:
    """A leaf that holds a gradient, as one that does not: torch.export would make guards about the gradient's sizes."""
    if tensor.is_inference():
        return mutations.copied(tensor)
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_leaf or tensor.grad is None:
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _in_a_row(tensor: Tensor) -> Tensor:
    """A slice, say, as a tensor with its own memory: Dynamo has read the strides already and guards them."""
    if type(tensor) is not Tensor or tensor.is_contiguous() and not tensor._is_view():
        return tensor
    with torch.no_grad():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    copy.requires_grad_(tensor.requires_grad)
    return copy if tensor.is_leaf else copy.clone()


def _apart(tensors: Sequence[Tensor], module: torch.nn.Module) -> tuple[Tensor, ...]:
    """The same tensors as so many objects: torch.export takes one that is passed twice, or that the module holds, for
    one input, and the program would be wrong for two.
    """
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    apart = []
    for tensor in tensors:
        again = id(tensor) in seen
        seen.add(id(tensor))
        apart.append(tensor.detach().requires_grad_(tensor.requires_grad) if again else tensor)
    return tuple(apart)


def _owned(module: torch.nn.Module) -> dict[int, tuple[str, str]]:
    """id of a parameter or buffer -> (kind, its first name); tied ones have one."""
    owned = {id(t): ("buffer", name) for name, t in module.named_buffers()}
    owned.update({id(t): ("parameter", name) for name, t in module.named_parameters()})
    return owned


def _lookup(module: torch.nn.Module, target: str) -> Tensor | None:
    """The tensor that a name of the traced program stands for, as the module holds it now."""
    value: Any = module
    for part in target.split(".")[1:]:
        value = getattr(value, part, None)
    return value if isinstance(value, Tensor) else None


def _trace(flat: _Flat, tensors: tuple[Tensor, ...]) -> tuple[torch.export.ExportedProgram, set[str]]:
    """The program, and the symbols that may also be 1."""
    program = _torch_export(flat, tensors)
    if not any(1 in tensor.shape for tensor in tensors):
        return program, set()
    traced = flat.traced
    for larger, places in sizes.enlarged(tensors):
        try:
            candidate = _torch_export(flat, larger)
        except Exception:  # a 1 that has to be one: a channel, a mask that broadcasts
            continue
        symbols = sizes.symbols_at(candidate, places)
        names = {str(symbol) for symbol in symbols}
        admits = symbols and shape_guards.from_program(candidate, names)(tensors) is None
        if admits and flat.traced == traced and sizes.same_program(program, candidate):
            return candidate, names
    flat.traced = traced
    return program, set()


def _torch_export(flat: _Flat, tensors: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    # Of images the planes' sizes are fixed: what strides and pooling make of them are long formulas.
    axes = [{*range(2 if t.dim() > 3 and t.is_floating_point() else t.dim())} for t in tensors]
    axes = [each | open_ for each, open_ in zip(axes, flat.module._captured.dynamic, strict=True)]
    dynamic = [tuple(dict.fromkeys(each, auto) for each in axes)] if axes else None
    flat.traced = _Traced()
    with state.unchanged(flat.module), formulas.bounded():
        return torch.export.export(flat, tensors, strict=False, dynamic_shapes=dynamic)


# --- the TorchScript exporter -----------------------------------------------------------------------------------------


def _torchscript(flat: _Flat, names: list[str], leaves: list[Any], opset: int, notes: list[str]) -> Exported:
    """Sizes are frozen (a trace does not say which of them it used); branches too, hence needs_verification."""
    import onnx_ir as ir

    module = flat.module
    if module._captured.reads_contents:
        raise ExportError("TorchScript would freeze a data-dependent number or size.")
    # Copies: the trace runs forward, which may change its arguments.
    tensors = tuple(mutations.copied(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    if not tensors:
        raise ExportError("TorchScript's exporter needs at least one tensor among the arguments.")
    owned = _owned(module)
    register_symbolics(opset)
    file = io.BytesIO()
    start = time.perf_counter()
    with state.unchanged(module), state.private_buffers(module), messages.no_log():
        torch.onnx.export(
            flat, tensors, file,  # type: ignore[arg-type]
            dynamo=False, opset_version=opset, keep_initializers_as_inputs=True,
            do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE, export_params=False,
            input_names=[f"leaves_{i}" for i in range(len(tensors))],
        )
    done = time.perf_counter()
    import onnx

    model = ir.serde.deserialize_model(onnx.load_from_string(file.getvalue()))
    weights: dict[str, str] = {}
    bound: dict[str, tuple[Any, Any]] = {}
    leaf_names = [f"leaves_{i}" for i in range(len(tensors))]
    for value in model.graph.inputs:  # those of unused leaves are gone
        if value.name in leaf_names:
            continue
        tensor = _lookup(module, str(value.name))
        if tensor is None or id(tensor) not in owned:
            raise ExportError(f"TorchScript's exporter made an input {value.name} that is not a parameter or buffer "
                              "of the module.")
        kind, name = owned[id(tensor)]
        weights[str(value.name)] = name
        bound[name] = (kind, name)
    seconds = {"torch_export": 0.0, "torch_onnx": done - start}
    given = {value.name: value for value in model.graph.inputs}
    exported = _finish(
        model, flat, names, leaves, weights, bound, shape_guards.exact(tensors), "torchscript", opset, seconds, notes,
        [given.get(name) for name in leaf_names],
    )
    exported.needs_verification = True
    return exported


# --- both -------------------------------------------------------------------------------------------------------------


def _finish(
    model: Any, flat: _Flat, names: list[str], leaves: list[Any], weights: dict[str, str],
    bound: dict[str, tuple[Any, Any]], guards: shape_guards.Guards, exporter: Any, opset: int,
    seconds: dict[str, float], notes: list[str], user_inputs: Sequence[Any] | None = None,
) -> Exported:
    """Binds inputs and outputs of the translated model and serialises it.

    user_inputs: for each leaf that is a tensor its graph input, None where it has none; the first inputs otherwise.
    """
    onnx_graph.inline_functions(model)
    onnx_graph.sized_splits(model)
    onnx_graph.weights_to_inputs(model, weights)
    graph = model.graph
    user_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if user_inputs is None:
        user_inputs = list(graph.inputs)[: len(user_indices)]
    held = [place for place, value in enumerate(user_inputs) if value is not None]
    user_values, user_indices = [user_inputs[i] for i in held], [user_indices[i] for i in held]
    names = [names[i] for i in held]
    targets: list[tuple[Any, Any]] = [("user", i) for i in flat.traced.out_tensors]
    targets += [("buffer", name) for name in flat.traced.buffers]
    targets += [("check", i) for i in range(flat.traced.checks)]
    targets += [("argument", leaf) for leaf in flat.traced.written]
    if len(graph.outputs) != len(targets):
        raise ExportError(f"{len(targets)} outputs were traced, and the exporter made {len(graph.outputs)}.")
    kept, made = [], views.leaves(flat.traced.views)
    for value, (kind, target) in zip(list(graph.outputs), targets):
        unchanged = onnx_graph.source_input(value) if kind == "buffer" else None
        if unchanged is not None and bound.get(unchanged.name) == ("buffer", target):
            continue
        if kind == "user" and target in made:
            continue
        kept.append((value, kind, target))
    graph.outputs.clear()
    graph.outputs.extend(value for value, _, _ in kept)
    if not kept:
        raise NothingToCompute("All results are arguments, weights or views of them; a graph has nothing to compute.")
    onnx_graph.separate_outputs(model)
    onnx_graph.drop_unused(model, 0)
    onnx_graph.rename_inputs(model, user_values, names)
    inputs = []
    users = {id(value): index for value, index in zip(user_values, user_indices)}
    for value in graph.inputs:
        if id(value) in users:
            inputs.append(GraphInput("user", value.name, users[id(value)]))
        else:
            source, where = bound[value.name]
            inputs.append(GraphInput(source, str(value.name), where))
    outputs = tuple(
        GraphOutput(kind, value.name, target) for value, (_, kind, target) in zip(graph.outputs, kept)
    )
    # TorchScript's If is Python's own.
    conditional = onnx_graph.conditional(model) if exporter == "dynamo" else ((), ())
    data, origins = onnx_graph.serialise(model)
    return Exported(data, tuple(inputs), outputs, len(flat.traced.out_tensors), guards, exporter, opset, seconds, notes,
                    origins=origins, conditional=conditional, views=flat.traced.views)
