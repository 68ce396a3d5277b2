"""An nn.Module and example arguments in, an ONNX graph fit for training out.

Called by ORTModule once per schema of arguments. Tracing is torch.export's and translation torch.onnx's; what they get
wrong for training is put right on the way (onnxtrain/_export/rewrite.py). The module, the random state and torch's
switches are left exactly as they were, also after a failure. Nothing here knows the C core.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree

from onnxtrain._export import (
    attributes,
    captured,
    exclusive,
    filled,
    formulas,
    functional,
    functions,
    messages,
    mutations,
    refusals,
    retrace,
    rewrite,
    sizes,
    snapshot,
    state,
    trees,
    values,
    views,
    whole_numbers,
)
from onnxtrain._export import flags as flags_of
from onnxtrain._export import graph as onnx_graph
from onnxtrain._export import guards as shape_guards
from onnxtrain._export.domain import register_symbolics
from onnxtrain._export.errors import ArgumentError, Changed, ExportError, Untraceable
from onnxtrain._export.exported import Assignment, Exported, GraphInput, GraphOutput
from onnxtrain._export.function_apply import CustomFunctions
from onnxtrain._export.refusals import PLAIN_TENSORS as PLAIN_TENSORS
from onnxtrain._export.translations import registry_reused, translations, wide_numbers

SMALL_CONSTANT = 1024  # elements; larger constants become graph inputs
DYNAMO_OPSETS = (18, 22)
TORCHSCRIPT_OPSETS = (12, 20)


def order(opset: int) -> tuple[Literal["dynamo", "torchscript"], ...]:
    """Both exporters, the one to try first in front: below opset 18 that is TorchScript's, which alone has them."""
    return ("dynamo", "torchscript") if opset >= DYNAMO_OPSETS[0] else ("torchscript", "dynamo")


def is_final(exporter: str, error: ExportError) -> bool:
    """Whether what one exporter said of a module holds for the other one too."""
    return isinstance(error, ArgumentError) or exporter == "dynamo" and isinstance(error.__cause__, Untraceable)


@dataclasses.dataclass
class _Traced:
    """What a trace says of the user's output. Apart from the module, whose attributes torch.export puts back."""

    out_spec: Any = None
    out_constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    out_tensors: list[int] = dataclasses.field(default_factory=list)
    buffers: list[str] = dataclasses.field(default_factory=list)
    assignments: list[Assignment] = dataclasses.field(default_factory=list)
    same: dict[int, int | str] = dataclasses.field(default_factory=dict)
    checks: list[bool] = dataclasses.field(default_factory=list)
    filled: list[filled.Filled] = dataclasses.field(default_factory=list)
    given: dict[int, int] = dataclasses.field(default_factory=dict)  # leaf of the output -> cache that it is
    written: list[int] = dataclasses.field(default_factory=list)  # leaves of the input that forward changes in place
    views: list[Any] | None = None
    consulted: bool = False  # whether forward asks for requires_grad, or for grad mode
    flags: tuple[tuple[str, bool], ...] = ()
    functions: list[functions.Call] = dataclasses.field(default_factory=list, compare=False)
    settings: list[state.Setting] = dataclasses.field(default_factory=list, compare=False)
    record: attributes.Record = dataclasses.field(default_factory=attributes.Record, compare=False)


class _Flat(torch.nn.Module):
    """The user's module as a function of tensors: leaves in; leaves of the output, then every buffer, out."""

    def __init__(self, module: torch.nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec, barriers: bool) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._call = (list(leaves), spec, barriers)
        self.traced = _Traced()
        self.by_torch: tuple[str, ...] = ()
        self.planes = "dynamic"
        self.settings: list[state.Setting] = []
        self.watched = False

    def arguments(self) -> Any:
        """(args, kwargs) of the example."""
        return pytree.tree_unflatten(self._call[0], self._call[1])

    def tensors(self) -> list[Tensor]:
        """The leaves of the example that are inputs of forward."""
        return [leaf for leaf in self._call[0] if isinstance(leaf, Tensor)]

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        example, spec, barriers = self._call
        given = iter(leaves)
        args, kwargs = pytree.tree_unflatten(
            [next(given) if isinstance(leaf, Tensor) else leaf for leaf in example], spec
        )
        traced, module = self.traced, self.module
        functions.begin(traced.functions)
        versions, before = [(leaf._version, leaf.shape) for leaf in leaves], pytree.tree_leaves((args, kwargs))
        caches = filled.Watch((args, kwargs))
        checked: list[tuple[Tensor, bool]] = []
        flags = flags_of.Flags(dict(module.named_parameters()))
        patch = rewrite.Rewrite(barriers, flags, None if barriers else checked, self.watched)
        if self.watched:
            traced.record.entered = values.Entered()
        with (state.nothing_lost(module, traced.record.writes, traced.settings), flags_of.noting_modes(flags, module),
              patch, attributes.recording(traced.record, module), values.watching(traced.record.entered)):
            results, traced.out_spec = trees.flatten(module(*args, **kwargs), caches.holds)
            results = [leaf.item() if patch.is_number(leaf) else leaf for leaf in results]
        if patch.unread is not None:
            raise Untraceable(f"Python code reads the value of a tensor by {patch.unread}, and goes on where that "
                              "fails.")
        traced.consulted, traced.flags = flags.consulted, flags.changed
        traced.given = {i: caches.index(leaf) for i, leaf in enumerate(results) if caches.holds(leaf)}
        results = [None if i in traced.given else leaf for i, leaf in enumerate(results)]
        traced.filled, kept = caches.take()
        traced.out_tensors = [i for i, leaf in enumerate(results) if isinstance(leaf, Tensor)]
        flat = mutations.unchanged_containers((args, kwargs), spec, before)
        own: dict[int, Any] = {id(leaf): i for i, leaf in enumerate(flat)}
        own.update((id(parameter), name) for name, parameter in module.named_parameters())
        traced.same = {i: own[id(results[i])] for i in traced.out_tensors if id(results[i]) in own}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # what is asked here is no part of the graph
            traced.written = [own[id(leaf)] for leaf in mutations.written(leaves, versions)]
            if barriers:
                views.refuse(results, traced, [*leaves, *module.parameters()])
        traced.out_constants = {i: refusals.concrete(leaf) for i, leaf in enumerate(results)
                                if not isinstance(leaf, Tensor)}
        buffers = dict(self.module.named_buffers())
        traced.buffers = list(buffers)
        assigned = _assigned(module, traced)
        flags.refuse_visible([*results, *(leaf for child, name in traced.record.writes
                                          for leaf in trees.flatten(attributes.attribute(child, name))[0])])
        traced.checks = [wanted for _, wanted in checked]
        # Cloned, so that torch.export sees no output that is an input. Those that forward left alone are dropped later.
        return (*(results[i] for i in traced.out_tensors), *(b.clone() for b in buffers.values()), *assigned,
                *(condition for condition, _ in checked), *(flat[i].clone() for i in traced.written), *kept)


def _assigned(module: torch.nn.Module, traced: _Traced) -> list[Tensor]:
    """Describes the attributes that forward has set, in traced.assignments; returns their tensors in a row."""
    names = {child: name for name, child in module.named_modules()}
    tensors: list[Tensor] = []
    for (child, name), before in traced.record.writes.items():
        value = attributes.attribute(child, name)
        if (child not in names or value is before or name in child._buffers
            or state.follows_parameters(child, name)):
            continue  # made by forward itself; no change; an output already; torch's own
        if (value is attributes.ABSENT or any(isinstance(v, (torch.nn.Module, torch.nn.Parameter))
                                              for v in (value, before))):
            raise Untraceable(f"The module exchanges its {name!r} inside forward; a graph would lose that.")
        leaves, spec = trees.flatten(value)
        where = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        constants = {i: refusals.concrete(leaf) for i, leaf in enumerate(leaves) if i not in where}
        traced.assignments.append(Assignment(names[child], name, spec, constants, where))
        tensors += [leaves[i].clone() for i in where]
    return tensors


def export(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool, opset: int = 20,
    exporter: Literal["auto", "dynamo", "torchscript"] = "auto", custom: CustomFunctions | None = None,
    by_torch: tuple[str, ...] = (), planes: Literal["dynamic", "fixed"] = "dynamic", watched: bool = False,
) -> Exported:
    """Exports `module` for arguments like these.

    Args:
        training: the mode to export for. Where the module is in it already, each submodule keeps its own mode.
        opset: wanted version of ai.onnx; the nearest one that the exporter has is used, with a note.
        exporter: "auto" tries the default exporter, then TorchScript's; below opset 18 TorchScript's first.
        custom: what becomes of torch.autograd.Functions; PythonOp nodes where None.
        by_torch: operators such as "aten.cross.default" that are PythonOp nodes as well, run by torch (default
        exporter).
        planes: "fixed" exports for these heights and widths alone: dims from the third on of floats of four and more
        dims.
            Sizes after strides, windows and pooling are long formulas, which take torch.export minutes to compare.
        watched: say in Exported.outside what forward reads outside of the module, for another process to compare.

    Raises:
        ExportError: neither can export it faithfully.
    """
    if exporter != "auto":
        return _run(module, args, kwargs, training, opset, exporter, custom, by_torch, planes, watched)
    names = {"dynamo": "The default exporter", "torchscript": "TorchScript's exporter"}
    first, second = order(opset)
    try:
        return _run(module, args, kwargs, training, opset, first, custom, by_torch, planes, watched)
    except ExportError as error:
        if is_final(first, error):
            raise  # the other would not trace it either
        reason = error
    try:
        exported = _run(module, args, kwargs, training, opset, second, custom, by_torch, planes, watched)
    except ExportError as error:
        raise ExportError(f"{reason} {names[second]}: {error}") from reason
    exported.notes.append(f"{names[second]} was used, because of the other one: {reason}")
    return exported


def _run(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool, opset: int, exporter: str,
    custom: CustomFunctions | None, by_torch: tuple[str, ...], planes: str, watched: bool,
) -> Exported:
    """One exporter, inside everything that has to be undone after it."""
    run, opsets = (_dynamo, DYNAMO_OPSETS) if exporter == "dynamo" else (_torchscript, TORCHSCRIPT_OPSETS)
    notes: list[str] = []
    custom = dataclasses.replace(custom or CustomFunctions(), nodes=exporter == "dynamo", inlined=[])
    used = min(max(opset, opsets[0]), opsets[1])
    if used != opset:
        notes.append(f"opset {opset} was asked for; this exporter has {opsets[0]} to {opsets[1]}, and {used} is used.")
    leaves, spec = trees.flatten((args, kwargs))

    def flattened() -> _Flat:
        flat = _Flat(module, leaves, spec, barriers=exporter == "torchscript")
        flat.by_torch, flat.planes, flat.watched = by_torch, planes, watched
        return flat

    flat = flattened()
    modes = grad_modes(module, leaves, torch.is_grad_enabled())
    start = time.perf_counter()
    try:
        with (exclusive.exclusive(), state.unchanged(module), state.random_unchanged(),
              state.autocast_unchanged(), rewrite.patched(module, notes, custom), messages.quiet()):
            names = _names(module, args, kwargs)
            refusals.refuse_lost(module, leaves, names)
            refusals.refuse_nothing(module, args, kwargs)
            if module.training != training:
                module.train(training)
            with torch.enable_grad():
                tensor_names = [name for name, leaf in zip(names, leaves) if isinstance(leaf, Tensor)]
                exported = run(flat, tensor_names, leaves, used, notes)
            if flat.traced.consulted and not torch.is_grad_enabled():  # it has seen the wrong answer
                flat = flattened()
                exported = run(flat, tensor_names, leaves, used, notes)
    except ExportError as error:
        error.state = _state(flat)
        raise
    except Exception as error:
        if isinstance(messages.root(error), ArgumentError):
            argument = ArgumentError(str(messages.root(error)))
            argument.state = _state(flat)
            raise argument from messages.root(error)
        failure = ExportError(messages.reason(error, exporter))
        failure.state = _state(flat)
        raise failure from messages.root(error)
    exported.settings = tuple(flat.settings)
    if flat.settings:
        exported.state.take()  # as the module is again; the caller may apply them
    exported.seconds["total"] = time.perf_counter() - start
    exported.functions, exported.same = tuple(flat.traced.functions), tuple(flat.traced.same.items())
    exported.filled, exported.given = tuple(flat.traced.filled), tuple(flat.traced.given.items())
    exported.modes, exported.flags = modes if flat.traced.consulted else None, flat.traced.flags
    exported.outside = values.described(flat.traced.record.entered, module)
    if custom.inlined:
        notes.append("Traced through, as asked for, and differentiated as plain operators: "
                     f"{', '.join(custom.inlined)}.")
        exported.needs_verification = True
    return exported


def grad_modes(module: torch.nn.Module, leaves: Sequence[Any], grad_enabled: bool) -> tuple[Any, ...]:
    """All that forward may see of gradients: what a graph of one that looks holds for."""
    return (grad_enabled, torch.is_inference_mode_enabled(),
            [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)],
            [parameter.requires_grad for parameter in module.parameters()])


def _state(flat: _Flat, free: frozenset[tuple[int, str]] = frozenset()) -> attributes.State:
    """The attributes that forward has read, hooks always among them."""
    record = flat.traced.record
    own = {flat, *flat.module._captured.modules()} if isinstance(flat.module, captured.Graph) else {flat}
    for child in [child for child in record.reads
                  if child in own or type(child) is torch.nn.Module or snapshot.is_wrapper(child)]:
        del record.reads[child]  # the exporter's own, and ours
    for child in flat.module.modules():
        record.reads.setdefault(child, set()).update(attributes.HOOKS)
    return attributes.State(flat.module, record, free)


def _names(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for each leaf, after the parameters of forward."""
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
        flat, _ = pytree.tree_flatten_with_path((args, kwargs))
        positional = [name for name, value in inspect.signature(module.forward).parameters.items()
                      if value.kind in (value.POSITIONAL_ONLY, value.POSITIONAL_OR_KEYWORD)]
    except TypeError:
        flat, positional = pytree.tree_flatten_with_path((args, kwargs))[0], []
    except ValueError:  # a container that was registered without names for its parts
        return [f"input_{i}" for i, _ in enumerate(pytree.tree_leaves((args, kwargs)))]
    names = []
    for path, _ in flat:
        keys = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", "")))) for key in path]
        if keys[0] == "0" and int(keys[1]) < len(positional):
            keys[1] = positional[int(keys[1])]
        elif keys[0] == "0":
            keys[1] = f"args_{keys[1]}"
        names.append(re.sub(r"\W", "_", "_".join(keys[1:])))
    return names


# --- the default exporter ---------------------------------------------------------------------------------------------


def _dynamo(flat: _Flat, names: list[str], leaves: list[Any], opset: int, notes: list[str]) -> Exported:
    module = flat.module
    tensors = _apart([_without_grad(leaf) for leaf in leaves if isinstance(leaf, Tensor)], module)
    if isinstance(module, captured.Graph) and not module._captured.reads_strides:
        tensors = tuple([_in_a_row(tensor) for tensor in tensors])
    owned = _owned(module)
    start = time.perf_counter()
    program, relaxed = _trace(flat, tensors)
    if settings := flat.traced.settings:
        program, relaxed = _settled(flat, tensors, program, settings)
    functions.begin(flat.traced.functions)
    guards = shape_guards.from_program(program, relaxed)
    if (violated := guards(tensors)) is not None:
        raise ExportError(f"The traced program does not admit the example arguments themselves: {violated}.")
    users = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    flat.traced.views = views.find(program, flat.traced, users, lambda target: owned[id(_lookup(module, target))])
    mutations.check(program)
    mutations.mark_no_grad(program)
    functional.simplify(program)
    traced = time.perf_counter()
    drawn = functions.drawn_by_torch() if all(t.is_cpu for t in (*tensors, *module.parameters())) else {}
    with registry_reused(), wide_numbers(), retrace.spared():
        translated: Any = torch.onnx.export(
            program, opset_version=opset, optimize=False, verbose=False,
            custom_translation_table=translations(opset) | drawn | functions.by_torch(flat.by_torch),
        )
    done = time.perf_counter()
    model, signature = translated.model, translated.exported_program.graph_signature
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
        tensor = constants[target]
        # A tensor that the module holds may change in place between calls: read it each time.
        if tensor.numel() > SMALL_CONSTANT or _lookup(module, target) is not None:
            name = target.removeprefix("module.")
            weights[target] = name
            bound[name] = ("constant", tensor) if _lookup(module, target) is None else ("attribute", name)
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


def _settled(
    flat: _Flat, tensors: tuple[Tensor, ...], first: torch.export.ExportedProgram, settings: list[state.Setting],
) -> tuple[torch.export.ExportedProgram, set[str]]:
    """A trace of a forward that gives objects plain values, once they have these: as long as it is the same program,
    forward has only noted what it found, and the caller may set them for good.

    Raises:
        Changed: it is another one, or the values change again.
    """
    for setting in settings:
        setting.apply()
    flat.traced = _Traced()
    program, relaxed = _trace(flat, tensors)
    if flat.traced.settings or not (sizes.same_program(first, program) and sizes.same_constants(first, program)):
        _refuse_settings(settings)
    flat.settings = settings
    return program, relaxed


def _refuse_settings(settings: list[state.Setting]) -> None:
    if settings:
        raise Changed(f"The module changes {settings[0].place!r} inside forward; a graph would lose that.")


def _torch_export(flat: _Flat, tensors: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    module: Any = flat.module
    graph = isinstance(module, captured.Graph)
    fixed = graph or flat.planes == "fixed"
    grows = set() if graph else {id(t) for cache in filled.among(flat.arguments()) for t in pytree.tree_leaves(cache)}
    axes = [{*range(2 if fixed and t.dim() > 3 and t.is_floating_point() and id(given) not in grows else t.dim())}
            for t, given in zip(tensors, flat.tensors())]
    if graph:
        axes = [each | open_ for each, open_ in zip(axes, module._captured.dynamic, strict=True)]
    dynamic = [tuple(dict.fromkeys(each, auto) for each in axes)] if axes else None

    def trace() -> torch.export.ExportedProgram:
        flat.traced = _Traced()
        with state.unchanged(flat.module), formulas.bounded(), \
                torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            return torch.export.export(flat, tensors, strict=False, dynamic_shapes=dynamic)

    return whole_numbers.traced(trace)


# --- the TorchScript exporter -----------------------------------------------------------------------------------------


def _torchscript(flat: _Flat, names: list[str], leaves: list[Any], opset: int, notes: list[str]) -> Exported:
    """Sizes are frozen (a trace does not say which of them it used); branches too, hence needs_verification."""
    import onnx_ir as ir

    module = flat.module
    if isinstance(module, captured.Graph) and module._captured.reads_contents:
        raise ExportError("TorchScript would freeze a number or a size that depends on the values of a tensor.")
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
    _refuse_settings(flat.traced.settings)
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
    assignments = flat.traced.assignments
    targets += [("attribute", (i, leaf)) for i, assignment in enumerate(assignments) for leaf in assignment.tensors]
    targets += [("check", wanted) for wanted in flat.traced.checks]
    targets += [("argument", leaf) for leaf in flat.traced.written]
    targets += [("cache", (each.index, leaf)) for each in flat.traced.filled for leaf in each.tensors]
    given = {id(value) for value in graph.inputs if bound.get(value.name, ("user", None))[0] != "constant"}
    cached = _caches(assignments, [v for v, (kind, _) in zip(graph.outputs, targets) if kind == "attribute"], given)
    if len(graph.outputs) != len(targets):
        raise ExportError(f"{len(targets)} outputs were traced, and the exporter made {len(graph.outputs)}.")
    kept, made = [], views.leaves(flat.traced.views)
    for value, (kind, target) in zip(list(graph.outputs), targets):
        unchanged = onnx_graph.source_input(value) if kind == "buffer" else None
        if unchanged is not None and bound.get(unchanged.name) == ("buffer", target):
            continue
        if kind == "user" and target in made:
            continue
        if kind != "attribute" or target[0] not in cached:
            kept.append((value, kind, target))
    graph.outputs.clear()
    graph.outputs.extend(value for value, _, _ in kept)
    if made and not kept:
        nothing = "All results are views of arguments or weights; there is nothing for a graph to compute."
        raise ExportError(nothing) from Untraceable(nothing)
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
    frozen = _frozen(flat, inputs, cached)
    # TorchScript's If is Python's own.
    conditional = onnx_graph.conditional(model) if exporter == "dynamo" else ((), ())
    data, origins = onnx_graph.serialise(model)
    return Exported(
        data, tuple(inputs), outputs, flat.traced.out_spec, flat.traced.out_constants, guards,
        tuple(assignments), frozen, exporter, opset, seconds, notes, origins=origins, conditional=conditional,
        views=flat.traced.views,
    )


def _caches(assignments: Sequence[Assignment], values: list[Any], data: set[int]) -> set[int]:
    """Assignments that keep nothing but tensors made of sizes and constants: forward makes the same ones again."""
    found, at = set(), 0
    for index, assignment in enumerate(assignments):
        own = values[at:at + len(assignment.tensors)]
        at += len(own)
        if own and not assignment.constants and not any(onnx_graph.depends_on(value, data) for value in own):
            found.add(index)
    return found


def _frozen(flat: _Flat, inputs: Sequence[GraphInput], cached: set[int]) -> attributes.State:
    """Attributes that must not change on the modules; without those that are read at each step, and caches."""
    module, traced = flat.module, flat.traced
    places = [source.target for source in inputs if source.kind == "attribute"]
    places += [f"{traced.assignments[i].module}.{traced.assignments[i].name}".lstrip(".") for i in cached]
    free = set()
    for place in places:
        owner, _, name = place.rpartition(".")
        free.add((id(module.get_submodule(owner)), name))
    return _state(flat, frozenset(free))
