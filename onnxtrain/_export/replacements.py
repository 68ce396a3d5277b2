"""Torch functions written so that torch.onnx translates them faithfully, values and gradients.

rewrite.py has them called in the place of torch's own while the user's forward is traced (PATCHES, by their name in
torch.nn.functional). Each computes what torch's does; the tests hold them against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxtrain._export import domain  # noqa: F401  defines torch.ops.onnxtrain
from onnxtrain._export.decompositions import interpolate, multi_margin_loss, multilabel_margin_loss
from onnxtrain._export.errors import Untraceable
from onnxtrain._export.lookups import embedding_bag, one_hot
from onnxtrain._torch import Reduction, verify_batch_size, verify_spatial_size


def _unbiased(var: Tensor, count: int) -> Tensor:
    """torch normalises with the biased variance and stores the unbiased one."""
    return var * count / (count - 1)  # by whole numbers: torch.onnx keeps a symbolic quotient in float32


def _update(running: Tensor, batch: Tensor, momentum: float | Tensor, count: int | torch.SymInt = 1) -> None:
    """count: of how many entries `batch` is a statistic. Of none, torch leaves what is there."""
    batch = batch.detach().to(running.dtype)
    if isinstance(count, torch.SymInt) and free_unbacked_symbols(count):  # what a mask selects, which may be nothing
        entries: Any = count
        some = torch.scalar_tensor(entries, dtype=running.dtype, device=running.device).sign()
        batch, momentum = torch.where(some > 0, batch, torch.zeros_like(batch)), momentum * some
    elif count == 0:
        return
    running.mul_(1 - momentum).add_(batch * momentum)


def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float | Tensor = 0.1, eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm with the running statistics updated in the open."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    verify_batch_size(input.size())
    y, mean, var = torch.ops.onnxtrain.batch_norm(input, weight, bias, eps)
    count = input.numel() // input.size(1)
    if running_mean is not None:
        _update(running_mean, mean, momentum, count)
    if running_var is not None:
        _update(running_var, _unbiased(var, count), momentum, count)
    return y


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.instance_norm with the running statistics, the mean over the batch of each instance's, updated in the open."""
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    verify_spatial_size(input.size())
    axes = list(range(2, input.dim()))
    if running_mean is not None and running_var is not None:
        wide = input.to(torch.promote_types(input.dtype, running_mean.dtype))
        _update(running_mean, wide.mean(axes).mean(0), momentum)
        _update(running_var, wide.var(axes, unbiased=True).mean(0), momentum)
    def plain(x: Tensor, _: object, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return F.instance_norm(x, None, None, weight, bias, True, 0.0, eps)

    return _in_the_weights_dtype(plain, input, None, weight, bias, eps)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    dropout: Callable[..., Tensor] = F.dropout,
) -> Tensor:
    """Attention in plain operators. Rows that a mask hides entirely give zero, as torch's own do."""
    if enable_gqa:
        key, value = (_repeat_heads(x, query.size(-3) // x.size(-3)) for x in (key, value))
    if scale is None:
        scale = 1.0 / math.sqrt(int(query.size(-1)))
    # query: (..., L, E)  key: (..., S, E)  value: (..., S, Ev)  scores: (..., L, S)
    if query.dtype == torch.bfloat16:  # a query times a number of more digits would be rounded once more
        scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    else:
        scores = torch.matmul(query * scale, key.transpose(-2, -1))
    empty = None
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("scaled_dot_product_attention: explicit attn_mask should not be set when is_causal=True")
        causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        attn_mask = torch.zeros_like(causal, dtype=scores.dtype).masked_fill(causal.logical_not(), -math.inf)
    elif attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
        # On the mask alone, which is small or constant: a hidden row is shown, and its result thrown away.
        empty = attn_mask.amax(-1, keepdim=True) == -math.inf
        attn_mask = attn_mask.masked_fill(empty, 0.0)
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = dropout(weights, dropout_p, True)
    output = torch.matmul(weights, value)
    return output if empty is None else output.masked_fill(empty, 0.0)


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """(..., H, S, E) to (..., H * times, S, E), each head repeated in place."""
    return x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:]).flatten(-4, -3)


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:
    """F.cross_entropy; ONNX's operator knows neither label smoothing nor class probabilities nor a single sample."""
    input, weight = _widened(input), _widened(weight)
    if size_average is not None or reduce is not None:
        reduction = Reduction.legacy_get_string(size_average, reduce)
    if input.dim() == 1:
        loss = cross_entropy(
            input.unsqueeze(0), target.unsqueeze(0), weight, None, ignore_index, None, reduction, label_smoothing
        )
        return loss.squeeze(0) if reduction == "none" else loss
    if target.is_floating_point():
        return _soft_cross_entropy(input, target, weight, reduction, label_smoothing)
    if label_smoothing > 0.0:
        return _smooth_cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)
    target, ignore_index = _labels(target, ignore_index)
    return F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)


@overload
def _widened(x: Tensor) -> Tensor: ...
@overload
def _widened(x: None) -> None: ...
def _widened(x: Tensor | None) -> Tensor | None:
    """Scores or weights of a loss in float32 where autocast computes it, or its parts, in that.

    torch.export keeps the loss whole and takes it apart after the region of autocast; on a GPU that has casts for its
    parts alone, on the CPU for the whole alone, which a loss of smoothed labels is not.
    """
    if x is None or x.dtype not in (torch.float16, torch.bfloat16):
        return x
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


def _labels(target: Tensor, ignore_index: int) -> tuple[Tensor, int]:
    """Labels in int64, and the one to ignore, which ONNX's operator takes as a constant: no size of a tensor."""
    target = target if target.dtype == torch.int64 else target.long()
    if isinstance(ignore_index, torch.SymInt):
        return target.masked_fill(target == ignore_index, -100), -100
    return target, ignore_index


def _along_classes(weight: Tensor, dims: int) -> Tensor:
    return weight.view(1, -1, *([1] * (dims - 2)))


def _soft_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float
) -> Tensor:
    """Class probabilities as targets."""
    classes = input.size(1)
    if label_smoothing > 0.0:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    losses = torch.log_softmax(input, 1) * target  # (N, C, ...)
    if weight is not None:
        losses = losses * _along_classes(weight, input.dim())
    if reduction == "none":
        return -losses.sum(1)
    total = -losses.sum()
    return total if reduction == "sum" else total / (input.numel() // classes)


def _smooth_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    """(1 - s) times the negative log likelihood of the label, plus s times the mean over all classes."""
    classes = input.size(1)
    log_prob = torch.log_softmax(input, 1)  # (N, C, ...)
    kept = target != ignore_index  # (N, ...)
    label = target.masked_fill(kept.logical_not(), 0).long()
    picked = -log_prob.gather(1, label.unsqueeze(1)).squeeze(1)  # (N, ...)
    if weight is None:
        scale = kept.to(input.dtype)
        spread = -log_prob.sum(1)
    else:
        # gather on the flat labels, since the weight is one vector for all positions
        scale = weight.gather(0, label.reshape(-1)).reshape(label.shape) * kept.to(weight.dtype)
        picked = picked * scale
        spread = -(log_prob * _along_classes(weight, input.dim())).sum(1)
    losses = (1 - label_smoothing) * picked + (label_smoothing / classes) * spread
    losses = losses.masked_fill(kept.logical_not(), 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / scale.sum()


def nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:
    """F.nll_loss; positions are folded into the batch, since torch.onnx knows two dimensions only."""
    input, weight = _widened(input), _widened(weight)
    if size_average is not None or reduce is not None:
        reduction = Reduction.legacy_get_string(size_average, reduce)
    labels, ignore_index = _labels(target.reshape(-1) if input.dim() > 2 else target, ignore_index)
    if input.dim() > 2:
        flat = input.movedim(1, -1).flatten(0, -2)
        loss = F.nll_loss(flat, labels, weight, ignore_index=ignore_index, reduction=reduction)
        return loss.reshape(target.shape) if reduction == "none" else loss
    return F.nll_loss(input, labels, weight, ignore_index=ignore_index, reduction=reduction)


def logsigmoid(input: Tensor) -> Tensor:
    """F.logsigmoid; torch.onnx writes Log(Sigmoid(x)), minus infinity from x = -104 on."""
    return -F.softplus(-input, threshold=math.inf)  # with one, float64 would lose digits below -20


def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    reduce: bool | None = None, reduction: str = "mean", pos_weight: Tensor | None = None,
) -> Tensor:
    """F.binary_cross_entropy_with_logits, which torch.onnx writes with logarithms of a sigmoid that may be 0."""
    if size_average is not None or reduce is not None:
        reduction = Reduction.legacy_get_string(size_average, reduce)
    log_likelihood = logsigmoid(input)
    if pos_weight is not None:
        log_likelihood = log_likelihood * (1 + (pos_weight - 1) * target)
    losses = ((1 - target) * input - log_likelihood).to(target.dtype)  # torch works in place on 1 - target
    if weight is not None:
        losses = losses * weight
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:
    """F.embedding; ONNX's Gather would give the row of padding_idx a gradient. The engine's gradients are dense."""
    if max_norm is not None:
        raise Untraceable("The module uses an embedding with max_norm, which changes the weight in forward.")
    if sparse or scale_grad_by_freq:
        return F.embedding(input, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)
    rows = F.embedding(input, weight)
    if padding_idx is None:  # a frozen weight may be thawed later, with this graph
        return rows
    padded = (input == padding_idx % weight.size(0)).unsqueeze(-1)
    return torch.where(padded, rows.detach(), rows)


def _in_the_weights_dtype(norm: Callable[..., Tensor], input: Tensor, size: object, weight: Tensor | None,
                          bias: Tensor | None, eps: float) -> Tensor:
    """Under autocast rows may be bfloat16 and weights float32: torch computes in float32,
    and ONNX has one type for both.
    """
    y = norm(input, size, weight, bias, eps)
    if weight is None or weight.dtype == input.dtype or y.dtype == weight.dtype:
        return y
    return norm(input.to(weight.dtype), size, weight, bias, eps).to(y.dtype)


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm, also for weights of another dtype than the input's."""
    return _in_the_weights_dtype(F.layer_norm, input, normalized_shape, weight, bias, eps)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:
    """F.group_norm, also for weights of another dtype than the input's."""
    return _in_the_weights_dtype(F.group_norm, input, num_groups, weight, bias, eps)


def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """F.grouped_mm of rows in groups, (S, K), and a matrix for each, (E, K, N); other operands are torch's.

    What torch refuses is said here: its fake kernel takes bfloat16 alone.
    """
    if offs is None or bias is not None or mat_a.dim() != 2 or mat_b.dim() != 3 or mat_a.dtype != mat_b.dtype:
        return F.grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    rows = [max(int(x.stride(-1)), int(x.stride(-2))) * x.element_size() for x in (mat_a, mat_b)]
    if (mat_a.dtype not in (torch.float32, torch.bfloat16, torch.float16) or offs.dtype != torch.int32
            or out_dtype not in (None, mat_a.dtype) or any(row % 16 for row in rows)):
        raise Untraceable("The module calls grouped_mm with dtypes, or with rows whose size is not a multiple of "
                          "16 bytes, that PyTorch does not accept.")
    return torch.ops.onnxtrain.grouped_mm(mat_a, mat_b, offs)


def _lengths(value: Tensor | Sequence[int], like: Tensor) -> Tensor:
    """Lengths may be a tensor, or numbers."""
    if isinstance(value, Tensor):
        return value.reshape(-1)
    return torch.tensor(value, dtype=torch.int64, device=like.device).reshape(-1)


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor | Sequence[int], target_lengths: Tensor | Sequence[int],
    blank: int = 0, reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:
    """F.ctc_loss by an operator of ours; reductions as torch has them, the mean over target lengths of at least one."""
    if log_probs.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(log_probs.device.type):
        log_probs = log_probs.float()
    single = log_probs.dim() == 2  # (T, C), one sample
    frames, goals = _lengths(input_lengths, targets), _lengths(target_lengths, targets)
    losses = torch.ops.onnxtrain.ctc_loss(log_probs.unsqueeze(1) if single else log_probs, targets, frames, goals,
                                          blank, zero_infinity)
    if reduction == "mean":
        return (losses / goals.clamp(min=1).to(losses.dtype)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if single else losses


PATCHES: dict[str, Callable[..., Tensor]] = {
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
    "embedding": embedding,
    "logsigmoid": logsigmoid,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "grouped_mm": grouped_mm,
    "embedding_bag": embedding_bag,
    "one_hot": one_hot,
    "interpolate": interpolate,
    "multi_margin_loss": multi_margin_loss,
    "multilabel_margin_loss": multilabel_margin_loss,
    "ctc_loss": ctc_loss,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
}
