"""Cross-entropy and the logarithm of a sum of exponentials over rows that are read a page at a time."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from onnxtrain import _C

INF, NAN = float("inf"), float("nan")
LENGTHS = [1, 15, 255, 1023, 1024, 1025, 2048, 3001, 9000]


def rows_of(n):
    """Rows that rise, fall and lie far from 0, and such as have pages without a number or with too large ones."""
    rng = np.random.default_rng(n)
    ramp = np.linspace(-60, 60, n) if n > 1 else np.zeros(1)
    page = np.arange(n) // 1024
    rows = np.stack([rng.normal(size=n), ramp, ramp[::-1], 1e4 + rng.normal(size=n), -1e30 * np.ones(n),
                     *[rng.normal(size=n) for _ in range(8)], np.full(n, -INF), 59 * page + rng.normal(size=n),
                     61 * page + rng.normal(size=n)]).astype(np.float32)
    rows[5, :n // 2] = -INF
    rows[6, n // 2:] = -INF
    rows[7, -1] = 500
    rows[8, 0] = 500
    rows[9, n // 2] = INF
    rows[10, n // 3] = NAN
    rows[11, -1], rows[11, 0] = NAN, INF
    rows[12, :-1] = -INF
    return torch.from_numpy(rows)


def session_of(node, inputs):
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
                      .SerializeToString())


@pytest.mark.parametrize("n", LENGTHS)
def test_cross_entropy(n):
    x = rows_of(n)
    labels = torch.arange(len(x)) * 7 % n
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["x", "labels"], ["y"], reduction="none")
    session = session_of(node, [helper.make_tensor_value_info("x", 1, x.shape),
                                helper.make_tensor_value_info("labels", 7, labels.shape)])
    (y,), run = session.forward([x, labels], b"\1\0")
    saved = [(x, labels)[i] for i in run.saved_inputs] + [y for _ in run.saved_outputs]
    dy = torch.linspace(0.5, 1.5, len(x))
    dx = run.backward(saved, [dy])[0]
    wide = x.double().requires_grad_()
    want = F.cross_entropy(wide, labels, reduction="none")
    want.backward(dy.double())
    torch.testing.assert_close(y.double(), want.detach(), rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(dx.double(), wide.grad, rtol=2e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("n", LENGTHS)
def test_log_sum_exp(n):
    x = rows_of(n)
    y, = session_of(helper.make_node("ReduceLogSumExp", ["x"], ["y"], keepdims=1),
                    [helper.make_tensor_value_info("x", 1, x.shape)]).forward([x], b"\0")[0]
    assert torch.allclose(y.double(), torch.logsumexp(x.double(), (0, 1), keepdim=True), equal_nan=True)
    for row in x[:9]:
        y, = session_of(helper.make_node("ReduceLogSumExp", ["x"], ["y"], keepdims=0),
                        [helper.make_tensor_value_info("x", 1, row.shape)]).forward([row], b"\0")[0]
        torch.testing.assert_close(y.double(), torch.logsumexp(row.double(), 0), rtol=2e-6, atol=2e-6)
