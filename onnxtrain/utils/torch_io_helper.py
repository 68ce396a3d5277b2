"""Nested Python data as a list of tensors and a schema, and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch

_DTYPES = {
    torch.float32: onnx.TensorProto.FLOAT, torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16, torch.uint8: onnx.TensorProto.UINT8, torch.int8: onnx.TensorProto.INT8,
    torch.int16: onnx.TensorProto.INT16, torch.int32: onnx.TensorProto.INT32, torch.int64: onnx.TensorProto.INT64,
    torch.bool: onnx.TensorProto.BOOL, torch.complex64: onnx.TensorProto.COMPLEX64,
    torch.complex128: onnx.TensorProto.COMPLEX128,
}
_BACK: dict[int, torch.dtype] = {number: dtype for dtype, number in _DTYPES.items()}


@dataclasses.dataclass(eq=True)
class _TensorStub:
    """Stands for a tensor in a schema."""

    tensor_idx: int
    name: str | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    shape_dims: int | None = None


def pytorch_type_to_onnx_dtype(dtype: torch.dtype | str) -> int:
    """The TensorProto.DataType of a torch dtype, or of its name as "torch.float32" or "Float".

    Raises:
        KeyError: a dtype that ONNX does not have.
    """
    if isinstance(dtype, str):
        short = dtype.removeprefix("torch.").lower()
        names = {"float": torch.float32, "half": torch.float16, "double": torch.float64, "long": torch.int64,
                 "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8}
        dtype = names.get(short) or getattr(torch, short)
    return _DTYPES[dtype]


def onnx_dtype_to_pytorch_dtype(number: int) -> torch.dtype:
    """The torch dtype of a TensorProto.DataType. KeyError for one that torch does not have."""
    return _BACK[number]


def extract_data_and_schema(data: object, constant_as_tensor: bool = False,
                            device: torch.device | None = None) -> tuple[list[torch.Tensor], Any]:
    """Tensors of nested sequences and mappings, in order, and the same nesting with a stub for each.

    Args:
        constant_as_tensor: bool, int and float become 0-d tensors on `device` too; str and None stay in the schema.

    Raises:
        TypeError: a leaf of another kind.
    """
    tensors: list[torch.Tensor] = []

    def stub(tensor: torch.Tensor, path: tuple[str, ...]) -> _TensorStub:
        tensors.append(tensor)
        return _TensorStub(len(tensors) - 1, "_".join(path), tensor.dtype, shape_dims=tensor.dim())

    def walk(value: object, path: tuple[str, ...]) -> object:
        if isinstance(value, torch.Tensor):
            return stub(value, path)
        if isinstance(value, (bool, int, float)):
            return stub(torch.tensor(value, device=device), path) if constant_as_tensor else value
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, Sequence):
            items = [walk(item, (*path, str(index))) for index, item in enumerate(value)]
            kind: Any = type(value)
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        if isinstance(value, Mapping):
            made = copy.copy(value)
            for key, item in value.items():
                made[key] = walk(item, (*path, str(key)))  # type: ignore[index]
            return made
        raise TypeError(f"ORTModule fails to extract schema from data: Unsupported flatten data type: {type(value)}")

    schema = walk(data, ())
    return tensors, schema


def unflatten_data_using_schema(data: Sequence[torch.Tensor], schema: Any) -> Any:
    """The nesting of `schema` with its stubs replaced by the tensors that they name.

    Raises:
        IndexError: a stub names a tensor that is not in `data`.
    """
    if isinstance(schema, _TensorStub):
        return data[schema.tensor_idx]
    if schema is None or isinstance(schema, (str, bool, int, float)):
        return schema
    if isinstance(schema, Sequence):
        items = [unflatten_data_using_schema(data, item) for item in schema]
        kind: Any = type(schema)
        return kind(*items) if hasattr(schema, "_fields") else kind(items)
    made = copy.copy(schema)
    for key, item in schema.items():
        made[key] = unflatten_data_using_schema(data, item)
    return made
