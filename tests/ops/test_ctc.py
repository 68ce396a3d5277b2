"""CTCLoss against torch in float64, and the refusal of lengths and targets that do not fit."""


import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, V, call, expect_error, run_case, session_of

INTS = np.int64


def losses(blank=0, zero=False):
    def run(x, targets, frames, lengths):
        return F.ctc_loss(x, targets, frames, lengths, blank=blank, reduction="none", zero_infinity=zero)

    return run


def case(x, targets, frames, lengths, blank=0, zero=0, ints=INTS, name="", **more):
    # Torch's gradient assumes that log_probs come from a log-softmax, so differences would give another one.
    return Case("CTCLoss", [x, V(targets, ints), V(frames, ints), V(lengths, ints)],
                {"blank": blank, "zero_infinity": zero},
                domain="ai.onnxtrain", torch=losses(blank, bool(zero)), fd=False, name=name, **more)


X = R(6, 3, 5, low=-3.0, high=-0.1)
PADDED = [[1, 2, 3, 4], [2, 2, 1, 0], [4, 3, 0, 0]]
CASES = [
    case(X, PADDED, [6, 6, 6], [4, 3, 2], name="padded"),
    case(X, PADDED, [6, 6, 6], [4, 3, 2], ints=np.int32, name="int32"),
    case(X, [1, 2, 3, 4, 2, 2, 1, 4, 3], [6, 6, 6], [2, 4, 3], name="in a row"),
    case(X, PADDED, [6, 5, 3], [4, 3, 2], name="shorter inputs"),
    case(X, [[0, 1, 2, 3], [0, 0, 1, 3], [2, 1, 3, 3]], [6, 6, 4], [4, 3, 2], blank=4, name="another blank"),
    case(X, [[1, 2, 3, 4], [0, 2, 0, 0], [0, 0, 0, 0]], [6, 6, 6], [4, 0, 0], name="empty targets"),
    case(X, [], [6, 5, 1], [0, 0, 0], name="all targets empty"),
    case(X, PADDED, [6, 2, 6], [4, 3, 2], zero=1, name="infinite, made zero"),
    case(X, PADDED, [6, 0, 0], [4, 0, 2], zero=1, name="no frames"),
    case(X, [[1, 1, 1], [2, 2, 2], [3, 3, 3]], [6, 5, 6], [3, 3, 2], name="repeated targets"),
    case(R(1, 2, 3, low=-3.0, high=-0.1), [[1], [2]], [1, 1], [1, 0], name="one frame"),
    case(R(0, 2, 3), [[1], [2]], [0, 0], [1, 0], name="no time",
         reference=lambda x, *_: np.array([np.inf, 0], x.dtype), grad=False),
    case(R(4, 0, 3), [], [], [], name="no batch", reference=lambda x, *_: np.zeros(0, x.dtype), grad=False),
    case(R(50, 4, 30, low=-6.0, high=-0.1), np.arange(80).reshape(4, 20) % 29 + 1, [50, 45, 44, 50], [20, 20, 7, 13],
         alloc=False, name="long"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ctc(case):
    run_case(case)


def test_an_infinite_loss_has_torchs_gradient():
    """Not a number, where torch's is."""
    x = R(4, 2, 3, low=-3.0, high=-0.1).make(0)
    arrays = [x, np.array([[1, 2, 1], [1, 1, 2]]), np.array([4, 2]), np.array([3, 3])]
    infinite = case(V(x), *[a.tolist() for a in arrays[1:]])
    tensors = [torch.from_numpy(a) for a in arrays]
    seed = torch.tensor([1.0, 2.0], dtype=torch.float64)
    (got,), grads = call(session_of(infinite, arrays), tensors, b"\1\0\0\0", [seed])
    leaf = tensors[0].clone().requires_grad_()
    expected = losses()(leaf, *tensors[1:])
    expected.backward(seed)
    assert expected[1].isinf()
    torch.testing.assert_close(got, expected.detach())
    torch.testing.assert_close(grads[0], leaf.grad, equal_nan=True)


@pytest.mark.parametrize("case, error, match", [
    (case(X, PADDED, [6, 7, 6], [4, 3, 2]), IndexError, "input length 7 of sample 1 is outside 0 to 6"),
    (case(X, PADDED, [6, 6, -1], [4, 3, 2]), IndexError, "input length -1 of sample 2"),
    (case(X, PADDED, [6, 6, 6], [4, 5, 2]), IndexError, "target length 5 of sample 1 is outside 0 to 4"),
    (case(X, [1, 2, 3], [6, 6, 6], [2, 1, 1]), IndexError, "target length 1 of sample 2 is outside 0 to 0"),
    (case(X, [[1, 5], [1, 1], [1, 1]], [6, 6, 6], [2, 1, 1]), IndexError,
     "target 5 of sample 0 is out of range for 5 classes"),
    (case(X, PADDED, [6, 6], [4, 3, 2]), ValueError, "input_lengths are"),
    (case(X, PADDED, [6, 6, 6], [4, 3, 2], blank=5), ValueError, "blank is 5 of 5 classes"),
    (case(X, PADDED, [6, 6, 6], [4, 3, 2], ints=np.float64), TypeError, "targets are double"),
    (case(R(6, 3), PADDED, [6, 6, 6], [4, 3, 2]), ValueError, "rank 2, expected 3"),
], ids=str)
def test_lengths_and_targets_are_checked(case, error, match):
    expect_error(case, error, match)
