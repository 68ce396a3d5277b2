"""Cross-entropy and negative log likelihood have the values and gradients of torch, in 16 bits too."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, V, call, check_forward, expect_error, run_case

from onnxtrain import _C


def cross_entropy(kind, reduction, ignore):
    def run(x, labels, weight=None):
        f = F.cross_entropy if kind == "SoftmaxCrossEntropyLoss" else F.nll_loss
        return f(x, labels.long(), weight, ignore_index=-100 if ignore is None else ignore, reduction=reduction)

    return run


LABELS = [2, 0, 4, 2, 1, 3]
CASES = []
for kind in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
    for mode in ("mean", "sum", "none"):
        for ignore in (None, 2):
            for weighted in (False, True):
                attrs = {"reduction": mode} | ({} if ignore is None else {"ignore_index": ignore})
                inputs = [R(6, 5), V(LABELS, np.int64)] + ([R(5, low=0.1)] if weighted else [])
                CASES.append(Case(kind, inputs, attrs, torch=cross_entropy(kind, mode, ignore), grad=[0],
                                  alloc=weighted, name=f"{mode}-{ignore}-{weighted}"))
    CASES.append(Case(kind, [R(2, 5, 3), V([LABELS[:3], LABELS[3:]], np.int32)], {},
                      torch=cross_entropy(kind, "mean", None),
                      grad=[0], name="spatial"))
    # Rows that start at any multiple of their elements' size, and have more classes than a block of threads.
    CASES.append(Case(kind, [R(5, 1301), V([1300, 0, 7, 650, 3], np.int64)], {"ignore_index": 3},
                      torch=cross_entropy(kind, "mean", 3), grad=[0], alloc=False, name="long"))
HALVES = [dataclasses.replace(case, dtypes=(np.float16,), name=f"{case.name}-half") for case in CASES
          if case.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")]


@pytest.mark.parametrize("case", HALVES, ids=str)
def test_loss_of_halves(case):
    check_forward(case, np.float16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reduce(case):
    run_case(case)


@pytest.mark.parametrize("label", [5, -1])
def test_label_out_of_range(label):
    case = Case("SoftmaxCrossEntropyLoss", [R(2, 5), V([0, label], np.int64)])
    expect_error(case, IndexError, f"label {label} at position 1")


@pytest.mark.parametrize("dtype, ulp", [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=["f16", "bf16"])
def test_gradient_of_halves_is_rounded_once(dtype, ulp):
    """What is saved of the rows of 16-bit scores has more bits than they have."""
    torch.manual_seed(0)
    x, labels = torch.randn(4, 2500).mul(4).to(dtype), torch.tensor([0, 2499, 7, 1300])
    elem = {torch.float16: "float16", torch.bfloat16: "bfloat16"}[dtype]
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]>
        g ({elem}[4, 2500] x, int64[4] l) => ({elem} y) {{ y = SoftmaxCrossEntropyLoss <reduction = "sum"> (x, l) }}""")
    _, (dx, _) = call(_C.Session(model.SerializeToString()), [x, labels], b"\1\0", [torch.ones((), dtype=dtype)])
    wide = x.double().requires_grad_()
    F.cross_entropy(wide, labels, reduction="sum").backward()
    assert ((dx.double() - wide.grad).abs() <= 1.01 * ulp * wide.grad.abs() + 1e-7).all()


@pytest.mark.parametrize("mode", ["mean", "sum", "none"])
def test_log_prob_is_differentiable(mode):
    """Both outputs of SoftmaxCrossEntropyLoss, the loss and the log probabilities, with gradients at once."""
    f = cross_entropy("SoftmaxCrossEntropyLoss", mode, None)
    run_case(Case("SoftmaxCrossEntropyLoss", [R(6, 5), V(LABELS, np.int64)], {"reduction": mode}, n_outputs=2, grad=[0],
                  torch=lambda x, labels: (f(x, labels), F.log_softmax(x, 1))))


def test_log_prob_alone():
    """The loss is not asked for; classes stand at dim 1 of three."""
    run_case(Case("SoftmaxCrossEntropyLoss", [R(2, 5, 3), V([LABELS[:3], LABELS[3:]], np.int64)], n_outputs=2, grad=[0],
                  no_grad_outputs=[0], torch=lambda x, labels: (F.cross_entropy(x, labels), F.log_softmax(x, 1))))
