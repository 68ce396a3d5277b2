"""Functions written with others that torch.onnx translates have torch's values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from test_edges import INF, NAN, TIES, agree
from torch import nn, tensor

import onnxtrain
from onnxtrain._export.decompositions import SPECIAL
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_times_the_logarithm_of_zero(dtype):
    """The slope in the second operand is the quotient of both."""
    x = tensor([0.0, 0.0, 1.0, 2.0, -1.0]).to(dtype)
    agree({"xlogy": torch.xlogy, "number": lambda x, y: torch.xlogy(0, y)},
          [x, tensor([0.0, 1.0, 0.0, 3.0, 2.0]).to(dtype)])
    agree({"xlog1py": torch.special.xlog1py}, [x, tensor([-1.0, 0.0, -1.0, 3.0, 2.0]).to(dtype)])


def test_margins_that_are_met():
    scores, labels = tensor([[0.0, 1, 2], [1, 0, NAN], [2, 3, INF]]), tensor([1, 0, 2])
    rows = tensor([[1, -1, 0], [0, 1, -1], [2, -1, 1]])
    agree({"multi": lambda x: F.multi_margin_loss(x, labels), "square": lambda x: F.multi_margin_loss(x, labels, 2),
           "weighted": lambda x: F.multi_margin_loss(x, labels, 1, 2.0, tensor([0.5, 1, 2]), reduction="none"),
           "sum": lambda x: F.multi_margin_loss(x[:2], labels[:2], reduction="sum"),
           "one": lambda x: F.multi_margin_loss(x[0], labels[0]),
           "multilabel": lambda x: F.multilabel_margin_loss(x, rows, reduction="none")}, [scores])


def test_zeros_of_either_sign_among_the_arguments():
    class Signed(nn.Module):
        def forward(self, x, s):
            return torch.copysign(x, torch.full_like(x, s))

    model = ORTModule(Signed(), DebugOptions(log_level=LogLevel.ERROR))
    assert torch.equal(model(TIES, 0.0), TIES.abs()) and torch.equal(model(TIES, -0.0), -TIES.abs())
    for _ in range(2):
        model(TIES, NAN)
    assert onnxtrain.stats(model)["exports"] == 3


EDGES = torch.cat([torch.linspace(-7.3, 20, 150), torch.tensor([1e-8, 0.5, 1.0, 2.0, 1e5])]).double()
PAIRS = (torch.tensor([0.0, -0.0, 1.5, -2.0, 3.0, float("nan"), 1.0, 0.5]).double(),
         torch.tensor([-0.0, 0.0, -0.0, 2.0, float("nan"), 1.0, 1.0, -0.5]).double())


@pytest.mark.parametrize("ours, theirs, inputs", [
    (lambda x: SPECIAL[torch.polygamma](1, x), lambda x: torch.polygamma(1, x), (EDGES[5:],)),
    (SPECIAL[torch.hypot], torch.hypot, (EDGES, EDGES.flip(0))),
    (SPECIAL[torch.copysign], torch.copysign, PAIRS),
    (SPECIAL[torch.fmax], torch.fmax, PAIRS),
    (SPECIAL[torch.fmin], torch.fmin, PAIRS),
], ids=["polygamma", "hypot", "copysign", "fmax", "fmin"])
def test_replacement_in_eager(ours, theirs, inputs):
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        y.backward(torch.linspace(0.5, 1, y.numel(), dtype=y.dtype).view_as(y))
        results.append([y.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)])
    for got, want in zip(*results, strict=True):
        ok = want.isfinite() & got.isfinite()
        assert ok.sum() >= 0.5 * ok.numel()
        torch.testing.assert_close(got[ok], want[ok], rtol=1e-9, atol=1e-9)
        assert torch.equal(got.isnan(), want.isnan()) or theirs is torch.copysign
