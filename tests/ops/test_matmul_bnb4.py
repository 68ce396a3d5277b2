"""MatMulBnb4 of com.microsoft: products with a weight of 4-bit codes against NumPy and torch, gradients against finite
differences, 16-bit floats, codes that end within a byte or a block, errors by name.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from harness import C, Case, R, V, assert_close, call, expect_error, run_case, session_of
from onnx import helper, numpy_helper

from onnxtrain import _C

DOMAIN = "com.microsoft"
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                0.7229568362236023, 1.0], np.float32)
DTYPES = {torch.float16: onnx.TensorProto.FLOAT16, torch.bfloat16: onnx.TensorProto.BFLOAT16,
          torch.float32: onnx.TensorProto.FLOAT}


def weight_of(codes, absmax, n, k, block, quant_type):
    """The (n, k) weight: the earlier of two codes is in the high half of their byte."""
    codes = codes.to(torch.int64)
    flat = torch.stack([codes >> 4, codes & 15], 1).reshape(-1)[: n * k]
    table = torch.from_numpy((FP4, NF4)[quant_type])[flat].to(absmax.dtype)
    return (table * absmax.repeat_interleave(block)[: n * k]).reshape(n, k)


def attributes(n, k, block, quant_type, **more):
    return {"N": n, "K": k, "block_size": block, "quant_type": quant_type, **more}


def case(a, n, k, block, quant_type, **more):
    """A of these dims in front of the inner one; codes and scales at random."""
    trans = more.get("transB", 1)

    def expected(x, codes, absmax):
        weight = weight_of(codes, absmax, n, k, block, quant_type).to(x.dtype)
        return x @ (weight.T if trans else weight)

    count = n * k
    return Case("MatMulBnb4", [R(*a, k if trans else n), R(-(-count // 2), low=0, high=256, dtype=np.uint8),
                               R(-(-count // block), low=0.1, high=2)], attributes(n, k, block, quant_type, **more),
                domain=DOMAIN, torch=expected, grad=[0], fd=count < 200, tol=1e-4,
                name=f"{'x'.join(map(str, a))}_{n}_{k}_{block}_{quant_type}_{trans}")


CASES = [
    case([5], 8, 16, 16, 1),
    case([5], 8, 16, 16, 0),
    case([2, 3], 7, 11, 16, 1),  # an odd number of codes, rows that begin within a byte, a block that is not full
    case([3], 5, 13, 32, 0, transB=0),
    case([4], 6, 16, 16, 1, transB=0, training_mode=1),
    case([], 6, 9, 16, 1),
    case([0], 6, 16, 16, 1),
    case([1, 2, 2], 1, 1, 64, 0),
    case([3], 70, 4100, 64, 1),  # several panels of rows
    case([3], 600, 33, 64, 1, transB=0),  # several panels that add up
    case([3], 3, 1537, 128, 1, transB=0),  # several panels of columns
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def test_values_of_every_code():
    """Codes 0 to 15 of a block, which a unit matrix multiplies: the table, times the scale, bit for bit."""
    codes = np.array([16 * i + i + 1 for i in range(0, 16, 2)], np.uint8)
    for quant_type, table in enumerate((FP4, NF4)):
        made = Case("MatMulBnb4", [R(1, 1), R(8, dtype=np.uint8), R(1)], attributes(16, 1, 16, quant_type), domain=DOMAIN)
        arrays = [np.ones((1, 1), np.float32), codes, np.array([0.3], np.float32)]
        (y,), _ = call(session_of(made, arrays), [torch.from_numpy(a) for a in arrays], bytes(3), None)
        np.testing.assert_array_equal(y.numpy()[0], table * np.float32(0.3))


def session_16(a, absmax, attrs):
    inputs = [helper.make_tensor_value_info("a", DTYPES[a.dtype], a.shape),
              helper.make_tensor_value_info("b", onnx.TensorProto.UINT8, None),
              helper.make_tensor_value_info("absmax", DTYPES[absmax.dtype], absmax.shape)]
    node = helper.make_node("MatMulBnb4", ["a", "b", "absmax"], ["y"], name="node", domain=DOMAIN, **attrs)
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    return _C.Session(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("narrow_scales", [False, True])
@pytest.mark.parametrize("trans", [0, 1])
def test_16_bits(dtype, narrow_scales, trans):
    """The weight is rounded to the dtype of A, the sums of float32 once: what torch gives for the dequantized weight."""
    torch.manual_seed(0)
    n, k, block = 24, 40, 32
    a = torch.randn(6, k if trans else n).to(dtype)
    codes = torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8)
    absmax = torch.rand(n * k // block) + 0.1
    absmax = absmax.to(dtype) if narrow_scales else absmax
    weight = weight_of(codes, absmax.float(), n, k, block, 1).to(dtype).double()
    dy = torch.randn(6, n if trans else k).to(dtype)
    session = session_16(a, absmax, attributes(n, k, block, 1, transB=trans))
    (y,), grads = call(session, [a, codes, absmax], b"\1\0\0", [dy])
    assert y.dtype == grads[0].dtype == dtype and grads[1:] == (None, None)
    for got, x, w in ((y, a, weight.T if trans else weight), (grads[0], dy, weight if trans else weight.T)):
        exact = x.double() @ w
        error = (got.double() - exact).abs()
        assert (error <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5).all(), error.max()


def test_the_gradient_has_a_weight_of_its_own_dtype():
    """As bitsandbytes' backward, which rounds to what the weight was before it was quantized."""
    torch.manual_seed(0)
    n, k, block = 8, 16, 16
    a, dy = torch.randn(3, k), torch.randn(3, n)
    codes, absmax = torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8), torch.rand(n * k // block)
    weight = weight_of(codes, absmax, n, k, block, 1)
    session = session_16(a, absmax, attributes(n, k, block, 1, grad_weight_dtype=int(DTYPES[torch.bfloat16])))
    (y,), grads = call(session, [a, codes, absmax], b"\1\0\0", [dy])
    torch.testing.assert_close(y, a @ weight.T)
    torch.testing.assert_close(grads[0], dy @ weight.bfloat16().float(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(grads[0], dy @ weight, rtol=1e-6, atol=1e-6)


def test_any_number_of_threads():
    made = case([5], 200, 1100, 64, 1)
    arrays = [spec.make(i).astype(np.float32) if spec.is_float else spec.make(i) for i, spec in enumerate(made.inputs)]
    tensors = [torch.from_numpy(a) for a in arrays]
    dy = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            (y,), grads = call(session_of(made, arrays), tensors, b"\1\0\0", [dy])
            results.append((y, grads[0]))
    finally:
        torch.set_num_threads(before)
    for y, dx in results[1:]:
        assert_close(y.numpy(), results[0][0].numpy(), "y", 1e-4)
        assert_close(dx.numpy(), results[0][1].numpy(), "dx", 1e-4)


def refused(error, message, *, n=4, k=8, block=16, quant_type=1, a=None, b=None, absmax=None, drop=(), **more):
    attrs = {name: value for name, value in attributes(n, k, block, quant_type, **more).items() if name not in drop}
    expect_error(Case("MatMulBnb4", [a or R(3, 8), b or R(16, dtype=np.uint8, low=0, high=256), absmax or R(2)], attrs,
                      domain=DOMAIN, dtypes=[np.float32]), error, f"MatMulBnb4 'node': {message}")


@pytest.mark.parametrize("name", ["N", "K", "block_size", "quant_type"])
def test_a_missing_attribute(name):
    refused(ValueError, f"attribute {name} is missing", drop=(name,))


def test_errors():
    refused(ValueError, "attribute N is 0, at least 1", n=0)
    refused(ValueError, f"N {2**40} times K {2**40} overflows", n=2**40, k=2**40)
    refused(ValueError, "attribute block_size is 8, at least 16", block=8)
    refused(ValueError, "attribute block_size is 48, a power of two", block=48)
    refused(ValueError, "attribute quant_type is 2", quant_type=2)
    refused(ValueError, "attribute quant_type is -1", quant_type=-1)
    refused(ValueError, "attribute weight_dtype is 7, a float", weight_dtype=7)
    refused(ValueError, "attribute grad_weight_dtype is 99, a float", grad_weight_dtype=99)
    refused(_C.UnsupportedError, "attribute 'accuracy_level'", accuracy_level=1)
    refused(ValueError, "A is [3, 7], its last dim must be K, 8", a=R(3, 7))
    refused(ValueError, "A is [3, 8], its last dim must be N, 4", transB=0)
    refused(ValueError, "A is [], its last dim", a=R())
    refused(ValueError, "B is [15], [16] is expected", b=R(15, dtype=np.uint8))
    refused(ValueError, "B is [16, 1], [16] is expected", b=R(16, 1, dtype=np.uint8))
    refused(ValueError, "absmax is [3], [2] is expected", absmax=R(3))
    refused(TypeError, "A is int64", a=R(3, 8, dtype=np.int64))
    refused(TypeError, "B is int8, uint8 is expected", b=R(16, dtype=np.int8))
    refused(TypeError, "absmax is double, float or the type of A", absmax=R(2, dtype=np.float64))


def test_without_an_input():
    with pytest.raises(ValueError, match="MatMulBnb4 'node': 2 inputs, expected 3"):
        made = Case("MatMulBnb4", [R(3, 8), R(16, dtype=np.uint8)], attributes(4, 8, 16, 1),
                    domain=DOMAIN)
        arrays = [np.ones((3, 8), np.float32), np.ones(16, np.uint8)]
        call(session_of(made, arrays), [torch.from_numpy(a) for a in arrays], bytes(2), None)


def test_constants_are_folded():
    """All inputs known: no kernel is left."""
    made = Case("MatMulBnb4", [C(np.ones((2, 8)), np.float32), C(np.full(16, 0xFF), np.uint8), C([1.0, 2.0], np.float32)],
                attributes(4, 8, 16, 1), domain=DOMAIN)
    session = session_of(made, [spec.make(0) for spec in made.inputs])
    (y,), _ = call(session, [], b"", None)
    np.testing.assert_array_equal(y.numpy(), [[8, 8, 16, 16]] * 2)
    assert session.kernels() == []


def test_rows_of_ignored_labels_are_not_computed():
    """The product has the rows that the loss reads; losses and gradients are those of all rows."""
    torch.manual_seed(0)
    n, k = 6, 16
    inputs = [helper.make_tensor_value_info("x", 1, [5, 12, k]), helper.make_tensor_value_info("b", 2, [n * k // 2]),
              helper.make_tensor_value_info("s", 1, [n * k // 16]), helper.make_tensor_value_info("labels", 7, [5, 12])]
    nodes = [helper.make_node("MatMulBnb4", ["x", "b", "s"], ["p"], domain=DOMAIN, **attributes(n, k, 16, 1)),
             helper.make_node("Reshape", ["p", "flat"], ["rows"]),
             helper.make_node("Reshape", ["labels", "vector"], ["l"]),
             helper.make_node("SoftmaxCrossEntropyLoss", ["rows", "l"], ["loss"], ignore_index=-100)]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("loss", 1, [])],
                              [numpy_helper.from_array(np.array([-1, n]), "flat"),
                               numpy_helper.from_array(np.array([-1]), "vector")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    session = _C.Session(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(),
                         programs=16, rows=7)
    x, labels = torch.randn(5, 12, k), torch.randint(0, n, (5, 12))
    labels[torch.rand(5, 12) < 0.7] = -100
    b, s = torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8), torch.rand(n * k // 16)
    _C.disable_passes(["+pack_rows"])
    try:
        (loss,), grads = call(session, [x, b, s, labels], b"\1\0\0\0", [torch.ones(())])
        text = session.text("program")
    finally:
        _C.disable_passes([])
    x.requires_grad_()
    want = torch.nn.functional.cross_entropy((x @ weight_of(b, s, n, k, 16, 1).T).reshape(60, n), labels.reshape(60))
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(grads[0], torch.autograd.grad(want, x)[0])
    count = int((labels != -100).sum())
    products = [line for line in text.splitlines() if "com.microsoft.MatMulBnb4" in line]
    assert len(products) == 2 and all(f"[{count},1,{width}]" in line for line, width in zip(products, (n, k))), products


def test_v_is_a_run_time_weight():
    """Codes and scales that change between calls are read again."""
    made = Case("MatMulBnb4", [V([[1.0]]), V([0], np.uint8), V([1.0])], attributes(1, 1, 16, 1), domain=DOMAIN)
    session = session_of(made, [np.ones((1, 1), np.float32), np.zeros(1, np.uint8), np.ones(1, np.float32)])
    for code, scale in ((0xF0, 2.0), (0x00, 3.0)):
        (y,), _ = call(session, [torch.ones(1, 1), torch.tensor([code], dtype=torch.uint8), torch.tensor([scale])],
                       bytes(3), None)
        assert y.item() == (scale if code else -scale)
