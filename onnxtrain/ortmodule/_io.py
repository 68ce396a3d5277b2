"""Nested inputs and outputs, by the names that scripts import."""

from onnxtrain.utils.torch_io_helper import _TensorStub, extract_data_and_schema, unflatten_data_using_schema

__all__ = ["_TensorStub", "extract_data_and_schema", "unflatten_data_using_schema"]
