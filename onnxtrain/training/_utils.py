"""Small helpers that scripts of onnxruntime-training import."""

from __future__ import annotations

import importlib.util
import os
import sys
import types

import torch

from onnxtrain.utils.torch_io_helper import onnx_dtype_to_pytorch_dtype


def dtype_onnx_to_torch(onnx_type: int) -> torch.dtype:
    """The torch dtype of a TensorProto.DataType. KeyError for one that torch does not have."""
    return onnx_dtype_to_pytorch_dtype(onnx_type)


def import_module_from_file(file_path: str, module_name: str | None = None) -> types.ModuleType:
    """Runs a Python file as a module of this name, that of the file unless given, and puts it into sys.modules.

    Raises:
        FileNotFoundError: no such file.
    """
    name = module_name or os.path.splitext(os.path.basename(file_path))[0]
    spec = importlib.util.spec_from_file_location(name, file_path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file_path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
