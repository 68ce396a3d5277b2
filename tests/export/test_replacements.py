"""Norms, attention, losses and embeddings are exported as functions that compute what torch's own do."""

from __future__ import annotations

import math
from typing import Any

import onnx
import onnx.reference
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from test_export import Of, check, compare, export, naive, ops, proto, real_dropouts
from torch import Tensor

from onnxtrain.ortmodule._whole import export_whole

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("momentum", [0.1, 0.3])
def test_batch_norm(momentum: float | None) -> None:
    module = nn.Sequential(nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    x = torch.randn(5, 4) * 2 + 1
    for _ in range(3):
        module(x + torch.randn(5, 4))
    exported = check(module, x)
    assert module[0].momentum == momentum
    assert [next(a.i for a in n.attribute if a.name == "training_mode") for n in ops(exported, "BatchNormalization")] \
        == [1, 1]
    assert {o.target for o in exported.outputs if o.kind == "buffer"} == set(dict(module.named_buffers()))
    compare(exported, module, (torch.randn(7, 4),), {})
    plain = ops(naive(nn.BatchNorm1d(4).train(), x), "BatchNormalization")
    assert not any(a.name == "training_mode" and a.i for n in plain for a in n.attribute)


def test_batch_norm_variants() -> None:
    check(nn.BatchNorm2d(3, track_running_stats=False), torch.randn(4, 3, 5, 5))
    check(nn.BatchNorm2d(3, track_running_stats=False), torch.randn(4, 3, 5, 5), training=False)
    check(nn.InstanceNorm2d(3, affine=True, track_running_stats=True), torch.randn(4, 3, 5, 5))
    frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    frozen[2].eval()
    exported = export_whole(frozen, (torch.randn(5, 4),), {})
    assert {o.target for o in exported.outputs if o.kind == "buffer"} == {
        "0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert not frozen[2].training and frozen[0].training


def attention(m: Of, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(m.fc(q), k, v, mask, **options)


def test_attention_dropout() -> None:
    q = torch.randn(2, 2, 5, 4)
    module = Of(lambda m, q: attention(m, q, q, q, dropout_p=0.3))
    exported = export(module, (q,), {}, training=True)
    assert real_dropouts(exported) == 1
    assert real_dropouts(naive(module, q)) == 0
    order = [n.op_type for n in proto(exported).graph.node if n.op_type in ("Softmax", "Dropout")]
    assert order == ["Softmax", "Dropout"]


BOOL_MASK = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])


@pytest.mark.parametrize("options", [
    [{}, {"is_causal": True}, {"scale": 0.7}],
    [{"mask": BOOL_MASK}, {"mask": torch.where(BOOL_MASK, 0.3, -math.inf)}],
], ids=["plain", "masks"])
def test_attention(options: list[dict[str, Any]]) -> None:
    q, k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 4, 4), torch.randn(2, 2, 4, 6)
    check(Of(lambda m, q, k, v: [attention(m, q, k, v, **chosen) for chosen in options]), q, k, v)


def test_attention_grouped_and_heads() -> None:
    q, k = torch.randn(2, 6, 3, 4), torch.randn(2, 2, 5, 4)
    check(Of(lambda m, q, k: attention(m, q, k, k, enable_gqa=True)), q, k)
    heads = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True)
    x = torch.randn(2, 5, 4)
    exported = export(heads, (x, x, x), {"need_weights": False}, training=True)
    assert real_dropouts(exported) == 1
    padding = torch.tensor([[False] * 4 + [True]] * 2)
    check(heads, x, x, x, training=False, key_padding_mask=padding, need_weights=False)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str, smoothing: float) -> None:
    weights = (None, torch.rand(4) + 0.5)
    labels = torch.tensor([0, 2, -100, 3, 1])

    def forward(m, x, y):
        return [F.cross_entropy(m.fc(x), y, w, reduction=reduction, label_smoothing=smoothing) for w in weights]

    check(Of(forward), torch.randn(5, 4), labels)


def test_cross_entropy_shapes() -> None:
    def images(m, x, y):
        logits = m.fc(x).movedim(-1, 1)
        return (F.cross_entropy(logits, y, ignore_index=1, label_smoothing=0.2), F.cross_entropy(logits, y),
                F.nll_loss(logits.log_softmax(1), y))

    check(Of(images), torch.randn(2, 3, 5, 4), torch.randint(0, 4, (2, 3, 5)))
    check(Of(lambda m, x, y: F.cross_entropy(m.fc(x), y)), torch.randn(4), torch.tensor(2))
    check(Of(lambda m, x, y: F.cross_entropy(m.fc(x), y.softmax(-1), label_smoothing=0.1)), torch.randn(3, 4),
          torch.randn(3, 4))


def test_binary_cross_entropy_of_large_logits() -> None:
    def forward(m, x, y):
        w = torch.tensor([1.0, 2.0, 0.5, 3.0])
        return [F.binary_cross_entropy_with_logits(x * m.fc.weight.abs().sum(), y, reduction=r, weight=w, pos_weight=w)
                for r in ("mean", "none")], F.logsigmoid(x), F.binary_cross_entropy_with_logits(x, y)

    x = torch.tensor([[200.0, -200.0, 0.0, 1.0]])
    check(Of(forward), x.repeat(3, 1), torch.rand(3, 4))


def test_label_smoothing_is_ignored_by_the_plain_export() -> None:
    module = Of(lambda m, x, y: F.cross_entropy(m.fc(x), y, label_smoothing=0.5))
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    plain = naive(module, x, y)
    [wrong] = onnx.reference.ReferenceEvaluator(plain.model_proto).run(None, dict(zip(
        [i.name for i in plain.model_proto.graph.input], [x.numpy(), y.numpy()])))
    assert abs(wrong - module(x, y).item()) > 1e-3


def test_padding_row_of_an_embedding_has_no_gradient() -> None:
    module = nn.Embedding(7, 4, padding_idx=-2)
    exported = check(module, torch.tensor([[0, 5, 6], [5, 1, 2]]))
    [choice], [barrier] = ops(exported, "Where"), ops(exported, "StopGradient")
    assert barrier.output[0] == choice.input[1]
    assert not ops(naive(module, torch.tensor([[0, 5, 6]])), "StopGradient")
