"""The description of a model's inputs and outputs that an ORTTrainer takes: a dict, checked, as named tuples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from onnxtrain.training._validation import Errors, check

LEARNING_RATE_IO_DESCRIPTION_NAME = "__learning_rate"
ALL_FINITE_IO_DESCRIPTION_NAME = "__all_finite"
LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME = "__loss_scale_input_name"
GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME = "__gradient_accumulation_name"


class _InputDescription(NamedTuple):
    name: str
    shape: list[int | str]


class _InputDescriptionTyped(NamedTuple):
    name: str
    shape: list[int | str]
    dtype: torch.dtype


_Typed = _InputDescriptionTyped  # the class below has an attribute of that name


class _OutputDescription(NamedTuple):
    name: str
    shape: list[int | str]
    is_loss: bool


class _OutputDescriptionTyped(NamedTuple):
    name: str
    shape: list[int | str]
    is_loss: bool
    dtype: torch.dtype
    dtype_amp: torch.dtype | None


class _Added:
    """The description of a value that a trainer adds: None, until a name is assigned to it."""

    def __init__(self, shape: list[int | str], dtype: torch.dtype, doc: str) -> None:
        self._shape, self._dtype, self.__doc__ = shape, dtype, doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._place = f"_{name}"

    def __get__(self, desc: object, owner: type) -> Any:
        return self if desc is None else vars(desc).get(self._place)

    def __set__(self, desc: object, name: str) -> None:
        check(isinstance(name, str) and bool(name), "'name' must be a non-empty string")
        vars(desc)[self._place] = _InputDescriptionTyped(name, self._shape, self._dtype)


class _ORTTrainerModelDesc:
    """A description, checked.

    Args:
        model_desc: ``{"inputs": [(name, shape), ...], "outputs": [(name, shape) or (name, shape, is_loss), ...]}``;
            a shape is a list of sizes, and of names for sizes that may change; [] is that of a scalar.

    Attributes:
        inputs, outputs: _InputDescription and _OutputDescription, or the typed ones once dtypes are known.
        learning_rate, all_finite, loss_scale_input, gradient_accumulation: of values that a trainer adds; all but the
            first are set by assigning a name, and None before.

    Raises:
        ValueError: the dict is not of that form; the message says where.
    """

    _InputDescription = _InputDescription
    _InputDescriptionTyped = _Typed
    _OutputDescription = _OutputDescription
    _OutputDescriptionTyped = _OutputDescriptionTyped

    def __init__(self, model_desc: dict[str, Any]) -> None:
        errors = _errors(model_desc)
        if errors:
            raise ValueError(f"Invalid model_desc: {errors}")
        self.inputs: list[_InputDescription | _Typed] = [_InputDescription(*given) for given in model_desc["inputs"]]
        self.outputs: list[_OutputDescription | _OutputDescriptionTyped] = [
            _OutputDescription(given[0], given[1], bool(given[2:]) and given[2])
                                   for given in model_desc["outputs"]]
        self.learning_rate = _InputDescriptionTyped(LEARNING_RATE_IO_DESCRIPTION_NAME, [1], torch.float32)

    all_finite = _Added([1], torch.bool, "Whether all gradients of a step were finite.")
    loss_scale_input = _Added([], torch.float32, "What the loss is multiplied by.")
    gradient_accumulation = _Added([1], torch.bool, "Whether a step only accumulates.")

    def add_type_to_input_description(self, index: int, dtype: torch.dtype) -> None:
        """Makes one input's description a typed one."""
        check(isinstance(dtype, torch.dtype), "'dtype' must be a torch.dtype")
        self.inputs[index] = _InputDescriptionTyped(self.inputs[index].name, self.inputs[index].shape, dtype)

    def add_type_to_output_description(self, index: int, dtype: torch.dtype,
                                       dtype_amp: torch.dtype | None = None) -> None:
        """Makes one output's description a typed one; dtype_amp is what it has in mixed precision."""
        check(isinstance(dtype, torch.dtype), "'dtype' must be a torch.dtype")
        name, shape, is_loss = self.outputs[index][:3]
        self.outputs[index] = _OutputDescriptionTyped(name, shape, is_loss, dtype, dtype_amp)

    @property
    def loss(self) -> int:
        """Which output is the loss.

        Raises:
            AssertionError: none is.
        """
        for index, output in enumerate(self.outputs):
            if output.is_loss:
                return index
        raise AssertionError("model_desc: no output has is_loss set to True")

    def __repr__(self) -> str:
        return repr({"inputs": self.inputs, "outputs": self.outputs})


def _errors(given: object) -> Errors:
    if not isinstance(given, dict):
        return {"model_desc": ["must be of dict type"]}
    errors: Errors = {str(name): ["unknown field"] for name in given if name not in ("inputs", "outputs")}
    for name, of_item in (("inputs", _input_errors), ("outputs", _output_errors)):
        found = _list_errors(given, name, of_item)
        if found:
            errors[name] = found
    return dict(sorted(errors.items()))


def _list_errors(given: dict[str, Any], name: str, check: Callable[[object], list[str]]) -> Sequence[str | Errors]:
    if name not in given:
        return ["required field"]
    items = given[name]
    if not isinstance(items, list):
        return ["must be of list type"]
    if not items:
        return ["min length is 1"]
    found = {index: errors for index, item in enumerate(items) if (errors := check(item))}
    losses = [index for index, item in enumerate(items) if isinstance(item, tuple) and len(item) == 3
              and item[2] is True]
    for index in losses[1:]:
        found.setdefault(index, []).append("only one is_loss can bet set to True")
    return [dict(sorted(found.items()))] if found else []


def _input_errors(item: object) -> list[str]:
    if not isinstance(item, tuple) or len(item) != 2:
        return ["must be a tuple with size 2"]
    return _name_and_shape_errors(item)


def _output_errors(item: object) -> list[str]:
    if not isinstance(item, tuple) or len(item) not in (2, 3):
        return ["must be a tuple with size 2 or 3"]
    errors = _name_and_shape_errors(item)
    if len(item) == 3 and not isinstance(item[2], bool):
        errors.append("the third element of the tuple (aka is_loss) must be a boolean")
    return errors


def _name_and_shape_errors(item: tuple[object, ...]) -> list[str]:
    errors = []
    if not isinstance(item[0], str):
        errors.append("the first element of the tuple (aka name) must be a string")
    if not isinstance(item[1], list):
        errors.append("the second element of the tuple (aka shape) must be a list")
    elif any(isinstance(size, bool) or not isinstance(size, (int, str)) for size in item[1]):
        errors.append("each shape must be either a string or integer")
    return errors
