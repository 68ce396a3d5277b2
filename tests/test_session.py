"""A session that is made or called wrongly says what was expected, and stays of use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import _C

FLOAT = TensorProto.FLOAT


def model(nodes: list, inputs: dict[str, list], outputs: list[str], **constants: np.ndarray) -> bytes:
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info(n, FLOAT, s) for n, s in inputs.items()],
                              [helper.make_tensor_value_info(n, FLOAT, None) for n in outputs],
                              [numpy_helper.from_array(value, name) for name, value in constants.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


@pytest.fixture
def session() -> _C.Session:
    return _C.Session(model([helper.make_node("Mul", ["x", "w"], ["y"])], {"x": ["n", 3], "w": [3]}, ["y"]))


X, W = torch.ones(2, 3), torch.full((3,), 2.0)


@pytest.mark.parametrize("use", [lambda s: s.inputs, lambda s: s.outputs, lambda s: s.random, lambda s: s.text(),
                                 lambda s: s.stats(), lambda s: s.save(), lambda s: s.save("post_processed"),
                                 lambda s: s.subgraphs(), lambda s: s.graphs(), lambda s: s.timings(),
                                 lambda s: s.plan([[2, 3], [3]], b"\0\0"),
                                 lambda s: s.kernels(), lambda s: s.timeline(), lambda s: s.forward([X, W], b"\0\0")])
def test_session_that_was_never_initialised(use):
    with pytest.raises(RuntimeError, match="never initialised"):
        use(_C.Session.__new__(_C.Session))
    broken = _C.Session.__new__(_C.Session)
    with pytest.raises(ValueError, match="model"):
        broken.__init__(b"nonsense")
    with pytest.raises(RuntimeError, match="never initialised"):
        use(broken)


def test_session_is_initialised_once(session):
    with pytest.raises(RuntimeError, match="once"):
        session.__init__(b"")
    assert session.forward([X, W], b"\0\0")[0][0].tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("arguments, error, text", [
    (("model",), TypeError, "bytes"), ((b"", -1), ValueError, "programs is -1"),
    ((b"", 0), ValueError, "programs is 0"),
    ((b"", 2**40), OverflowError, "int"), ((), TypeError, "model"), ((b"x", 1, 2), TypeError, "Session"),
])
def test_arguments_of_session(arguments, error, text):
    with pytest.raises(error, match=text):
        _C.Session(*arguments)


@pytest.mark.parametrize("arguments, error, text", [
    (([X], b"\0\0"), ValueError, "1 tensors, expected 2"), (([X, W, W], b"\0\0"), ValueError, "3 tensors, expected 2"),
    (([X, W], b"\0"), ValueError, "grad_mask has 1 bytes, expected 2"),
    ((X.int(), b"\0\0"), TypeError, "input 'x': dtype is int32, the graph has float"),
    (([X, None], b"\0\0"), TypeError, "input 1: a torch.Tensor"),
    (([X, W.numpy()], b"\0\0"), TypeError, "input 1: a torch.Tensor"),
    (([X, W.double()], b"\0\0"), TypeError, "input 'w': dtype is double, the graph has float"),
    (([X, W[:2]], b"\0\0"), ValueError, r"input 'w': shape is \[2\], the graph has \[3\]"),
    (([X[0], W], b"\0\0"), ValueError, r"input 'x': shape is \[3\], the graph has \[\?, 3\]"),
    (([X.reshape(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3), W], b"\0\0"), Exception, "input 'x': rank 13, at most 12"),
    (([X.to_sparse(), W], b"\0\0"), TypeError, "input 0: a dense tensor"),
    (([X, W.to("meta")], b"\0\0"), TypeError, "input 1: a dense tensor"),
    ((5, b"\0\0"), TypeError, "iterable"),
])
def test_arguments_of_forward(session, arguments, error, text):
    with pytest.raises(error, match=text):
        session.forward(*arguments)
    assert session.forward([X, W], b"\0\0")[0][0].tolist() == [[2.0] * 3] * 2
