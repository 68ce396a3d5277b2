"""Small tools that training scripts import: nested data taken apart and put together, names of dtypes."""

from onnxtrain.utils.torch_io_helper import (
    extract_data_and_schema,
    onnx_dtype_to_pytorch_dtype,
    pytorch_type_to_onnx_dtype,
    unflatten_data_using_schema,
)

__all__ = ["extract_data_and_schema", "onnx_dtype_to_pytorch_dtype", "pytorch_type_to_onnx_dtype",
           "unflatten_data_using_schema"]
