"""A trained module as an onnx.ModelProto for other runtimes: in evaluation, with its weights, of standard operators.

Used by _models.py and _postprocess.py. _export makes graphs for training, with weights as inputs and operators of the
engine's own; here both are replaced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import onnx.parser
import torch
from onnx import helper
from torch import Tensor

from onnxtrain import UnsupportedError
from onnxtrain._export.domain import DOMAIN
from onnxtrain._export.exported import OPSETS, Exported
from onnxtrain._onnx_functions import bodies_of, nodes_of
from onnxtrain.ortmodule._whole import export_whole
from onnxtrain.training._opset import OPSET, converted, version_of
from onnxtrain.utils.torch_io_helper import pytorch_type_to_onnx_dtype

Described = tuple[str, list[int | str], *tuple[object, ...]]  # name, shape and more
# Operators of the engine's own that are one of the standard's, but for gradients and checks: its name, and how many of
# the inputs it has.
_SAME = {"StopGradient": ("Identity", 1), "InRange": ("Identity", 1), "HardTanh": ("Clip", 3), "TorchTopK": ("TopK", 2),
         "TorchGather": ("Gather", 2), "TorchGatherElements": ("GatherElements", 2),
         "TorchScatterElements": ("ScatterElements", 3)}
# Those that are a few of the standard's, as functions of the file's own.
_BODIES = {
    "Log1p": "(x) => (y) { one = Constant<value_float = 1.0>() like = CastLike(one, x) z = Add(x, like) y = Log(z) }",
    "Expm1": "(x) => (y) { one = Constant<value_float = 1.0>() like = CastLike(one, x) z = Exp(x) y = Sub(z, like) }",
    "Logit": "(x) => (y) { one = Constant<value_float = 1.0>() like = CastLike(one, x) rest = Sub(like, x) "
             "odds = Div(x, rest) y = Log(odds) }",
    "Remainder": "(x, y) => (z) { q = Div(x, y) f = Floor(q) whole = Mul(f, y) z = Sub(x, whole) }",
}


def tensor_proto(tensor: Tensor, name: str) -> onnx.TensorProto:
    """An initializer of a tensor's contents, of any dtype that ONNX has."""
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    return onnx.TensorProto(name=name, data_type=pytorch_type_to_onnx_dtype(tensor.dtype), dims=list(tensor.shape),
                            raw_data=data.numpy().tobytes())


def proto_of(module: torch.nn.Module, example: Sequence[Tensor], own: Callable[[str], str],
             inputs: Sequence[Described], outputs: Sequence[Described], opset: int = OPSET) -> onnx.ModelProto:
    """A module in evaluation.

    Args:
        module: takes the inputs in a row. It runs once; see export_whole().
        example: inputs of sizes and dtypes that it takes.
        own: of a weight's name in the module makes its name in the file.
        inputs, outputs: (name, shape) of each, as a description has them.
        opset: of the file.

    Raises:
        ExportError, UnsupportedError: see TorchModel.proto().
    """
    with evaluating(module), torch.no_grad():
        exported = exported_of(module, example, opset)
    model, _ = named(module, exported, own, inputs, outputs)
    del model.graph.output[len(outputs):]
    _to_standard_operators(model)
    return converted(model, opset)


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """The module is in evaluation; then each of its parts is in its own mode again."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def exported_of(module: torch.nn.Module, inputs: Sequence[object], opset: int) -> Exported:
    """export_whole(), in this opset; in the oldest that the exporter has for one before it."""
    return export_whole(module, tuple(inputs), {}, opset=max(opset, OPSETS[0]))


def named(module: torch.nn.Module, exported: Exported, own: Callable[[str], str],
          inputs: Sequence[Described], outputs: Sequence[Described]) -> tuple[onnx.ModelProto, dict[str, str]]:
    """An export with weights as initializers, its values under the names of proto_of()'s arguments, and what they were
    called before. Results that are not described are none of its outputs; what a run writes besides comes last.
    """
    model = onnx.load_model_from_string(exported.model)
    names = _weights_as_initializers(model, exported, module, own)
    users = {i.target: i.name for i in exported.inputs if i.kind == "user"}
    names |= {users[index]: described[0] for index, described in enumerate(inputs) if index in users}
    results = {target.target: target.name for target in exported.outputs if target.kind == "user"}
    made = [results[leaf] for leaf in sorted(results)][:len(outputs)]
    names |= {name: described[0] for name, described in zip(made, outputs)}
    order = [*made, *(target.name for target in exported.outputs if target.kind != "user")]
    kept = [output for output in model.graph.output if output.name in order]
    del model.graph.output[:]
    model.graph.output.extend(sorted(kept, key=lambda output: order.index(output.name)))
    names = _rename(model.graph, names)
    _describe(model.graph, inputs)
    return model, names


def _weights_as_initializers(model: onnx.ModelProto, exported: Exported, module: torch.nn.Module,
                             own: Callable[[str], str]) -> dict[str, str]:
    """Moves all but the user's inputs to the initializers; the names that they shall have."""
    names = {}
    for source in exported.inputs:
        if source.kind == "user":
            continue
        tensor = source.target
        if source.kind != "constant":
            path, _, name = source.target.rpartition(".")
            tensor = getattr(module.get_submodule(path), name)
            names[source.name] = own(source.target)
        model.graph.initializer.append(tensor_proto(tensor, source.name))
    held = {source.name for source in exported.inputs if source.kind != "user"}
    users = [value for value in model.graph.input if value.name not in held]
    del model.graph.input[:]
    model.graph.input.extend(users)
    return names


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> dict[str, str]:
    """Gives values new names; what else has one of these gets another. Returns all names that changed."""
    names = {old: new for old, new in names.items() if old != new}
    wanted = set(names.values())
    values = {value.name for value in (*graph.input, *graph.initializer)}
    values |= {name for node in nodes_of(graph.node) for name in node.output if name}
    for value in values:
        if value in wanted and value not in names:
            names[value] = _unused(f"{value}_value", values | wanted)
            values.add(names[value])
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in nodes_of(graph.node):
        for field in (node.input, node.output):
            renamed = [names.get(name, name) for name in field]
            del field[:]
            field.extend(renamed)
        for body in bodies_of(node):
            for value in (*body.input, *body.output, *body.initializer, *body.value_info):
                value.name = names.get(value.name, value.name)
    return names


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _describe(graph: onnx.GraphProto, inputs: Sequence[Described]) -> None:
    """Gives open dims the names, and the sizes, that the description has for them, wherever they stand."""
    order = {described[0]: place for place, described in enumerate(inputs)}
    given = sorted(graph.input, key=lambda value: order.get(value.name, len(order)))
    del graph.input[:]
    graph.input.extend(given)
    sizes: dict[str, int | str] = {}
    for value in graph.input:
        shape: Any = next((described[1] for described in inputs if described[0] == value.name), [])
        for dim, size in zip(value.type.tensor_type.shape.dim, shape):
            if dim.dim_param:
                sizes.setdefault(dim.dim_param, size)
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            size = sizes.get(dim.dim_param) if dim.dim_param else None
            if isinstance(size, int):
                dim.dim_value = size
            elif size is not None:
                dim.dim_param = size


@functools.cache
def _function(name: str, opset: int) -> onnx.FunctionProto:
    text = f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]> {name} {_BODIES[name]}'
    return onnx.parser.parse_function(text)


def _to_standard_operators(model: onnx.ModelProto) -> None:
    """Replaces operators of the engine's own.

    Raises:
        UnsupportedError: the graph has others of them; the message names them.
    """
    opset = version_of(model)
    functions, unknown = set(), set()
    for node in nodes_of(model.graph.node):
        if node.domain != DOMAIN:
            continue
        if node.op_type in _SAME:
            node.op_type, count = _SAME[node.op_type]
            node.domain = ""
            del node.input[count:]
        elif node.op_type in _BODIES:
            functions.add(node.op_type)
        else:
            unknown.add(node.op_type)
    if unknown:
        raise UnsupportedError(f"save_as_onnx: the graph has operators that ONNX does not have: "
                               f"{', '.join(sorted(unknown))}")
    model.functions.extend(_function(name, opset) for name in sorted(functions))
    imports = [o for o in model.opset_import if o.domain != DOMAIN or functions]
    if functions and not any(o.domain == DOMAIN for o in imports):
        imports.append(helper.make_opsetid(DOMAIN, 1))
    kept = [helper.make_opsetid(o.domain, o.version) for o in imports]
    del model.opset_import[:]
    model.opset_import.extend(kept)
