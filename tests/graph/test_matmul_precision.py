"""torch.set_float32_matmul_precision() errs within what "medium" and "high" promise, and leaves "highest" as it is."""

import numpy as np
import onnx
import pytest
import torch
from harness import HALF_KERNELS
from onnx import helper

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule


@pytest.fixture(autouse=True)
def restore():
    yield
    _C.disable_passes([])
    _C.set_matmul_precision("highest")
    torch.set_float32_matmul_precision("highest")


def random(*shape, seed):
    return torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, shape)).float()


A, B, C = random(3, 40, 200, seed=1), random(200, 70, seed=2), random(70, seed=3)
FORMS = {
    "MatMul": (["a", "b"], {}, lambda a, b: a @ b, (A, B)),
    "batch": (["a", "b"], {}, lambda a, b: a @ b, (A, random(3, 200, 70, seed=6))),
    "Gemm": (["a", "b", "c"], {"transB": 1, "alpha": 0.5}, lambda a, b, c: 0.5 * a @ b.T + c,
             (A[0], B.T.contiguous(), C)),
    "FusedMatMul": (["a", "b"], {"transA": 1, "domain": "ai.onnxtrain"}, lambda a, b: a.mT @ b, (A.mT.contiguous(), B)),
}


def tiles():
    """Whether one kernel of ours makes the parts and multiplies them."""
    return _C.build_info()["split_products"]


def off_by(form, precision):
    """Largest error of the value and of each gradient over that tensor's largest entry; 16-bit tensors and split
    products in the program. Without groups, as part of which operands are rounded where the processor has no 16-bit
    products, and widened again, so that nobody sees a 16-bit tensor.
    """
    _C.disable_passes(["fuse_elementwise"])
    names, attrs, compute, tensors = FORMS[form]
    infos = [helper.make_tensor_value_info(n, 1, t.shape) for n, t in zip(names, tensors)]
    op = "MatMul" if form == "batch" else form
    graph = helper.make_graph([helper.make_node(op, names, ["y"], **attrs)], "g", infos,
                              [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)]
    session = _C.Session(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    _C.set_matmul_precision(precision, True)
    ys, run = session.forward(list(tensors), b"\1" * len(tensors))
    leaves = [t.double().requires_grad_() for t in tensors]
    y = compute(*leaves)
    dy = random(*y.shape, seed=4)
    grads = run.backward([tensors[i] for i in run.saved_inputs] + [ys[i] for i in run.saved_outputs], [dy])
    expected = (y, *torch.autograd.grad(y, leaves, dy.double()))
    errors = [((got.double() - want).abs().max() / want.abs().max()).item()
              for got, want in zip((*ys, *grads), expected, strict=True)]
    text = session.text("program")
    return errors, text.count("-> bfloat16") + text.count("bfloat16["), text.count("bf16x3")


@pytest.mark.parametrize("form", FORMS)
def test_accuracy(form):
    exact, none, _ = off_by(form, "highest")
    three, no, bf16x3 = off_by(form, "high")
    one, some, _ = off_by(form, "medium")
    assert none == no == 0 and some > 0 and bool(bf16x3) == tiles()
    for highest, high, medium in list(zip(exact, three, one))[:3]:
        assert highest < 1e-6 and high < (2e-5 if tiles() else 1e-6) and 1e-4 < medium < 1e-2


def test_program_for_each():
    """A setting has a program of its own; going back finds the first again."""
    module = ORTModule(torch.nn.Linear(512, 512))
    x = random(512, 512, seed=5)
    results = {}
    for precision in ("highest", "medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        result = module(x).detach()
        if precision in results:
            assert torch.equal(results[precision], result)
        results[precision] = result
        session = module._all_programs()[0][1][0].session
        if precision == "medium":
            fast = any(kernel in HALF_KERNELS for _, kernel, _ in session.kernels())
    assert session.stats()["programs_built"] == 2
    error = (results["medium"] - results["highest"]).abs().max().item()
    assert (1e-5 < error < 1e-2) if fast else error == 0


def test_small_products_stay():
    """Rounding the operands would cost more than it gains."""
    torch.set_float32_matmul_precision("medium")
    module = ORTModule(torch.nn.Linear(16, 16))
    x = random(16, 16, seed=5)
    module(x)
    assert "bfloat16" not in module._all_programs()[0][1][0].session.text("program")


def test_unknown():
    with pytest.raises(ValueError, match="expected highest, high or medium"):
        _C.set_matmul_precision("low")
