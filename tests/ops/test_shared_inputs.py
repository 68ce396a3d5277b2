"""One value as several inputs of a node, and operators one after the other on it: gradients add up."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import assert_close, call
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from onnxtrain import _C

INDEX = torch.tensor([[1, 0, 2], [2, 2, 0], [0, 1, 1]])
# operator, how often x is an input, further inputs, attributes, torch on x
NODES = [
    ("Add", 2, [], {}, lambda x: x + x),
    ("Sub", 2, [], {}, lambda x: x - x),
    ("Mul", 2, [], {}, lambda x: x * x),
    ("Div", 2, [], {}, lambda x: x / x),
    ("Pow", 2, [], {}, lambda x: x**x),
    ("Sum", 3, [], {}, lambda x: x + x + x),
    ("Mean", 3, [], {}, lambda x: x),
    ("Max", 2, [], {}, torch.clone),
    ("PRelu", 2, [], {}, lambda x: torch.where(x < 0, x * x, x)),
    ("MatMul", 2, [], {}, lambda x: x @ x),
    ("Gemm", 3, [], {"transB": 1}, lambda x: x @ x.T + x),
    ("Gemm", 3, [], {"transA": 1, "beta": 0.5}, lambda x: x.T @ x + 0.5 * x),
    ("Concat", 3, [], {"axis": 1}, lambda x: torch.cat([x, x, x], 1)),
    ("SwiGLU", 2, [], {}, lambda x: F.silu(x) * x),
    ("Einsum", 2, [], {"equation": "ij,jk->ki"}, lambda x: (x @ x).T),
    ("Einsum", 3, [], {"equation": "ij,ij,kj->k"}, lambda x: torch.einsum("ij,ij,kj->k", x, x, x)),
    ("Einsum", 2, [], {"equation": "ii,ij->j"}, lambda x: torch.einsum("ii,ij->j", x, x)),
    ("ScatterElements", 1, [INDEX, "x"], {"reduction": "add"}, lambda x: x.scatter_add(0, INDEX, x)),
    ("ScatterElements", 1, [INDEX, "x"], {"reduction": "mul"}, lambda x: x.scatter_reduce(0, INDEX, x, "prod")),
    ("GatherElements", 1, [INDEX], {}, lambda x: x.gather(0, INDEX)),
    ("Where", 0, [INDEX > 0, "x", "x"], {}, torch.clone),
    ("TensorScatter", 2, [], {"axis": 1}, torch.clone),
]


def session(op_type, times, more, attrs, twice):
    names = ["x"] * times + [m if isinstance(m, str) else f"c{i}" for i, m in enumerate(more)]
    constants = [numpy_helper.from_array(m.numpy(), f"c{i}") for i, m in enumerate(more) if not isinstance(m, str)]
    nodes = [helper.make_node(op_type, names, ["y"], **attrs)]
    if twice:
        nodes.append(helper.make_node(op_type, ["y" if n == "x" else n for n in names], ["z"], **attrs))
    outputs = [ValueInfoProto(name="y"), *([ValueInfoProto(name="z")] if twice else [])]
    graph = helper.make_graph(nodes, "shared", [helper.make_tensor_value_info("x", TensorProto.DOUBLE, [3, 3])],
                              outputs, constants)
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)],
                                        ir_version=10).SerializeToString())


@pytest.mark.parametrize("node, twice", [(n, t) for n, t in itertools.product(NODES, (False, True)) if not t
                                         or n[0] not in ("Concat", "Einsum")],
                         ids=lambda v: f"{v[0]}-{v[3]}" if isinstance(v, tuple) else "chain" if v else "one")
def test_shared(node, twice):
    op_type, times, more, attrs, function = node
    x = torch.from_numpy(np.random.default_rng(1).uniform(0.3, 1.4, (3, 3))).requires_grad_()
    y = function(x)
    want = [y, function(y)] if twice else [y]
    rng = np.random.default_rng(2)
    grads = [torch.from_numpy(rng.uniform(-1, 1, tuple(w.shape))) for w in want]
    (dx,) = torch.autograd.grad(want, [x], grads)
    outputs, (got,) = call(session(op_type, times, more, attrs, twice), [x.detach()], b"\1", grads)
    for o, w in zip(outputs, want, strict=True):
        assert_close(o.numpy(), w.detach().numpy(), "output")
    assert_close(got.numpy(), dx.numpy(), "gradient", 1e-10)
