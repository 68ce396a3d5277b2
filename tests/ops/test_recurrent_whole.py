"""RNN, GRU and LSTM as one node need a device's kernel: on the CPU they are expanded, whatever the node says of it."""

from __future__ import annotations

import onnx
import pytest
import torch

from onnxtrain import _C

MODEL = '''<ir_version: 10, opset_import: ["" : 20]> g (float[3, 2, 4] x, float[1, 20, 4] w, float[1, 20, 5] r)
    => (float[3, 1, 2, 5] y) { y = LSTM <hidden_size = 5MORE> (x, w, r) }'''


def model(more: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(MODEL.replace("MORE", more))


def test_the_cpu_expands_a_layer():
    _C.set_timing(True)
    try:
        session = _C.Session(model(", saved_bytes = 64").SerializeToString(), 16)
        tensors = [torch.randn(3, 2, 4), torch.randn(1, 20, 4), torch.randn(1, 20, 5)]
        outputs, run = session.forward(tensors, bytes([1, 1, 1]), 0)
        saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
        run.backward(saved, [torch.ones(3, 1, 2, 5)])
        operators = {op for _, op, *_ in session.timeline()}
    finally:
        _C.set_timing(False)
    assert {"RecurrentSteps", "RecurrentStepsGrad"} <= operators and "LSTM" not in operators


def test_what_a_kernel_saves_is_no_output_of_a_model():
    changed = model(", saved_bytes = 64")
    changed.graph.node[0].output.extend(["", "", "bytes"])
    changed.graph.output.append(onnx.helper.make_tensor_value_info("bytes", onnx.TensorProto.UINT8, [64]))
    tensors = [torch.randn(3, 2, 4), torch.randn(1, 20, 4), torch.randn(1, 20, 5)]
    with pytest.raises((ValueError, _C.UnsupportedError), match="output 3|outputs"):
        _C.Session(changed.SerializeToString(), 16).forward(tensors, bytes(3), 0)


def test_a_size_below_zero_is_refused():
    tensors = [torch.randn(3, 2, 4), torch.randn(1, 20, 4), torch.randn(1, 20, 5)]
    with pytest.raises(ValueError, match="LSTM.*saved_bytes is -5"):
        _C.Session(model(", saved_bytes = -5").SerializeToString(), 16).forward(tensors, bytes(3), 0)
