"""A graph that Dynamo captured and example arguments in, an ONNX graph fit for training out.

Called by ortmodule/_runner.py once per schema of arguments. Tracing is torch.export's and translation torch.onnx's;
what they get wrong for training is put right on the way (onnxtrain/_export/rewrite.py). The random state and torch's
switches are left exactly as they were, also after a failure. Nothing here runs a graph in the C core.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from onnxtrain._export import (
    autograd_functions,
    complex_parts,
    derivatives,
    exclusive,
    formulas,
    messages,
    recompute_regions,
    retrace,
    rewrite,
    simplify,
    state,
    views,
)
from onnxtrain._export import graph as onnx_graph
from onnxtrain._export import guards as shape_guards
from onnxtrain._export.autograd_calls import CustomFunctions, deciding
from onnxtrain._export.captured import Graph, layout_of
from onnxtrain._export.errors import ArgumentError, ExportError, NothingToCompute, Untraceable
from onnxtrain._export.exported import (
    OPSETS,
    PLAIN_TENSORS,
    Exported,
    GraphInput,
    GraphOutput,
)
from onnxtrain._export.functionalization import Batched, Functionalized, follow, is_batched
from onnxtrain._export.instead import exchanged
from onnxtrain._export.recompute_regions import noting
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
    functions: list[autograd_functions.Call] = dataclasses.field(default_factory=list)


class _Flat(torch.nn.Module):
    """The graph as a function of its tensors: those in; out its results, the buffers that it changes, conditions (see
    checks.py), and the arguments that it changes.
    """

    def __init__(self, module: Graph, args: Sequence[object]) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._args = list(args)
        self.traced = _Traced()
        self.by_torch: tuple[str, ...] = ()
        self.for_file = False
        graph = module._captured.graph
        self.mode: type[Functionalized | Batched] = (
            derivatives.Differentiated if derivatives.differentiates(graph) else
            Batched if is_batched(graph) else Functionalized)

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        given = iter(leaves)
        args = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._args]
        traced, module = self.traced, self.module
        autograd_functions.begin(traced.functions)
        checked: list[Tensor] = []
        follow(module._captured.graph)
        with self.mode() as mode:
            own: dict[int, int | str] = {id(mode.wrap_parameter(parameter, name)): name
                                         for name, parameter in module.named_parameters()}
            own.update({id(mode.wrap(leaf)): i for i, leaf in enumerate(args) if isinstance(leaf, Tensor)})
            inputs = [mode.wrap(value) for value in module._captured.inputs(args)]
            with (patch := rewrite.Rewrite(inputs, checked, mode)):
                wrapped = module._captured.trace(inputs, functools.partial(_constant, mode))
            patch.refuse_visible(wrapped)
            traced.same = {i: own[id(result)] for i, result in enumerate(wrapped) if id(result) in own}
            conditions = [*checked, *mode.checked]
            results, conditions = mode.unwrap((tuple(wrapped), tuple(conditions)))
            buffers, written = _changes(mode.changed(), module, args)
        traced.out_tensors = list(range(len(results)))
        traced.buffers, traced.checks, traced.written = list(buffers), len(conditions), list(written)
        return (*results, *buffers.values(), *conditions, *written.values())


def _constant(mode: Functionalized | Batched, value: object) -> object:
    """A tensor that the graph holds, as the mode has it, or the graph of a branch or of a loop's body."""
    return exchanged(value, rewrite.REWRITES) if isinstance(value, torch.fx.GraphModule) else mode.wrap(value)


def _changes(changed: Sequence[tuple[Tensor, Tensor, str | None]], module: Graph,
             args: Sequence[object]) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """What the buffers and frozen parameters hold that a graph has changed, by name, and its arguments, by place.

    Raises Untraceable where it is something else that changes, or the shape.
    """
    places = {id(leaf): i for i, leaf in enumerate(args)}
    parameters = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    buffers = {id(tensor): name for name, tensor in (*module.named_buffers(), *module.named_parameters())
               if id(tensor) not in parameters}
    captured = module._captured
    held: dict[str, Tensor] = {}
    written: dict[int, Tensor] = {}
    for before, after, trace in changed:
        buffer, place = buffers.get(id(before)), places.get(id(before))
        lasts = place is not None and captured.lasting[place]
        if after.shape != before.shape:
            fault = "changes the shape of an argument or buffer in place; a graph would lose that"
        elif buffer is None and place is None:
            fault = f"changes its parameter {parameters.get(id(before))} in place inside forward" if (
                id(before) in parameters) else "changes a tensor that is not a buffer in place inside forward"
        elif module.training and after.requires_grad and (buffer is not None or lasts):
            fault = (f"writes a value with a gradient into its buffer or attribute "
                     f"{buffer or captured.argument_names[place or 0]}, without detach(): in eager PyTorch it has that "
                     "gradient afterwards")
        elif buffer is not None:
            held[buffer] = after
            continue
        else:
            written[place or 0] = after
            continue
        error = Untraceable(f"The module {fault}.")
        messages.raised_at(error, trace)
        raise error
    return held, written


def export(
    module: Graph, args: Sequence[object], *, opset: int = 20, custom: CustomFunctions | None = None,
    by_torch: tuple[str, ...] = (), for_file: bool = False,
) -> Exported:
    """Exports `module` for arguments like these: tensors, and numbers, which become constants.

    Args:
        opset: wanted version of ai.onnx; the nearest one of OPSETS is used, with a note.
        custom: what becomes of torch.autograd.Functions; PythonOp nodes where None.
        by_torch: operators such as "aten.cross.default" that are PythonOp nodes as well, run by torch.
        for_file: the graph's outputs are the results; elsewhere the runtime takes views of them, of eager's strides and
            of complex numbers.

    Raises:
        ExportError: it cannot be exported faithfully.
    """
    autograd_functions.register()
    notes: list[str] = []
    custom = dataclasses.replace(custom or CustomFunctions(), inlined=[])
    used = min(max(opset, OPSETS[0]), OPSETS[1])
    if used != opset:
        notes.append(f"opset {opset} was requested, and {used} is used: an export has {OPSETS[0]} to {OPSETS[1]}.")
    names = module._captured.argument_names
    for leaf, name in zip(args, names, strict=True):
        if type(leaf) not in PLAIN_TENSORS and not isinstance(leaf, _NUMBERS):
            reason = ("a subclass of Tensor may return results of its own class" if isinstance(leaf, Tensor)
                      else "it is neither a tensor nor a number")
            raise ArgumentError(f"ORTModule does not support input type {type(leaf)} for input {name}: {reason}.")
    flat = _Flat(module, args)
    flat.by_torch, flat.for_file = by_torch, for_file
    start = time.perf_counter()
    try:
        with (exclusive.exclusive(), state.unchanged(module), state.random_unchanged(),
              state.autocast_unchanged(), deciding(custom), noting(notes), messages.quiet(), torch.enable_grad()):
            tensor_names = [name for name, leaf in zip(names, args) if isinstance(leaf, Tensor)]
            exported = _translated(flat, tensor_names, list(args), used, notes)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(messages.reason(error)) from messages.root(error)
    exported.seconds["total"] = time.perf_counter() - start
    exported.needs_verification = flat.mode is derivatives.Differentiated
    exported.functions = tuple(flat.traced.functions)
    if custom.inlined:
        notes.append("Traced through, as requested, and differentiated as plain operators: "
                     f"{', '.join(custom.inlined)}.")
        exported.needs_verification = True
    return exported


def _translated(flat: _Flat, names: list[str], leaves: list[object], opset: int, notes: list[str]) -> Exported:
    """The export itself, inside everything that has to be undone after it."""
    module = flat.module
    tensors = _apart([_without_grad(leaf) for leaf in leaves if isinstance(leaf, Tensor)], module)
    if not module._captured.reads_strides:
        tensors = tuple([_dense(tensor) for tensor in tensors])
    owned = _owned(module)
    start = time.perf_counter()
    program = _torch_export(flat, tensors)
    autograd_functions.begin(flat.traced.functions)
    guards = shape_guards.from_program(program)
    if (violated := guards(tensors)) is not None:
        raise ExportError(f"The exported graph does not accept the arguments that it was exported with: {violated}.")
    users = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    flat.traced.views = views.find(program, flat.traced, users, lambda target: owned[id(_lookup(module, target))],
                                   flat.for_file)
    flat.mode.settle(program)
    complex_parts.split(program)
    simplify.refuse_complex(program)
    simplify.mark_no_grad(program)
    simplify.state_dtypes(program)
    simplify.simplify(program)
    traced = time.perf_counter()
    drawn = autograd_functions.drawn_by_torch() if all(t.is_cpu for t in (*tensors, *module.parameters())) else {}
    try:
        table = translations(opset) | drawn | autograd_functions.run_by_torch(flat.by_torch)
        with wide_numbers():
            translated = retrace.translated(program, opset, table)
    except Exception as error:
        messages.raised_by_node(error, program)
        raise
    done = time.perf_counter()
    model, signature = translated.model, translated.exported_program.graph_signature
    onnx_graph.mark_regions(model, recompute_regions.regions_of(translated.exported_program))
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
    return _finish(model, flat, names, leaves, weights, bound, guards, opset, seconds, notes)


def _without_grad(tensor: Tensor) -> Tensor:
    """A leaf that holds a gradient, or a view, as a tensor by itself: torch.export would make guards about the sizes of
    the gradient, and of what is viewed.
    """
    if tensor.is_inference():
        with torch.inference_mode(False):  # a copy that counts its versions, as no tensor of inference mode does
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not (
            tensor._is_view() or tensor.is_leaf and tensor.grad is not None):
        return tensor
    return tensor.data.requires_grad_(tensor.requires_grad)


def _dense(tensor: Tensor) -> Tensor:
    """A slice, say, as a tensor with its own memory and the same order of axes in it: Dynamo has read the strides
    already and guards them.
    """
    if type(tensor) is not Tensor or tensor.is_contiguous() and not tensor._is_view():
        return tensor
    strides, step = [1] * tensor.dim(), 1
    for axis in reversed(layout_of(tensor) or range(tensor.dim())):
        strides[axis], step = step, step * max(tensor.shape[axis], 1)
    with torch.no_grad():
        copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
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


def _torch_export(flat: _Flat, tensors: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    # Of images the planes' sizes are fixed: what strides and pooling make of them are long formulas.
    axes = [{*range(2 if t.dim() > 3 and t.is_floating_point() else t.dim())} for t in tensors]
    captured = flat.module._captured
    if captured.unrolled:  # the loop has fixed a size, on which each entry that it takes would be one more condition
        axes = [set() for _ in tensors]
    axes = [each | open_ for each, open_ in zip(axes, captured.dynamic, strict=True)]
    dynamic = [tuple(dict.fromkeys(each, auto) for each in axes)] if axes else None
    flat.traced = _Traced()
    with state.unchanged(flat.module), formulas.bounded():
        return torch.export.export(flat, tensors, strict=False, dynamic_shapes=dynamic)


def _finish(
    model: Any, flat: _Flat, names: list[str], leaves: list[object], weights: dict[str, str],
    bound: dict[str, tuple[Any, Any]], guards: shape_guards.Guards, opset: int, seconds: dict[str, float],
    notes: list[str],
) -> Exported:
    """Binds inputs and outputs of the translated model, whose first inputs are the user's, and serialises it."""
    onnx_graph.inline_functions(model)
    onnx_graph.sized_splits(model)
    onnx_graph.weights_to_inputs(model, weights)
    graph = model.graph
    user_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    user_values = list(graph.inputs)[:len(user_indices)]
    given = {value.name: leaves[index] for value, index in zip(user_values, user_indices)}
    given |= {name: tensor for name, (_, tensor) in bound.items() if isinstance(tensor, Tensor)}
    given |= {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}
    onnx_graph.complex_inputs(graph, given)
    targets: list[tuple[Any, int | str]] = [("user", i) for i in flat.traced.out_tensors]
    targets += [("buffer", name) for name in flat.traced.buffers]
    targets += [("check", i) for i in range(flat.traced.checks)]
    targets += [("argument", leaf) for leaf in flat.traced.written]
    if len(graph.outputs) != len(targets):
        raise ExportError(f"{len(targets)} outputs were traced, and torch.onnx made {len(graph.outputs)}.")
    made = views.leaves(flat.traced.views)
    kept = [(value, kind, target) for value, (kind, target) in zip(graph.outputs, targets)
            if kind != "user" or target not in made]
    graph.outputs.clear()
    graph.outputs.extend(value for value, _, _ in kept)
    if not kept:
        raise NothingToCompute("All results are arguments, weights or views of them; a graph has nothing to compute.")
    onnx_graph.separate_outputs(model)
    onnx_graph.drop_unused(model)
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
    data, origins = onnx_graph.serialise(model)
    return Exported(data, tuple(inputs), outputs, len(flat.traced.out_tensors), guards, opset, seconds, notes,
                    origins=origins, views=flat.traced.views)
