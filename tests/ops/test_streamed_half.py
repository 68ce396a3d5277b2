"""StreamedCrossEntropy of bfloat16 operands: values are rounded where those of stored scores are, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from harness import call, failing_allocations
from onnx import TensorProto, helper

from onnxtrain import _C

OURS = "ai.onnxtrain"
KERNELS = ["streamed_cross_entropy_half", "streamed_cross_entropy_grad_half"]


@pytest.fixture(autouse=True)
def kernels_as_they_were():
    yield
    _C.disable_kernels([])


def operands(rows, width, classes, trans, ignored=-1):
    """h, W, labels and a row whose products are exact sums, whatever their order; the last rows have no label."""
    rng = torch.Generator().manual_seed(rows)

    def fractions(*size):
        return (torch.randint(-60, 61, size, generator=rng) / 32).bfloat16()

    w = fractions(classes, width)
    labels = torch.randint(0, classes, (rows,), generator=rng)
    labels[0], labels[1], labels[rows // 3], labels[-3:] = classes - 1, 0, ignored, ignored
    return fractions(rows, width), w if trans else w.mT.contiguous(), labels, fractions(classes)


def wanted(h, w, labels, row, attrs, rounds):
    """Loss and gradients for dloss = 1 in float64, where `rounds` says which values become bfloat16; and the error that
    is to be expected of each gradient's sums in float32, u * sqrt(k) times the sums of magnitudes (Higham and Mary,
    A New Approach to Probabilistic Rounding Error Analysis, 2019), which one order of the sums in BLAS comes near."""
    h, w, row = h.double(), w.double(), None if row is None else row.double()
    w = w.mT if attrs["transB"] else w
    scores = h @ w + (0 if row is None else row)
    if "scores" in rounds:
        scores = scores.bfloat16().double()
    scores.requires_grad_()
    reduction = attrs.get("reduction", "mean")
    loss = F.cross_entropy(scores, labels, ignore_index=-1, reduction=reduction)
    (d,) = torch.autograd.grad(loss.sum(), scores)
    if "gradient" in rounds:
        d = d.float().bfloat16().double()

    def gradients(d, h, w):
        dw = d.mT @ h
        return [d @ w.mT, dw if attrs["transB"] else dw.mT, *([] if row is None else [d.sum(0)])]

    terms = [d.shape[1], d.shape[0], d.shape[0]]
    sums = gradients(d.abs(), h.abs(), w.abs())
    errors = [2**-24 * k**0.5 * s for k, s in zip(terms, sums, strict=False)]
    return loss.detach(), gradients(d, h, w), errors


def session_of(tensors, attrs):
    names = ["h", "w", "labels", "row"][:len(tensors)]
    outputs = ["y", "", "dh", "dw", *(["drow"] if len(tensors) == 4 else [])] if "rows" in attrs else ["y"]
    node = helper.make_node("StreamedCrossEntropy", names, outputs, domain=OURS, **attrs)
    graph = helper.make_graph([node], "g", [
        helper.make_tensor_value_info(n, TensorProto.INT64 if n == "labels" else TensorProto.BFLOAT16, list(t.shape))
        for n, t in zip(names, tensors, strict=True)],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs if n])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(OURS, 1)])
    return _C.Session(model.SerializeToString())


def computed(tensors, attrs):
    """Loss, gradients of h, W and row, and whether bfloat16 was multiplied as it is."""
    session = session_of(tensors, attrs)
    if "rows" in attrs:
        (loss, *grads), _ = session.forward(tensors, bytes(len(tensors)))
        assert all(g.dtype == torch.float32 for g in grads)
    else:
        each = attrs.get("reduction") == "none"
        dloss = torch.ones(tensors[2].shape if each else ())
        (loss,), grads = call(session, tensors, bytes(t.is_floating_point() for t in tensors), [dloss])
        grads = [g for g in grads if g is not None]
        assert all(g.dtype == torch.bfloat16 for g in grads)  # as the operands
    assert loss.dtype == torch.float32
    return loss, grads, any(kernel in KERNELS for _, kernel, _ in session.kernels())


def check(tensors, attrs):
    """The program rounds exactly what it is to round: its error is far below that of one rounding more or less."""
    loss, grads, native = computed(tensors, attrs)
    row = tensors[3] if len(tensors) == 4 else None
    rounds = ({"gradient", "scores"} if attrs.get("to", 16) == 16 else {"gradient"}) if native else set()
    want, wants, errors = wanted(*tensors[:3], row, attrs, rounds)
    assert (loss.double() - want).abs().max() <= 1e-6 * want.abs().max()
    _, others, _ = wanted(*tensors[:3], row, attrs, rounds ^ {"gradient"})
    for got, exact, apart, error in zip(grads, wants, others, errors, strict=True):
        def away(x, got=got, exact=exact, error=error):
            """Norm of what the sums' errors and the last rounding do not explain."""
            low, high = ((exact + way * 2 * error).to(got.dtype).double() for way in (-1, 1))
            return (x.double() - x.double().clamp(low, high)).norm()
        limit = 0.05 if "rows" in attrs else 0.6  # ties of the last rounding may fall to either side
        assert away(got) <= limit * (apart - exact).norm()
        assert "rows" not in attrs or away(apart) > 0.5 * (apart - exact).norm()
    without = wanted(*tensors[:3], row, attrs, rounds ^ {"scores"})[0]
    assert (without - want).abs().max() > 4e-6 * want.abs().max()
    for i in (tensors[2] < 0).nonzero():
        assert not grads[0][i].any()
    return native


SIZES = [(37, 24, 103), (11, 5, 1031)]


@pytest.mark.parametrize("gemm", ["native", "onednn"])
@pytest.mark.parametrize("how", [{"rows": 16}, {"rows": 5, "reduction": "sum"}, {}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("scores", [16, 1])
@pytest.mark.parametrize("trans", [0, 1])
def test_roundings(trans, scores, how, gemm, monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_GEMM", gemm)
    for size in SIZES:
        tensors = operands(*size, trans)
        attrs = {"transB": trans, "ignore_index": -1, "to": scores, **how}
        check(tensors, attrs)
        check(tensors[:3], attrs)


@pytest.mark.parametrize("gemm", ["native", "onednn"])
@pytest.mark.parametrize("rows, width, classes, trans", [
    (300, 8, 8000, 1),   # several tiles of classes, the last one narrower
    (2100, 4, 1100, 0),  # two chunks of rows, two tiles of classes
    (2500, 6, 1030, 1),
])
def test_many_tiles(rows, width, classes, trans, gemm, monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_GEMM", gemm)
    for scores in 16, 1:
        check(operands(rows, width, classes, trans), {"transB": trans, "ignore_index": -1, "to": scores})
        check(operands(rows, width, classes, trans), {"transB": trans, "ignore_index": -1, "to": scores, "rows": 1000})


@pytest.mark.parametrize("how", [{"rows": 16}, {}, {"reduction": "none"}], ids=str)
def test_operands_are_widened_where_the_processor_does_not_multiply_them(how):
    _C.disable_kernels(KERNELS)
    for trans in 0, 1:
        assert not check(operands(37, 24, 103, trans), {"transB": trans, "ignore_index": -1, **how})


def test_rows_without_a_label_do_not_matter():
    """Nor do the zeros that fill a chunk up, whatever W holds."""
    h, w, labels, row = operands(37, 24, 103, 1)
    h[-1] = torch.inf
    loss, grads, _ = computed([h, w, labels, row], {"transB": 1, "ignore_index": -1, "rows": 16})
    assert torch.isfinite(loss) and all(torch.isfinite(g).all() for g in grads)
    row[7] = -torch.inf  # a masked class
    loss, grads, _ = computed([h, w, torch.where(labels == 7, 8, labels), row],
                              {"transB": 1, "ignore_index": -1, "rows": 16})
    assert torch.isfinite(loss) and all(torch.isfinite(g).all() for g in grads)
    labels[:] = -1
    _, grads, _ = computed([h, w, labels, row], {"transB": 1, "ignore_index": -1, "rows": 16})
    assert not any(g.any() for g in grads)


def test_a_class_of_the_last_tile_is_found():
    h, w, labels, row = operands(64, 8, 50257, 1)
    labels[:] = 50256
    for how in {}, {"rows": 24}:
        check([h, w, labels, row], {"transB": 1, "ignore_index": -1, **how})


@pytest.mark.parametrize("gemm", ["native", "onednn"])
def test_failing_allocations(gemm, monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_GEMM", gemm)
    tensors, attrs = operands(11, 5, 103, 1), {"transB": 1, "ignore_index": -1, "rows": 5}
    computed(tensors, attrs)  # what is allocated once a process
    failing_allocations(lambda: computed(tensors, attrs), "StreamedCrossEntropy")


def test_refused():
    h, w, labels, _ = operands(5, 6, 7, 0)
    with pytest.raises(_C.UnsupportedError, match="scores of bfloat16 as type 10"):
        session_of([h, w, labels], {"to": 10}).forward([h, w, labels], bytes(3))
    labels[1] = 7
    with pytest.raises(IndexError, match="label 7 at position 1 of 'labels' is out of range for 7 classes"):
        session_of([h, w, labels], {"ignore_index": -1}).forward([h, w, labels], bytes(3))


def test_products_have_many_rows():
    """Without gradients in forward a chunk has 512 rows, so that W is read once and not once a row."""
    tensors = operands(512, 64, 16000, 1)[:3]
    session = session_of(tensors, {"transB": 1, "ignore_index": -1, "to": 16})
    steps = session.plan([list(t.shape) for t in tensors], bytes([1, 1, 0]))["steps"]
    scratch = [size for _, operator, _, size in steps if operator.startswith("StreamedCrossEntropy")]
    assert len(scratch) == 2 and min(scratch) > 2 * 512 * 1024, scratch
