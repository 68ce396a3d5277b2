"""Embeddings whose gradient only torch has: sparse ones, and those scaled by how often a row is looked up.

A SparseAdam wants the sparse gradient that `sparse=True` promises. These operators torch runs, between segments of the
graph (arguments.py); replacements.py and rewrite.py put the functions here in the place of torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onnxtrain._export.errors import Untraceable


def _equal_bags(input: Tensor, weight: Tensor, mode: str, per_sample_weights: Tensor | None) -> Tensor:
    """Bags (N, L) of as many rows each, in one piece: torch.onnx writes a loop over bags."""
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        if mode != "sum":
            raise ValueError(f"embedding_bag: per_sample_weights are for mode 'sum', not '{mode}'")
        rows = rows * per_sample_weights.unsqueeze(-1)
    return rows.max(1)[0] if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:
    """F.embedding_bag; torch runs it as a node if the engine does not have its gradient."""
    if max_norm is not None:
        raise Untraceable("The module uses an embedding bag with max_norm, which changes the weight in forward.")
    input = torch.ops.onnxtrain.in_range(input, weight.size(0))
    if sparse or scale_grad_by_freq:
        if input.dim() == 2:
            offsets, input = torch.arange(0, input.numel(), input.size(1), device=input.device), input.reshape(-1)
            per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        return torch.ops.aten._embedding_bag(
            weight, input, offsets, scale_grad_by_freq, ("sum", "mean", "max").index(mode), sparse, per_sample_weights,
            include_last_offset, -1 if padding_idx is None else padding_idx % weight.size(0))[0]
    if offsets is None and padding_idx is None and input.dim() == 2 and input.shape[1] > 0:
        return _equal_bags(input, weight, mode, per_sample_weights)
    return F.embedding_bag(input, weight, offsets, mode=mode, per_sample_weights=per_sample_weights,
                          include_last_offset=include_last_offset, padding_idx=padding_idx)


def _from_front(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`theirs`, with the check that no index is below 0, which its decomposition leaves out."""

    def run(input: Tensor, dim: int, index: Tensor, source: Tensor, *args: object, **kwargs: object) -> Tensor:
        if input.dim() != source.dim() and input.dim() and source.dim():
            raise Untraceable(f"PyTorch does not accept a source of rank {source.dim()} for rank {input.dim()}.")
        return theirs(input, dim, torch.ops.onnxtrain.in_range(index, -1), source, *args, **kwargs)

    return run


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """F.one_hot, whose decomposition compares and so takes any class."""
    return F.one_hot(torch.ops.onnxtrain.in_range(input, num_classes), num_classes)


def _masked_scatter(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            raise Untraceable(f"PyTorch does not accept a mask of {mask.dtype} in masked_scatter.")
        return theirs(input, mask, source)

    return run


INDEXED: dict[object, Callable[..., Tensor]] = {
    getattr(owner, name + tail): _from_front(getattr(owner, name + tail))
    for name in ("index_add", "index_copy", "index_reduce")
    for owner, tail in ((torch, ""), (Tensor, ""), (Tensor, "_"))
} | {theirs: _masked_scatter(theirs)
     for theirs in (torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_)}
