"""StreamedCrossEntropy against torch: cross-entropy of scores h W + row that are never stored as a whole."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, V, call, expect_error, run_case, session_of

from onnxtrain import _C

OURS = "ai.onnxtrain"


def streamed(reduction="mean", ignored=-100, trans=0):
    def loss(h, w, labels, row=None):
        scores = h.flatten(0, -2) @ (w.mT if trans else w)
        scores = scores if row is None else scores + row.reshape(-1)
        y = F.cross_entropy(scores, labels.reshape(-1).long(), reduction=reduction, ignore_index=ignored)
        return y.reshape(labels.shape) if reduction == "none" else y
    return loss


def case(rows, width, classes, labels=None, reduction="mean", trans=0, row=False, ignored=None, dtype=np.int64,
         name="", **kwargs):
    """`rows`: a shape. Without `labels` drawn ones, the first and the last class among them."""
    if labels is None:
        labels = np.random.default_rng(5).integers(0, classes, rows)
        labels.reshape(-1)[0], labels.reshape(-1)[-1] = 0, classes - 1
    inputs = [R(*rows, width), R(classes, width) if trans else R(width, classes), V(labels, dtype)]
    attrs = {"reduction": reduction} | ({"transB": 1} if trans else {})
    attrs |= {} if ignored is None else {"ignore_index": ignored}
    what = name or f"{'x'.join(map(str, rows))}-{width}-{classes}"
    return Case("StreamedCrossEntropy", [*inputs, *([R(*row) if isinstance(row, tuple) else R(classes)] if row else [])],
                attrs, domain=OURS, torch=streamed(reduction, -100 if ignored is None else ignored, trans),
                dtypes=(np.float32, np.float64), name="-".join([what, reduction, *(["transB"] if trans else []),
                                                     *(["row"] if row else []), np.dtype(dtype).name]), **kwargs)


CASES = [
    *[case((5,), 6, 7, reduction=reduction, trans=trans, row=row, alloc=row and not trans)
      for reduction in ("mean", "sum", "none") for trans in (0, 1) for row in (False, True)],
    case((1,), 6, 7, alloc=False),  # one row
    case((7,), 3, 1, alloc=False),  # one class
    case((2, 3), 4, 8, trans=1, row=True, alloc=False),
    case((2, 3), 4, 8, reduction="none", row=(1, 8), alloc=False),
    case((5,), 6, 7, dtype=np.int32, alloc=False),
    # Chunks, of the reference kernel two rows: without a label, with one, whole, and after the last that counts.
    case((11,), 4, 10, [-1, -1, 3, 9, 0, -1, 5, -1, -1, -1, -1], ignored=-1, trans=1, row=True, name="ignored"),
    case((11,), 4, 10, [3, 2, -1, 9, 0, -1, 5, -1, 1, -1, 1], ignored=-1, reduction="none", row=True, name="ignored",
         alloc=False),
    case((4,), 4, 10, [2, 7, 2, 5], ignored=2, reduction="sum", alloc=False, name="a class is ignored"),
    case((3,), 4, 5, [-7, -7, -7], ignored=-7, row=True, alloc=False, name="all ignored"),
    case((3,), 4, 5, [-7, -7, -7], ignored=-7, reduction="sum", trans=1, row=True, alloc=False, name="all ignored"),
    case((3,), 4, 5, [-7, -7, -7], ignored=-7, reduction="none", row=True, alloc=False, name="all ignored"),
    case((0,), 4, 5, np.zeros(0), row=True, alloc=False, name="no rows"),
    case((0,), 4, 5, np.zeros(0), reduction="sum", row=True, alloc=False, name="no rows"),
    case((3,), 0, 5, [1, 2, 4], row=True, alloc=False, name="no width"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def step(inputs, attrs, dy=1.0, kernels=()):
    """Loss and gradients of h, W and, where there is one, row."""
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in inputs]
    session = session_of(Case("StreamedCrossEntropy", [R(*x.shape) for x in inputs], attrs, domain=OURS), inputs)
    mask = bytes(t.is_floating_point() for t in tensors)
    (loss,), grads = call(session, tensors, mask, [torch.tensor(dy, dtype=tensors[0].dtype)])
    return loss, [g for g in grads if g is not None]


def eager(h, w, row, labels, trans, dtype):
    """PyTorch's loss and gradients of what step() computes, for a loss of weight 1.5."""
    leaves = [torch.from_numpy(x).to(dtype).requires_grad_() for x in (h, w, row)]
    loss = F.cross_entropy(leaves[0] @ leaves[1].mT + leaves[2], torch.from_numpy(labels))
    (loss * 1.5).backward()
    grads = [leaf.grad for leaf in leaves]
    return loss, grads if trans else [grads[0], grads[1].mT, grads[2]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows, width, classes, trans", [
    (300, 8, 8000, 1),       # several tiles of classes, the last one not full
    (2100, 4, 1100, 0),      # two chunks of rows, two tiles of classes
    (2500, 6, 1030, 1),
    (40, 16500, 20, 0),      # h so wide that a chunk has fewer rows
])
def test_many_tiles(rows, width, classes, trans, dtype):
    rng = np.random.default_rng(rows)
    h, w = (rng.uniform(-1, 1, s).astype(dtype) for s in ((rows, width), (classes, width)))
    h /= max(1.0, width**0.5 / 4)
    row = rng.uniform(-1, 1, classes).astype(dtype)
    labels = np.where(rng.uniform(size=rows) < 0.2, -100, rng.integers(0, classes, rows))
    labels[0], labels[-1] = classes - 1, 0
    attrs = {"transB": trans, "ignore_index": -100}
    loss, grads = step([h, w if trans else w.T, labels, row], attrs, 1.5)
    expected, wants = eager(h, w, row, labels, trans, torch.float64)
    eps = 1e-6 if dtype is np.float32 else 1e-13
    assert abs(loss.item() - expected.item()) <= eps * expected.item()
    # Sums of thousands of terms that cancel: the product's library rounds them as eager's does.
    for got, want, same in zip(grads, wants, eager(h, w, row, labels, trans, torch.float32)[1], strict=True):
        limit = max(2 * eps * want.abs().max(), 2 * (same.double() - want).abs().max())
        assert (got.double() - want).abs().max() <= limit


def test_differences():
    """The gradient along a direction is what the loss changes by there."""
    rng = np.random.default_rng(3)
    x = [rng.uniform(-2, 2, s) for s in ((5, 6), (6, 7), (7,))]
    d = [rng.uniform(-1, 1, a.shape) for a in x]
    labels = np.array([1, 6, -100, 0, 3])

    def run(t):
        h, w, row = ((a + t * b).astype(np.float32) for a, b in zip(x, d))
        return step([h, w, labels, row], {"reduction": "sum", "ignore_index": -100})

    slope = sum(float((g.double() * torch.from_numpy(b)).sum()) for g, b in zip(run(0.0)[1], d))
    differences = (run(1e-2)[0].item() - run(-1e-2)[0].item()) / 2e-2
    assert abs(slope - differences) <= 2e-3 * abs(slope)


def test_scores_that_are_not_finite():
    """Masked classes, whole tiles of them with the reference kernel, rows of nothing else, and NaN: as torch has it."""
    labels = np.array([5, 1, 0, 3])
    for row in ([0.5, -np.inf, 1, 2, -np.inf, 3], [-np.inf] * 4 + [0, 1], [-np.inf] * 6, [0, 1, np.nan, 1, 1, 1],
                [0, 1, np.inf, 1, 1, 1]):
        for kernel, dtype in itertools.product(("", "streamed_cross_entropy"), (np.float32, np.float64)):
            h, row = np.ones((4, 1), dtype), np.array(row, dtype)
            _C.disable_kernels([kernel] if kernel else [])
            try:
                loss, _ = step([h, np.ones((1, 6), dtype), labels, row], {"reduction": "none"}, [1.0] * 4)
            finally:
                _C.disable_kernels([])
            want = F.cross_entropy(torch.from_numpy(h + row), torch.from_numpy(labels), reduction="none")
            assert torch.allclose(loss, want, equal_nan=True), (row, loss, want)


def test_rows_without_a_label_do_not_matter():
    h, w = np.ones((3, 2), np.float32), np.ones((2, 4), np.float32)
    h[1] = np.inf
    loss, grads = step([h, w, np.array([1, -1, 2])], {"ignore_index": -1})
    assert torch.isfinite(loss) and all(torch.isfinite(g).all() for g in grads)
    assert not grads[0][1].any()


H, W, LABELS = R(3, 4), R(4, 5), V([0, 1, 2], np.int64)


@pytest.mark.parametrize("inputs, attrs, error, match", [
    ([H, W, V([0, 5, 2], np.int64)], {}, IndexError, "label 5 at position 1 of 'x2' is out of range for 5 classes"),
    ([H, W, V([0, 1, -100], np.int64)], {}, IndexError, "label -100 at position 2"),  # no ignore_index
    ([H, W, V([0, 1], np.int64)], {}, ValueError, "labels are [2], expected one for each row of h, [3, 4]"),
    ([H, W, V([0, 1, 2], np.int16)], {}, TypeError, "labels are int16"),
    ([H, R(5, 4), LABELS], {}, ValueError, "h is [3, 4] and W [5, 4]"),
    ([H, R(1, 4, 5), LABELS], {}, ValueError, "W [1, 4, 5]"),
    ([H, W, LABELS, R(4)], {}, ValueError, "the row added is [4]: it must have 5 entries"),
    ([H, W, LABELS, R(5, 1)], {}, ValueError, "the row added is [5, 1]"),
    ([H, W, LABELS], {"reduction": "max"}, ValueError, "reduction is 'max'"),
    ([H, W, LABELS], {"transA": 1}, _C.UnsupportedError, "transA"),
    ([H, W, LABELS], {"classes": 6}, ValueError, "classes is 6, and W has 5 columns"),
    ([H, W, LABELS], {"classes": 4}, _C.UnsupportedError, "more columns than classes"),
    ([R(3, 4, dtype=np.float64), W, LABELS], {}, _C.UnsupportedError, "operands must be of one floating-point type, got double and"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_refused(inputs, attrs, error, match):
    expect_error(Case("StreamedCrossEntropy", inputs, attrs, domain=OURS, dtypes=(np.float32,)), error, match)
