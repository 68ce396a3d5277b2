"""A backend that also takes sequences and optionals as graph inputs, which tests of such operators have: the core
takes tensors only, so a model is rewritten for what a call gives.

A sequence of n tensors becomes n tensor inputs and a SequenceConstruct, an optional what it holds and an Optional.
Results need no such care: the core hands a sequence out as a list, an optional without element as None.
"""

from __future__ import annotations

from typing import Any, Sequence

import onnx
from onnx import helper

from onnxtrain import _onnx_functions
from onnxtrain.backend import OnnxtrainBackend, OnnxtrainBackendRep

#: Of one input: True is a tensor, None an optional without element, n a sequence of n tensors.
Structure = tuple[Any, ...]


def containers_of(model: onnx.ModelProto) -> bool:
    """Whether any graph input is a sequence or an optional."""
    return any(i.type.WhichOneof("value") not in ("tensor_type", None) for i in model.graph.input)


def structure_of(inputs: Sequence[Any]) -> Structure:
    """What a call gives, as the key of the model that is made for it."""
    return tuple(None if value is None else len(value) if isinstance(value, (list, tuple)) else True
                 for value in inputs)


def flatten(inputs: Sequence[Any]) -> list[Any]:
    """The tensors of a call, in the order of the inputs that `unfold` makes."""
    flat: list[Any] = []
    for value in inputs:
        if isinstance(value, (list, tuple)):
            flat += value
        elif value is not None:
            flat.append(value)
    return flat


def _element(type_proto: onnx.TypeProto) -> onnx.TypeProto:
    """The type inside a sequence or an optional."""
    kind = type_proto.WhichOneof("value")
    return getattr(type_proto, kind).elem_type


def _tensor_input(name: str, tensor: onnx.TypeProto) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor.tensor_type.elem_type, None)


def _unfold_one(info: onnx.ValueInfoProto, shape: Any) -> tuple[list[onnx.ValueInfoProto], list[onnx.NodeProto]]:
    """Inputs and nodes that stand for `info`."""
    outer = info.type.WhichOneof("value")
    if outer == "tensor_type":
        if shape is not True:
            raise TypeError(f"input '{info.name}' is a tensor, {'None' if shape is None else 'a list'} is given")
        return [info], []
    optional = outer == "optional_type"
    held = _element(info.type) if optional else info.type
    if shape is None:
        if not optional:
            raise TypeError(f"input '{info.name}' is a sequence, None is given")
        return [], [helper.make_node("Optional", [], [info.name], type=held)]
    sequence = held.WhichOneof("value") == "sequence_type"
    if sequence != (shape is not True):
        raise TypeError(f"input '{info.name}' holds a {'sequence' if sequence else 'tensor'}, "
                        f"{'a tensor' if shape is True else 'a list'} is given")
    nodes: list[onnx.NodeProto] = []
    inner = f"{info.name}/held" if optional else info.name
    if sequence:
        item = _element(held)
        inputs = [_tensor_input(f"{info.name}/{k}", item) for k in range(shape)]
        nodes.append(helper.make_node("SequenceConstruct", [i.name for i in inputs], [inner]) if shape else
                     helper.make_node("SequenceEmpty", [], [inner], dtype=item.tensor_type.elem_type))
    else:
        inputs = [_tensor_input(inner, held)]
    if optional:
        nodes.append(helper.make_node("Optional", [inner], [info.name]))
    return inputs, nodes


def unfold(model: onnx.ModelProto, structure: Structure) -> onnx.ModelProto:
    """A model whose inputs are tensors, for calls of one structure.

    Args:
        model: the model; it is not changed.
        structure: of the graph inputs that are no initializers, in order; see `structure_of`.

    Raises:
        TypeError: an input is given as something else than its type says.
    """
    initialized = {i.name for i in model.graph.initializer}
    given = [i for i in model.graph.input if i.name not in initialized]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.input[:], result.graph.node[:]
    nodes: list[onnx.NodeProto] = []
    for info, shape in zip(given, structure, strict=True):
        inputs, added = _unfold_one(info, shape)
        result.graph.input.extend(inputs)
        nodes += added
    result.graph.node.extend([*nodes, *model.graph.node])
    return result


class _Rep:
    """A sequence is given as a list of arrays, an optional without element as None."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = _onnx_functions.inline(model)
        initialized = {i.name for i in model.graph.initializer}
        self._names = [i.name for i in model.graph.input if i.name not in initialized]

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = [inputs[name] for name in self._names] if isinstance(inputs, dict) else inputs
        return OnnxtrainBackendRep(unfold(self._model, structure_of(given))).run(flatten(given), **kwargs)


class ContainersBackend(OnnxtrainBackend):
    """OnnxtrainBackend, for such inputs too."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Any:
        return _Rep(model) if containers_of(model) else super().prepare(model, device, **kwargs)
