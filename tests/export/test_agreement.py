"""What torch refuses, a wrapped module refuses: sizes, dtypes, names and indices, at the first and at later calls."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, tensor

import onnxtrain
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule

SCORES = torch.linspace(-2, 2, 20).view(5, 4)
ROW = SCORES[:3, :1]
IMAGE = torch.linspace(-1, 1, 24).view(1, 4, 2, 3)
QUERY = torch.linspace(-1, 1, 24).view(1, 3, 8)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def wrapped(function):
    return ORTModule(Function(function), DebugOptions(log_level=LogLevel.ERROR))


def raised(function, *args):
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.type, str(caught.value)


def attention(mask, **kwargs):
    return lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m if mask else None, **kwargs)


REFUSED = {
    "bce_sizes": (F.binary_cross_entropy_with_logits, SCORES[:, :1], torch.rand(5)),
    "bce_reduction": (lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="batchmean"), SCORES, SCORES),
    "cross_entropy_of_floats": (F.cross_entropy, SCORES, torch.ones(5, 1)),
    "cross_entropy_reduction": (lambda x, t: F.cross_entropy(x, t, reduction="avg", label_smoothing=0.1), SCORES,
                                tensor([0, 1, 2, 3, 0])),
    "cross_entropy_of_one_label": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), SCORES, tensor([1])),
    "cross_entropy_smoothing": (lambda x, t: F.cross_entropy(x, t, label_smoothing=1.5), SCORES,
                                tensor([0, 1, 2, 3, 0])),
    "nll_transposed": (lambda x, t: F.nll_loss(x.log_softmax(1), t), IMAGE, torch.zeros(1, 3, 2, dtype=torch.long)),
    "attention_integer_mask": (attention(True), QUERY, tensor([[1, 1, 0]] * 3)),
    "attention_two_masks": (attention(True, is_causal=True), QUERY, torch.ones(3, 3)),
    "layer_norm_size": (lambda x, w: F.layer_norm(x, (3,), w), SCORES, torch.ones(3)),
    "group_norm_groups": (lambda x, w: F.group_norm(x, 3, w), IMAGE, torch.ones(4)),
    "batch_norm_of_one": (lambda x, w: F.batch_norm(x, None, None, w, training=True), SCORES[:1], torch.ones(4)),
    "multilabel_sizes": (F.multilabel_margin_loss, SCORES, torch.zeros(5, 3, dtype=torch.long)),
    "ctc_reduction": (lambda x, t: F.ctc_loss(x, t, (5,), (2,), reduction="batchmean"), SCORES.unsqueeze(1),
                      tensor([[1, 2]])),
    "index_add_rank": (lambda x, s: x.index_add(0, tensor([0, 1]), s), SCORES, torch.ones(2)),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_by_torch(name):
    function, *args = REFUSED[name]
    assert raised(wrapped(function), *args) == raised(function, *args)


MATRICES = torch.linspace(-1, 1, 64).view(2, 8, 4)
ENDS = tensor([2, 4], dtype=torch.int32)
GROUPED = {
    "int64 ends": lambda x: F.grouped_mm(x, MATRICES, offs=ENDS.long()),
    "float64": lambda x: F.grouped_mm(x.double(), MATRICES.double(), offs=ENDS),
    "odd rows": lambda x: F.grouped_mm(x[:, :7], MATRICES[:, :7, :3].contiguous(), offs=ENDS),
    "another dtype": lambda x: F.grouped_mm(x, MATRICES, offs=ENDS, out_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", sorted(GROUPED))
def test_groups_refused_by_torch(name):
    x = torch.linspace(-1, 1, 32).view(4, 8)
    assert raised(wrapped(GROUPED[name]), x) == raised(GROUPED[name], x)


@pytest.mark.parametrize("name", ["cross_entropy_reduction", "cross_entropy_of_one_label", "nll_transposed"])
def test_refused_in_a_branch(name):
    function, *args = REFUSED[name]

    def branches(*given):
        return torch.cond(given[0].sum() > -1e9, lambda *x: function(*x).sum(), lambda *x: x[0].sum(), given)

    want, got = raised(branches, *args), raised(wrapped(branches), *args)
    assert got[0] is want[0]


LATER = {
    "bce": (F.binary_cross_entropy_with_logits, SCORES, SCORES.sigmoid(), SCORES[:1].sigmoid()),
    "soft_cross_entropy": (F.cross_entropy, SCORES, SCORES.softmax(1), SCORES[:1].softmax(1)),
    "nll": (F.nll_loss, SCORES, tensor([0, 1, 2, 3, 0]), tensor([0, 1])),
    "smooth_cross_entropy": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), SCORES, tensor([0, 1, 2, 3, 0]),
                             tensor([0, 1])),
    "label": (F.cross_entropy, SCORES, tensor([0, 1, 2, 3, 0]), tensor([0, 1, 2, 3, 4])),
}


@pytest.mark.parametrize("name", sorted(LATER))
def test_refused_later(name):
    """After an export for good arguments, others of the same dtypes and ranks."""
    function, x, good, bad = LATER[name]
    model = wrapped(function)
    torch.testing.assert_close(model(x, good), function(x, good))
    assert onnxtrain.stats(model)["engine_steps"] == 1
    assert raised(model, x, bad) == raised(function, x, bad)
    torch.testing.assert_close(model(x, good), function(x, good))
    assert onnxtrain.stats(model)["engine_steps"] == 2


def test_a_complex_result():
    for function in (torch.fft.rfft, lambda x: torch.fft.rfft(x).abs()):
        model = wrapped(function)
        torch.testing.assert_close(model(SCORES), function(SCORES))
        assert onnxtrain.stats(model)["engine_steps"] == 1
