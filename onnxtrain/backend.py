"""The ONNX Backend interface over the C core: run any model or single node on NumPy arrays.

    import onnxtrain.backend as backend
    outputs = backend.run_model(onnx.load("model.onnx"), [x, y])

`prepare`, `run_model`, `run_node` and `supports_device` follow `onnx.backend.base`. It is what the ONNX backend suite
runs against (tests/onnx_suite). For training use `ORTModule`: this interface computes forward results only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from onnx.backend.base import Backend, BackendRep

from onnxtrain import _C, _onnx_functions

__all__ = ["OnnxtrainBackend", "OnnxtrainBackendRep", "is_compatible", "prepare", "run_model", "run_node",
           "supports_device"]

_FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e4m3fnuz": torch.float8_e4m3fnuz,
           "float8_e5m2": torch.float8_e5m2, "float8_e5m2fnuz": torch.float8_e5m2fnuz,
           "float8_e8m0fnu": torch.float8_e8m0fnu}
_NARROW = {number: np.dtype(helper.tensor_dtype_to_np_dtype(number))
           for name, number in onnx.TensorProto.DataType.items()
           if name.startswith(("FLOAT8", "FLOAT6", "FLOAT4", "INT4", "UINT4", "INT2", "UINT2"))}


def _to_tensor(array: object, name: str) -> torch.Tensor:
    """A torch tensor with the array's contents. NumPy and torch exchange bfloat16 and float8 by their bits; below 8
    bits
    int8 or uint8 carries an element."""
    array = np.asarray(array)
    if array.dtype.kind in "OUS":
        raise _C.UnsupportedError(f"input '{name}': strings")
    if array.dtype.name == "bfloat16":
        bits = np.ascontiguousarray(array).view(np.int16).reshape(array.shape).copy()
        return torch.from_numpy(bits).view(torch.bfloat16)
    if array.dtype.name in _FLOAT8:
        return torch.from_numpy(np.array(array.view(np.uint8), order="C", copy=True)).view(_FLOAT8[array.dtype.name])
    if array.dtype.name in ("int4", "int2"):
        return torch.from_numpy(array.astype(np.int8))
    if array.dtype.name in ("uint4", "uint2", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"):
        return torch.from_numpy(np.array(array.view(np.uint8), order="C", copy=True))
    return torch.from_numpy(np.array(array, order="C", copy=True))


def _to_array(tensor: Any, elem_type: int = 0) -> Any:
    """NumPy view of an output; sequences become lists and an absent optional None. `elem_type` is what the model says
    of
    it, which alone tells dtypes below 8 bits from the bytes that carry them."""
    if isinstance(tensor, (list, tuple)):
        return [_to_array(t) for t in tensor]
    if tensor is None:
        return None
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
    if tensor.is_floating_point() and tensor.element_size() == 1:
        name = next(name for name, dtype in _FLOAT8.items() if dtype == tensor.dtype)
        return tensor.view(torch.uint8).numpy().view(next(t for t in _NARROW.values() if t.name == name))
    if elem_type in _NARROW and tensor.element_size() == 1:
        return tensor.numpy().view(_NARROW[elem_type])
    return tensor.numpy()


class OnnxtrainBackendRep(BackendRep):
    """A model made ready for `run`. One session serves every shape; see `prepare`."""

    def __init__(self, model: onnx.ModelProto):
        initialized = {i.name for i in model.graph.initializer}
        self._names = [i.name for i in model.graph.input if i.name not in initialized]
        self._elem_types = [o.type.tensor_type.elem_type for o in model.graph.output]
        self._session = _C.Session(_onnx_functions.inline(model).SerializeToString())

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Runs the model.

        Args:
            inputs: a sequence of arrays in the order of the graph's inputs, a dict by name, or one array.
            seed: key of the random operators' generator, 0 unless given.

        Returns:
            One array per graph output; a list for a sequence, None for an optional without element.

        Raises:
            ValueError, TypeError: an input does not fit the graph; the message names it.
            UnsupportedError: an operator, dtype or case that onnxtrain does not have.
        """
        if isinstance(inputs, dict):
            missing = [name for name in self._names if name not in inputs]
            if missing:
                raise ValueError(f"inputs are missing: {', '.join(missing)}")
            inputs = [inputs[name] for name in self._names]
        elif isinstance(inputs, np.ndarray) and len(self._names) == 1:
            inputs = [inputs]
        if len(inputs) != len(self._names):
            raise ValueError(f"{len(inputs)} inputs, the graph has {len(self._names)}")
        tensors = [_to_tensor(a, name) for a, (name, _, _) in zip(inputs, self._session.inputs, strict=True)]
        outputs, _ = self._session.forward(tensors, bytes(len(tensors)), int(kwargs.get("seed", 0)))
        return tuple(_to_array(o, t) for o, t in zip(outputs, self._elem_types))


class OnnxtrainBackend(Backend):
    """`onnx.backend.base.Backend` on the CPU."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether the model loads: every operator is known and every initializer readable."""
        try:
            return cls.supports_device(device) and cls.prepare(model, device, **kwargs) is not None
        except (NotImplementedError, ValueError, TypeError):
            return False

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> OnnxtrainBackendRep:
        """Loads a model.

        Args:
            model: a ModelProto, with its initializers inside.
            device: "CPU".

        Raises:
            ValueError: the model is malformed, or the device is not there.
            UnsupportedError: an operator that onnxtrain does not have, which the message names with its node; or a
                sequence or an optional among the inputs.
        """
        if not cls.supports_device(device):
            raise ValueError(f"device {device!r} is not supported, expected 'CPU'")
        return OnnxtrainBackendRep(model)

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """`prepare` and one `run`."""
        return cls.prepare(model, device, **kwargs).run(inputs, **kwargs)

    @classmethod
    def run_node(cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: object = None,
                 **kwargs: Any) -> tuple[Any, ...]:
        """Runs one operator.

        Args:
            node: the node; its empty input names are absent inputs.
            inputs: one array per input that is present.
            outputs_info: ignored, as dtypes and shapes are inferred.
            opset_version: opset of the node's domain; the newest that `onnx` knows unless given.
        """
        names = [name for name in node.input if name]
        arrays = [np.asarray(a) for a in inputs]
        if len(arrays) != len(names):
            raise ValueError(f"{node.op_type}: {len(arrays)} inputs are given, the node has {len(names)}")
        graph = helper.make_graph(
            [node], "node",
            [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
             for n, a in zip(names, arrays)],
            [onnx.ValueInfoProto(name=name) for name in node.output if name])
        version = int(kwargs.pop("opset_version", onnx.defs.onnx_opset_version()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, version)])
        return cls.run_model(model, arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models run on `device`: only "CPU" (or "CPU:0") does."""
        return device.split(":")[0] == "CPU"


is_compatible = OnnxtrainBackend.is_compatible
prepare = OnnxtrainBackend.prepare
run_model = OnnxtrainBackend.run_model
run_node = OnnxtrainBackend.run_node
supports_device = OnnxtrainBackend.supports_device
